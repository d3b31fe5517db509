"""Where an update's windows come from and where its latents go, beside the updates.

A *source* is a replay with the limiter that admits updates. Two threads stand between it and the loop: one keeps
batches on the devices, each sampled once it was admitted; the other fetches latents from the devices and sends them.
Both are bounded: the loop waits for them before memory grows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jax.profiler import TraceAnnotation, annotate_function

from learner import limiter
from learner.background import POLL_SECONDS, Background, Beside, Outbox
from learner.update import Outcome
from telamon.data import Window, WriteBack
from telamon.replay import Replay

log = logging.getLogger(__name__)

DEPTH = 2
"""Batches on the devices ahead of the update."""
WRITE_BACKS = 4
"""Updates whose latents may wait for being sent."""


Lack = Literal["rows", "batch"]
"""What a loop without a batch waits for. `rows`: for admission, or for rows to sample; what was then left to do to make
the batch is counted with it. `batch`: for the sampling and placing of what might be sampled at once."""


class Origin(NamedTuple):
    """Whose rows the windows of a batch are."""

    env_id: np.ndarray
    """int32 [B]."""
    first_row: np.ndarray
    """int64 [B]."""
    incarnation: int


class Batch(NamedTuple):
    """What an update is given."""

    window: Window
    """On the devices; all processes' windows."""
    origin: Origin
    """Of this process's windows."""


def origin(window: Window) -> Origin:
    """Of a window on the host, whose other arrays need not be kept for it."""
    return Origin(window.env_id, window.first_row, window.incarnation)


def fresh_latents(windows: Window | Origin, context: int, latents: Mapping[str, Any]) -> WriteBack:
    """What an update made of the rows of windows behind their context, [B, T, ...], as rows by identity."""
    count = next(iter(latents.values())).shape[1]
    row = windows.first_row[:, None] + context + np.arange(count)
    flat = {k: np.asarray(v).reshape(row.size, *v.shape[2:]) for k, v in latents.items()}
    return WriteBack(np.repeat(windows.env_id, count), row.ravel(), flat, windows.incarnation)


# sources


class Gate(Protocol):
    """Who says when to train: what is needed of `learner.limiter.Limiter`."""

    def wait_to_train(self, timeout: float) -> bool: ...

    def trained(self) -> None: ...

    def look(self) -> None: ...

    def totals(self) -> limiter.Totals: ...

    def status(self) -> limiter.Status: ...


@dataclass(frozen=True)
class Source:
    """A replay, and who says when to train on it."""

    replay: Replay
    gate: Gate
    dropped_rows: Callable[[], int] = lambda: 0
    """Rows of write-backs that were dropped because their shard was away."""


# the two threads


