"""Exactly-once appends: who writes which environments, and how far each writer has come.

A stream is one writer across its restarts. It has environments of its own, an epoch that every opening raises, and the
number of its next tick. All of it lies beside the rows, so it survives what they survive.

A tick moves several heads and the stream's own count. Before it begins, what they are is written down; a process that
finds such a note when it opens the table puts them back, so that after SIGKILL a tick is there whole or not at all.
Several ticks that came together share one note.

Axes: E environments, N rows of one tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from replay_server.storage import Storage
from telamon.replay import StreamSuperseded, TickGap

INT64 = np.dtype(np.int64)


@dataclass(frozen=True)
class Stream:
    """A writer's place in a table: environments first_env_id to first_env_id + num_envs - 1."""

    index: int
    first_env_id: int
    num_envs: int


@dataclass(frozen=True)
class Opened:
    """What a writer is told when it opens its stream."""

    epoch: int
    next_tick: int
    first_env_id: int


class Streams:
    """The streams of one table with room for `max_envs` environments.

    known: the streams so far, by name.
    """

    def __init__(self, storage: Storage, max_envs: int, known: Mapping[str, Stream]) -> None:
        self.by_name = dict(known)
        self._max_envs = max_envs
        # a stream has an environment at least, so there are no more streams
        self._epoch = storage.array("epoch", (max_envs,), INT64)
        self._next_tick = storage.array("next-tick", (max_envs,), INT64)
        self._note = storage.array("note", (3 + 2 * max_envs,), INT64)
        """Rows of the tick in progress (0: none), its stream, its number; then environments, then their heads."""

    @property
    def num_envs(self) -> int:
        """Environments that belong to a stream."""
        return sum(stream.num_envs for stream in self.by_name.values())

    def join(self, name: str, num_envs: int) -> bool:
        """Gives a new stream its environments; returns whether it is new.

        Raises ValueError where it is known with another number of them, OSError where there is no room.
        """
        known = self.by_name.get(name)
        if known is None:
            used = self.num_envs
            if num_envs < 1:
                raise ValueError(f"stream {name!r} has {num_envs} environments; num_envs must be at least 1")
            if used + num_envs > self._max_envs:
                raise OSError(
                    f"stream {name!r} needs {num_envs} environments, but {used} of the table's {self._max_envs} are "
                    "taken; raise max_envs"
                )
            self.by_name[name] = Stream(len(self.by_name), used, num_envs)
        elif known.num_envs != num_envs:
            raise ValueError(
                f"stream {name!r} has {known.num_envs} environments since it was first opened, not {num_envs}; "
                "give a writer of another size another stream name"
            )
        return known is None

    def leave(self, name: str) -> None:
        """Takes back the newest `join`."""
        del self.by_name[name]

    def open(self, name: str) -> Opened:
        """Begins the next epoch of a stream that has joined."""
        stream = self.by_name[name]
        self._epoch[stream.index] += 1
        epoch, next_tick = int(self._epoch[stream.index]), int(self._next_tick[stream.index])
        return Opened(epoch, next_tick, stream.first_env_id)

    def check(self, name: str, epoch: int, tick: int, env_id: np.ndarray) -> tuple[Stream, int]:
        """(the stream, how many of the ticks from `tick` on it holds already).

        Raises FileNotFoundError, StreamSuperseded, TickGap, and ValueError for environments [N] of another stream.
        """
        stream = self.by_name.get(name)
        if stream is None:
            raise FileNotFoundError(f"there is no stream {name!r}; open it first")
        if epoch != (present := int(self._epoch[stream.index])):
            raise StreamSuperseded(f"epoch {epoch} of stream {name!r} is over; the present one is {present}")
        if tick < 0:
            raise ValueError(f"tick {tick} of stream {name!r} is negative; ticks count from 0")
        next_tick = int(self._next_tick[stream.index])
        if tick > next_tick:
            raise TickGap(f"tick {tick} of stream {name!r} came, but {next_tick} is the next one")
        first, end = stream.first_env_id, stream.first_env_id + stream.num_envs
        if env_id.size and not (env_id.min() >= first and env_id.max() < end):
            raise ValueError(f"env_id {env_id.tolist()} leaves environments {first} to {end - 1} of stream {name!r}")
        return stream, next_tick - tick

    def held(self, name: str) -> int:
        """The highest tick held of a stream; -1 before the first, and of an unknown stream."""
        stream = self.by_name.get(name)
        return -1 if stream is None else int(self._next_tick[stream.index]) - 1

    def begin(self, stream: Stream, env_id: np.ndarray, head: np.ndarray) -> None:
        """Notes where a tick of environments `env_id` [N] begins. head: int64 [E]."""
        count, note = env_id.size, self._note
        note[1], note[2] = stream.index, self._next_tick[stream.index]
        note[3 : 3 + count] = env_id
        note[3 + count : 3 + 2 * count] = head[env_id]
        note[0] = count  # last: from here on the note counts

    def end(self, stream: Stream, ticks: int) -> None:
        """The ticks are whole: they are counted, and the note does not count any more."""
        self._next_tick[stream.index] += ticks
        self._note[0] = 0

    def recover(self, head: np.ndarray) -> bool:
        """Takes back what was begun and not ended, if there is anything. head: int64 [E], changed."""
        count, note = int(self._note[0]), self._note
        if not count:
            return False
        head[note[3 : 3 + count]] = note[3 + count : 3 + 2 * count]
        self._next_tick[note[1]] = note[2]
        note[0] = 0
        return True

    def next_ticks(self) -> dict[str, int]:
        """By stream; what a mark keeps."""
        return {name: int(self._next_tick[stream.index]) for name, stream in self.by_name.items()}

    def set_next_ticks(self, ticks: Mapping[str, int]) -> None:
        """The inverse of `next_ticks`; a stream that the mark does not know begins anew."""
        for name, stream in self.by_name.items():
            self._next_tick[stream.index] = ticks.get(name, 0)
