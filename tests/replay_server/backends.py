"""The ways in which one may have a replay: each gives new tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np

from replay_server.store import Store
from telamon.data import RowSpec, WindowSpec
from telamon.replay import Replay
from tests.replay_server.model import ROW


class Embedded:
    """Tables in this process, each with a folder of its own for marks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = count()

    @contextmanager
    def table(
        self, window: WindowSpec, num_envs: int, capacity: int, seed: int = 0, row: RowSpec = ROW
    ) -> Iterator[Replay]:
        folder = self._directory / f"table-{next(self._number)}"
        yield Store(row, window, num_envs, capacity, np.random.default_rng(seed), folder)


@contextmanager
def store(directory: Path) -> Iterator[Embedded]:
    yield Embedded(directory)


BACKENDS = {"store": store}
"""Name -> (a folder of its own -> context manager of what makes tables)."""
