"""The ways in which one may have a replay: each gives new tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np

from replay_server.store import Store
from telamon.data import RowSpec, WindowSpec
from telamon.replay import Replay, TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from tests.replay_server.model import ROW
from tests.waiting import SECONDS

NUMBER = count()
"""Of tables; several backends may share a server."""


class Embedded:
    """Tables in this process, each with a folder of its own for marks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def table(
        self, window: WindowSpec, num_envs: int, capacity: int, seed: int = 0, row: RowSpec = ROW
    ) -> Iterator[Replay]:
        folder = self._directory / f"table-{next(NUMBER)}"
        yield Store(row, window, num_envs, capacity, np.random.default_rng(seed), folder)


class Remote:
    """Tables of a server, each through a client that is their only writer."""

    def __init__(self, endpoint: Endpoint, shared_memory: bool) -> None:
        self.endpoint = endpoint
        self.shared_memory = shared_memory

    @staticmethod
    def name() -> str:
        """Of a table that is not there yet."""
        return f"table-{next(NUMBER)}"

    def client(
        self, name: str, spec: TableSpec, stream: str | None = "writer", num_envs: int | None = None, **options: object
    ) -> Client:
        """A client, by default the one that writes all environments."""
        num_envs = spec.max_envs if num_envs is None else num_envs
        options = {"timeout": SECONDS, "shared_memory": self.shared_memory, **options}
        return Client(self.endpoint, name, spec, stream=stream, num_envs=num_envs, **options)

    @contextmanager
    def table(
        self, window: WindowSpec, num_envs: int, capacity: int, seed: int = 0, row: RowSpec = ROW
    ) -> Iterator[Client]:
        with self.client(self.name(), TableSpec(row, window, capacity, num_envs), seed=seed) as client:
            yield client
