"""The policy prior: bounds, the worked example of both recipes' entropies, and the flat squash (numerics, B12)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.tdmpc2.networks import bounded_log_std
from telamon.agents.tdmpc2.policy import entropy_bonus, sample, squash_log_det, squashed_entropy

EPS, MEAN, RAW = jnp.array([0.5, -1.0]), jnp.array([0.1, -0.2]), jnp.array([0.0, 1.0])
LOG_STD = bounded_log_std(RAW, -10, 2)
DRAWN = sample(MEAN, LOG_STD, EPS)


def test_log_std_stays_in_its_bounds():
    np.testing.assert_allclose(bounded_log_std(jnp.array([0, jnp.inf, -jnp.inf]), -10, 2), [-4, 2, -10])


def test_worked_example_pinned():
    np.testing.assert_allclose(LOG_STD, [-4, 0.5695648], rtol=1e-6)
    np.testing.assert_allclose(MEAN + EPS * jnp.exp(LOG_STD), [0.10915782, -1.9674977], rtol=1e-6)
    np.testing.assert_allclose(DRAWN.action, [0.10872632, -0.9616578], rtol=1e-6)
    np.testing.assert_allclose(squash_log_det(DRAWN.action), -2.5992928, rtol=1e-6)


def test_entropy_quantities_pinned():
    """n = 2 dimensions, Gaussian log density 0.967558: -log_pi of `paper`, scaled entropy of `latest`."""
    np.testing.assert_allclose(entropy_bonus(DRAWN, EPS, squashed=True), -6.372286, rtol=1e-6)
    np.testing.assert_allclose(entropy_bonus(DRAWN, EPS, squashed=False), -2 * 0.967558, rtol=1e-6)
    np.testing.assert_allclose(squashed_entropy(DRAWN, EPS), -3.5668507, rtol=1e-6)


def test_only_recipe_paper_pulls_the_mean_towards_zero():
    gradient = lambda squashed: jax.grad(
        lambda mean, log_std: entropy_bonus(sample(mean, log_std, EPS), EPS, squashed), argnums=(0, 1)
    )(MEAN, LOG_STD)
    (paper_mean, _), (latest_mean, latest_log_std) = gradient(True), gradient(False)
    assert (np.asarray(paper_mean) != 0).all()
    assert not np.asarray(latest_mean).any()
    np.testing.assert_allclose(latest_log_std, [2, 2])  # n per dimension


def test_the_squash_is_flat_at_saturation():
    """1e-6 stands inside the logarithm: the exact log-determinant would go on falling with slope 2."""
    log_det = lambda u: squash_log_det(jnp.tanh(u)[None])
    np.testing.assert_allclose(log_det(jnp.float32(12)), np.log(1e-6), rtol=1e-5)
    assert abs(jax.grad(log_det)(jnp.float32(12))) < 1e-3
    assert abs(jax.grad(log_det)(jnp.float32(2)) + 2 * np.tanh(2)) < 1e-3
