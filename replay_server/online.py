"""The queue of fresh windows, which training is served before any window is drawn (DreamerV3's online queue).

Axes: K ticks, N rows of one tick, B windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np


class OnlineQueue:
    """Each environment's consecutive windows of `length` rows without overlap, in the order in which they became whole.

    As in the reference a window is whole with a row whose number is a multiple of `length` and which has length - 1
    before it, so an environment's windows start at rows 1, 1 + length, 1 + 2 * length, ... and row 0 is in none
    (but of one row each).
    limit: windows that may wait; when one more comes the oldest goes. 0: none ever waits.
    passed: int64 [E], kept up to date: the first row that no window taken out covers. With it a queue is made again
    after its process died (`waiting_windows`).
    waiting: (environment, first row) of windows that wait from the beginning, oldest first.
    """

    def __init__(self, length: int, limit: int, passed: np.ndarray, waiting: Iterable[tuple[int, int]] = ()) -> None:
        self._length = length
        self.passed = passed
        self._waiting = deque(waiting, maxlen=limit)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[tuple[int, int]]:
        """(environment, first row) of every window that waits, oldest first; some may have been overwritten since."""
        return list(self._waiting)

    def append(self, env_id: np.ndarray, row: np.ndarray) -> None:
        """Follows K ticks: `row` [K, N] are the new rows' numbers in environments `env_id` [N]."""
        whole = (row % self._length == 0) & (row >= self._length - 1)
        if self._waiting.maxlen and whole.any():
            first = row[whole] - (self._length - 1)
            env_id = np.broadcast_to(env_id, row.shape)[whole]
            self._waiting.extend(zip(env_id.tolist(), first.tolist(), strict=True))

    def pop(self, count: int, tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes out the oldest windows, at most `count`: (env_id, first_row), int64 [B] each.

        tail: int64 [E], the oldest row of each environment; windows that begin before it are dropped on the way.
        """
        taken: list[tuple[int, int]] = []
        while self._waiting and len(taken) < count:
            env, first = self._waiting.popleft()
            self.passed[env] = first + self._length
            if first >= tail[env]:
                taken.append((env, first))
        pairs = np.array(taken, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]


def waiting_windows(length: int, passed: np.ndarray, tail: np.ndarray, head: np.ndarray) -> list[tuple[int, int]]:
    """(environment, first row) of the fresh windows that are held and were not taken out, oldest rows first.

    passed, tail, head: int64 [E].
    """
    found = []
    for env in np.flatnonzero(head).tolist():
        begin = max(int(passed[env]), int(tail[env]))
        # windows start where row % length == 1 % length
        first = begin + (1 - begin) % length
        found += [(row, env) for row in range(first, int(head[env]) - length + 1, length)]
    return [(env, row) for row, env in sorted(found)]


def passed_rows(length: int, head: np.ndarray, waiting: Iterable[tuple[int, int]]) -> np.ndarray:
    """`passed` [E] of a queue that holds `waiting`: everything whole that does not wait was taken out."""
    passed = np.maximum(0, 1 + length * ((head - 1) // length)) if length > 1 else head.copy()
    for env, first in waiting:
        passed[env] = min(passed[env], first)
    return passed
