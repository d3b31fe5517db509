"""One process of a learner of several: `python -m tests.learner.processes RANK SIZE COORDINATOR DIRECTORY`.

Each has a replay of its own in place of the shards. Prints what it has done as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from actors.collector import Collector
from learner import limiter
from learner.batches import Gate, Source
from learner.limiter import Totals
from learner.loop import Loop
from learner.source import Ungated
from learner.worker import join
from replay_server.store import Store
from telamon.data import Counters
from tests.learner.parts import AGENT, LIMITER, environment, learner_setup
from tests.waiting import SECONDS

DUE = 30
"""Updates."""


class Due(Ungated):
    """The leading process's gate: so many updates are due."""

    def __init__(self) -> None:
        self.admitted, self.made = 0, 0

    def wait_to_train(self, timeout: float) -> bool:
        if self.admitted == DUE:
            threading.Event().wait(timeout)
            return False
        self.admitted += 1
        return True

    def trained(self) -> None:
        self.made += 1

    def totals(self) -> Totals:
        return Totals(100, self.made)

    def status(self) -> limiter.Status:
        return replace(super().status(), lead=(self.admitted - DUE) * LIMITER.update_rows)


def main(rank: int, size: int, coordinator: str, directory: Path) -> dict[str, Any]:
    setup = learner_setup(
        directory, (), rank=rank, size=size, coordinator=coordinator, timeout=5 * SECONDS, publish_seconds=0.0
    )
    published: list[int] = []
    drawn: list[int] = []

    class Slow(Store):
        """The second process's batches come late."""

        def sample(self, *args: Any) -> Any:
            if rank == 1:
                threading.Event().wait(0.05)
            window = super().sample(*args)
            drawn.append(len(window.env_id))
            return window

    @contextmanager
    def connect(endpoints: Any, totals: Totals) -> Iterator[Source]:
        store = Slow(
            AGENT.row_spec, AGENT.window_spec, 1, 1000, np.random.default_rng(rank), directory / f"replay-{rank}"
        )
        collector = Collector(AGENT, environment(rank), store, rank, Counters())
        params = AGENT.init(jax.random.key(rank))
        for _ in range(50):
            collector.tick(params)
        gate: Gate = Due() if rank == 0 else Ungated()
        yield Source(store, gate)

    loop = Loop(setup, connect, lambda version, params: published.append(version), lambda: join(setup))
    loop.finish()
    finished = loop.run()
    status = loop.status()
    return {
        "reason": finished.reason, "updates": finished.counters.updates, "checkpoint": finished.checkpoint,
        "version": finished.version, "published": published, "devices": len(loop.devices), "drawn": sorted(set(drawn)),
        "digest": status.metrics["digest"], "torn": status.metrics["torn"], "misplaced": status.metrics["misplaced"],
    }  # fmt: skip


if __name__ == "__main__":
    rank, size, coordinator, directory = sys.argv[1:]
    print(json.dumps(main(int(rank), int(size), coordinator, Path(directory))))
