"""The columns of one table: a ring of rows per environment.

Row number r of an environment (int64, counts from 0, never reused) lives in slot r % capacity. Slots stay inside this
file; everybody else says (env_id, row). An environment holds the rows tail <= r < head.

Order in a full ring: advance the tail, write the rows, advance the head. So at no moment does [tail, head) contain a
row that is being overwritten, and a reader that looks at the tail again after its gather knows whether what it copied
was still there. One thread appends.

Axes: E environments, K ticks, N rows of one tick or call, B windows, T rows of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from replay_server.storage import LATENTS, Memory, Storage
from telamon.data import ArraySpec, as_dtype, check_columns

CHUNK_ROWS = 1024
"""Rows, over all environments, that are persisted together (`touched`, `take_chunk`, `load_chunk`)."""

CHUNK_SLOTS = 16
"""Rows of one environment in such a chunk, at least: a table may have room for many more environments than it has."""

RESERVED_SLOTS = 1024
"""Rows of one environment for which space is reserved at a time."""

Layout = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Column name -> (shape, dtype) of one row of it."""

Chunk = tuple[str, int]
"""What is persisted together: a group, "rows" or "latents", and the number of a range of slots."""


def sizes(specs: Mapping[str, ArraySpec], num_envs: int, capacity: int) -> dict[str, int]:
    """Bytes of the arrays that hold the columns of such rings, by column."""
    return {name: spec.nbytes * num_envs * capacity for name, spec in specs.items()}


