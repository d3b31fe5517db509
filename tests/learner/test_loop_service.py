"""The learner's loop over two replay servers: the limiter looks at them, and writers wait for its credit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from learner import worker
from learner.loop import Loop
from telamon.rpc.security import Endpoint
from tests.learner.parts import LIMITER, SHARDS, Writer, learner_setup, running
from tests.service import serve
from tests.waiting import until


def joined(loop: Loop) -> bool:
    """Whether all shards are on the clock of the loop's limiter."""
    status = loop.limiter_status()
    return status is not None and len(status.headroom) == SHARDS


def acting(endpoints: Sequence[Endpoint], ticks: int, loop: Loop) -> list[Writer]:
    """A writer for each shard, all on the clock of the loop's limiter."""
    writers = [Writer(i, endpoint, ticks) for i, endpoint in enumerate(endpoints)]
    until(lambda: joined(loop))
    for writer in writers:
        writer.go_on.set()
    return writers


@contextmanager
def servers(tmp_path: Path) -> Iterator[tuple[Endpoint, ...]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(serve(tmp_path / f"shard-{i}")) for i in range(SHARDS))


def make(run_dir: Path, endpoints: Sequence[Endpoint], **changed: Any) -> Loop:
    setup = learner_setup(run_dir, endpoints, **changed)
    return Loop(setup, partial(worker.connect, setup), lambda version, params: None)


def test_the_train_ratio_is_kept_over_two_shards(tmp_path):
    with servers(tmp_path) as endpoints:
        loop = make(tmp_path, endpoints)
        with running(loop) as ended:
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
            for writer in acting((still, before), 60, loop):
                writer.join()
            until(lambda: loop.status().stage == "waiting for rows" and loop.status().counters.rows == SHARDS * 60)
        after = stack.enter_context(serve(tmp_path / "shard-1"))
        made = loop.status().counters.updates
        loop.set_shards((still, after))
        writers = acting((still, after), 60, loop)
        for writer in writers:
            writer.join()
        asked = SHARDS * 120 * LIMITER.ratio / LIMITER.rows_per_update
        until(lambda: loop.status().counters.rows == SHARDS * 120 and loop.status().stage == "waiting for rows")
        assert loop.status().counters.updates > made
        assert loop.status().counters.updates <= asked + LIMITER.band / LIMITER.update_rows
