"""Distributions: pinned numbers and false friends (docs/numerics.md, B7, B8, B12, B16)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.agents.dreamerv3.distributions import (
    BoundedNormal,
    Categorical,
    binary_loss,
    bounded_normal,
    categorical_error,
    divergence,
    latent_entropy,
    one_hot_sample,
    squared_error,
    symlog_error,
    unimix,
)
from telamon.networks import grouped_softmax

KEY = jax.random.key(0)
PEAKED = jnp.array([10.0, 0, 0, 0])

# B8: latents


def test_unimix_pinned():
    np.testing.assert_allclose(jnp.exp(unimix(PEAKED, 0.01)), [0.9923651] + [0.00254494] * 3, rtol=3e-6)
    np.testing.assert_allclose(jnp.exp(unimix(jnp.full(4, 7.0), 0.01)), [0.25] * 4, rtol=1e-6)


def test_unimix_puts_a_floor_under_every_class():
    mixed = unimix(jnp.array([1000.0, 0, -1000, -1e9]), 0.01)
    np.testing.assert_allclose(jnp.exp(mixed), [0.9925, 0.0025, 0.0025, 0.0025], rtol=1e-5)


def test_no_share_is_the_plain_softmax():
    x = jax.random.normal(KEY, (3, 5))
    np.testing.assert_allclose(unimix(x, 0), jax.nn.log_softmax(x, -1), rtol=1e-6)


@pytest.mark.parametrize(("height", "kl"), [((2.0, 1.0), 0.5745868), ((8.0, 8.0), 2.6559892)])
def test_divergence_pinned_summed_over_latents(height, kl):
    post = jnp.array([[height[0], 0, 0, 0], [0, height[1], 0, 0]])
    np.testing.assert_allclose(divergence(post, jnp.zeros((2, 4)), 0.01), kl, rtol=2e-6)
    assert divergence(post[None, None], jnp.zeros((1, 1, 2, 4)), 0.01).shape == (1, 1)


def test_divergence_is_of_mixed_probabilities_and_never_infinite():
    one, other = jnp.array([[500.0, 0]]), jnp.array([[0.0, 500]])
    p, q = np.array([0.995, 0.005]), np.array([0.005, 0.995])
    np.testing.assert_allclose(divergence(one, other, 0.01), (p * np.log(p / q)).sum(), rtol=1e-5)
    assert divergence(one, one, 0.01) == 0


def test_entropy_of_latents_is_of_mixed_probabilities():
    p = np.array([0.9923651] + [0.00254494] * 3)
    both = jnp.stack([PEAKED, jnp.zeros(4)])
    np.testing.assert_allclose(latent_entropy(both, 0.01), -(p * np.log(p)).sum() + np.log(4), rtol=1e-5)


def test_a_draw_is_exactly_one_hot_and_its_gradient_that_of_the_mixed_softmax():
    gumbel = jax.random.gumbel(KEY, (100, 4))
    drawn = np.asarray(jax.vmap(lambda g: one_hot_sample(PEAKED, g, 0.01))(gumbel))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(np.sort(drawn, -1), np.tile([0.0, 0, 0, 1], (100, 1)), atol=1e-6)
    slope = jax.grad(lambda x: one_hot_sample(x, gumbel[0], 0.01)[0])(PEAKED)
    np.testing.assert_allclose(slope, [1.3480149e-4] + [-4.4933695e-5] * 3, rtol=3e-4)  # 1 - p cancels


def test_draws_follow_the_mixed_probabilities():
    gumbel = jax.random.gumbel(KEY, (40_000, 3))
    logits = jnp.broadcast_to(jnp.array([[2.0, 0, -50]]), (40_000, 3))
    drawn = np.asarray(one_hot_sample(logits, gumbel, 0.3)).mean(0)
    np.testing.assert_allclose(drawn, np.exp(unimix(logits[0], 0.3)), atol=0.01)


def test_a_latent_is_not_simnorm():
    """B7: the same softmax within groups, but mixed, drawn, and one-hot."""
    logits = jax.random.normal(KEY, (2, 4))
    simnorm = grouped_softmax(logits.reshape(8), 4).reshape(2, 4)
    np.testing.assert_allclose(jnp.exp(unimix(logits, 0.01)), 0.99 * simnorm + 0.01 / 4, rtol=1e-5)
    drawn = one_hot_sample(logits, jnp.zeros((2, 4)), 0.01)
    np.testing.assert_allclose(drawn, jax.nn.one_hot(jnp.argmax(logits, -1), 4), atol=1e-6)
    assert (np.abs(drawn - simnorm) > 0.1).any()


# B12: continuous policies


def test_a_bounded_normal_pinned():
    one = bounded_normal(jnp.zeros(1), jnp.zeros(1), 0.1, 1.0, (1,))
    np.testing.assert_allclose(one.std, 0.8927173, rtol=1e-6)
    np.testing.assert_allclose(one.entropy(), 1.3054532, rtol=1e-6)


def test_bounds_of_a_bounded_normal():
    far = bounded_normal(jnp.array([-99.0, 99, 0.5]), jnp.array([-99.0, 99, 1]), 0.1, 1.0, (3,))
    np.testing.assert_allclose(far.mean, np.tanh([-99, 99, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(far.std, [0.1, 1, 0.9 / (1 + np.exp(-3)) + 0.1], rtol=1e-6)
    np.testing.assert_allclose(far._replace(std=jnp.full(3, 0.1)).randomness(), 0, atol=1e-6)
    np.testing.assert_allclose(far._replace(std=jnp.ones(3)).randomness(), 1, rtol=1e-6)
    fixed = bounded_normal(jnp.zeros(3), jnp.zeros(3), 0.5, 0.5, (3,))
    np.testing.assert_allclose(fixed.randomness(), 0, atol=1e-6)


def test_samples_are_neither_squashed_nor_clipped_and_their_log_prob_has_no_jacobian():
    normal = BoundedNormal(jnp.array([[0.9, -0.5]]), jnp.array([[0.5, 1.0]]), (2,), (0.1, 1.0))
    action = normal.sample(jnp.array([[3.0, -2.0]]))
    np.testing.assert_allclose(action, [[2.4, -2.5]], rtol=1e-6)
    expected = -0.5 * (9 + 4) - np.log(0.5) - np.log(2 * np.pi)
    np.testing.assert_allclose(normal.log_prob(action), [expected], rtol=1e-6)


def test_an_action_of_any_shape_counts_as_one():
    eps = jax.random.normal(KEY, (5, 6))
    flat = bounded_normal(eps, eps[::-1], 0.1, 1.0, (6,))
    grid = bounded_normal(eps, eps[::-1], 0.1, 1.0, (2, 3))
    np.testing.assert_array_equal(grid.sample(eps).reshape(5, 6), flat.sample(eps))
    for name in ("log_prob", "entropy", "randomness"):
        args = lambda d, name=name: (d.sample(eps),) if name == "log_prob" else ()
        np.testing.assert_allclose(getattr(grid, name)(*args(grid)), getattr(flat, name)(*args(flat)), rtol=1e-5)
        assert getattr(grid, name)(*args(grid)).shape == (5,)
    scalar = bounded_normal(eps[:, :1], eps[:, :1], 0.1, 1.0, ())
    assert scalar.sample(eps[:, :1]).shape == scalar.entropy().shape == (5,)


def test_bf16_parameters_become_float32_before_anything_is_computed():
    raw = jnp.array([0.3], jnp.bfloat16)
    normal = bounded_normal(raw, raw, 0.1, 1.0, (1,))
    assert normal.mean.dtype == normal.std.dtype == jnp.float32
    np.testing.assert_allclose(normal.mean, jnp.tanh(raw.astype(jnp.float32)), rtol=1e-6)
    assert unimix(raw, 0.01).dtype == unimix(raw, 0).dtype == jnp.float32
    assert binary_loss(raw, jnp.ones(1)).dtype == jnp.float32
    assert categorical_error(raw, jnp.zeros((), jnp.int32), 0).dtype == jnp.float32


# discrete policies

PAIR = Categorical((jnp.log(jnp.array([[0.2, 0.8]])), jnp.array([[3.0, 3, 3]])), (2,))


def test_each_element_of_a_discrete_action_has_its_own_classes():
    sampled = PAIR.sample(jnp.array([[5.0, 0, 0, 1, 0]]))
    np.testing.assert_array_equal(sampled, [[0, 1]])
    assert sampled.dtype == jnp.int32
    np.testing.assert_allclose(PAIR.log_prob(sampled), [np.log(0.2 / 3)], rtol=1e-6)
    h = -(0.2 * np.log(0.2) + 0.8 * np.log(0.8)) + np.log(3)
    np.testing.assert_allclose(PAIR.entropy(), [h], rtol=1e-6)
    np.testing.assert_allclose(PAIR.randomness(), [h / np.log(6)], rtol=1e-6)


def test_discrete_samples_follow_their_probabilities():
    gumbel = jax.random.gumbel(KEY, (40_000, 5))
    logits = tuple(jnp.broadcast_to(x, (40_000, x.shape[-1])) for x in PAIR.logits)
    drawn = np.asarray(Categorical(logits, (2,)).sample(gumbel))
    assert drawn[:, 0].mean() == pytest.approx(0.8, abs=0.01)
    np.testing.assert_allclose(np.bincount(drawn[:, 1]) / 40_000, [1 / 3] * 3, atol=0.01)


def test_discrete_actions_of_any_shape():
    logits = tuple(jax.random.normal(jax.random.key(i), (7, i)) for i in (2, 3, 4, 5))
    gumbel = jax.random.gumbel(KEY, (7, 14))
    grid, flat = Categorical(logits, (2, 2)), Categorical(logits, (4,))
    np.testing.assert_array_equal(grid.sample(gumbel).reshape(7, 4), flat.sample(gumbel))
    np.testing.assert_array_equal(grid.log_prob(grid.sample(gumbel)), flat.log_prob(flat.sample(gumbel)))
    scalar = Categorical(logits[:1], ())
    assert scalar.sample(gumbel[:, :2]).shape == scalar.log_prob(jnp.zeros(7, jnp.int32)).shape == (7,)


def test_an_action_without_a_choice_has_no_randomness():
    """0 of 0 would be no number, and an update with one is skipped."""
    only = Categorical((jnp.zeros((3, 1)),), ())
    np.testing.assert_array_equal(only.randomness(), [0, 0, 0])


# B16


def test_binary_loss_pinned():
    for target in (0.0, 0.3, 0.997, 1.0):
        np.testing.assert_allclose(binary_loss(jnp.float32(0), target), 0.6931472, rtol=1e-6)
    best = jnp.float32(5.8061385)
    np.testing.assert_allclose(binary_loss(best, 0.997), 0.0204229, rtol=1e-5)
    assert abs(jax.grad(binary_loss)(best, 0.997)) < 1e-7
    assert np.isfinite(binary_loss(jnp.array([-1e4, 1e4]), 0.5)).all()


# reconstruction


def test_squared_errors_are_summed_without_a_half():
    prediction, target = jnp.array([[1.0, 2], [0, 0]]), jnp.array([[0.0, 0], [3, 0]])
    np.testing.assert_allclose(squared_error(prediction, target, 1), [5, 9])
    np.testing.assert_allclose(squared_error(prediction, target, 2), 14)
    np.testing.assert_allclose(squared_error(prediction, target, 0), [[1, 4], [9, 0]])
    assert not jax.grad(lambda y: squared_error(prediction, y, 2))(target).any()


def test_only_the_target_is_symlogged():
    np.testing.assert_allclose(symlog_error(jnp.float32(2), jnp.float32(np.e**3 - 1), 0, 0.0), 1, rtol=1e-5)
    np.testing.assert_allclose(symlog_error(jnp.float32(-2), jnp.float32(1 - np.e**3), 0, 0.0), 1, rtol=1e-5)


def test_squares_below_the_floor_are_0_one_by_one():
    prediction = jnp.array([5e-5, 3e-4, 0.0])
    np.testing.assert_allclose(symlog_error(prediction, jnp.zeros(3), 1, 1e-8), 9e-8, rtol=1e-6)
    np.testing.assert_allclose(symlog_error(prediction, jnp.zeros(3), 1, 0.0), 9.25e-8, rtol=1e-6)
    slope = jax.grad(lambda x: symlog_error(x, jnp.zeros(3), 1, 1e-8))(prediction)
    np.testing.assert_allclose(slope, [0, 6e-4, 0], rtol=1e-6)


def test_a_category_costs_its_log_probability():
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.1, 0.9]]]))
    np.testing.assert_allclose(categorical_error(logits, jnp.array([[0, 1]]), 1), [-np.log(0.45)], rtol=1e-5)
    np.testing.assert_allclose(categorical_error(logits, jnp.array([[True, False]]), 1), [-np.log(0.05)], rtol=1e-5)


def test_a_missing_category_costs_nothing():
    """-1 marks it; its one-hot is all zeros, not the last class."""
    logits = jnp.array([[0.0, 1, 2], [3, 2, 1]])
    np.testing.assert_array_equal(categorical_error(logits, jnp.array([-1, -1]), 0), [0, 0])
