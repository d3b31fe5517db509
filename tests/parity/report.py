"""Comparing one quantity, and saying how it went.

Tolerances are ten times the errors that an independent float32 re-implementation of the reference showed.
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
}
"""Bounds of |a - b| / (1 + |b|) by kind of quantity. `plan`: means, standard deviations and actions of a planner."""

ABSOLUTE = {"parameter": 1e-5, "exact": 0.0}
"""Bounds of |a - b|. One Adam step moves a parameter by 3e-4."""

SCALED = {"gradient": 1e-4}
"""Bounds of |a - b| / (s + |b|), s = `magnitude` of the tensor."""


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
    tolerance = {**RELATIVE, **ABSOLUTE, **SCALED}[kind]
    a, b = np.asarray(ours), np.asarray(recorded)
    if a.shape != b.shape:
        return Line(name, np.inf, tolerance, f"shape {a.shape}, recorded {b.shape}")
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not b.size:
        return Line(name, 0.0, tolerance, "empty")
    denominator = slack + (magnitude(b) if kind in SCALED else 1.0) + (0.0 if kind in ABSOLUTE else np.abs(b))
    error = np.where(a == b, 0.0, np.abs(a - b) / denominator)
    return Line(name, float(error.max()), tolerance)


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
    tolerance = {**ABSOLUTE, **SCALED, **RELATIVE}[kind]
    if ours.keys() != recorded.keys():
        return Line(name, np.inf, tolerance, f"names differ: {', '.join(sorted(ours.keys() ^ recorded.keys()))}")
    lines = [compare(key, kind, ours[key], recorded[key], slack.get(key, 0.0)) for key in sorted(ours)]
    worst = max(lines, key=lambda line: np.nan_to_num(line.error, nan=np.inf))
    return Line(name, worst.error, tolerance, f"{len(lines)} tensors, worst {worst.name} {worst.note}")
