"""The learner's loop over two replay servers: the limiter looks at them, and writers wait for its credit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.collector import Collector
from learner import source
from learner.loop import LearnerSetup, Loop
from telamon.data import Counters, LimiterConfig, TrainRatio, Window
from telamon.envs import counting
from telamon.replay import TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from tests.probe import ACTION_SIZE, LENGTH, Remembering
from tests.service import serve

SECONDS = 120.0
"""Bound of every wait: for a machine that is busy with other things."""
SHARDS, FIRST = 2, 25
"""And ticks that each writer makes at once."""
LIMITER = LimiterConfig(
    ratio=6.0, rows_per_update=4 * LENGTH, tick_rows=SHARDS, capacity=2000, band=8, min_rows=40, lead=0
)


def until(reached: Callable[[], bool]) -> None:
    """Waits for another thread."""
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def environment(shard: int) -> Any:
    return counting.make("continuous", 1, shard, lengths=(7,), action_size=ACTION_SIZE)


class Agent(Remembering):
    """Its environments all call themselves number 0, each on a shard of its own."""

    def update(self, state: Any, window: Window, noise: Any) -> Any:
        return super().update(state, replace(window, env_id=0 * window.env_id), noise)


AGENT = Agent(environment(0).spec, TrainRatio(1.0, 1, LENGTH + 1))
SPEC = TableSpec(AGENT.row_spec, AGENT.window_spec, 1000, 1)


class Writer:
    """An actor: appends ticks to its shard in a thread, first some for the fill, and the others when it may go on."""

    def __init__(self, shard: int, endpoint: Endpoint, ticks: int) -> None:
        self.written = 0
        self.go_on = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, args=(shard, endpoint, ticks))
        self._thread.start()

    def _write(self, shard: int, endpoint: Endpoint, ticks: int) -> None:
        try:
            with Client(endpoint, "run", SPEC, stream=f"actor-{shard}", num_envs=1, timeout=SECONDS) as client:
                collector = Collector(AGENT, environment(shard), client, shard, Counters())
                for tick in range(ticks):
                    if tick == FIRST:
                        assert self.go_on.wait(SECONDS)
                    collector.tick(None)
                    self.written += 1
        except Exception as error:  # noqa: BLE001  # `join` raises it
            self._error = error

    def join(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def acting(endpoints: Sequence[Endpoint], ticks: int, loop: Loop) -> list[Writer]:
    """A writer for each shard, all on the clock of the loop's limiter."""
    writers = [Writer(i, endpoint, ticks) for i, endpoint in enumerate(endpoints)]
    until(lambda: len(loop.limiter_status().headroom) == SHARDS)
    for writer in writers:
        writer.go_on.set()
    return writers


@contextmanager
def servers(tmp_path: Path) -> Iterator[tuple[Endpoint, ...]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(serve(tmp_path / f"shard-{i}")) for i in range(SHARDS))


def make(tmp_path: Path, endpoints: Sequence[Endpoint], **changed: Any) -> Loop:
    setup = LearnerSetup(
        make_agent=lambda: AGENT, run_dir=tmp_path, seed=3, endpoints=tuple(endpoints), table="run", spec=SPEC,
        limiter=LIMITER, timeout=SECONDS, checkpoint_every=10**9, checkpoint_keep=2, max_skipped=5, first_version=1,
        meta={},
    )  # fmt: skip
    connect = partial(
        source.connect, table="run", spec=SPEC, config=LIMITER, rng=np.random.default_rng(0), timeout=SECONDS,
        leading=True,
    )  # fmt: skip
    return Loop(replace(setup, **changed), connect, lambda version, params: None)


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


def test_the_train_ratio_is_kept_over_two_shards(tmp_path):
    with servers(tmp_path) as endpoints:
        loop = make(tmp_path, endpoints)
        with running(loop) as ended:
            until(lambda: loop.limiter_status() is not None)
            for writer in acting(endpoints, 200, loop):
                writer.join()
            loop.finish()
            until(lambda: ended)
    (finished,) = ended
    assert finished.reason == "finished"
    assert finished.counters.rows == SHARDS * 200
    # every row owes as much: nothing is missing at the end, and nobody was further ahead than the band
    asked = SHARDS * 200 * LIMITER.ratio / LIMITER.rows_per_update
    assert asked <= finished.counters.updates <= 1.02 * asked
    status = loop.status()
    assert status.metrics["torn"] == status.metrics["misplaced"] == 0
    assert status.written.written + status.written.stale == finished.counters.updates * LIMITER.rows_per_update
    assert status.written.dropped == 0


@pytest.mark.slow
def test_a_learner_that_begins_again_owes_no_burst(tmp_path):
    with servers(tmp_path) as endpoints:
        first = make(tmp_path, endpoints)
        with running(first) as ended:
            until(lambda: first.limiter_status() is not None)
            writers = acting(endpoints, 200, first)
            until(lambda: first.status().counters.updates >= 30)
            first.stop()  # in the middle of the writers' work: they wait for its successor
        (stopped,) = ended
        assert stopped.reason == "stopped"
        second = make(tmp_path, endpoints, first_version=stopped.version + 1)
        with running(second) as ended:
            for writer in writers:
                writer.join()
            second.finish()
            until(lambda: ended)
    (finished,) = ended
    assert finished.counters.rows == SHARDS * 200
    # the clocks of both begin at zero: rows in between are on neither, and no update is made twice
    asked = SHARDS * 200 * LIMITER.ratio / LIMITER.rows_per_update
    assert 0.8 * asked <= finished.counters.updates <= asked + 1
    assert finished.version > stopped.version
    assert finished.counters.updates == stopped.counters.updates + second.status().updates


@pytest.mark.slow
def test_a_shard_at_another_address_is_gone_on_with(tmp_path):
    with ExitStack() as stack:
        still = stack.enter_context(serve(tmp_path / "shard-0"))
        with serve(tmp_path / "shard-1") as before:
            loop = make(tmp_path, (still, before))
            stack.enter_context(running(loop))
            until(lambda: loop.limiter_status() is not None)
            for writer in acting((still, before), 60, loop):
                writer.join()
            until(lambda: loop.status().stage == "waiting for rows" and loop.status().counters.rows == SHARDS * 60)
        after = stack.enter_context(serve(tmp_path / "shard-1"))
        made = loop.status().counters.updates
        loop.set_shards((still, after))
        until(lambda: len(loop.limiter_status().headroom if loop.limiter_status() else ()) == SHARDS)
        writers = acting((still, after), 60, loop)
        for writer in writers:
            writer.join()
        asked = SHARDS * 120 * LIMITER.ratio / LIMITER.rows_per_update
        until(lambda: loop.status().counters.rows == SHARDS * 120 and loop.status().stage == "waiting for rows")
        assert loop.status().counters.updates > made
        assert loop.status().counters.updates <= asked + LIMITER.band / LIMITER.update_rows
