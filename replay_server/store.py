"""The replay of one process: rings, the index of their episodes, the online queue, and counters.

Implements `telamon.replay.Replay`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from replay_server import persist, windows
from replay_server.online import OnlineQueue
from replay_server.ring import CHUNK_ROWS, LATENTS, Ring
from telamon.data import Rows, RowSpec, Window, WindowSpec, WriteBack, from_columns, to_columns
from telamon.replay import Purpose, ReplayStats


def table_bytes(row_spec: RowSpec, num_envs: int, capacity: int) -> int:
    """Bytes of a full table: `capacity` rows for each of `num_envs` environments."""
    return row_spec.nbytes * num_envs * capacity


class Store:
    """A table of `num_envs` rings of `capacity` rows each, served as windows of `window_spec`.

    rng: draws every window for training; one spawned from it draws those of reports, so that looking changes nothing.
    The states of both are part of a mark, so its bit generator is one whose state JSON can hold (PCG64).
    directory: where marks are kept; it must be this store's alone. None where none will be asked for.
    Raises ValueError for windows that such a table cannot serve.
    """

    def __init__(
        self,
        row_spec: RowSpec,
        window_spec: WindowSpec,
        num_envs: int,
        capacity: int,
        rng: np.random.Generator,
        directory: Path | None = None,
    ) -> None:
        windows.check_spec(window_spec, capacity)
        self._row_spec = row_spec
        self._window_spec = window_spec
        self._rngs: dict[Purpose, np.random.Generator] = {"train": rng, "report": rng.spawn(1)[0]}
        self._directory = directory
        self._ring = Ring(row_spec.columns, num_envs, capacity)
        self._episodes = windows.Episodes(num_envs, capacity, windows.min_rows(window_spec))
        self._online = OnlineQueue(window_spec.length, self._online_limit())
        self._chunks: dict[tuple[str, int], persist.ChunkFile] = {}
        sent = {"none": {}, "context": {f"latents/{k}": window_spec.context for k, _ in row_spec.latents}}
        rows = {name: window_spec.length for name in row_spec.columns if not name.startswith(LATENTS)}
        self._served = rows | sent[window_spec.latents]
        self._counters = {"sampled_windows": 0, "written_back": 0, "stale": 0}

    def append(self, rows: Rows) -> None:
        """Adds one tick. Raises ValueError naming the column or environment, expected and found."""
        columns = to_columns(rows)
        self._ring.check(rows.env_id, columns)
        self._episodes.check(rows.env_id, rows.is_first)
        row = self._ring.append(rows.env_id, columns)
        self._episodes.append(rows.env_id, row, self._ring.tail[rows.env_id], rows.is_first, rows.is_last)
        self._online.append(rows.env_id, row)

    def can_sample(self) -> bool:
        return self._items() > 0

    def sample(self, batch: int, purpose: Purpose = "train") -> Window:
        """Serves `batch` windows in fresh arrays: those of the online queue first, and drawn ones for the rest.

        A report only draws: it leaves queue, counters and the windows of training as they are.
        Raises LookupError while no window can be drawn.
        """
        if batch < 1:
            raise ValueError(f"a batch of {batch} windows is empty; batch must be at least 1")
        spec, ring = self._window_spec, self._ring
        env_id, first_row = self._online.pop(batch if purpose == "train" else 0, ring.tail)
        if drawn := batch - env_id.size:
            more = windows.draw(spec, self._episodes, ring.tail, ring.head, drawn, self._rngs[purpose])
            env_id, first_row = (np.concatenate(parts) for parts in zip((env_id, first_row), more, strict=True))
        columns = ring.gather(env_id, first_row, self._served)
        if spec.annotate:
            columns["is_first"], columns["is_last"] = windows.annotate(columns["is_first"], columns["is_last"])
        if purpose == "train":
            self._counters["sampled_windows"] += batch
        return Window(env_id=env_id.astype(np.int32), first_row=first_row, **from_columns(columns))  # type: ignore[arg-type]  # from_columns gives each field its array or dict

    def write_back(self, update: WriteBack) -> int:
        """Replaces latents of rows that are still held; returns how many were. Stale rows are dropped and counted."""
        latents = {f"latents/{k}": v for k, v in update.latents.items()}
        written = self._ring.write(update.env_id, update.row, latents)
        self._counters["written_back"] += written
        self._counters["stale"] += update.row.size - written
        return written

    def stats(self) -> ReplayStats:
        held = int((self._ring.head - self._ring.tail).sum())
        return ReplayStats(
            rows=int(self._ring.head.sum()),
            rows_held=held,
            bytes_held=held * self._row_spec.nbytes,
            episodes=int(self._episodes.count.sum()),
            items=self._items(),
            online_queue=len(self._online),
            **self._counters,
        )

    def mark(self, name: str) -> None:
        """Makes the present state restorable under `name`, in place of an earlier mark of that name.

        Writes only what was appended or written back since the last mark or restore. Raises OSError naming path and
        bytes when the disk does not take it; earlier marks are then untouched.
        """
        state = {
            "counters": self._counters,
            "generators": {purpose: rng.bit_generator.state for purpose, rng in self._rngs.items()},
            "online": self._online.waiting,
        }
        self._chunks = persist.save(self._folder(), name, self._ring, self._chunks, self._spec(), state)
        self._ring.settle()

    def restore(self, name: str) -> None:
        """Returns to a mark; the present state stays as it is when the mark is refused.

        A mark of smaller rings is taken into this table's; one of larger rings keeps them: no row is lost.
        The mark is read beside the present rows, so a store that has rows needs memory for both.
        Raises FileNotFoundError or ValueError naming what is missing, damaged or different.
        """
        capacity = persist.capacity(self._folder(), name)
        ring = Ring(self._row_spec.columns, self._ring.num_envs, capacity)
        chunks, state = persist.load(self._folder(), name, ring, {**self._spec(), "capacity": capacity})
        if capacity < self._ring.capacity:
            ring, chunks = ring.enlarged(self._ring.capacity), {}
        episodes = windows.Episodes(ring.num_envs, ring.capacity, windows.min_rows(self._window_spec))
        for env in range(ring.num_envs):
            episodes.rebuild(env, int(ring.tail[env]), ring.held("is_first", env), ring.held("is_last", env))
        self._ring, self._chunks, self._episodes = ring, chunks, episodes
        self._online = OnlineQueue(
            self._window_spec.length, self._online_limit(), ((env, first) for env, first in state["online"])
        )
        self._counters = state["counters"]
        for purpose, rng in self._rngs.items():
            rng.bit_generator.state = state["generators"][purpose]

    def marks(self) -> list[str]:
        """Names of all marks, damaged ones included."""
        return persist.names(self._folder())

    def forget(self, name: str) -> None:
        """Drops a mark and the files that no other mark needs. Raises FileNotFoundError for an unknown mark."""
        persist.forget(self._folder(), name)

    def _folder(self) -> Path:
        if self._directory is None:
            raise ValueError("this replay was made without a directory, so it keeps no marks; give Store a directory")
        return self._directory

    def _items(self) -> int:
        return windows.choices(self._window_spec, self._episodes, self._ring.tail, self._ring.head)

    def _online_limit(self) -> int:
        """Fresh windows that the rings can hold: where environments advance together, none that is held is dropped."""
        return (
            self._ring.num_envs * (self._ring.capacity // self._window_spec.length) if self._window_spec.online else 0
        )

    def _spec(self) -> dict[str, Any]:
        """What must be equal where a mark is restored."""
        return {
            "num_envs": self._ring.num_envs,
            "capacity": self._ring.capacity,
            "chunk_rows": CHUNK_ROWS,
            "generator": type(self._rngs["train"].bit_generator).__name__,
            **{f"row.{k}": v for k, v in asdict(self._row_spec).items()},
            **{f"window.{k}": v for k, v in asdict(self._window_spec).items()},
        }