class Batches:
    """Keeps `depth` batches on the devices, in a thread.

    sample: windows on the host; raises LookupError while there are none and TimeoutError while no shard answers, and is
    asked again, under the same admission. admit: waits so many seconds until one more update may be made; whether it
    may. place: puts windows on the devices. waits: told what `get` waits for, each time it begins to. beside: what the
    thread spends, which this adds to. clock: seconds, monotonic.
    """

    def __init__(
        self,
        sample: Callable[[], Window],
        admit: Callable[[float], bool],
        place: Callable[[Window], Window],
        waits: Callable[[Lack], None],
        beside: Beside,
        depth: int = DEPTH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sample, self._admit, self._place = sample, admit, place
        self._depth, self._clock = depth, clock
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._lack: Lack = "rows"
        self._admitted = self._taken = 0
        self._waits, self._beside = waits, beside
        self._thread = Background(self._fill, "batches")

    def get(self, timeout: float) -> Batch | None:
        """The next batch; None if there is none in `timeout` seconds. Raises what sampling raised."""
        with self._changed:
            deadline = self._clock() + timeout
            while not self._ready:
                self._thread.check()
                left = deadline - self._clock()
                if left <= 0:
                    return None
                self._waits(self._lack)
                self._changed.wait(left)
            self._taken += 1
            self._changed.notify_all()
            return self._ready.popleft()

    @property
    def ahead(self) -> int:
        """Updates that were admitted and whose batch nobody has taken yet."""
        with self._changed:
            return self._admitted - self._taken

    def stop(self) -> None:
        """Asks for the end; a call of `sample` may still be going on."""
        self._thread.stop()
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """As `stop`, and waits until the last call has returned."""
        self.stop()
        self._thread.end()

    def _fill(self, stop: threading.Event) -> None:
        while True:
            with self._changed:
                while len(self._ready) >= self._depth and not stop.is_set():
                    self._changed.wait(POLL_SECONDS)
            batch = self._next(stop)
            if batch is None:
                return
            with self._changed:
                self._ready.append(batch)
                self._lack = "batch"
                self._changed.notify_all()

    def _next(self, stop: threading.Event) -> Batch | None:
        """The batch after those that are ready; None at the end."""
        wait = 0.0
        while not self._admit(wait):
            self._lacking("rows")
            wait = POLL_SECONDS
            if stop.is_set():
                return None
        with self._changed:
            self._admitted += 1
        while not stop.is_set():
            try:
                window = self._sampled()
            except LookupError as error:
                if isinstance(error, (IndexError, KeyError)):
                    raise  # a mistake, not an empty table
                self._lacking("rows")
                stop.wait(POLL_SECONDS)
            except TimeoutError as error:
                self._lacking("rows")
                log.warning("event=no_windows error=%s", error)
            else:
                began = self._clock()
                with TraceAnnotation("copy"):
                    batch = Batch(self._place(window), origin(window))
                self._beside.copy += self._clock() - began
                return batch
        return None

    def _sampled(self) -> Window:
        began = self._clock()
        try:
            with TraceAnnotation("sample"):
                return self._sample()
        finally:
            self._beside.sample += self._clock() - began

    def _lacking(self, lack: Lack) -> None:
        with self._changed:
            self._lack = lack
            self._changed.notify_all()


@dataclass
class Written:
    """What became of the rows of write-backs."""

    written: int = 0
    stale: int = 0
    """Overwritten since, or of another incarnation."""
    dropped: int = 0
    """Their shard was away."""
    skipped: int = 0
    """Updates whose latents were not sent because they were skipped."""


class WriteBacks:
    """Fetches the latents of updates from the devices and sends them to their rows, in a thread.

    context: rows of a window that have none. local: this process's part of an array on the devices.
    written: what became of them, and beside: what the thread spends, which this adds to. clock: seconds, monotonic.
    """

    def __init__(
        self,
        source: Source,
        context: int,
        local: Callable[[Any], Any],
        written: Written,
        beside: Beside,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._context, self._local = source, context, local
        self._written, self._beside, self._clock = written, beside, clock
        self._outbox: Outbox[tuple[Origin, Outcome]] = Outbox(self._send, WRITE_BACKS, "write-backs", clock)

    def put(self, origin: Origin, outcome: Outcome) -> None:
        """Waits while there is no room. Raises what sending raised."""
        if outcome.write_back is not None:
            self._outbox.put((origin, outcome))

    def drain(self, timeout: float) -> bool:
        """Waits until all has been sent; whether it has. Raises what sending raised."""
        return self._outbox.drain(timeout)

    def stop(self) -> None:
        """Drops what waits."""
        self._outbox.stop()

    def end(self) -> None:
        """As `stop`, and waits for the last call."""
        self._outbox.end()

    @partial(annotate_function, name="write_back")
    def _send(self, item: tuple[Origin, Outcome]) -> None:
        origin, outcome = item
        if int(outcome.streak) > 0:
            self._written.skipped += 1
            return
        began = self._clock()
        update = fresh_latents(origin, self._context, self._local(outcome.write_back))
        before = self._source.dropped_rows()
        try:
            written = self._source.replay.write_back(update)
            dropped = self._source.dropped_rows() - before
        except TimeoutError:
            written, dropped = 0, update.row.size
        self._written.written += written
        self._written.dropped += dropped
        self._written.stale += update.row.size - written - dropped
        self._beside.write_back += self._clock() - began
