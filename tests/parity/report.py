"""Comparing one quantity, and saying how it went.

Tolerances of TD-MPC2 are ten times the errors that an independent float32 re-implementation of the reference showed;
those of DreamerV3 (OF_MAXIMUM, SHARE, `mean`, `step`) are six to ten times as large too (tests/golden/README.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

RELATIVE = {
    "latent": 4e-6,
    "logit": 2e-5,
    "value": 7e-5,
    "loss": 2e-6,
    "norm": 2e-5,
    "target": 1e-6,
    "plan_value": 1e-3,
    "plan": 2e-4,
    "two_hot": 1e-4,
    "cross_entropy": 4e-4,
    "scale": 5e-5,
    "constant": 1e-6,
    "mean": 1e-5,
}
"""Bounds of |a - b| / (1 + |b|) by kind of quantity. `plan`: means, standard deviations and actions of a planner."""

ABSOLUTE = {"parameter": 1e-5, "exact": 0.0, "step": 5e-6}
"""Bounds of |a - b|. One Adam step moves a parameter by 3e-4. `step`: after one of LaProp, from a recorded gradient."""

SCALED = {"gradient": 1e-4}
"""Bounds of |a - b| / (s + |b|), s = `magnitude` of the tensor."""

OF_MAXIMUM = {"forward": 1e-5, "whole_gradient": 1e-4, "square": 1e-5, "momentum": 1e-3}
"""Bounds of |a - b| / max |b|, the maximum over the tensor. `square`, `momentum`: moments of a gradient."""

LEAST = {"forward": 1e-2, "whole_gradient": 1e-3, "square": 1e-12, "momentum": 1e-3}
"""What a maximum is taken to be at least, for tensors of nothing but rounding noise."""

SHARE = {"moved": 5e-3}
"""Bounds of the share of elements that are further off than PLACE. LaProp's first step is the gradient's
*sign*: where a gradient is rounding noise, it may go the other way."""

PLACE = 1e-5
"""A step is about `lr`, in these files 1e-3."""

TOLERANCES = {**RELATIVE, **ABSOLUTE, **SCALED, **OF_MAXIMUM, **SHARE}


@dataclass(frozen=True)
class Line:
    """How far one quantity is from the record."""

    name: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN fails

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAIL"
        return f"  {self.name:<36} {self.error:9.1e}  <= {self.tolerance:7.1e}  {verdict:<4} {self.note}".rstrip()


def compare(name: str, kind: str, ours: object, recorded: np.ndarray, slack: np.ndarray | float = 0.0) -> Line:
    """Largest error of `ours` against `recorded`, by the bound of `kind`.

    `slack` (shaped like the record) is added to the denominator where the quantity itself is badly conditioned.
    """
    tolerance = TOLERANCES[kind]
    a, b = np.asarray(ours), np.asarray(recorded)
    if a.shape != b.shape:
        return Line(name, np.inf, tolerance, f"shape {a.shape}, recorded {b.shape}")
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not b.size:
        return Line(name, 0.0, tolerance, "empty")
    error = np.where(a == b, 0.0, np.abs(a - b) / (slack + denominator(kind, b)))
    return Line(name, float((~(error <= PLACE)).mean() if kind in SHARE else error.max()), tolerance)


def denominator(kind: str, recorded: np.ndarray) -> np.ndarray:
    """What a difference is divided by."""
    size = np.abs(recorded)
    if kind in OF_MAXIMUM:
        return np.full_like(size, max(size.max(), LEAST[kind]))
    if kind in SCALED:
        return magnitude(recorded) + size
    return 1.0 + size if kind in RELATIVE else np.ones_like(size)


def magnitude(x: np.ndarray) -> float:
    """The size of a tensor of gradients or moments, which are small: its largest entry, within [1e-3, 1]."""
    return float(np.clip(np.abs(x).max(), 1e-3, 1))


def compare_tree(
    name: str,
    kind: str,
    ours: Mapping[str, np.ndarray],
    recorded: Mapping[str, np.ndarray],
    slack: Mapping[str, np.ndarray] = {},
) -> Line:
    """The worst of many named tensors, as one line that names it."""
    tolerance = TOLERANCES[kind]
    if ours.keys() != recorded.keys():
        return Line(name, np.inf, tolerance, f"names differ: {', '.join(sorted(ours.keys() ^ recorded.keys()))}")
    lines = [compare(key, kind, ours[key], recorded[key], slack.get(key, 0.0)) for key in sorted(ours)]
    worst = max(lines, key=lambda line: np.nan_to_num(line.error, nan=np.inf))
    return Line(name, worst.error, tolerance, f"{len(lines)} tensors, worst {worst.name} {worst.note}")
