"""The queue of fresh windows, which training is served before any window is drawn (DreamerV3's online queue).

Axes: N rows of one tick, B windows.
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
    waiting: (environment, first row) of windows that wait from the beginning, oldest first.
    """

    def __init__(self, length: int, limit: int, waiting: Iterable[tuple[int, int]] = ()) -> None:
        self._length = length
        self._waiting = deque(waiting, maxlen=limit)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[tuple[int, int]]:
        """(environment, first row) of every window that waits, oldest first; some may have been overwritten since."""
        return list(self._waiting)

    def append(self, env_id: np.ndarray, row: np.ndarray) -> None:
        """Follows one tick: `row` [N] are the new rows' numbers in environments `env_id` [N]."""
        whole = (row % self._length == 0) & (row >= self._length - 1)
        if whole.any():
            first = row[whole] - (self._length - 1)
            self._waiting.extend(zip(env_id[whole].tolist(), first.tolist(), strict=True))

    def pop(self, count: int, tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes out the oldest windows, at most `count`: (env_id, first_row), int64 [B] each.

        tail: int64 [E], the oldest row of each environment; windows that begin before it are dropped on the way.
        """
        taken: list[tuple[int, int]] = []
        while self._waiting and len(taken) < count:
            env, first = self._waiting.popleft()
            if first >= tail[env]:
                taken.append((env, first))
        pairs = np.array(taken, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]
