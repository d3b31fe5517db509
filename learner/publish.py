"""Snapshots on their way to the actors: each put into the object store once, and pushed to whoever has time for it.

A worker whose last push is unfinished is left out; when it has answered it gets the newest snapshot, which may not be
the one it missed. So at most one push per worker is under way, however slow one is, and nobody waits for anybody.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import ray

from learner.background import POLL_SECONDS, Background
from telamon.agents.base import PyTree

log = logging.getLogger(__name__)

DELAYS = 1000
"""Pushes of which the time to their answer is remembered."""


@dataclass(frozen=True)
class Published:
    """How snapshots reach the actors."""

    snapshots: int
    """Put into the object store."""
    snapshot_bytes: int
    """Of the newest one."""
    pushes: int
    """Answered."""
    skipped: int
    """Pushes left out because the one before was unfinished."""
    failed: int
    ack_seconds: tuple[float, float]
    """Median and 99th percentile from the publishing of a snapshot to a worker's answer that it has it, of the last
    pushes; zeros before any."""
    behind: Mapping[str, int]
    """Worker -> versions by which its newest snapshot is older than the newest."""
    push_seconds: float = 0.0
    """Total time of the pushes that were answered, each from the publishing of its snapshot."""


class Receiver:
    """A worker as the publisher knows it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.has: int | None = None
        """Version that it has said it has."""
        self.busy = False
        """Whether a push is under way."""
        self.failing = False
        """Whether the last push failed."""


class Answer(NamedTuple):
    """Of a push; noted in a thread of Ray's, which must not wait."""

    name: str
    receiver: Receiver
    version: int
    seconds: float
    """Since the publishing of the snapshot began."""
    error: BaseException | None


class Publisher:
    """Pushes to workers by their method `set_params(version, [reference])`.

    put: puts a tree of numpy arrays into the object store. clock: seconds, monotonic.
    """

    def __init__(self, put: Callable[[Any], Any] = ray.put, clock: Callable[[], float] = time.monotonic) -> None:
        self._put, self._clock = put, clock
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._newest: tuple[int, float, Any] | None = None
        """Version, when its publishing began, and reference."""
        self._delays: deque[float] = deque(maxlen=DELAYS)
        self._snapshots = self._bytes = self._pushes = self._skipped = self._failed = 0
        self._push_seconds = 0.0
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._thread = Background(self._listen, "answers")

    def publish(self, version: int, params: PyTree) -> None:
        """Fetches a snapshot from the devices, and begins to push it."""
        self._thread.check()
        began = self._clock()
        tree = jax.tree.map(np.asarray, params)
        reference = self._put(tree)
        with self._lock:
            self._newest = version, began, reference
            self._snapshots += 1
            self._bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            for name, receiver in self._receivers.items():
                if receiver.busy:
                    self._skipped += 1
                else:
                    self._push(name, receiver)

    def set_workers(self, workers: Mapping[str, Any]) -> None:
        """These workers get the snapshots from now on: new handles the newest at once."""
        with self._lock:
            kept = {n: r for n, r in self._receivers.items() if n in workers and r.handle == workers[n]}
            self._receivers = {name: kept.get(name) or Receiver(handle) for name, handle in workers.items()}
            for name, receiver in self._receivers.items():
                if name not in kept:
                    self._push(name, receiver)

    def status(self) -> Published:
        """How snapshots reach the actors."""
        with self._lock:
            newest = None if self._newest is None else self._newest[0]
            p50, p99 = np.percentile(self._delays, [50, 99]) if self._delays else (0.0, 0.0)
            return Published(
                self._snapshots, self._bytes, self._pushes, self._skipped, self._failed,
                (float(p50), float(p99)),
                {n: newest - r.has for n, r in self._receivers.items() if newest is not None and r.has is not None},
                self._push_seconds,
            )  # fmt: skip

    def settle(self, timeout: float) -> bool:
        """Waits until every worker that answers has the newest snapshot; whether all have."""
        deadline = self._clock() + timeout
        while True:
            with self._lock:
                if self._newest is None or all(r.has == self._newest[0] for r in self._receivers.values()):
                    return True
            if self._clock() >= deadline:
                return False
            time.sleep(POLL_SECONDS / 10)

    def end(self) -> None:
        """Ends the thread, and lets the newest snapshot go."""
        self._thread.end()
        with self._lock:
            self._receivers, self._newest = {}, None

    # with the lock held

    def _push(self, name: str, receiver: Receiver) -> None:
        if self._newest is None:
            return
        version, began, reference = self._newest
        receiver.busy = True
        # In a list it travels as a reference: an argument by itself would be fetched before the call may begin.
        future = receiver.handle.set_params.remote(version, [reference]).future()
        future.add_done_callback(
            lambda done: self._answers.put(Answer(name, receiver, version, self._clock() - began, done.exception()))
        )

    # in the thread

    def _listen(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                answer = self._answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            with self._lock:
                self._take(answer)

    def _take(self, answer: Answer) -> None:
        name, receiver, version, seconds, error = answer
        receiver.busy = False
        if error is not None:
            # Whoever started it notices, and names its replacement; one that is only away gets the next snapshot.
            self._failed += 1
            if not receiver.failing:
                log.warning("event=push_failed worker=%s version=%d error=%r", name, version, str(error).split("\n")[0])
            receiver.failing = True
            return
        receiver.failing, receiver.has = False, version
        self._pushes += 1
        self._push_seconds += seconds
        self._delays.append(seconds)
        if self._newest is not None and version < self._newest[0] and self._receivers.get(name) is receiver:
            self._push(name, receiver)
