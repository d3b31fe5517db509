"""The pool and its workers for real: Ray processes that append to a replay server of this one."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.pool import Arrived, Died, Event, Left, Pool, RestartPolicy, Seen, Started
from actors.worker import GROUPS, EvalWorker, RolloutWorker, WorkerSetup, describe
from replay_server.__main__ import Served
from telamon.envs.base import EnvError
from telamon.envs.counting import Fault
from tests import service
from tests.actors import parts
from tests.probe import acted
from tests.waiting import SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

QUICK = RestartPolicy(first=0.1, longest=1.0)


def start(kind: type, setup: Any) -> Any:
    return ray.remote(num_cpus=1, concurrency_groups=GROUPS)(kind).remote(setup)


class Driver:
    """Polls a pool whose workers append to `served`, and keeps what it says."""

    def __init__(self, served: Served, size: int, setup: Callable[..., WorkerSetup], **options: Any) -> None:
        self.served = served
        self.events: list[Event] = []
        endpoint = service.endpoint_of(served.info)
        make = lambda index, attempt: start(RolloutWorker, setup(endpoint, index, attempt))
        self.pool = Pool(make, **{"policy": QUICK, "status_seconds": 0.2, **options})
        self.pool.resize(size)

    def until(self, condition: Callable[[], object]) -> None:
        """Polls until `condition` holds."""
        deadline = time.monotonic() + 5 * SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"the last that happened was {self.events[-5:]}"
            self.events += self.pool.poll()
            time.sleep(0.02)

    def of(self, kind: type[Event], name: str | None = None) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and name in (None, e.name)]

    def acts(self, *names: str) -> bool:
        """Whether each has had a piece with rows since it was started last, and has not died since."""
        acting: dict[str, bool] = {}
        for event in self.events:
            if isinstance(event, Started | Died):
                acting[event.name] = False
            elif isinstance(event, Arrived) and event.piece.rows:
                acting[event.name] = True
        return all(acting.get(name) for name in names)

    def pid(self, name: str) -> int:
        self.until(lambda: self.pool.statuses()[name] is not None)
        status = self.pool.statuses()[name]
        assert status is not None
        return status.pid

    @property
    def told(self) -> int:
        """Rows of the pieces that have arrived."""
        return sum(e.piece.rows for e in self.of(Arrived))

    def rows(self, env: int, name: str) -> np.ndarray:
        """A column of the rows that the server holds of an environment."""
        column: np.ndarray = self.served.tables.get("t")._store._content.ring.held(name, env)
        return column

    def check_rings(self) -> None:
        """Every environment's rows follow one another: none is missing, none is there twice."""
        for env in range(self.served.tables.get("t").num_envs):
            where, is_first = self.rows(env, "obs/where").astype(int), self.rows(env, "is_first")
            goes_on = ~is_first[1:]
            assert (where[1:, 1:] == where[:-1, 1:] + [0, 1])[goes_on].all()
            assert (where[1:, 2][is_first[1:]] == 0).all()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with service.serve_open(tmp_path) as served:
        yield served


@pytest.fixture
def drive(ray_cluster: None, served: Served) -> Iterator[Callable[..., Driver]]:
    """Makes drivers, whose workers end with the test."""
    made: list[Driver] = []

    def drive(size: int, setup: Callable[..., WorkerSetup] = parts.worker_setup, **options: Any) -> Driver:
        made.append(Driver(served, size, setup, **options))
        return made[-1]

    yield drive
    for driver in made:
        driver.pool.kill()


BIG = parts.table_spec(capacity=100_000)


