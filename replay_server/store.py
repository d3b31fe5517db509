"""The replay of one process: rings, the index of their episodes, the online queue, and counters.

Implements `telamon.replay.Replay`. One thread appends; any number sample and write back meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from replay_server import persist, windows
from replay_server.online import OnlineQueue, passed_rows, waiting_windows
from replay_server.ring import CHUNK_ROWS, Chunk, Ring
from replay_server.storage import LATENTS, Memory, Storage
from telamon.data import Rows, RowSpec, Window, WindowSpec, WriteBack, as_dtype, from_columns, to_columns
from telamon.replay import Purpose, ReplayStats, TableSpec

COUNTERS = ("sampled_windows", "written_back", "stale")
"""Fields of ReplayStats that are counted here."""

Chunks = dict[Chunk, persist.ChunkFile]


def table_bytes(row_spec: RowSpec, num_envs: int, capacity: int) -> int:
    """Bytes of a full table: `capacity` rows for each of `num_envs` environments."""
    return row_spec.nbytes * num_envs * capacity


@dataclass
class Content:
    """What a mark brings back."""

    ring: Ring
    episodes: windows.Episodes
    online: OnlineQueue
    counters: np.ndarray
    """int64, in the order of COUNTERS."""
    chunks: Chunks
    """Where the ring's chunks lie since the last mark, but for those touched since."""


@dataclass(frozen=True)
class Chosen:
    """Windows [B] that were chosen and are still to be gathered."""

    env_id: np.ndarray
    """int64 [B]."""
    first_row: np.ndarray
    """int64 [B]."""
    purpose: Purpose
    content: Content
    """Whose windows they are: a restore in the meantime does not change that."""

    def __getitem__(self, part: slice) -> Chosen:
        """Some of them; what is changed in place there is changed here."""
        return replace(self, env_id=self.env_id[part], first_row=self.first_row[part])


