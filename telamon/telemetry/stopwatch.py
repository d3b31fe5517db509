"""What a loop does, or waits for, by the seconds that each thing has taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

D = TypeVar("D", bound=str)


class Stopwatch(Generic[D]):
    """Of one thread, which says what it does; any other may look. At each look the seconds add up to its life.

    things: all that may be done. doing: the first of it. clock: seconds, monotonic.
    """

    def __init__(self, things: Iterable[D], doing: D, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds: dict[D, float] = dict.fromkeys(things, 0.0)
        self._clock = clock
        self._doing, self._since = doing, clock()
        # Without it a look in the middle of `now` would count a stretch twice, and the next one would go back.
        self._lock = threading.Lock()

    @property
    def doing(self) -> D:
        """What is being done now."""
        return self._doing

    @property
    def age(self) -> float:
        """Seconds for which that has been done."""
        return self._clock() - self._since

    def now(self, doing: D) -> None:
        """Ends what was being done, and begins something."""
        with self._lock:
            at = self._clock()
            self._seconds[self._doing] += at - self._since
            self._doing, self._since = doing, at

    @property
    def seconds(self) -> dict[D, float]:
        """What each thing has taken up to this moment."""
        with self._lock:
            found = dict(self._seconds)
            found[self._doing] += self._clock() - self._since
        return found
