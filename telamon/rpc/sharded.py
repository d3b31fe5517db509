"""One replay over several servers: `telamon.replay.Replay`.

A writer's stream lives on one shard. Windows are drawn from the shards in proportion to what each offers, which is what
drawing from one large table would do. A shard that does not answer offers nothing until it answers again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

import numpy as np

from telamon.data import Rows, Window, WriteBack, from_columns, to_columns
from telamon.replay import Purpose, ReplayStats

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

_NO_ANSWER = (TimeoutError, ConnectionError)
"""What a shard raises that does not answer. Anything else is a mistake and is raised."""


class Shard(Protocol):
    """What is needed of `telamon.rpc.client.Client`. Time-outs are seconds."""

    items: int | None
    """What the last `sample` chose among, or `stats` found."""

    def append(self, rows: Rows, timeout: float | None = None) -> None: ...

    def sample(self, batch: int, purpose: Purpose = "train", timeout: float | None = None) -> Window: ...

    def write_back(self, update: WriteBack, timeout: float | None = None) -> int: ...

    def stats(self, timeout: float | None = None) -> ReplayStats: ...

    def mark(self, name: str, timeout: float | None = None) -> None: ...

    def restore(self, name: str, timeout: float | None = None) -> None: ...

    def marks(self, timeout: float | None = None) -> list[str]: ...

    def forget(self, name: str, timeout: float | None = None) -> None: ...

    def flush(self, timeout: float | None = None) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass
class _State:
    """What is known of a shard."""

    items: int = 0
    seen: float = -np.inf
    """When it said so."""
    away_since: float | None = None
    probe: Future[ReplayStats] | None = None
    """The question that a shard that is away has not answered yet."""


class ShardedReplay:
    """The tables of `shards` as one. Safe to use from several threads.

    home: the shard that takes what is appended; None for a replay that only samples.
    rng: draws how many windows each shard serves; used by nobody else.
    max_envs: environments per shard; number e of shard s is s * max_envs + e here.
    timeout: seconds that every call waits while no shard answers (the home shard, for `append`).
    patience: seconds after which a shard that does not answer counts as away, and the others go on without it.
    refresh: seconds for which is believed what a shard offered.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        home: int | None,
        rng: np.random.Generator,
        max_envs: int,
        timeout: float = 60.0,
        patience: float = 2.0,
        refresh: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not shards or not (home is None or 0 <= home < len(shards)):
            raise ValueError(f"home={home} must be one of {len(shards)} shards, of which there must be one at least")
        if not 1 <= max_envs * len(shards) < 2**31:
            raise ValueError(f"{len(shards)} shards of {max_envs} environments are more than int32 can number")
        self._shards = list(shards)
        self._home = home
        self._rng = rng
        self._max_envs = max_envs
        self._timeout, self._patience = timeout, min(patience, timeout)
        self._refresh, self._clock = refresh, clock
        self._lock = threading.Lock()
        self._states = [_State() for _ in shards]
        # each shard has at most a question of a caller and one that probes it; several callers wait in turn
        self._pool = ThreadPoolExecutor(2 * len(shards), thread_name_prefix="telamon-shards")
        self.dropped_rows = 0
        """Rows of write-backs for shards that were away."""
        self._pasts: list[tuple[int, ...]] = []
        """Incarnations of all shards; number n of them is called n + 1 in windows. One more after every restore."""
        self._drawn_from = (0,) * len(self._shards)
        """The incarnations that each shard's windows had last; 0 before the first."""

    # Replay

    def append(self, rows: Rows) -> None:
        """Adds one tick to the home shard. Raises as its client."""
        if self._home is None:
            raise ValueError("this replay was made without a home shard, so it appends nothing; give ShardedReplay one")
        self._shards[self._home].append(rows)

    def can_sample(self) -> bool:
        return bool(self._weights(self._clock() + self._timeout).any())

    def sample(self, batch: int, purpose: Purpose = "train") -> Window:
        """Serves `batch` windows, those of the first shard first, in arrays of their own.

        Raises LookupError while no shard that answers has one, and TimeoutError when none answers.
        """
        if batch < 1:
            raise ValueError(f"a batch of {batch} windows is empty; batch must be at least 1")
        deadline = self._clock() + self._timeout
        parts: list[list[Window]] = [[] for _ in self._shards]
        missing = batch
        while missing:
            weights = self._weights(deadline)
            if not weights.any():
                raise LookupError("no shard that answers holds the rows that a window needs; append more first")
            with self._lock:
                counts = self._rng.multinomial(missing, weights / weights.sum())
            calls = {
                i: partial(self._draw, self._shards[i], int(count), purpose) for i, count in enumerate(counts) if count
            }
            for i, window in self._ask(calls).items():
                if window is None:
                    self._learn(i, 0)
                else:
                    self._learn(i, self._shards[i].items or 0)
                    parts[i].append(window)
                    missing -= window.env_id.size
        return self._join(parts)

    def write_back(self, update: WriteBack) -> int:
        """Replaces latents of rows that are still held; returns how many were.

        Those for a shard that is away are dropped and counted. Those of a shard that was restored since the window of
        `update.incarnation` was drawn are stale.
        """
        with self._lock:
            if not 0 <= update.incarnation <= len(self._pasts):
                raise ValueError(f"no window of this replay is of incarnation {update.incarnation}")
            past = self._pasts[update.incarnation - 1] if update.incarnation else (0,) * len(self._shards)
        home = update.env_id // self._max_envs
        if home.size and not (home.min() >= 0 and home.max() < len(self._shards)):
            raise ValueError(
                f"env_id goes from {update.env_id.min()} to {update.env_id.max()}, but {len(self._shards)} shards have "
                f"environments 0 to {len(self._shards) * self._max_envs - 1}"
            )
        calls, rows = {}, {}
        for i in np.unique(home).tolist():
            mine = home == i
            part = WriteBack(
                update.env_id[mine] - np.int32(i * self._max_envs),
                update.row[mine],
                {key: value[mine] for key, value in update.latents.items()},
                past[i],
            )
            calls[i], rows[i] = partial(self._shards[i].write_back, part, timeout=self._patience), part.row.size
        self._probe()
        present = {i: call for i, call in calls.items() if self._states[i].away_since is None}
        written = self._ask(present)
        with self._lock:
            self.dropped_rows += sum(count for i, count in rows.items() if written.get(i) is None)
        return sum(count for count in written.values() if count is not None)

    def stats(self) -> ReplayStats:
        """The sums over the shards that answer (`shard_stats` says which). Raises TimeoutError when none does."""
        found = [stats for stats in self.shard_stats() if stats is not None]
        return ReplayStats(**{f.name: sum(getattr(stats, f.name) for stats in found) for f in fields(ReplayStats)})

    def shard_stats(self) -> list[ReplayStats | None]:
        """Of each shard; None for those that do not answer. Raises TimeoutError when none does."""
        deadline = self._clock() + self._timeout
        while True:
            present = self._present(deadline)
            answers = self._ask({i: partial(self._shards[i].stats, timeout=self._patience) for i in present})
            found = [answers.get(i) for i in range(len(self._shards))]
            for i, stats in enumerate(found):
                if stats is not None:
                    self._learn(i, stats.items)
            if any(stats is not None for stats in found):
                return found

    def mark(self, name: str) -> None:
        """Makes the present state of every shard restorable; only `marks` that all of them have count."""
        self._shard_marks()  # raises TimeoutError where one is away; to mark takes as long as it takes
        self._all(lambda shard: shard.mark(name))

    def restore(self, name: str) -> None:
        """Returns every shard to a mark. Raises FileNotFoundError naming the shards that lack it; none changes then."""
        lack = [i for i, names in enumerate(self._shard_marks()) if name not in names]
        if lack:
            raise FileNotFoundError(f"there is no mark {name!r} on shards {lack} of {len(self._shards)}")
        self._all(lambda shard: shard.restore(name))
        with self._lock:
            for state in self._states:
                state.seen = -np.inf

    def marks(self) -> list[str]:
        """Names of the marks that all shards have."""
        first, *others = self._shard_marks()
        return [name for name in first if all(name in names for names in others)]

    def forget(self, name: str) -> None:
        """Drops a mark wherever it is. Raises FileNotFoundError where no shard has it."""
        having = [i for i, names in enumerate(self._shard_marks()) if name in names]
        if not having:
            raise FileNotFoundError(f"there is no mark {name!r} on any of {len(self._shards)} shards")
        self._all(lambda shard: shard.forget(name, timeout=self._timeout), having)

    # What only a service has

    def flush(self) -> None:
        """Waits until everything that was appended is acknowledged."""
        if self._home is not None:
            self._shards[self._home].flush()

    def close(self) -> None:
        """Closes the clients of all shards, and ends the threads, in any case. Raises what a client raises then."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self._pool.shutdown)  # last: a question under way ends with its client
            for shard in self._shards:
                stack.callback(shard.__exit__, kind, error, trace)

    # Which shards there are

    def _weights(self, deadline: float) -> np.ndarray:
        """What each shard offers now, float64; 0 for those that are away. Raises TimeoutError when all are."""
        while True:
            present = self._present(deadline)
            now = self._clock()
            old = [i for i in present if now - self._states[i].seen > self._refresh]
            for i, stats in self._ask({i: partial(self._shards[i].stats, timeout=self._patience) for i in old}).items():
                if stats is not None:
                    self._learn(i, stats.items)
            with self._lock:
                states = [(s.items, s.away_since) for s in self._states]
            if any(away is None for _, away in states):
                return np.array([items if away is None else 0 for items, away in states], np.float64)

    def _present(self, deadline: float) -> list[int]:
        """The shards that answer; waits for one while there is none."""
        while True:
            probes = self._probe()
            with self._lock:
                present = [i for i, state in enumerate(self._states) if state.away_since is None]
            left = deadline - self._clock()
            if left <= 0:
                raise TimeoutError(f"{len(self._shards)} replay servers did not answer within {self._timeout:g} s")
            if present:
                return present
            wait(probes, left, FIRST_COMPLETED)

    def _probe(self) -> list[Future[ReplayStats]]:
        """Sees which of those that were away have answered; the questions to the others, which wait for them."""
        asked = []
        with self._lock:
            for i, state in enumerate(self._states):
                if state.away_since is None:
                    continue
                if state.probe is not None and state.probe.done():
                    answered, state.probe = state.probe, None
                    if answered.exception() is None:
                        _log.warning("event=shard_back shard=%d seconds=%.1f", i, self._clock() - state.away_since)
                        state.items, state.seen, state.away_since = answered.result().items, self._clock(), None
                        continue
                    if not isinstance(answered.exception(), _NO_ANSWER):
                        answered.result()
                if state.probe is None:
                    state.probe = self._pool.submit(self._shards[i].stats, timeout=self._patience)
                asked.append(state.probe)
        return asked

    def _learn(self, shard: int, items: int) -> None:
        with self._lock:
            self._states[shard].items, self._states[shard].seen = items, self._clock()

    def _ask(self, calls: Mapping[int, Callable[[], Answer]]) -> dict[int, Answer | None]:
        """What shards answer, asked at once; None for those that turn out to be away."""
        futures = {i: self._pool.submit(call) for i, call in calls.items()}
        wait(futures.values())
        answers: dict[int, Answer | None] = {}
        for i, future in futures.items():
            try:
                answers[i] = future.result()
            except _NO_ANSWER as error:
                answers[i] = None
                with self._lock:
                    if self._states[i].away_since is None:
                        self._states[i].away_since = self._clock()
                        _log.warning("event=shard_away shard=%d error=%r", i, str(error))
        return answers

    # Helpers

    def _draw(self, shard: Shard, batch: int, purpose: Purpose) -> Window | None:
        """None where the shard has nothing to offer any more."""
        try:
            return shard.sample(batch, purpose, timeout=self._patience)
        except LookupError:
            return None

    def _join(self, parts: Sequence[Sequence[Window]]) -> Window:
        """The windows of each shard, one after the other, with the numbering of all."""
        columns = [
            {
                "env_id": window.env_id + np.int32(i * self._max_envs),
                "first_row": window.first_row,
                **to_columns(window),  # type: ignore[arg-type]  # which reads what Rows and Window have in common
            }
            for i, windows in enumerate(parts)
            for window in windows
        ]
        joined = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
        env_id, first_row = joined.pop("env_id"), joined.pop("first_row")
        incarnation = self._past_of(parts)
        return Window(env_id=env_id, first_row=first_row, incarnation=incarnation, **from_columns(joined))  # type: ignore[arg-type]  # from_columns gives each field its array or dict

    def _past_of(self, parts: Sequence[Sequence[Window]]) -> int:
        """What stands for the incarnations of the windows of each shard."""
        with self._lock:
            # Of a shard that was restored between two draws the older one: then all of its windows count as stale.
            self._drawn_from = tuple(
                windows[0].incarnation if windows else last
                for windows, last in zip(parts, self._drawn_from, strict=True)
            )
            if self._drawn_from not in self._pasts:
                self._pasts.append(self._drawn_from)
            return self._pasts.index(self._drawn_from) + 1

    def _shard_marks(self) -> list[list[str]]:
        return self._all(lambda shard: shard.marks(timeout=self._timeout))

    def _all(self, call: Callable[[Shard], Answer], shards: Sequence[int] | None = None) -> list[Answer]:
        """What every shard answers, or every one of `shards`. Raises what one of them raises, after all have ended."""
        futures = [
            self._pool.submit(call, shard) for i, shard in enumerate(self._shards) if shards is None or i in shards
        ]
        wait(futures)
        return [future.result() for future in futures]
