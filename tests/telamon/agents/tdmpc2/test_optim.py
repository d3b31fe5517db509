"""Two Adam optimisers, each behind one global clip norm (numerics, B17)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telamon.agents.tdmpc2 import optim
from telamon.agents.tdmpc2.config import TDMPC2Config

WORLD = {"encoder": jnp.zeros(1), "dynamics": jnp.zeros(1)}
GRADS = {"encoder": jnp.array([30.0]), "dynamics": jnp.array([40.0])}
PI = {"layer0": jnp.zeros(2)}


def test_clip_and_first_step_pinned():
    """Gradients 30 and 40 are clipped by their common norm of 50 to 12 and 16; the encoder's rate comes after."""
    start = optim.init(WORLD, PI)
    stepped, state, norm = optim.world_step(TDMPC2Config(), GRADS, start, WORLD)
    assert norm == pytest.approx(50)
    np.testing.assert_allclose([state.world.mu["encoder"][0], state.world.mu["dynamics"][0]], [1.2, 1.6], rtol=1e-6)
    np.testing.assert_allclose(stepped["encoder"], -8.99994e-5, rtol=1e-5)
    np.testing.assert_allclose(stepped["dynamics"], -2.99998e-4, rtol=1e-5)


def test_clip_coefficient_has_torchs_form():
    assert optim.clip_coefficient(jnp.float32(0.0), 20) == 1
    assert optim.clip_coefficient(jnp.float32(1e-6), 1e-6) == pytest.approx(0.5)
    assert optim.clip_coefficient(jnp.float32(40.0), 20) == pytest.approx(0.5, rel=1e-6)


def test_adam_is_optax_adam_with_each_optimisers_epsilon():
    config = TDMPC2Config(grad_clip_norm=1e9, recipe="latest")
    state = optim.init(WORLD, PI)
    for step, params, eps, key in (
        (optim.world_step, WORLD, 1e-8, "dynamics"),
        (optim.policy_step, PI, 1e-5, "layer0"),
    ):
        adam = optax.adam(3e-4, b1=0.9, b2=0.999, eps=eps)
        expected, theirs, ours = params, adam.init(params), state
        for i in range(3):
            grads = jax.tree.map(lambda p, i=i: (i - 0.5) * 1e-5 * jnp.ones_like(p), params)
            updates, theirs = adam.update(grads, theirs)
            expected = optax.apply_updates(expected, updates)
            params, ours, _ = step(config, grads, ours, params)
        np.testing.assert_allclose(params[key], expected[key], rtol=1e-5)


def test_a_gradient_of_zero_still_advances_adam():
    start = optim.init(WORLD, PI)
    _, state, _ = optim.world_step(TDMPC2Config(), GRADS, start, WORLD)
    zero = jax.tree.map(jnp.zeros_like, GRADS)
    moved, state, _ = optim.world_step(TDMPC2Config(), zero, state, WORLD)
    assert state.world.count == 2
    assert moved["encoder"] != WORLD["encoder"]


@pytest.mark.parametrize(("recipe", "expected"), [("paper", np.sqrt(50**2 + 20**2)), ("latest", 50.0)])
def test_the_last_clipped_policy_gradient_counts_in_the_next_world_norm_of_recipe_paper(recipe, expected):
    config = TDMPC2Config(recipe=recipe)
    state = optim.init(WORLD, PI)
    first = optim.world_step(config, GRADS, state, WORLD)[2]
    assert first == pytest.approx(50)  # nothing is left over yet
    _, state, norm = optim.policy_step(config, {"layer0": jnp.array([60.0, 80.0])}, state, PI)
    assert norm == pytest.approx(100)
    stepped, after, second = optim.world_step(config, GRADS, state, WORLD)
    assert second == pytest.approx(expected, rel=1e-5)
    assert set(stepped) == {"encoder", "dynamics"}  # it is not applied
    assert after.world.mu["dynamics"][0] == pytest.approx(0.1 * 40 * 20 / expected, rel=1e-5)
