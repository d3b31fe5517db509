"""Comparing one quantity, and saying how it went. Tolerances are ten times what an independent re-implementation needs."""

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

SCALED = {"gradient": 1e-4, "moment": 2e-5}
"""Bounds of |a - b| / (s + |b|), s = the tensor's own largest magnitude, within [1e-3, 1]: gradients are small."""


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
    scale = np.clip(np.abs(b).max(), 1e-3, 1) if kind in SCALED else 1.0
    denominator = 1.0 if kind in ABSOLUTE else scale + np.abs(b) + slack
    error = np.where(a == b, 0.0, np.abs(a - b) / denominator)
    return Line(name, float(error.max()), tolerance)


def compare_tree(name: str, kind: str, ours: Mapping[str, np.ndarray], recorded: Mapping[str, np.ndarray]) -> Line:
    """The worst of many named tensors, as one line that names it."""
    tolerance = {**ABSOLUTE, **SCALED, **RELATIVE}[kind]
    if ours.keys() != recorded.keys():
        return Line(name, np.inf, tolerance, f"names differ: {', '.join(sorted(ours.keys() ^ recorded.keys()))}")
    lines = [compare(key, kind, ours[key], recorded[key]) for key in sorted(ours)]
    worst = max(lines, key=lambda line: np.nan_to_num(line.error, nan=np.inf))
    return Line(name, worst.error, tolerance, f"{len(lines)} tensors, worst {worst.name} {worst.note}")
