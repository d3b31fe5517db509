"""An embedded store beside the model of it, for the tests of its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from replay_server.store import Store
from telamon.data import RowSpec, WindowSpec
from tests.replay_server import model


class Table(model.Tracked):
    """A store whose rows say their own environment and number."""

    rows = staticmethod(model.rows_of)
    latents = staticmethod(model.latents_of)

    def __init__(
        self, window: WindowSpec, num_envs: int, capacity: int, seed: int = 0, directory: Path | None = None
    ) -> None:
        self.store = Store(model.ROW, window, num_envs, capacity, np.random.default_rng(seed), directory)
        super().__init__(self.store, window, num_envs, capacity)


@pytest.fixture(scope="session")
def make_table() -> type[Table]:
    return Table


@pytest.fixture(scope="session")
def any_case() -> st.SearchStrategy[tuple[Table, list[dict[int, model.Flags]]]]:
    """A new table and ticks for it."""
    return model.cases().map(lambda case: (Table(case.window, case.num_envs, case.capacity, case.seed), case.ticks))


@pytest.fixture(scope="session")
def make_stream():
    return model.stream


@pytest.fixture(scope="session")
def row_spec() -> RowSpec:
    return model.ROW
