"""The learner as a Ray actor: what the driver sees of it, and what is left when it was killed."""

from __future__ import annotations

import os
import signal
import urllib.request
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import ray

from learner.worker import GROUPS, LearnerWorker
from tests.learner.parts import LIMITER, SHARDS, Writer, learner_setup
from tests.service import serve
from tests.waiting import SECONDS, until

LONG = 5 * SECONDS
"""For processes that start, and compile, beside others that do."""

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@ray.remote(num_cpus=0)
class Receiver:
    """A worker that remembers what it was sent."""

    def __init__(self) -> None:
        self.got: list[tuple[int, Any]] = []

    def set_params(self, version: int, references: list[Any]) -> int:
        params = ray.get(references[0])
        self.got.append((version, [np.array(leaf) for leaf in params]))
        return version

    def versions(self) -> list[int]:
        return [version for version, _ in self.got]

    def newest(self) -> Any:
        return self.got[-1]


def start(*args: Any, **changed: Any) -> Any:
    options = {"num_cpus": 0, "concurrency_groups": GROUPS}
    return ray.remote(**options)(LearnerWorker).remote(learner_setup(*args, **changed))


def ask(call: Any) -> Any:
    return ray.get(call, timeout=LONG)


def test_a_learner_and_its_successor(ray_cluster, tmp_path):
    with ExitStack() as stack:
        endpoints = [stack.enter_context(serve(tmp_path / f"shard-{i}")) for i in range(SHARDS)]
        receiver, learner = Receiver.remote(), start(tmp_path, endpoints, checkpoint_every=50)
        ask(learner.set_workers.remote({"actor-0": receiver}))
        status = ask(learner.status.remote())
        assert status.loop.stage in ("starting", "restoring")
        assert status.pid != os.getpid()
        running = learner.run.remote()
        until(lambda: ask(receiver.versions.remote()) == [1], LONG)  # at once: this agent acts by its policy

        writers = [Writer(i, endpoint, 200) for i, endpoint in enumerate(endpoints)]
        limited = lambda: ask(learner.status.remote()).loop.limiter
        until(lambda: limited() is not None and len(limited().headroom) == SHARDS, LONG)
        for writer in writers:
            writer.go_on.set()
        until(lambda: ask(learner.status.remote()).loop.counters.updates > 30, LONG)
        ask(learner.count.remote(60, 8))
        until(lambda: ask(learner.status.remote()).loop.checkpoint is not None, LONG)
        report = ask(learner.report.remote(5))
        assert float(report.losses["torn"]) == 0
        assert isinstance(report.open_loop["where"].truth, np.ndarray)
        status = ask(learner.status.remote())
        page = urllib.request.urlopen(status.metrics, timeout=SECONDS).read().decode()
        assert "\ntelamon_learner_updates_total " in page
        assert '\ntelamon_learner_limiter_waiting{side="none"}' in page
        assert f"\ntelamon_learner_snapshot_bytes {status.published.snapshot_bytes}.0\n" in page
        assert "\ntelamon_learner_recompilations_total 0.0\n" in page
        assert status.loop.compiled.programs > 0  # in a process of its own there is nothing that it could share
        assert f'\ntelamon_learner_device_bytes{{device="{status.devices[0]}",kind="live"}} ' in page
        assert status.memory > 1 << 20

        os.kill(status.pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ask(running)

        successor = start(tmp_path, endpoints, first_version=status.loop.version + 1000)
        ask(successor.set_workers.remote({"actor-0": receiver}))
        running = successor.run.remote()
        for writer in writers:  # who have waited for it
            writer.join()
        ask(successor.finish.remote())
        finished = ask(running)
        after = ask(successor.status.remote())
        assert finished.reason == after.loop.stage == "finished"
        assert finished.counters.rows == SHARDS * 200
        assert finished.counters.transitions == 60
        assert finished.counters.updates <= 1.02 * SHARDS * 200 * LIMITER.ratio / LIMITER.rows_per_update
        assert after.loop.updates < finished.counters.updates  # it went on from a checkpoint
        assert any(f"event=restored checkpoint={status.loop.checkpoint}" in line for line in after.log)
        versions = ask(receiver.versions.remote())
        assert versions == sorted(set(versions))
        assert versions[-1] == finished.version
        version, (updates, _) = ask(receiver.newest.remote())
        assert (version, int(updates)) == (finished.version, finished.counters.updates)
        for actor in (successor, receiver):
            ray.kill(actor)


def test_what_cannot_be_is_said_by_run(ray_cluster, tmp_path):
    learner = start(tmp_path, [], fsdp=3)
    with pytest.raises(ValueError, match=r"mesh\.fsdp=3 does not divide \d devices"):
        ask(learner.run.remote())
    ray.kill(learner)