class Ring:
    """Rings of `capacity` rows for each of E environments, one array per column.

    Memory is touched only where rows are written.
    storage: what holds the arrays; rows that are in it already are held from the beginning.
    """

    head: np.ndarray
    """int64 [E]: one past the newest row; the number of the next one."""
    tail: np.ndarray
    """int64 [E]: the oldest row held."""

    def __init__(
        self, specs: Mapping[str, ArraySpec], num_envs: int, capacity: int, storage: Storage | None = None
    ) -> None:
        self.storage: Storage = storage or Memory()
        self.specs = dict(specs)
        self._layout: Layout = {name: (spec.shape, as_dtype(spec.dtype)) for name, spec in specs.items()}
        self._latents = {name: row for name, row in self._layout.items() if name.startswith(LATENTS)}
        self.num_envs = num_envs
        self.capacity = capacity
        self.head = self.storage.array("head", (num_envs,), np.dtype(np.int64))
        self.tail = self.storage.array("tail", (num_envs,), np.dtype(np.int64))
        self._columns = {
            name: self.storage.array(name, (num_envs * capacity, *shape), dtype, sparse=True)
            for name, (shape, dtype) in self._layout.items()
        }
        # A gather moves bytes: rows of bytes need no alignment where they go.
        self._bytes = {
            name: column.reshape(num_envs * capacity, specs[name].size).view(np.uint8)
            for name, column in self._columns.items()
        }
        self._reserved = np.zeros(num_envs, np.int64)  # slots that may be written, from the first one on
        self._complete = isinstance(self.storage, Memory)  # whether every slot may be
        # Environments advance in lockstep, so a chunk is one range of slots of all of them: what a few ticks
        # touch is a few chunks, however many environments there are.
        self._chunk_slots = max(CHUNK_SLOTS, CHUNK_ROWS // num_envs)
        groups = ("rows", "latents") if self._latents else ("rows",)
        chunks = -(-capacity // self._chunk_slots)
        self._touched = {group: self.storage.array(f"touched-{group}", (chunks,), np.dtype(bool)) for group in groups}

    def check(self, env_id: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError for a tick that `append` must not get: no row, an unknown or repeated environment, a bad
        column."""
        self._check_env_id(env_id)
        if not env_id.size:
            raise ValueError("a tick has no rows; it must have one of at least one environment")
        if env_id.size > 1 and np.bincount(env_id).max() > 1:
            raise ValueError(f"env_id {env_id.tolist()} repeats an environment; a tick has one row of each")
        check_columns(columns, self._layout, env_id.size)

    def reserve(self, env_id: np.ndarray, ticks: int) -> None:
        """Makes sure that the next `ticks` rows of each environment of `env_id` [N] have space.

        Raises OSError naming path and bytes; nothing is changed then.
        """
        if self._complete:
            return
        slots = self.head[env_id] % self.capacity + ticks  # beyond the capacity: round the end, so every slot
        for i in np.flatnonzero(np.minimum(slots, self.capacity) > self._reserved[env_id]).tolist():
            self._reserve(int(env_id[i]), min(int(slots[i]), self.capacity))

    def append(self, env_id: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Adds K ticks, at most `capacity`: a row each to the environments of `env_id` [N]; columns are [K, N, ...].

        Takes only ticks that `check` accepts, after `reserve`. Returns the rows' numbers, int64 [K, N].
        """
        head, ticks = self.head[env_id], next(iter(columns.values())).shape[0]
        row = head + np.arange(ticks)[:, None]
        slot = row % self.capacity
        self.tail[env_id] = np.maximum(self.tail[env_id], head + ticks - self.capacity)
        place = self._place(env_id, slot)
        for name, value in columns.items():
            self._columns[name][place] = value
        for touched in self._touched.values():
            touched[slot // self._chunk_slots] = True
        self.head[env_id] = head + ticks
        return row

    def gather(self, env_id: np.ndarray, first_row: np.ndarray, out: Mapping[str, np.ndarray]) -> np.ndarray:
        """Copies windows from `first_row` [B] on of environments `env_id` [B].

        out: column name -> C-contiguous array [B, rows of it, ...], filled; it need not be aligned.
        Returns bool [B]: the windows that were still held wholly after the copy. The others' contents are anything.
        """
        self._check_env_id(env_id)
        length = max(into.shape[1] for into in out.values())
        slot = (first_row[:, None] + np.arange(length)) % self.capacity
        place = self._place(env_id[:, None], slot)
        for name, into in out.items():
            rows = into.shape[1]
            if not into.flags.c_contiguous:
                raise ValueError(f"the array for column {name!r} is not C-contiguous")
            column = self._bytes[name]
            flat = into.view(np.uint8) if into.ndim > 2 else into[..., None].view(np.uint8)
            # mode="clip": any other fills a buffer first; every place is inside
            column.take(place[:, :rows], axis=0, out=flat.reshape(env_id.size, rows, column.shape[1]), mode="clip")
        # after the copy: see the order of an append above
        return (first_row >= self.tail[env_id]) & (first_row + length <= self.head[env_id])

    def write(self, env_id: np.ndarray, row: np.ndarray, latents: Mapping[str, np.ndarray]) -> int:
        """Replaces the latent columns ([N, ...]) of rows (`env_id`, `row`) [N]; of two for one row the later wins.

        Returns how many of the N were for rows still held; the others are dropped. Raises ValueError for an unknown
        environment, a row that was never appended, and as `check_columns`.
        """
        self._check_env_id(env_id)
        if row.shape != env_id.shape or row.dtype.kind != "i":
            raise ValueError(f"row is {row.dtype} {list(row.shape)}, but env_id has {list(env_id.shape)} integers")
        check_columns(latents, self._latents, row.size)
        never = (row < 0) | (row >= self.head[env_id])
        if never.any():
            i = int(never.argmax())
            raise ValueError(
                f"row {row[i]} of environment {env_id[i]} was never appended; the next one is {self.head[env_id[i]]}"
            )
        held = np.flatnonzero(row >= self.tail[env_id])
        slot = row[held] % self.capacity
        place = self._place(env_id[held], slot)
        # Runs of neighbours, in the update and in memory, are copied whole: twice as fast as row by row. One run after
        # the other, so that the later of two for one row stays; inside a run all rows differ.
        begin = np.flatnonzero((np.diff(place, prepend=-2) != 1) | (np.diff(held, prepend=-2) != 1))
        runs = [array.tolist() for array in (held[begin], place[begin], np.diff(begin, append=held.size))]
        for name, value in latents.items():
            column = self._columns[name]
            for source, at, count in zip(*runs, strict=True):
                column[at : at + count] = value[source : source + count]
        if latents:
            self._touched["latents"][slot // self._chunk_slots] = True
        return held.size

    def held(self, name: str, env: int) -> np.ndarray:
        """A copy of column `name` of every row that environment `env` holds, oldest first: [head - tail, ...]."""
        slot = np.arange(self.tail[env], self.head[env]) % self.capacity
        return self._columns[name].take(self._place(np.array(env), slot), axis=0)

    def enlarged(self, capacity: int) -> Ring:
        """The same rows in new rings, in memory, of a larger `capacity`."""
        new = Ring(self.specs, self.num_envs, capacity)
        new.head[:], new.tail[:] = self.head, self.tail
        for env in range(self.num_envs):
            slot = np.arange(self.tail[env], self.head[env]) % capacity
            for name, column in new._columns.items():
                column[new._place(np.array(env), slot)] = self.held(name, env)
            for touched in new._touched.values():
                touched[slot // new._chunk_slots] = True
        return new

    # What persist.py needs: the same memory as numbered chunks.

    def touched(self) -> set[Chunk]:
        """Chunks written to since they were last taken."""
        return {(group, n) for group, touched in self._touched.items() for n in np.flatnonzero(touched).tolist()}

    def chunks(self) -> set[Chunk]:
        """Chunks that have rows."""
        used = -(-min(int(self.head.max(initial=0)), self.capacity) // self._chunk_slots)
        return {(group, n) for group in self._touched for n in range(used)}

    def touch(self, chunks: Iterable[Chunk]) -> None:
        """Takes back that they were taken."""
        for group, number in chunks:
            self._touched[group][number] = True

    def take_chunk(self, chunk: Chunk) -> np.ndarray:
        """A copy of one chunk, which counts as untouched from now on: one column after the other, uint8 [n].

        Of the environments up to the last one that has rows.
        """
        group, number = chunk
        self._touched[group][number] = False
        used = int(np.flatnonzero(self.head).max(initial=-1)) + 1
        return np.concatenate([part[:used].reshape(-1) for part in self._parts(group, number)])

    def load_chunk(self, chunk: Chunk, data: np.ndarray) -> None:
        """The inverse of `take_chunk`. Raises OSError as `reserve`."""
        group, number = chunk
        parts = self._parts(group, number)
        used = data.size // sum(part[0].nbytes for part in parts)
        ends = np.cumsum([part[:used].nbytes for part in parts])
        last = min((number + 1) * self._chunk_slots, self.capacity)
        for env in np.flatnonzero(self._reserved[:used] < last).tolist():
            self._reserve(env, last)
        for part, piece in zip(parts, np.split(data, ends[:-1]), strict=True):
            part[:used] = piece.reshape(part[:used].shape)

    def _reserve(self, env: int, slots: int) -> None:
        """Space for the first `slots` slots of an environment at least."""
        begin = int(self._reserved[env])
        end = max(slots, min(begin + RESERVED_SLOTS, self.capacity))
        for name, spec in self.specs.items():
            first = env * self.capacity
            self.storage.reserve(name, (first + begin) * spec.nbytes, (first + end) * spec.nbytes)
        self._reserved[env] = end
        self._complete = bool((self._reserved == self.capacity).all())

    def _place(self, env_id: np.ndarray, slot: np.ndarray) -> np.ndarray:
        # env_id may be int32, which E * capacity overflows
        return env_id.astype(np.int64) * self.capacity + slot

    def _parts(self, group: str, number: int) -> list[np.ndarray]:
        """Views [E, slots, bytes of a row] of the columns of one chunk, in the order of `specs`."""
        slots = slice(number * self._chunk_slots, (number + 1) * self._chunk_slots)
        return [
            column.reshape(self.num_envs, self.capacity, column.shape[1])[:, slots]
            for name, column in self._bytes.items()
            if name.startswith(LATENTS) == (group == "latents")
        ]

    def _check_env_id(self, env_id: np.ndarray) -> None:
        if env_id.ndim != 1 or env_id.dtype.kind != "i":
            raise ValueError(f"env_id is {env_id.dtype} {list(env_id.shape)}, expected a vector of signed integers")
        if env_id.size and not (env_id.min() >= 0 and env_id.max() < self.num_envs):
            raise ValueError(f"env_id {env_id.tolist()} leaves the table's environments 0 to {self.num_envs - 1}")
