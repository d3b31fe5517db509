"""LaProp behind a clip of each tensor's gradient (docs/numerics.md, B17)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telamon.agents.dreamerv3 import optim
from tests.telamon.agents.dreamerv3 import tiny

SHAPES = {"linear": {"kernel": (5, 3), "bias": (3,)}, "blocks": {"kernel": (2, 4, 3)}}


def tree(seed: int, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def steps(config, gradients, params):
    """The steps that a sequence of gradients makes, each applied before the next."""
    tx = optim.make(config)
    state, out, update = tx.init(params), [], jax.jit(tx.update)
    for grads in gradients:
        step, state = update(grads, state, params)
        params = optax.apply_updates(params, step)
        out.append(step)
    return out, params


def reference(c, gradients, params):
    """The same in float64, line by line: clip, root mean square, momentum, decay of kernels, rate."""
    norm = lambda x: np.sqrt((x**2).sum())
    out, params = [], {k: v.astype(np.float64) for k, v in tiny.leaves(params).items()}
    square, mean = ({k: np.zeros_like(p) for k, p in params.items()} for _ in range(2))
    for k, grads in enumerate(gradients):
        n, step = k + 1, {}
        for name, g in tiny.leaves(grads).items():
            p, g = params[name], g.astype(np.float64)
            g = g / max(1, norm(g) / (c.agc * max(1e-3, norm(p))))
            square[name] = c.beta2 * square[name] + (1 - c.beta2) * g**2
            u = g / (np.sqrt(square[name] / (1 - c.beta2**n)) + c.eps)
            mean[name] = c.beta1 * mean[name] + (1 - c.beta1) * u
            u = mean[name] / (1 - c.beta1**n)
            u = u + (c.weight_decay * p if name.endswith("['kernel']") else 0)
            step[name] = -c.lr * (min(k / c.warmup, 1) if c.warmup else 1) * u
            params[name] = p + step[name]
        out.append(step)
    return out


@pytest.mark.parametrize("changes", [dict(warmup=3), dict(warmup=0), dict(warmup=3, weight_decay=0.1)])
def test_five_steps_are_the_references(changes):
    config = tiny.config(lr=0.1, **changes)
    gradients = [tree(i + 1, scale) for i, scale in enumerate((0.1, 10, 1e-3, 1, 0.3))]  # clipped and not
    ours, _ = steps(config, gradients, tree(0))
    for step, expected in zip(ours, reference(config, gradients, tree(0)), strict=True):
        for name, leaf in tiny.leaves(step).items():
            np.testing.assert_allclose(leaf, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_the_first_update_of_a_warm_up_changes_nothing_but_counts():
    gradients = [tree(i) for i in range(4)]
    warm, _ = steps(tiny.config(warmup=2, lr=1.0), gradients, tree(9))
    assert not any(leaf.any() for leaf in tiny.leaves(warm[0]).values())
    # with AGC's parameters fixed by tiny rates, later steps are those of a constant rate, scaled
    slow, _ = steps(tiny.config(warmup=2, lr=1e-6), gradients, tree(9))
    constant, _ = steps(tiny.config(warmup=0, lr=1e-6), gradients, tree(9))
    for share, one, other in zip((0, 0.5, 1, 1), slow, constant, strict=True):
        for name, leaf in tiny.leaves(one).items():
            np.testing.assert_allclose(leaf, share * tiny.leaves(other)[name], rtol=1e-4, atol=1e-12)


def test_steps_do_not_depend_on_the_scale_of_the_loss():
    gradients = [tree(i, 1e-3) for i in range(4)]
    scaled = [jax.tree.map(lambda g: 1000 * g, grads) for grads in gradients]
    config = tiny.config(warmup=0, agc=1e9)
    for one, other in zip(steps(config, gradients, tree(9))[0], steps(config, scaled, tree(9))[0], strict=True):
        for name, leaf in tiny.leaves(one).items():
            np.testing.assert_allclose(leaf, tiny.leaves(other)[name], rtol=1e-5)


def test_the_first_step_has_the_sign_of_the_gradient():
    """The gradient is divided before it is averaged; Adam's first step is the same, its later ones are not."""
    config = tiny.config(warmup=0, lr=0.5, agc=1e9)
    gradients = [tree(1), tree(2)]
    ours, _ = steps(config, gradients, tree(0))
    adam = optax.adam(0.5, b1=config.beta1, b2=config.beta2, eps=config.eps)
    state, theirs = adam.init(tree(0)), []
    for grads in gradients:
        step, state = adam.update(grads, state)
        theirs.append(step)
    for name, grads in tiny.leaves(gradients[0]).items():
        np.testing.assert_allclose(tiny.leaves(ours[0])[name], -0.5 * np.sign(grads), rtol=2e-5)
        assert (np.abs(tiny.leaves(ours[1])[name] - tiny.leaves(theirs[1])[name]) > 1e-3).any()


def test_weight_decay_is_on_kernels_alone():
    zero = jax.tree.map(jnp.zeros_like, tree(0))
    config = tiny.config(warmup=0, lr=0.5, weight_decay=0.1)
    step = tiny.leaves(steps(config, [zero], tree(0))[0][0])
    for name, leaf in tiny.leaves(tree(0)).items():
        np.testing.assert_allclose(step[name], -0.05 * leaf if "kernel" in name else 0 * leaf, rtol=1e-6)


# the clip


def clipped(g, p, clip: float = 0.3):
    tx = optim.adaptive_clip(clip)
    return tx.update({"w": g}, tx.init({"w": p}), {"w": p})[0]["w"]


def test_clip_pinned():
    np.testing.assert_allclose(clipped(jnp.full((2, 2), 3.0), jnp.ones((2, 2))), np.full((2, 2), 0.3), rtol=1e-6)
    np.testing.assert_allclose(clipped(jnp.array([3.0, 4]), jnp.zeros(2)), [1.8e-4, 2.4e-4], rtol=1e-6)
    small = jnp.array([1e-5, -2e-5])
    np.testing.assert_array_equal(clipped(small, jnp.zeros(2)), small)
    np.testing.assert_array_equal(clipped(jnp.zeros(2), jnp.zeros(2)), [0, 0])


def test_clip_is_of_whole_tensors_not_of_units():
    p, g = jnp.eye(2), jnp.array([[3.0, 0], [0, 0.1]])
    np.testing.assert_allclose(clipped(g, p), [[0.42402855, 0], [0, 0.01413429]], rtol=1e-6)
    by_unit = optax.adaptive_grad_clip(0.3)
    theirs, _ = by_unit.update(g, by_unit.init(p), p)
    np.testing.assert_allclose(theirs, [[0.3, 0], [0, 0.1]], rtol=1e-5)


def test_each_tensor_is_clipped_by_itself():
    tx = optim.adaptive_clip(0.3)
    params, grads = {"a": jnp.ones(4), "b": jnp.ones(4)}, {"a": jnp.full(4, 300.0), "b": jnp.full(4, 0.1)}
    out, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(out["a"], [0.3] * 4, rtol=1e-6)
    np.testing.assert_array_equal(out["b"], grads["b"])


def test_norms():
    assert optim.norm(jnp.array([[3.0, 0], [0, 4]])) == pytest.approx(5)
    assert optim.global_norm({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}) == pytest.approx(5)
