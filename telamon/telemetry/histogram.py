"""Histograms that cost a search and two sums per value: what is made of them is made when somebody looks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Counted(NamedTuple):
    """What a histogram has counted."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, themselves included."""
    counts: tuple[int, ...]
    """Of each bucket alone, and of what lies above them all."""
    above: float
    """Sum of the values above zero."""
    below: float
    """Sum of those below zero, without their sign."""

    @property
    def total(self) -> float:
        """Sum of the values."""
        return self.above - self.below


class Histogram:
    """Counts values by size. One thread observes, others may look. bounds: ascending, finite."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._above = self._below = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        if value > 0:
            self._above += value
        else:
            self._below -= value

    @property
    def counted(self) -> Counted:
        return Counted(self._bounds, tuple(self._counts), self._above, self._below)
