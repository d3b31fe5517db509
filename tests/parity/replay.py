"""replay_trace.npz: what the reference's replay served, annotated and took back, over a run of it.

The trace says which windows came out but not why. Of a training sample the windows of the online queue come first, from
our own queue. The others are uniform draws, which index the reference's list of windows: it is kept here as the
reference keeps it (`Items`), and our generator is replaced by one that makes our store draw the window that is meant
(`Script`). Everything else is the store's own doing.

The reference gives up the oldest window of all workers when it is full, our rings each their oldest row. Where workers
take turns that is the same, for rings that hold as many windows together; other files are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from replay_server.store import Store
from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec, WriteBack
from tests.parity.fixture import Fixture, Refused
from tests.parity.report import Line, compare

WORKER = 10_000
"""Row n of a worker is called worker * WORKER + n."""

IMMATERIAL = {"config/chunksize"}
"""The reference stores rows in chunks; ours has none."""


class Items:
    """The windows (worker, first row) that the reference may draw, in its order: deleting moves the last one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._age: deque[tuple[int, int]] = deque()
        self.listed: list[tuple[int, int]] = []

    def add(self, item: tuple[int, int]) -> None:
        """The oldest one goes first where there is no room."""
        if len(self.listed) == self._capacity:
            oldest, last = self._age.popleft(), self.listed.pop()
            if oldest != last:
                self.listed[self.listed.index(oldest)] = last
        self._age.append(item)
        self.listed.append(item)


class Script:
    """Stands for the store's generator: the reference's draws, as the store numbers its windows."""

    def __init__(self, items: Items, seed: int) -> None:
        self._items, self._rng = items, np.random.default_rng(seed)

    def integers(self, high: int, size: int) -> np.ndarray:
        """One draw at a time, as the reference draws; our windows are numbered by worker, then by first row."""
        listed, numbered = self._items.listed, sorted(self._items.listed)
        return np.array([numbered.index(listed[self._rng.integers(len(listed))]) for _ in range(size)])

    def spawn(self, count: int) -> list[Script]:
        """The reference draws for reports from the same stream."""
        return [self] * count


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of what can be drawn, and of ids, flags and latents of every window served.

    Raises Refused for workers that do not take turns.
    """
    length, capacity, workers, batch, seed = (
        int(fixture[f"config/{name}"]) for name in ("length", "capacity", "workers", "batch", "uniform_seed")
    )
    rows, recorded = fixture["rows"], fixture.under("sample/")
    fixture.read |= IMMATERIAL & fixture.keys()
    worker, number, *_ = rows.T
    turn = np.arange(len(rows))
    if capacity % workers or (worker != turn % workers).any() or (number != turn // workers).any():
        raise Refused(
            f"{fixture.path} has {workers} workers that do not take turns or do not divide {capacity} windows, "
            "and rings of one environment each then hold other rows than one queue of all windows"
        )
    items = Items(capacity)
    store = Store(
        RowSpec(obs=(("id", ArraySpec((), "int32")),), action=ArraySpec(()), latents=(("lat", ArraySpec(())),)),
        # more context than training has, to see the latents of all rows but the last
        WindowSpec(
            length, context=length - 1, cross_episodes=True, closed_only=False, start="windows", latents="context",
            online=True, annotate=True,
        ),
        workers, capacity // workers + length - 1, Script(items, seed),
    )  # fmt: skip
    served: dict[str, list[np.ndarray]] = {name: [] for name in ("rowid", "is_first", "is_last", "is_terminal", "lat")}
    gathered, can_draw = [], []
    for done, row in enumerate(rows, start=1):
        append(store, row)
        if row[1] >= length - 1:
            items.add((int(row[0]), int(row[1]) - length + 1))
        can_draw.append(store.stats().items)
        for i in np.flatnonzero(recorded["after_rows"] == done):
            train = bool(recorded["is_train"][i])
            window = store.sample(batch, "train" if train else "report")
            at = window.first_row[:, None] + np.arange(length)
            served["rowid"].append(window.env_id[:, None] * WORKER + at)
            gathered.append(window.obs["id"])
            served["lat"].append(window.latents["lat"])
            for name in ("is_first", "is_last", "is_terminal"):
                served[name].append(getattr(window, name))
            if train:
                where = np.repeat(window.env_id, length - 1), at[:, 1:].reshape(-1)
                store.write_back(WriteBack(*where, {"lat": np.full(batch * (length - 1), i + 1, np.float32)}))
    yield compare("items_after_row", "exact", can_draw, fixture["items_after_row"])
    yield compare("gathered", "exact", gathered, served["rowid"])
    latents = recorded["lat"][..., : length - 1]
    for name, values in served.items():
        yield compare(f"sample/{name}", "exact", values, latents if name == "lat" else recorded[name])


def append(store: Store, row: np.ndarray) -> None:
    """One row of the trace: worker, number and flags."""
    worker, number, *flags = row
    is_first, is_last, is_terminal = (np.array([flag], bool) for flag in flags)
    store.append(
        Rows(
            env_id=np.array([worker], np.int32),
            obs={"id": np.array([worker * WORKER + number], np.int32)},
            reward=np.zeros(1, np.float32),
            is_first=is_first, is_last=is_last, is_terminal=is_terminal,
            action=np.zeros(1, np.float32),
            latents={"lat": np.zeros(1, np.float32)},
        )
    )  # fmt: skip
