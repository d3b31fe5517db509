"""symlog, symexp and two-hot regression: scalars learned as categorical distributions over fixed bins.

Both agents regress through `TwoHot`, and differ where it hurts to mix them up:

* DreamerV3 interpolates between its bins in *raw* space, `dreamer_two_hot` (arXiv:2301.04104, eq. 8 to 10);
* TD-MPC2 interpolates in *symlog* space and maps back after the expectation, `tdmpc2_two_hot` (arXiv:2310.16828,
  app. A).

All of it computes in float32, whatever the networks compute in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


def symlog(x: jax.Array) -> jax.Array:
    """sign(x) ln(1 + |x|), elementwise, in the dtype of `x`."""
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: jax.Array) -> jax.Array:
    """sign(x) (exp|x| - 1), the inverse of `symlog`."""
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


@dataclass(frozen=True)
class TwoHot:
    """A scalar y as weights on the two bins that enclose it."""

    bins: tuple[float, ...]
    """Sorted and mirrored around their middle, at DreamerV3's an exact 0; in the space in which weights interpolate."""
    transform: Literal["identity", "symlog"]
    """Applied to targets before they are encoded; its inverse is applied after the expectation."""
    step: float | None = None
    """Distance of evenly spaced bins. The bin is then found by a division, in the rounding order of the
    TD-MPC2 reference, instead of by comparison with every bin."""

    def __post_init__(self) -> None:
        if len(self.bins) < 2:
            raise ValueError(f"two-hot needs 2 bins or more, got {len(self.bins)}; raise num_bins")
        bins = np.asarray(self.bins)
        if np.abs(bins + bins[::-1] - 2 * self.middle).max() > 1e-6 * (bins[-1] - bins[0]):
            raise ValueError(f"two-hot bins must be mirrored around their middle {self.middle}, got {self.bins}")

    @property
    def middle(self) -> float:
        return 0.5 * (self.bins[0] + self.bins[-1])

    def encode(self, y: jax.Array) -> jax.Array:
        """Targets [...] -> weights [..., K], float32, summing to 1. Beyond the edge bins all weight is on the edge."""
        bins, last = jnp.asarray(self.bins, jnp.float32), len(self.bins) - 1
        y = jnp.asarray(y, jnp.float32)
        y = symlog(y) if self.transform == "symlog" else y
        if self.step is not None:
            at = (jnp.clip(y, bins[0], bins[-1]) - bins[0]) / jnp.float32(self.step)
            below = jnp.minimum(jnp.floor(at), last - 1)
            upper, below = at - below, below.astype(jnp.int32)
        else:
            y = jnp.clip(y, bins[0], bins[-1])
            below = jnp.clip((_along_last(bins, y[..., None]) <= y[..., None]).sum(-1) - 1, 0, last - 1)
            upper = 1 - (bins[below + 1] - y) / (bins[below + 1] - bins[below])
        below, upper = below[..., None], upper[..., None]
        k = _along_last(jnp.arange(last + 1), below)
        return jnp.where(k == below, 1 - upper, 0.0) + jnp.where(k == below + 1, upper, 0.0)

    def decode(self, logits: jax.Array) -> jax.Array:
        """Logits [..., K] -> expected scalar [...], float32: exactly the middle (0) for uniform logits, also under jit.

        The expectation is summed as differences of mirror pairs, (p_j - p_i) b_j with b_i = -b_j: equal
        probabilities cancel before they meet a large bin, in whatever order the compiler adds.
        """
        p = jax.nn.softmax(logits.astype(jnp.float32), -1)
        half = len(self.bins) // 2
        upper = jnp.asarray(self.bins[-half:], jnp.float32) - self.middle
        mean = self.middle + ((p[..., -half:] - p[..., half - 1 :: -1]) * _along_last(upper, p)).sum(-1)
        return symexp(mean) if self.transform == "symlog" else mean

    def cross_entropy(self, logits: jax.Array, y: jax.Array) -> jax.Array:
        """-sum_k encode(y)_k log_softmax(logits)_k: [..., K], [...] -> [...], float32. No gradient reaches `y`."""
        target = jax.lax.stop_gradient(self.encode(y))
        return -(target * jax.nn.log_softmax(logits.astype(jnp.float32), -1)).sum(-1)


def dreamer_two_hot(num_bins: int = 255, limit: float = 20.0) -> TwoHot:
    """DreamerV3: bins at symexp of an even grid, interpolated in raw space. `num_bins` is odd.

    In the reference's own float32 arithmetic, which is up to 2e-6 from exact bins.
    """
    with jax.ensure_compile_time_eval():
        lower = np.asarray(symexp(jnp.linspace(-limit, 0, (num_bins + 1) // 2, dtype=jnp.float32)))
    return TwoHot(tuple(float(b) for b in np.concatenate([lower, -lower[:-1][::-1]])), "identity")


def tdmpc2_two_hot(num_bins: int = 101, vmin: float = -10.0, vmax: float = 10.0) -> TwoHot:
    """TD-MPC2: an even grid in symlog space, computed from its middle so that it is exactly mirrored."""
    if num_bins < 2 or not vmin < vmax:
        raise ValueError(f"two-hot needs num_bins={num_bins} of 2 or more and vmin={vmin} below vmax={vmax}")
    step = (vmax - vmin) / (num_bins - 1)
    grid = 0.5 * (vmin + vmax) + step * (np.arange(num_bins) - 0.5 * (num_bins - 1))
    return TwoHot(tuple(float(b) for b in grid.astype(np.float32)), "symlog", step)


def _along_last(x: jax.Array, like: jax.Array) -> jax.Array:
    """x [K] with as many leading axes of 1 as `like` [..., K] has: broadcasting is written out."""
    return jnp.expand_dims(x, tuple(range(like.ndim - 1)))