class Store:
    """A table of `num_envs` rings of `capacity` rows each, served as windows of `window_spec`.

    rng: draws every window for training; one spawned from it draws those of reports, so that looking changes nothing.
    The states of both are part of a mark, so its bit generator is one whose state JSON can hold (PCG64).
    directory: where marks are kept; it must be this store's alone. None where none will be asked for.
    storage: what holds the rows; those that it has from an earlier process are there again.
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
        storage: Storage | None = None,
    ) -> None:
        windows.check_spec(window_spec, capacity)
        self._row_spec = row_spec
        self._window_spec = window_spec
        self._rngs: dict[Purpose, np.random.Generator] = {"train": rng, "report": rng.spawn(1)[0]}
        self._directory = directory
        # Held for what must see heads, tails and index together, and by write-backs: a row must not be overwritten
        # between the look at the tail and the write. Windows are gathered without it, but for their latents.
        self._lock = threading.RLock()
        sent = {"none": {}, "context": {f"latents/{k}": window_spec.context for k, _ in row_spec.latents}}
        rows = {name: window_spec.length for name in row_spec.columns if not name.startswith(LATENTS)}
        columns = row_spec.columns
        self.served = {
            name: ((count, *columns[name].shape), as_dtype(columns[name].dtype))
            for name, count in (rows | sent[window_spec.latents]).items()
        }
        """Column -> (shape, dtype) of its part of one window."""
        self._content = self._index(Ring(columns, num_envs, capacity, storage))

    @property
    def spec(self) -> TableSpec:
        ring = self._content.ring
        return TableSpec(self._row_spec, self._window_spec, ring.capacity, ring.num_envs)

    @property
    def head(self) -> np.ndarray:
        """int64 [num_envs]: the number of each environment's next row."""
        return self._content.ring.head

    # rows in

    def append(self, rows: Rows) -> None:
        """Adds one tick. Raises ValueError naming the column or environment, expected and found."""
        columns = {name: value[None] for name, value in to_columns(rows).items()}
        self.prepare(rows.env_id, columns)
        self.commit(rows.env_id, columns)

    def prepare(self, env_id: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Refuses ticks that must not be appended: as `append`, and OSError where they have no space.

        columns: [K, N, ...], K at most the capacity, of K ticks of environments `env_id` [N].
        """
        ring, episodes = self._content.ring, self._content.episodes
        ring.check(env_id, {name: value[0] for name, value in columns.items()})
        episodes.check(env_id, columns["is_first"], columns["is_last"])
        ring.reserve(env_id, columns["is_first"].shape[0])

    def commit(self, env_id: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Adds ticks that `prepare` has let pass."""
        content = self._content
        with self._lock:
            row = content.ring.append(env_id, columns)
            content.episodes.append(env_id, row, content.ring.tail[env_id], columns["is_first"], columns["is_last"])
            content.online.append(env_id, row)

    # windows out

    def can_sample(self) -> bool:
        return self.items() > 0

    def items(self) -> int:
        """What a draw chooses among now."""
        with self._lock:
            return self._items()

    def sample(self, batch: int, purpose: Purpose = "train") -> Window:
        """Serves `batch` windows in fresh arrays: those of the online queue first, and drawn ones for the rest.

        A report only draws: it leaves queue, counters and the windows of training as they are.
        Raises LookupError while no window can be drawn.
        """
        chosen = self.choose(batch, purpose)
        columns = {name: np.empty((batch, *shape), dtype) for name, (shape, dtype) in self.served.items()}
        self.fill(chosen, columns)
        fields = from_columns(columns)
        return Window(env_id=chosen.env_id.astype(np.int32), first_row=chosen.first_row, **fields)  # type: ignore[arg-type]  # each field is given its array or dict

    def choose(self, batch: int, purpose: Purpose = "train") -> Chosen:
        """The next windows to serve. Raises as `sample`."""
        if batch < 1:
            raise ValueError(f"a batch of {batch} windows is empty; batch must be at least 1")
        with self._lock:
            content = self._content
            env_id, first_row = content.online.pop(batch if purpose == "train" else 0, content.ring.tail)
            if drawn := batch - env_id.size:
                more = self._draw(content, drawn, purpose)
                env_id, first_row = (np.concatenate(parts) for parts in zip((env_id, first_row), more, strict=True))
            if purpose == "train":
                content.counters[COUNTERS.index("sampled_windows")] += batch
        return Chosen(env_id, first_row, purpose, content)

    def fill(self, chosen: Chosen, out: Mapping[str, np.ndarray]) -> None:
        """Gathers chosen windows [B] into `out`: column -> C-contiguous [B, *shape], as `served` says.

        A window that is overwritten in the meantime is drawn anew: `chosen` is changed in place.
        """
        env_id, first_row, content = chosen.env_id, chosen.first_row, chosen.content
        latents = {name: into for name, into in out.items() if name.startswith(LATENTS)}
        others = {name: into for name, into in out.items() if not name.startswith(LATENTS)}
        if latents:
            with self._lock:  # a write-back must not be seen half
                content.ring.gather(env_id, first_row, latents)
        held = content.ring.gather(env_id, first_row, others)
        if self._window_spec.annotate:
            is_first, is_last = windows.annotate(out["is_first"], out["is_last"])
            out["is_first"][...], out["is_last"][...] = is_first, is_last
        lost = np.flatnonzero(~held)
        if lost.size:
            with self._lock:
                again = Chosen(*self._draw(content, lost.size, chosen.purpose), chosen.purpose, content)
            columns = {name: np.empty((lost.size, *into.shape[1:]), into.dtype) for name, into in out.items()}
            self.fill(again, columns)
            env_id[lost], first_row[lost] = again.env_id, again.first_row
            for name, into in out.items():
                into[lost] = columns[name]

    def write_back(self, update: WriteBack) -> int:
        """Replaces latents of rows that are still held; returns how many were. Stale rows are dropped and counted."""
        latents = {f"latents/{k}": v for k, v in update.latents.items()}
        with self._lock:
            written = self._content.ring.write(update.env_id, update.row, latents)
            self._count_written(written, update.row.size - written)
        return written

    def drop(self, update: WriteBack) -> None:
        """Counts every row of an update as stale."""
        with self._lock:
            self._count_written(0, update.row.size)

    def stats(self) -> ReplayStats:
        with self._lock:
            content = self._content
            held = int((content.ring.head - content.ring.tail).sum())
            return ReplayStats(
                rows=int(content.ring.head.sum()),
                rows_held=held,
                bytes_held=held * self._row_spec.nbytes,
                episodes=int(content.episodes.count.sum()),
                items=self._items(),
                online_queue=len(content.online),
                **dict(zip(COUNTERS, content.counters.tolist(), strict=True)),
            )

    # marks

    def mark(
        self,
        name: str,
        extra: Callable[[], Mapping[str, Any]] = dict,
        outer: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        """Makes the present state restorable under `name`, in place of an earlier mark of that name.

        extra: gives JSON values of the caller's own, kept with it. outer: the caller's lock; it is held as `lock` of
        persist.save is, so others go on while most is written. One mark, restore or forget at a time.
        Writes only what was appended or written back since the last mark or restore. Raises OSError naming path and
        bytes when the disk does not take it; earlier marks are then untouched.
        """
        content = self._content

        @contextmanager
        def lock() -> Iterator[None]:
            with outer, self._lock:
                yield

        def state() -> dict[str, Any]:
            return {
                "counters": dict(zip(COUNTERS, content.counters.tolist(), strict=True)),
                "generators": {purpose: rng.bit_generator.state for purpose, rng in self._rngs.items()},
                "online": content.online.waiting,
                "extra": dict(extra()),
            }

        spec = self._spec(content.ring.capacity)
        content.chunks = persist.save(self._folder(), name, content.ring, content.chunks, spec, state, lock)

    def continue_from(self, name: str | None, fingerprint: int) -> None:
        """Lets the next mark write only what was touched since mark `name`, if that mark is still the one meant.

        For a store over storage that outlived its process; otherwise the next mark writes everything.
        """
        with self._lock:
            content = self._content
            marked = name is not None and name in self.marks()
            if name is not None and marked and persist.fingerprint(self._folder(), name) == fingerprint:
                content.chunks = persist.chunk_files(self._folder(), name)
            else:
                content.ring.touch(content.ring.chunks())

    def restore(self, name: str) -> None:
        """Returns to a mark; the present state stays as it is when the mark is refused.

        A mark of smaller rings is taken into this table's; one of larger rings keeps them: no row is lost.
        The mark is read beside the present rows, so a store that has rows needs memory for both.
        Raises FileNotFoundError or ValueError naming what is missing, damaged or different.
        """
        self.adopt(*self.load(name, Memory()))

    def load(self, name: str, storage: Storage) -> tuple[Content, dict[str, Any]]:
        """Reads a mark into `storage`, which is empty: (what `adopt` takes, the mark's state). Raises as `restore`."""
        capacity = persist.capacity(self._folder(), name)
        ring = Ring(self._row_spec.columns, self._content.ring.num_envs, capacity, storage)
        chunks, state = persist.load(self._folder(), name, ring, self._spec(capacity))
        if capacity < self._content.ring.capacity:
            ring, chunks = ring.enlarged(self._content.ring.capacity), {}
        waiting = [(env, first) for env, first in state["online"]]
        passed = passed_rows(self._window_spec.length, ring.head, waiting)
        ring.storage.array("passed", passed.shape, passed.dtype)[:] = passed
        content = self._index(ring)
        content.online = self._queue(ring, waiting)
        content.counters[:] = [state["counters"][name] for name in COUNTERS]
        content.chunks = chunks
        return content, state

    def adopt(self, content: Content, state: Mapping[str, Any]) -> None:
        """Goes on with what `load` gave."""
        with self._lock:
            self._content = content
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

    def _index(self, ring: Ring) -> Content:
        """Everything that follows from the rows of a ring."""
        episodes = windows.Episodes(ring.num_envs, ring.capacity, windows.min_rows(self._window_spec))
        for env in np.flatnonzero(ring.head).tolist():
            episodes.rebuild(env, int(ring.tail[env]), ring.held("is_first", env), ring.held("is_last", env))
        counters = ring.storage.array("counters", (len(COUNTERS),), np.dtype(np.int64))
        passed = ring.storage.array("passed", ring.head.shape, ring.head.dtype)
        length = self._window_spec.length
        waiting = waiting_windows(length, passed, ring.tail, ring.head) if self._window_spec.online else []
        return Content(ring, episodes, self._queue(ring, waiting), counters, {})

    def _queue(self, ring: Ring, waiting: list[tuple[int, int]]) -> OnlineQueue:
        # Fresh windows that the rings can hold: where environments advance together, none that is held is dropped.
        limit = ring.num_envs * (ring.capacity // self._window_spec.length) if self._window_spec.online else 0
        passed = ring.storage.array("passed", ring.head.shape, ring.head.dtype)
        return OnlineQueue(self._window_spec.length, limit, passed, waiting)

    def _items(self) -> int:
        content = self._content
        return windows.choices(self._window_spec, content.episodes, content.ring.tail, content.ring.head)

    def _draw(self, content: Content, count: int, purpose: Purpose) -> tuple[np.ndarray, np.ndarray]:
        ring = content.ring
        return windows.draw(self._window_spec, content.episodes, ring.tail, ring.head, count, self._rngs[purpose])

    def _count_written(self, written: int, stale: int) -> None:
        counters = self._content.counters
        counters[COUNTERS.index("written_back")] += written
        counters[COUNTERS.index("stale")] += stale

    def _spec(self, capacity: int) -> dict[str, Any]:
        """What must be equal where a mark is restored."""
        return {
            "num_envs": self._content.ring.num_envs,
            "capacity": capacity,
            "chunk_rows": CHUNK_ROWS,
            "generator": type(self._rngs["train"].bit_generator).__name__,
            **{f"row.{k}": v for k, v in asdict(self._row_spec).items()},
            **{f"window.{k}": v for k, v in asdict(self._window_spec).items()},
        }
