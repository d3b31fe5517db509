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
    """Sorted, odd in number, mirrored around an exact 0; in the space in which weights interpolate."""
    transform: Literal["identity", "symlog"]
    """Applied to targets before they are encoded; its inverse is applied after the expectation."""
    step: float | None = None
    """Distance of evenly spaced bins. The bin is then found by a division, in the rounding order of the
    TD-MPC2 reference, instead of by comparison with every bin."""

    def __post_init__(self) -> None:
        if len(self.bins) < 3 or len(self.bins) % 2 == 0:
            raise ValueError(f"two-hot needs an odd number of bins, 3 or more, got {len(self.bins)}; change num_bins")

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
            below = jnp.clip((bins <= y[..., None]).sum(-1) - 1, 0, last - 1)
            upper = 1 - (bins[below + 1] - y) / (bins[below + 1] - bins[below])
        k, below, upper = jnp.arange(last + 1), below[..., None], upper[..., None]
        return jnp.where(k == below, 1 - upper, 0.0) + jnp.where(k == below + 1, upper, 0.0)

    def decode(self, logits: jax.Array) -> jax.Array:
        """Logits [..., K] -> expected scalar [...], float32. Exactly 0 for uniform logits, also under jit.

        The expectation is summed as differences of mirror pairs, (p_j - p_i) b_j with b_i = -b_j: equal
        probabilities cancel before they meet a large bin, in whatever order the compiler adds.
        """
        p = jax.nn.softmax(logits.astype(jnp.float32), -1)
        half = len(self.bins) // 2
        upper = jnp.asarray(self.bins[half + 1 :], jnp.float32)
        mean = ((p[..., half + 1 :] - p[..., half - 1 :: -1]) * upper).sum(-1)
        return symexp(mean) if self.transform == "symlog" else mean

    def cross_entropy(self, logits: jax.Array, y: jax.Array) -> jax.Array:
        """-sum_k encode(y)_k log_softmax(logits)_k: [..., K], [...] -> [...], float32. No gradient reaches `y`."""
        target = jax.lax.stop_gradient(self.encode(y))
        return -(target * jax.nn.log_softmax(logits.astype(jnp.float32), -1)).sum(-1)


def _mirrored(lower: np.ndarray) -> tuple[float, ...]:
    """Bins from their non-positive half (which ends in 0), exactly antisymmetric."""
    return tuple(float(b) for b in np.concatenate([lower, -lower[:-1][::-1]]))


def dreamer_two_hot(num_bins: int = 255, limit: float = 20.0) -> TwoHot:
    """DreamerV3: bins at symexp of an even grid, interpolated in raw space."""
    grid = np.linspace(-limit, 0, (num_bins + 1) // 2, dtype=np.float32)
    return TwoHot(_mirrored(np.sign(grid) * np.expm1(np.abs(grid))), "identity")


def tdmpc2_two_hot(num_bins: int = 101, vmin: float = -10.0, vmax: float = 10.0) -> TwoHot:
    """TD-MPC2: an even grid in symlog space. Raises ValueError unless vmin = -vmax."""
    if vmin != -vmax:
        raise ValueError(f"two-hot bins are mirrored around 0: vmin={vmin} must be -vmax={-vmax}")
    grid = np.linspace(vmin, 0, (num_bins + 1) // 2, dtype=np.float32)
    return TwoHot(_mirrored(grid), "symlog", step=(vmax - vmin) / (num_bins - 1))
