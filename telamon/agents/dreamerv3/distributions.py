"""DreamerV3's distributions: functions of their raw parameters, all in float32 (arXiv:2301.04104, sections "World
model learning" and "Actor learning").

Differs from the paper: a squared error has no factor of one half; the target of the continuation is soft.

A categorical over C classes is given by logits [..., C]. Noise that picks a class is Gumbel, of the logits' shape.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from telamon.distributional import symlog

sg = jax.lax.stop_gradient


def unimix(logits: jax.Array, share: float) -> jax.Array:
    """Log-probabilities [..., C] of (1 - share) softmax(logits) + share / C; the logits themselves where share is 0.

    A floor under every class, so that no divergence between two latents is infinite.
    """
    logits = logits.astype(jnp.float32)
    if share == 0:
        return jax.nn.log_softmax(logits, -1)
    return jnp.log((1 - share) * jax.nn.softmax(logits, -1) + share / logits.shape[-1])


def one_hot_sample(logits: jax.Array, gumbel: jax.Array, share: float) -> jax.Array:
    """A one-hot draw [..., C], float32, whose gradient is that of the mixed probabilities (straight through)."""
    mixed = unimix(logits, share)
    drawn = jax.nn.one_hot(jnp.argmax(mixed + gumbel, -1), logits.shape[-1], dtype=jnp.float32)
    p = jnp.exp(mixed)
    return sg(drawn - p) + p


def divergence(p: jax.Array, q: jax.Array, share: float) -> jax.Array:
    """KL(p || q) [...] of mixed categoricals, summed over the latents: logits [..., S, C]."""
    p, q = unimix(p, share), unimix(q, share)
    return (jnp.exp(p) * (p - q)).sum((-2, -1))


def latent_entropy(logits: jax.Array, share: float) -> jax.Array:
    """Entropy [...] in nats of mixed categoricals, summed over the latents: logits [..., S, C]."""
    p = unimix(logits, share)
    return -(jnp.exp(p) * p).sum((-2, -1))


class Categorical(NamedTuple):
    """Independent categoricals for one action array of n elements, each with its own number of classes."""

    logits: tuple[jax.Array, ...]
    """Per element [..., C], already mixed log-probabilities or raw."""
    shape: tuple[int, ...]
    """Of one action; n is its product."""

    def sample(self, gumbel: jax.Array) -> jax.Array:
        """int32 [..., *shape]; gumbel [..., sum of classes]."""
        edges = np.cumsum([x.shape[-1] for x in self.logits])[:-1]
        pairs = zip(self.logits, jnp.split(gumbel, edges, -1), strict=True)
        index = jnp.stack([jnp.argmax(x + g, -1) for x, g in pairs], -1)
        return index.reshape(*index.shape[:-1], *self.shape).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """[...], summed over the elements."""
        index = action.reshape(*action.shape[: action.ndim - len(self.shape)], len(self.logits))
        picked = [
            jnp.take_along_axis(jax.nn.log_softmax(x, -1), index[..., i, None], -1)[..., 0]
            for i, x in enumerate(self.logits)
        ]
        return sum(picked[1:], picked[0])

    def entropy(self) -> jax.Array:
        """[...], summed over the elements."""
        logs = [jax.nn.log_softmax(x, -1) for x in self.logits]
        each = [-(jnp.exp(x) * x).sum(-1) for x in logs]
        return sum(each[1:], each[0])

    def randomness(self) -> jax.Array:
        """Entropy [...] as a share of its greatest; 0 where there is no choice."""
        return self.entropy() / (sum(math.log(x.shape[-1]) for x in self.logits) or 1.0)


class BoundedNormal(NamedTuple):
    """A Gaussian with its mean in (-1, 1) and a bounded spread. Samples are neither squashed nor clipped."""

    mean: jax.Array
    """[..., *shape]."""
    std: jax.Array
    shape: tuple[int, ...]
    bounds: tuple[float, float]
    """Of the standard deviation."""

    def sample(self, eps: jax.Array) -> jax.Array:
        """[..., *shape]; eps [..., n] is N(0, 1)."""
        return self.mean + self.std * eps.reshape(self.mean.shape)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """[...], summed over the elements; no Jacobian, whatever clips the action later."""
        z = (action - self.mean) / self.std
        return self._summed(-0.5 * z**2 - jnp.log(self.std) - 0.5 * np.log(2 * np.pi))

    def entropy(self) -> jax.Array:
        """[...], summed over the elements."""
        return self._summed(jnp.log(self.std) + 0.5 * np.log(2 * np.pi * np.e))

    def randomness(self) -> jax.Array:
        """Entropy [...] between 0 at the least standard deviation and 1 at the greatest."""
        low, high = (math.log(bound) for bound in self.bounds)
        mean = self._summed(jnp.log(self.std)) / math.prod(self.shape)
        return (mean - low) / (high - low if high > low else 1.0)

    def _summed(self, x: jax.Array) -> jax.Array:
        return x.sum(tuple(range(x.ndim - len(self.shape), x.ndim)))


def bounded_normal(
    mean: jax.Array, raw_std: jax.Array, low: float, high: float, shape: tuple[int, ...]
) -> BoundedNormal:
    """tanh(mean) and (high - low) sigmoid(raw_std + 2) + low: [..., n] each."""
    mean, raw_std = (x.astype(jnp.float32).reshape(*x.shape[:-1], *shape) for x in (mean, raw_std))
    return BoundedNormal(jnp.tanh(mean), (high - low) * jax.nn.sigmoid(raw_std + 2) + low, shape, (low, high))


Distribution = Categorical | BoundedNormal


def binary_loss(logit: jax.Array, target: jax.Array) -> jax.Array:
    """-log likelihood [...] of a soft target in [0, 1]."""
    logit = logit.astype(jnp.float32)
    return -(target * jax.nn.log_sigmoid(logit) + (1 - target) * jax.nn.log_sigmoid(-logit))


def squared_error(prediction: jax.Array, target: jax.Array, rank: int) -> jax.Array:
    """(prediction - target)^2 summed over the last `rank` axes. No factor of one half; no gradient to the target."""
    error = (prediction.astype(jnp.float32) - sg(target)) ** 2
    return error.sum(tuple(range(error.ndim - rank, error.ndim)))


def symlog_error(prediction: jax.Array, target: jax.Array, rank: int, floor: float) -> jax.Array:
    """(prediction - symlog(target))^2, summed over the last `rank` axes; squares below `floor` count as 0."""
    error = (prediction.astype(jnp.float32) - sg(symlog(target.astype(jnp.float32)))) ** 2
    error = jnp.where(error < floor, 0.0, error) if floor > 0 else error
    return error.sum(tuple(range(error.ndim - rank, error.ndim)))


def categorical_error(logits: jax.Array, target: jax.Array, rank: int) -> jax.Array:
    """-log softmax(logits)[target], summed over the last `rank` axes of the target: [..., C], int [...].

    A target out of range, such as the -1 of a missing one, costs 0.
    """
    logs = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    error = -(jax.nn.one_hot(target.astype(jnp.int32), logs.shape[-1]) * logs).sum(-1)
    return error.sum(tuple(range(error.ndim - rank, error.ndim)))
