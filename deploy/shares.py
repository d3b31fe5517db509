"""What parts of a run spend their time on, between two looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Shares:
    """The shares of one kind of part."""

    def __init__(self) -> None:
        self._before: Mapping[str, Mapping[Any, float]] = {}

    def since(self, spent: Mapping[str, Mapping[Any, float]]) -> dict[str, float]:
        """Thing -> share of the time since the last call, 0 to 1, over all parts; empty where no time has passed.

        spent: part -> thing, a word -> seconds in its life. A part that was started again counts from its start.
        """
        total: Counter[str] = Counter()
        for part, seconds in spent.items():
            before = self._before.get(part, {})
            if sum(seconds.values()) < sum(before.values()):
                before = {}
            for thing, value in seconds.items():
                total[thing] += max(0.0, value - before.get(thing, 0.0))  # type: ignore[assignment]  # its stub knows whole numbers only
        self._before = {part: dict(seconds) for part, seconds in spent.items()}
        whole = sum(total.values())
        return {thing: value / whole for thing, value in total.items()} if whole > 0 else {}
