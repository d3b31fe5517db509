"""The policy prior: a tanh-squashed Gaussian, its samples and the entropy that its loss maximises."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

HALF_LOG_2PI = 0.9189385175704956  # the reference's literal


class Sample(NamedTuple):
    """A policy sample and what it was made of, all [..., A]."""

    action: jax.Array
    mean: jax.Array
    log_std: jax.Array


def sample(mean: jax.Array, log_std: jax.Array, eps: jax.Array) -> Sample:
    """tanh(mean + eps exp(log_std)) with eps ~ N(0, I), reparameterised."""
    return Sample(jnp.tanh(mean + eps * jnp.exp(log_std)), mean, log_std)


def squash_log_det(action: jax.Array) -> jax.Array:
    """sum_i ln(max(1 - a_i^2, 0) + 1e-6) [...]: flat at saturation, unlike the exact log-determinant."""
    return jnp.log(jax.nn.relu(1 - action**2) + 1e-6).sum(-1)


def entropy_bonus(sampled: Sample, eps: jax.Array, squashed: bool) -> jax.Array:
    """The entropy quantity [...] that the policy loss maximises; n = A action dimensions.

    With g = sum_i (-eps_i^2 / 2 - log_std_i) and c = ln(2 pi) / 2:
    squashed (recipe `paper`): J - n (g - c), J the tanh log-determinant, which pushes the mean towards 0;
    otherwise (recipe `latest`): -n (g - n c), whose only gradient is n per log_std.
    """
    n = eps.shape[-1]
    g = (-0.5 * eps**2 - sampled.log_std).sum(-1)
    if squashed:
        return squash_log_det(sampled.action) - n * (g - HALF_LOG_2PI)
    return -n * (g - n * HALF_LOG_2PI)


def squashed_entropy(sampled: Sample, eps: jax.Array) -> jax.Array:
    """-(log density of the squashed sample) [...], for the logs of recipe `latest`."""
    g = (-0.5 * eps**2 - sampled.log_std).sum(-1)
    return -(g - eps.shape[-1] * HALF_LOG_2PI - squash_log_det(sampled.action))
