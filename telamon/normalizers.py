"""Scales from the 5th to 95th percentile range of a batch. The two papers describe one thing and do two.

DreamerV3 (`ReturnNormalizer`) averages the percentiles from 0 and clamps what it *reads*; TD-MPC2 (`RunningScale`)
clamps what it *averages* and starts at 1. Where ranges alternate around 1 they settle apart: 1.51 against 2.01.
In both, the present batch already counts in its own division, and nothing is differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


def percentiles(x: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    """Linearly interpolated percentiles over all elements, float32, without gradient."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    lo, hi = jnp.percentile(x, jnp.asarray([low, high]), method="linear")
    return lo, hi


class PercentileRange(NamedTuple):
    """State of a ReturnNormalizer: averaged percentiles, float32 scalars."""

    low: jax.Array
    high: jax.Array


@dataclass(frozen=True)
class ReturnNormalizer:
    """DreamerV3's return scale: max(floor, EMA(p95) - EMA(p5)), both averages from 0 without debiasing."""

    rate: float = 0.01
    low: float = 5.0
    high: float = 95.0
    floor: float = 1.0

    def init(self) -> PercentileRange:
        return PercentileRange(jnp.zeros(()), jnp.zeros(()))

    def update(self, state: PercentileRange, x: jax.Array) -> PercentileRange:
        lo, hi = percentiles(x, self.low, self.high)
        ema = lambda old, new: (1 - self.rate) * old + self.rate * new
        return PercentileRange(ema(state.low, lo), ema(state.high, hi))

    def scale(self, state: PercentileRange) -> jax.Array:
        return jnp.maximum(self.floor, jax.lax.stop_gradient(state.high - state.low))


@dataclass(frozen=True)
class RunningScale:
    """TD-MPC2's Q scale: S <- S + tau (max(floor, p95 - p5) - S), from S = 1."""

    tau: float = 0.01
    low: float = 5.0
    high: float = 95.0
    floor: float = 1.0

    def init(self) -> jax.Array:
        return jnp.ones(())

    def update(self, state: jax.Array, x: jax.Array) -> jax.Array:
        lo, hi = percentiles(x, self.low, self.high)
        return state + self.tau * (jnp.maximum(self.floor, hi - lo) - state)
