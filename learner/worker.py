"""The Ray class of the learner: one process of it. The driver applies `ray.remote` with its options.

`run` is the only call that takes long, and has a concurrency group of its own (GROUPS). Nothing is built before it, so
that an error there arrives as itself and `status` tells how far it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import ray
from jax._src import distributed  # the key-value store has no public name

from learner import metrics, source
from learner.batches import Source
from learner.group import SOLO, DistributedGroup, Group
from learner.limiter import Totals
from learner.loop import Finished, LearnerSetup, Loop, LoopStatus
from learner.publish import Published, Publisher
from telamon.agents.base import Report
from telamon.allocator import keep_freed_memory
from telamon.keys import Stream, generator
from telamon.rpc.security import Endpoint
from telamon.telemetry.logs import setup_buffer
from telamon.telemetry.process import resident_bytes

GROUPS = {"loop": 1, "control": 4}
"""Threads of each concurrency group: the option `concurrency_groups` of `ray.remote`. One may wait for a report."""
SETTLE_SECONDS = 10.0
"""At the end of a run, for the workers to take the last snapshot."""
GROUP_SECONDS = 60
"""For all processes of a learner to meet."""
HEARTBEAT_SECONDS = 10
"""After which a process of a learner that says nothing is taken for dead, and the others end."""


@dataclass(frozen=True)
class LearnerStatus:
    """How a process of a learner stands."""

    pid: int
    host: str
    devices: tuple[str, ...]
    """Of all processes, by name; none before they are known."""
    loop: LoopStatus
    published: Published
    metrics: str | None
    """URL of its page; None for none."""
    log: tuple[str, ...]
    """Lines since the last status."""
    memory: int = 0
    """Bytes that it has in use."""


class LearnerWorker:
    """One process of a learner, which owns its devices."""

    def __init__(self, setup: LearnerSetup) -> None:
        keep_freed_memory()
        self._setup = setup
        self._log = setup_buffer(level=setup.log_level)
        self._publisher = Publisher()
        self._metrics: str | None = None
        self._loop = Loop(setup, partial(connect, setup), self._publisher.publish, partial(join, setup))

    @ray.method(concurrency_group="loop")
    def run(self) -> Finished:
        """As `Loop.run`."""
        s = self._setup
        with ExitStack() as stack:
            stack.callback(self._publisher.end)
            if s.metrics_port is not None:
                self._metrics = stack.enter_context(
                    metrics.serving(
                        self._loop, self._publisher.status, s.limiter, s.metrics_host, s.metrics_port, s.rank == 0
                    )
                )
            finished = self._loop.run()
            self._publisher.settle(SETTLE_SECONDS)
            return finished

    @ray.method(concurrency_group="control")
    def status(self) -> LearnerStatus:
        return LearnerStatus(
            os.getpid(), socket.gethostname(), self._loop.devices, self._loop.status(), self._publisher.status(),
            self._metrics, tuple(self._log.drain()), resident_bytes(),
        )  # fmt: skip

    @ray.method(concurrency_group="control")
    def set_workers(self, workers: Mapping[str, Any]) -> None:
        """Name -> handle of everyone who gets snapshots from now on."""
        self._publisher.set_workers(workers)

    @ray.method(concurrency_group="control")
    def set_shards(self, endpoints: Sequence[Endpoint]) -> None:
        """As `Loop.set_shards`."""
        self._loop.set_shards(endpoints)

    @ray.method(concurrency_group="control")
    def count(self, transitions: int, episodes: int) -> None:
        """As `Loop.count`."""
        self._loop.count(transitions, episodes)

    @ray.method(concurrency_group="control")
    def finish(self) -> None:
        """As `Loop.finish`."""
        self._loop.finish()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """As `Loop.stop`."""
        self._loop.stop()

    @ray.method(concurrency_group="control")
    def report(self, index: int) -> Report:
        """As `Loop.report`; returns when the next update is due. Arrays are numpy's."""
        found: Report = jax.tree.map(np.asarray, self._loop.report(index).result())
        return found


def join(setup: LearnerSetup) -> Group:
    """Meets the other processes of the learner, if there are any."""
    if setup.size == 1:
        return SOLO
    jax.distributed.initialize(
        setup.coordinator, setup.size, setup.rank,
        initialization_timeout=GROUP_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )  # fmt: skip
    return DistributedGroup(distributed.global_state.client, setup.rank, setup.size)


def connect(setup: LearnerSetup, endpoints: Sequence[Endpoint], totals: Totals) -> AbstractContextManager[Source]:
    """The source of this process's batches."""
    return source.connect(
        endpoints, totals, table=setup.table, spec=setup.spec, config=setup.limiter,
        rng=generator(setup.seed, Stream.REPLAY, 1 + setup.rank, totals.updates),
        timeout=setup.timeout, leading=setup.rank == 0,
    )  # fmt: skip