def test_workers_act_take_snapshots_die_and_come_back_grow_and_shrink(drive, served):
    d = drive(1, partial(parts.worker_setup, spec=BIG))
    d.until(lambda: d.acts("actor-0"))

    # snapshots, pushed while it acts
    for version in range(1, 4):
        shared = ray.put(parts.on_host(10 * version))
        assert ray.get(d.pool.handles()["actor-0"].set_params.remote(version, [shared])) == version
        d.until(lambda version=version: d.of(Arrived)[-1].piece.last_version == version)
    versions = [e.piece.last_version for e in d.of(Arrived) if e.piece.last_version is not None]
    assert versions == sorted(versions)

    # killed: replaced, with its stream and other draws
    os.kill(d.pid("actor-0"), signal.SIGKILL)
    d.until(lambda: d.of(Died))
    (died,) = d.of(Died)
    assert (died.name, died.pause) == ("actor-0", 0.1)
    d.until(lambda: d.acts("actor-0"))
    assert [e.attempt for e in d.of(Started, "actor-0")] == [0, 1]

    # more of them
    d.pool.resize(3)
    d.until(lambda: d.acts("actor-1", "actor-2"))
    assert sorted(d.pool.handles()) == ["actor-0", "actor-1", "actor-2"]
    assert {e.name for e in d.of(Seen)} >= {"actor-0"}

    # fewer: those that leave deliver their last rows
    d.pool.resize(1)
    d.until(lambda: len(d.of(Left)) == 2)
    assert sorted(e.name for e in d.of(Left)) == ["actor-1", "actor-2"]
    assert not any(e.closed.unsent for e in d.of(Left))
    for name in ("actor-1", "actor-2"):
        (left,) = d.of(Left, name)
        assert left.closed.figures.rows == sum(e.piece.rows for e in d.of(Arrived, name)) > 0

    d.events += d.pool.stop(SECONDS)
    assert d.pool.handles() == {}
    assert len(d.of(Left)) == 3
    table = served.tables.get("t")
    assert table.num_envs == 2 * 3  # the replacement went on with the rings of its predecessor
    assert table.stats().rows >= d.told  # a piece that a death cut off is not told of, and its rows are there
    d.check_rings()
    updates, _, _ = acted(d.rows(0, "action"))
    assert {10, 20, 30} <= set(updates.tolist())
    assert any("event=start name=actor-0" in line for e in d.of(Seen, "actor-0") for line in e.status.log)


def test_a_worker_whose_environment_hangs_is_replaced(drive):
    def setup(endpoint: Any, index: int, attempt: int) -> WorkerSetup:
        faults = [Fault("hang", env=1, episode=1, t=2)] if attempt == 0 else []
        return parts.worker_setup(
            endpoint, index, attempt, env={"faults": faults}, env_timeout=3.0 if attempt == 0 else SECONDS
        )

    d = drive(1, setup)
    said = "environment 1 (counting:continuous) has not returned for 3 s; the bound is env.timeout"
    d.until(lambda: d.of(Died))
    # a machine that stands still for three seconds lets another one seem to hang first
    d.until(lambda: said in [died.reason for died in d.of(Died)] or len(d.of(Started)) > 1)
    assert any("has not returned for 3 s" in died.reason for died in d.of(Died))
    d.until(lambda: d.acts("actor-0") and len(d.of(Started)) >= 2)
    d.check_rings()


def test_what_no_restart_mends_is_raised(drive):
    d = drive(1, partial(parts.worker_setup, env={"faults": [Fault("inf_obs", env=0, t=3)]}))
    with pytest.raises(EnvError, match=r"^environment 0 \(counting:continuous\): observation 'where' is inf at step 3"):
        d.until(lambda: False)
    d = drive(1, partial(parts.worker_setup, env={"lengths": (9,)}))
    with pytest.raises(ValueError, match="give every node the same environment"):
        d.until(lambda: False)


def test_the_evaluator_evaluates_while_snapshots_arrive(ray_cluster):
    worker = start(EvalWorker, parts.eval_setup(env={"lengths": (3, 7, 5)}))
    try:
        ray.get(worker.set_params.remote(5, [ray.put(parts.on_host(100))]))
        found = ray.get(worker.evaluate.remote(1))
        assert (found.index, found.version, found.lengths.tolist()) == (1, 5, [3, 7, 5])
        status = ray.get(worker.status.remote())
        assert (status.name, status.figures.version) == ("evaluator", 5)
        assert status.pid != os.getpid()
        assert status.memory > 2**20
        with urllib.request.urlopen(status.metrics, timeout=SECONDS) as page:
            assert b"telamon_evaluator_evaluations_total 1.0" in page.read()
    finally:
        ray.kill(worker)


def test_a_driver_learns_what_environments_are_like(ray_cluster):
    assert ray.get(ray.remote(describe).remote(parts.make_env)) == parts.make_env(0).spec


def test_the_object_store_holds_no_snapshot_that_was_taken(ray_cluster):
    worker = start(EvalWorker, parts.eval_setup())
    megabytes = lambda: ray.available_resources()["object_store_memory"] / 1e6
    try:
        ray.get(worker.status.remote())
        before = megabytes()
        references = [ray.put({"a": np.zeros(1_000_000, np.float32)}) for _ in range(10)]
        until(lambda: megabytes() < before - 30)
        for version, reference in enumerate(references):
            assert ray.get(worker.set_params.remote(version, [reference])) == version
        del references, reference
        until(lambda: megabytes() > before - 2)  # half of one
    finally:
        ray.kill(worker)
