"""What the learner of tests in processes of their own is made of: a module, which those processes import too."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from actors.collector import Collector
from learner.loop import LearnerSetup, Loop
from telamon.data import Counters, LimiterConfig, TrainRatio, Window
from telamon.envs import counting
from telamon.replay import TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from tests.probe import ACTION_SIZE, LENGTH, Remembering
from tests.waiting import SECONDS

SHARDS = 2
FIRST = 25
"""Ticks that each writer makes at once: the fill, with some to spare."""
LIMITER = LimiterConfig(
    ratio=6.0, rows_per_update=4 * LENGTH, tick_rows=SHARDS, capacity=2000, band=8, min_rows=40, lead=0
)


def environment(seed: int) -> Any:
    return counting.make("continuous", 1, seed, lengths=(7,), action_size=ACTION_SIZE)


class Agent(Remembering):
    """Its environments all call themselves number 0, each on a shard of its own."""

    def update(self, state: Any, window: Window, noise: Any) -> Any:
        return super().update(state, replace(window, env_id=0 * window.env_id), noise)

    def report(self, state: Any, window: Window, noise: Any) -> Any:
        return super().report(state, replace(window, env_id=0 * window.env_id), noise)


def make_agent() -> Agent:
    return Agent(environment(0).spec, TrainRatio(1.0, 1, LENGTH + 1))


AGENT = make_agent()
SPEC = TableSpec(AGENT.row_spec, AGENT.window_spec, 1000, 1)


def learner_setup(run_dir: Path, endpoints: Sequence[Endpoint], **changed: Any) -> LearnerSetup:
    setup = LearnerSetup(
        make_agent=make_agent, run_dir=run_dir, seed=3, endpoints=tuple(endpoints), table="run", spec=SPEC,
        limiter=LIMITER, timeout=SECONDS, checkpoint_every=10**9, checkpoint_keep=2, max_skipped=5, first_version=1,
        meta={},
    )  # fmt: skip
    return replace(setup, **changed)


class Writer:
    """An actor: appends ticks to its shard in a thread, first some for the fill, and the others when it may go on."""

    def __init__(self, shard: int, endpoint: Endpoint, ticks: int) -> None:
        self.go_on = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, args=(shard, endpoint, ticks))
        self._thread.start()

    def _write(self, shard: int, endpoint: Endpoint, ticks: int) -> None:
        try:
            # of which each append may wait for a learner that has still to be started
            options: dict[str, Any] = {"stream": f"actor-{shard}", "num_envs": 1, "timeout": 10 * SECONDS}
            with Client(endpoint, "run", SPEC, **options) as client:
                collector = Collector(AGENT, environment(shard), client, shard, Counters())
                params = AGENT.init(jax.random.key(shard))  # with latents, which say where a row belongs
                for tick in range(ticks):
                    if tick == FIRST:
                        assert self.go_on.wait(SECONDS)
                    collector.tick(params)
        except Exception as error:  # noqa: BLE001  # `join` raises it
            self._error = error

    def join(self) -> None:
        self._thread.join(10 * SECONDS)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@contextmanager
def running(loop: Loop) -> Iterator[list[Any]]:
    """The loop in a thread, which has ended with the block: its result or error is then in the list."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(loop.run())
        except Exception as error:  # noqa: BLE001  # the test looks at it
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ended
    finally:
        loop.stop()
        thread.join(SECONDS)
    assert not thread.is_alive()
