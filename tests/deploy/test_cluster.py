"""The driver of a launch, over a Ray that answers when a test says so: deaths, moves, restarts, requests, the end."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError
from rich.console import Console

from actors.collector import Episode
from actors.metrics import Figures
from actors.pool import PartFailed, RestartPolicy
from actors.rollout import Piece
from actors.worker import Closed, Evaluated, WorkerStatus
from deploy import cluster, discovery, running, session
from deploy import config as configs
from deploy.cluster import Launch, Memory
from deploy.config import ClusterConfig, EvalConfig, ReplayConfig, ReportConfig, RunConfig
from deploy.files import replace_text
from deploy.kept import Kept
from deploy.session import Session
from deploy.shards import ShardStatus
from learner.limiter import Status as LimiterStatus
from learner.limiter import Waits
from learner.loop import Finished, LoopStatus
from learner.publish import Published
from learner.worker import LearnerStatus
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.data import ActionSpec, ArraySpec, Counters, EnvSpec
from telamon.telemetry.live import LiveView
from telamon.telemetry.writer import METRICS_FILE, MetricsWriter, read_metrics

SPEC = EnvSpec("test:env", (("where", ArraySpec((3,))),), ActionSpec((2,)), 50)
CONFIG = RunConfig(
    "tdmpc2", "test:env", steps=1000, agent=TDMPC2Config(), eval=EvalConfig(every=0), report=ReportConfig(every=0)
)
EVALUATING = replace(CONFIG, eval=EvalConfig(every=100))
POLICY = RestartPolicy(first=1.0, factor=2.0, longest=4.0, budget=2, window=100.0)
HERE, THERE = "a" * 56, "b" * 56
"""Ids of nodes, as Ray writes them."""

WORKER = WorkerStatus("?", 1, "here", True, Figures(), None, None, (0.0, 0.0), ())
PUBLISHED = Published(0, 0, 0, 0, 0, (0.0, 0.0), {})
LIMITS = LimiterStatus(Waits(0.0, 0.0, "none"), 0.0, {}, 1.0, 1.0, 0)
LOOP = LoopStatus("training")
LEARNER = LearnerStatus(1, "here", ("cpu:0",), LOOP, PUBLISHED, None, ())
DEATH = RayActorError(error_msg="The worker died\n\tpid: 7\n unexpectedly. Some common causes include: (1) the moon")


def learner_status(rows: int, **changed: Any) -> LearnerStatus:
    """Of a learner that limits `rows` rows."""
    return replace(LEARNER, loop=replace(LOOP, **{"counters": Counters(rows=rows), "limiter": LIMITS, **changed}))


def piece(rows: int, resets: int = 0, episodes: tuple[Episode, ...] = ()) -> Piece:
    return Piece(rows, rows, resets, rows - resets, episodes, None, None, 0, 0.5, 0.0, "done")


def raised(error: Exception) -> RayTaskError:
    """As Ray gives what a method has raised."""
    return RayTaskError("method", "Traceback ...", error)


# Ray, as far as the driver needs it


class Ref:
    def __init__(self, method: str, args: tuple[Any, ...] = ()) -> None:
        self.method, self.args = method, args
        self.result: Any = None
        self.done = False

    def answer(self, result: Any) -> Ref:
        self.result, self.done = result, True
        return self


class Method:
    def __init__(self, call: Callable[..., Ref]) -> None:
        self.remote = call


class Actor:
    """A handle. Its calls are answered at once from `always`, else when a test says so, or with its death."""

    def __init__(self, kind: str, args: Sequence[Any] = (), options: dict[str, Any] | None = None) -> None:
        self.kind, self.args, self.options = kind, args, options or {}
        self.calls: list[Ref] = []
        """All that there were."""
        self.always: dict[str, Any] = {}
        self.killed = self.dead = False

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(lambda *args: self.call(method, args))

    def call(self, method: str, args: tuple[Any, ...]) -> Ref:
        self.calls.append(ref := Ref(method, args))
        if self.dead:
            return ref.answer(DEATH)
        return ref.answer(self.always[method]) if method in self.always else ref

    def asked(self, method: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of a method."""
        return [ref.args for ref in self.calls if ref.method == method]

    def answer(self, method: str, result: Any = None) -> None:
        """Answers the oldest call of `method` that waits; an exception as a result is raised."""
        next(ref for ref in self.calls if ref.method == method and not ref.done).answer(result)

    def die(self) -> None:
        self.dead = True
        for ref in self.calls:
            if not ref.done:
                ref.answer(DEATH)


class Made:
    """What `ray.remote` makes of a class or a function."""

    def __init__(self, ray: FakeRay, what: Any, options: dict[str, Any]) -> None:
        self.ray, self.what, self._options = ray, what, options

    def options(self, **options: Any) -> Made:
        return Made(self.ray, self.what, {**self._options, **options})

    def remote(self, *args: Any) -> Any:
        if not isinstance(self.what, type):
            return Ref(self.what.__name__).answer(self.ray.functions[self.what.__name__])
        return self.ray.make(Actor(self.what.__name__, args, self._options))


class FakeRay:
    """In place of Ray; time passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.actors: list[Actor] = []
        self.functions: dict[str, Any] = {"free_address": "10.0.0.1:7000"}
        self.nodes = {HERE: "10.0.0.1"}
        """Id -> address of those that are alive."""
        self.resources: dict[str, float] = {}
        """Of each node."""
        self.room = Ref("ready").answer(True)
        """Of placement groups."""
        self.ports = 5000
        self.while_asleep: Callable[[], None] = lambda: None
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "nodes", self.list_nodes)
        monkeypatch.setattr(cluster, "remote", lambda **options: lambda what: Made(self, what, options))
        group = SimpleNamespace(ready=lambda: self.room)
        monkeypatch.setattr(cluster, "placement_group", lambda bundles, strategy: group)
        monkeypatch.setattr(
            cluster, "time", SimpleNamespace(monotonic=self.clock, time=self.clock, sleep=self.sleep)
        )  # fmt: skip

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_asleep()

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        return [ref for ref in refs if ref.done], [ref for ref in refs if not ref.done]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        assert ref.done, f"a driver would wait here for {ref.method}"
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result

    def kill(self, handle: Actor) -> None:
        handle.killed = True
        handle.die()

    def list_nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "Alive": True, "NodeManagerAddress": address, "Resources": self.resources}
            for node, address in self.nodes.items()
        ]

    def make(self, actor: Actor) -> Actor:
        """Those that start well, and then do nothing of their own accord."""
        if actor.kind == "ShardActor":
            listen = actor.args[0].listen
            if listen.endswith(":0"):
                self.ports += 1
                listen = listen.removesuffix("0") + str(self.ports)
            actor.always = {"open": listen, "status": ShardStatus(listen, "here", 1, None, 1, ()), "close": None}
        else:
            actor.always = {
                "LearnerWorker": {"status": LEARNER},
                "RolloutWorker": {"open": 2, "status": WORKER, "stop": None, "close": Closed(Figures(), False)},
                "EvalWorker": {"status": WORKER},
            }[actor.kind]
        self.actors.append(actor)
        return actor

    def of(self, kind: str) -> list[Actor]:
        return [actor for actor in self.actors if actor.kind == kind]


@pytest.fixture
def fake(monkeypatch) -> FakeRay:
    return FakeRay(monkeypatch)


# Kept


class Part:
    """A part that is kept, and whoever polls it."""

    def __init__(self, fake: FakeRay, job: str | None = "run", policy: RestartPolicy = POLICY) -> None:
        self.fake, self.room = fake, True
        self.actors: list[Actor] = []
        self.kept = Kept("part", self.start, job, policy, fake.clock)

    def start(self, attempt: int) -> Actor | None:
        if not self.room:
            return None
        assert attempt == len(self.actors)
        self.actors.append(Actor("part"))
        return self.actors[-1]

    def poll(self, seconds: float = 0.0) -> Sequence[str]:
        self.fake.now += seconds
        return self.kept.poll()


def test_a_part_is_started_asked_every_second_and_does_its_job_once(fake):
    part = Part(fake)
    assert part.poll() == ()
    (actor,) = part.actors
    assert (part.kept.handle, part.kept.starts, part.kept.status) == (actor, 1, None)
    assert [ref.method for ref in actor.calls] == ["run", "status"]
    first = replace(WORKER, log=("one", "two"))
    actor.answer("status", first)
    assert part.poll(0.1) == ("one", "two")
    assert part.kept.status is first
    assert part.poll(0.8) == ()
    assert len(actor.asked("status")) == 1
    part.poll(0.1)
    part.poll(5.0)  # not answered: none is added
    assert len(actor.asked("status")) == 2
    assert part.kept.result is None
    actor.answer("run", "its result")
    part.poll()
    assert part.kept.result == "its result"
    part.poll(5.0)
    assert len(actor.asked("run")) == 1
    assert not actor.killed


def test_a_part_without_a_job_is_only_asked(fake):
    part = Part(fake, job=None)
    part.poll()
    assert [ref.method for ref in part.actors[0].calls] == ["status"]


def test_what_a_job_raises_ends_the_run_with_its_words(fake):
    part = Part(fake)
    part.poll()
    cause = ValueError("the update is not finite")
    part.actors[0].answer("run", raised(cause))
    with pytest.raises(PartFailed) as caught:
        part.poll()
    assert str(caught.value) == "part: the update is not finite"
    assert caught.value.__cause__ is cause
    with pytest.raises(PartFailed, match="part: the update is not finite"):  # whoever polls it once more hears it again
        part.poll()
    assert len(part.actors) == 1


@pytest.mark.parametrize("call", ["run", "status", "both"])
def test_a_part_that_dies_is_started_again_after_a_pause_and_its_death_counts_once(fake, call):
    part = Part(fake)
    part.poll()
    dead = part.actors[0]
    dead.answer("status", WORKER)
    part.poll(1.0)
    part.poll()
    if call == "both":
        dead.die()
    else:
        dead.answer(call, DEATH)
    assert part.poll(2.0) == ()
    assert (part.kept.handle, part.kept.status, dead.killed) == (None, None, True)
    part.poll(0.9)
    part.poll()
    assert len(part.actors) == 1
    part.poll(0.1)  # the pause of one death
    assert len(part.actors) == 2
    assert part.kept.handle is part.actors[1]
    assert part.kept.starts == 2
    assert [ref.method for ref in part.actors[1].calls] == ["run", "status"]
    part.actors[1].die()
    part.poll()
    part.poll(1.9)
    assert len(part.actors) == 2
    part.poll(0.1)  # the pause of two
    assert len(part.actors) == 3


def test_a_part_that_dies_too_often_ends_the_run_with_a_sentence(fake):
    part = Part(fake)
    for _ in range(2):
        part.poll(5.0)
        part.actors[-1].die()
        part.poll()
    part.poll(5.0)
    part.actors[-1].die()
    with pytest.raises(PartFailed) as caught:
        part.poll()
    assert str(caught.value) == (
        "part died 3 times within 100 s, the last time because: The worker died unexpectedly.; the bound is restarts"
    )
    assert len(part.actors) == 3


def test_deaths_that_are_long_ago_do_not_count(fake):
    part = Part(fake)
    for _ in range(10):
        part.poll(60.0)
        part.actors[-1].die()
        part.poll()
    assert len(part.actors) == 10


def test_a_part_without_room_waits_for_it(fake):
    part = Part(fake)
    part.room = False
    for _ in range(3):
        part.poll(1.0)
    assert (part.kept.handle, part.kept.starts) == (None, 0)
    part.room = True
    part.poll()
    assert (len(part.actors), part.kept.starts) == (1, 1)


def test_a_part_that_says_nothing_is_killed_and_started_again(fake):
    part = Part(fake)
    part.poll()
    part.poll(600.0)  # it may still be waiting for a node
    assert not part.actors[0].killed
    part.poll(0.1)
    assert part.actors[0].killed
    part.poll(1.0)
    again = part.actors[1]
    again.answer("status", WORKER)
    part.poll(1.0)
    part.poll(1.0)
    part.poll(119.0)
    assert not again.killed
    part.poll(0.1)
    part.poll(1.0)
    assert again.killed
    assert part.kept.handle is None


# A launch


class Run:
    """A launch whose parts are fakes."""

    def __init__(
        self, fake: FakeRay, run_dir: Path, config: RunConfig = CONFIG, own: bool = True, **options: Any
    ) -> None:
        self.fake, self.run_dir = fake, run_dir
        self.cluster = ClusterConfig(**options)
        self.launch = Launch(config, self.cluster, run_dir, Session(HERE, "10.0.0.1", own), SPEC, "token")
        for part in (*self.launch.shards, self.launch.learner, self.launch.evaluator, self.launch.pool):
            part._clock = fake.clock
        cluster.prepare(self.launch, "token")
        resume = cluster.whole_lines(run_dir) if (run_dir / METRICS_FILE).exists() else None
        self.writer = MetricsWriter(run_dir, resume)
        self.live = LiveView("a run", config.steps, Console(file=io.StringIO()), fake.clock)

    def begin(self, status: LearnerStatus | None = None) -> Run:
        """Until all parts are up, and the learner has said how it stands."""
        self.launch.start(self.live, lambda: False)
        self.learner.always["status"] = status or learner_status(0)
        self.turns(6)
        return self

    def turns(self, seconds: float) -> list[Episode]:
        """Lets time pass as the driver sees it."""
        episodes = []
        for _ in range(math.ceil(seconds / 0.5)):
            self.fake.now += 0.5
            episodes += self.launch.turn()
            self.launch.look(self.writer, self.live)
        return episodes

    @property
    def learner(self) -> Actor:
        """The first process of its last life."""
        return self.fake.of("LearnerWorker")[-self.cluster.learners]

    def worker(self, index: int) -> Actor:
        """The last one of this number."""
        return [a for a in self.fake.of("RolloutWorker") if a.args[0].index[0] == index][-1]

    def status(self) -> running.RunStatus:
        return running.read(self.run_dir)


@pytest.fixture(autouse=True)
def plain_logs(monkeypatch) -> None:
    """The root logger is the test runner's."""
    monkeypatch.setattr(cluster, "setup_logging", lambda run_dir, level: None)


@pytest.fixture
def run(fake, tmp_path):
    made = []

    def make(config: RunConfig = CONFIG, **options: Any) -> Run:
        end()  # that of an earlier driver
        made.append(Run(fake, tmp_path, config, **options))
        return made[-1]

    def end() -> None:
        while made:
            one = made.pop()
            one.writer.close()
            one.launch.logs.close()

    yield make
    end()


def addresses(setup: Any) -> list[str]:
    return [endpoint.address for endpoint in setup.endpoints]


def test_the_learner_and_the_workers_are_started_once_every_shard_has_an_address(fake, run):
    here = run(actors=3, replay_shards=2)
    polls = 0

    def asleep() -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            assert not here.fake.of("LearnerWorker")
            shard = fake.of("ShardActor")[1]
            shard.answer("status", shard.always.setdefault("status", late))

    make = fake.make

    def slow(actor: Actor) -> Actor:
        nonlocal late
        make(actor)
        if actor.kind == "ShardActor" and len(fake.of("ShardActor")) == 2:
            late = actor.always.pop("status")
        return actor

    late: Any = None
    fake.make, fake.while_asleep = slow, asleep
    here.begin()
    assert polls >= 3
    assert addresses(here.learner.args[0]) == ["127.0.0.1:5001", "127.0.0.1:5002"]
    assert [here.worker(i).args[0].endpoint.address for i in range(3)] == [
        "127.0.0.1:5001", "127.0.0.1:5002", "127.0.0.1:5001"
    ]  # fmt: skip
    assert here.learner.asked("set_workers")[-1][0] == {f"actor-{i}": here.worker(i) for i in range(3)}
    assert here.status().state == "running"


def test_a_start_that_is_stopped_says_so(fake, run):
    here = run()
    with pytest.raises(KeyboardInterrupt):
        here.launch.start(here.live, lambda: True)
    assert not fake.of("LearnerWorker")


def test_the_lines_of_parts_are_written_down(run, tmp_path, caplog):
    here = run().begin()
    here.learner.always["status"] = replace(learner_status(0), log=("level=WARNING it is hot",))
    here.worker(0).always["status"] = replace(WORKER, log=("level=INFO it acts",))
    here.turns(1.5)
    assert "it is hot" in (tmp_path / "logs" / "learner.log").read_text()
    assert "it acts" in (tmp_path / "logs" / "actor-0.log").read_text()
    said = [record.getMessage() for record in caplog.records]
    assert any("part=learner" in line and "it is hot" in line for line in said)
    assert not any("it acts" in line for line in said)


# shards


@pytest.mark.parametrize("learner", ["up", "down", "two"])
def test_a_shard_that_moves_takes_only_its_workers_with_it(fake, run, learner):
    fake.nodes[THERE] = "10.0.0.2"
    fake.resources = {"replay": 1.0}
    options = {"learners": 2} if learner == "two" else {}
    here = run(own=False, actors=3, replay_shards=2, insecure=True, **options)
    here.launch.memory.shards = ["10.0.0.1", "10.0.0.2"]  # where a driver before this one had them
    here.begin()
    shards, workers = fake.of("ShardActor"), [here.worker(i) for i in range(3)]
    assert [shard.args[0].listen for shard in shards] == ["10.0.0.1:0", "10.0.0.2:0"]
    del fake.nodes[THERE]
    shards[1].die()
    told = fake.of("LearnerWorker")[-2:] if learner == "two" else [here.learner]
    if learner == "down":
        here.learner.die()
        here.launch.learner.poll()
        here.launch.learner._start_at = fake.now + 20  # a long pause
    here.turns(4)
    moved = fake.of("ShardActor")[2]
    assert (moved.args[0].name, moved.args[0].listen) == ("shard-1", "10.0.0.1:0")
    new = ["10.0.0.1:5001", "10.0.0.1:5003"]
    assert here.launch.memory.shards == ["10.0.0.1", "10.0.0.1"]
    assert [w.killed for w in workers] == [False, True, False]
    assert here.worker(1).args[0].endpoint.address == new[1]
    if learner == "down":
        assert len(fake.of("LearnerWorker")) == 1
        here.turns(20)
        assert addresses(here.learner.args[0]) == new
    else:
        for process in told:
            ((endpoints,),) = process.asked("set_shards")
            assert [endpoint.address for endpoint in endpoints] == new
    here.turns(5)
    assert len(fake.of("RolloutWorker")) == 4  # once


def test_shards_are_started_where_their_files_are(fake, run):
    fake.nodes[THERE] = "10.0.0.2"
    fake.resources = {"replay": 1.0}
    here = run(own=False, replay_shards=2, insecure=True)
    here.launch.memory.shards = ["10.0.0.2", "10.0.0.1"]
    here.begin()
    assert [shard.args[0].listen for shard in fake.of("ShardActor")] == ["10.0.0.2:0", "10.0.0.1:0"]
    assert [shard.options["scheduling_strategy"].node_id for shard in fake.of("ShardActor")] == [THERE, HERE]
    assert Memory.load(here.run_dir).shards == ["10.0.0.2", "10.0.0.1"]


def test_a_shard_whose_keeper_dies_comes_back_where_it_was(fake, run):
    here = run(actors=2).begin()
    fake.of("ShardActor")[0].die()
    here.turns(4)
    again = fake.of("ShardActor")[1]
    assert again.args[0].listen == "127.0.0.1:5001"
    assert here.learner.asked("set_shards") == []
    assert len(fake.of("RolloutWorker")) == 2


# the learner


def test_a_learner_that_dies_goes_on_above_all_versions_that_were_seen(fake, run):
    here = run(actors=2).begin()
    assert here.learner.args[0].first_version == 1
    here.learner.always["status"] = learner_status(10, version=7)
    here.turns(2)
    assert here.launch.memory.version == 7
    here.worker(1).always["status"] = replace(WORKER, figures=Figures(newest=19))  # since the last status
    here.learner.die()
    here.turns(3)
    assert len(fake.of("LearnerWorker")) == 2
    assert here.learner.args[0].first_version == 20
    assert here.launch.memory.version == 19
    assert list(here.learner.asked("set_workers")[-1][0]) == ["actor-0", "actor-1"]  # the new one knows nobody
    here.turns(2)  # its first status is below
    assert here.launch.memory.version == 19


def test_the_evaluator_may_have_seen_the_highest_version(fake, run):
    here = run(EVALUATING, actors=1).begin(learner_status(10, version=7))
    fake.of("EvalWorker")[0].always["status"] = replace(WORKER, figures=Figures(newest=9))
    here.learner.die()
    here.turns(3)
    assert here.learner.args[0].first_version == 10


def test_workers_that_are_dead_are_not_asked_for_versions(fake, run):
    here = run(actors=2).begin()
    here.worker(0).always["status"] = replace(WORKER, figures=Figures(newest=5))
    here.learner.die()
    here.worker(1).die()
    here.launch._ask_versions()
    assert here.launch.memory.version == 5


def test_followers_that_end_stay_until_the_first_process_has(fake, run):
    here = run(learners=2).begin()
    first, follower = fake.of("LearnerWorker")
    assert [actor.args[0].rank for actor in (first, follower)] == [0, 1]
    assert first.args[0].coordinator == follower.args[0].coordinator == "10.0.0.1:7000"
    follower.answer("run", Finished("finished", Counters(), 3, None))
    here.turns(3)
    assert (first.killed, follower.killed) == (False, False)
    assert here.launch.learner.handle is first
    here.launch.kill()
    assert (first.killed, follower.killed) == (True, True)


def test_followers_are_asked_how_they_stand(fake, run):
    here = run(learners=2).begin()
    _, follower = fake.of("LearnerWorker")
    assert here.launch.parts()[1].name == "learner-1"
    said = ("time=2026-11-30T12:00:00.000Z level=WARNING logger=learner event=x",)
    follower.always["status"] = replace(LEARNER, host="there", metrics="http://10.0.0.2:9/metrics", log=said)
    here.turns(3)
    assert here.launch.parts()[1].where == "there pid 1"
    assert here.launch.targets.url("learner-1") == "http://10.0.0.2:9/metrics"
    assert "event=x" in (here.run_dir / "logs" / "learner-1.log").read_text()
    assert here.launch.figures.running["learner"] == 2
    del follower.always["status"]
    here.turns(2)
    follower.answer("status", DEATH)  # its death is heard of by its job
    here.turns(2)
    assert here.launch.targets.url("learner-1") is not None


@pytest.mark.parametrize("how", [DEATH, raised(RuntimeError("the group is broken"))])
def test_a_follower_that_dies_takes_the_group_with_it(fake, run, how, caplog):
    here = run(learners=2).begin()
    first, follower = fake.of("LearnerWorker")
    follower.answer("run", how)
    here.turns(0.5)
    assert (first.killed, here.launch.learner.handle) == (True, None)
    assert "another process of its group has died" in caplog.text
    here.turns(3)
    assert follower.killed
    assert [actor.args[0].rank for actor in fake.of("LearnerWorker")] == [0, 1, 0, 1]
    assert here.launch.learner.starts == 2  # one death


@pytest.mark.parametrize("comes", [True, False])
def test_a_learner_without_room_is_waited_for_and_then_given_up(fake, run, comes):
    fake.room = Ref("ready")
    here = run(learners=2)
    here.launch.start(here.live, lambda: False)
    fake.now += 599
    here.turns(0.5)
    assert fake.of("LearnerWorker") == []
    assert here.launch.pool.size == 2  # they make themselves ready
    if comes:
        fake.room.answer(True)
        here.turns(1)
        assert len(fake.of("LearnerWorker")) == 2
        return
    with pytest.raises(PartFailed, match="no room for 2 learners of 1 CPUs, 0 GPUs and 0 TPUs each for 600 s"):
        here.turns(1)


# counts


def test_environment_steps_never_go_back(run):
    here = run(actors=1).begin(learner_status(100))
    assert here.launch.env_steps == 100
    here.worker(0).answer("rollout", piece(50, resets=30))  # beginnings are told before their rows
    here.turns(1)
    assert here.launch.transitions == 70
    assert here.launch.env_steps == 100
    here.learner.always["status"] = learner_status(150)
    here.turns(2)
    assert here.launch.env_steps == 120
    here.learner.always["status"] = learner_status(80)  # of one that was started again
    here.turns(2)
    assert here.launch.env_steps == 120
    assert here.learner.asked("count")[-1] == (120, 0)
    assert here.status().numbers["env_steps"] == 120


def test_a_resumed_run_goes_on_where_the_one_before_was(run):
    here = run(actors=1).begin(learner_status(100, version=4))
    here.worker(0).answer("rollout", piece(50, resets=30, episodes=(Episode(0, 1.5, 9),)))
    assert here.turns(2) == [Episode(0, 1.5, 9)]
    here.launch.write(here.writer, here.live, {"a/b": 1.0})
    again = run(actors=1)
    assert (again.launch.env_steps, again.launch.memory.resets, again.launch.memory.lives) == (100, 30, 2)
    again.launch.start(again.live, lambda: False)
    again.turns(3)
    assert again.learner.args[0].first_version == 5
    assert again.learner.asked("count") == []  # nothing is known yet
    assert again.worker(0).args[0].index == (0, 2, 0)
    again.learner.always["status"] = learner_status(130)
    again.turns(3)
    assert again.learner.asked("count")[-1] == (100, 1)


def test_a_worker_acts_at_random_only_while_there_is_no_snapshot(run, monkeypatch):
    here = run(actors=1).begin(learner_status(10))
    here.launch.pool.resize(2)
    here.turns(1)
    here.learner.always["status"] = learner_status(10, version=1, snapshots=1)
    here.turns(2)
    here.launch.pool.resize(3)
    here.turns(1)
    here.learner.die()  # and another one comes, which has a checkpoint
    here.turns(0.5)
    monkeypatch.setattr(cluster.checkpoint, "names", lambda directory: ["000000000010-000000000001"])
    here.launch.pool.resize(4)
    here.turns(0.5)
    assert here.launch.learner.handle is None
    assert [here.worker(i).args[0].acts_at_random for i in range(4)] == [True, True, False, False]


def test_workers_are_held_while_nobody_limits_the_rows(run):
    here = run(actors=1).begin(replace(LEARNER, loop=LOOP))
    here.turns(3)
    assert here.launch.pool.running == 1
    assert here.worker(0).asked("rollout") == []
    here.learner.always["status"] = learner_status(0)
    here.turns(3)
    assert len(here.worker(0).asked("rollout")) == 2
    here.learner.die()  # the shards have their last credit
    here.turns(3)
    assert here.launch.learner.status.loop.limiter is None  # the next one is not as far yet
    assert not here.launch.pool.held


def test_workers_are_held_when_what_they_have_done_is_enough(run):
    here = run(actors=1).begin(learner_status(900))
    worker = here.worker(0)
    worker.answer("rollout", piece(100, resets=1))
    here.launch.turn()
    here.launch.turn()
    assert not here.launch.pool.held
    worker.answer("rollout", piece(1))
    here.launch.turn()
    calls = len(worker.asked("rollout"))
    here.launch.turn()
    assert here.launch.pool.held
    assert here.launch.env_steps == 900  # the learner has not said so
    worker.answer("rollout", piece(1))
    here.launch.turn()
    assert len(worker.asked("rollout")) == calls
    here.learner.always["status"] = learner_status(950)  # some did not arrive
    here.turns(2)
    assert not here.launch.pool.held


def test_rows_that_a_worker_could_not_send_are_told(run, caplog):
    here = run(actors=2).begin()
    here.worker(1).always["close"] = Closed(Figures(), True)
    replace_text(here.run_dir / running.CONTROL_FILE, json.dumps({"id": "x", "actors": 1}))
    here.turns(3)
    assert "event=rows_dropped part=actor-1" in caplog.text


# evaluations


def evaluated(version: int) -> Evaluated:
    return Evaluated(0, version, np.array([1.0, 3.0]), np.array([5, 7]), 0.5)


def test_an_evaluation_is_asked_for_when_there_is_a_snapshot_and_booked(fake, run):
    here = run(EVALUATING, actors=1).begin(learner_status(0))
    (evaluator,) = fake.of("EvalWorker")
    assert evaluator.asked("evaluate") == []
    here.learner.always["status"] = learner_status(250, version=1)
    here.turns(3)
    assert evaluator.asked("evaluate") == [(250,)]
    evaluator.answer("evaluate", None)  # its first snapshot has not arrived
    here.turns(2)
    assert here.launch.memory.evaluated is None
    assert evaluator.asked("evaluate") == [(250,), (250,)]
    here.learner.always["status"] = learner_status(290, version=2)
    here.turns(2)
    evaluator.answer("evaluate", evaluated(1))
    here.turns(2)
    (line,) = [line for line in read_metrics(here.run_dir) if "eval/return" in line]
    assert line["step"] == 290
    assert (line["eval/return"], line["eval/return_max"], line["eval/length"]) == (2.0, 3.0, 6.0)
    assert (line["eval/asked_at_step"], line["eval/snapshot_version"]) == (250, 1)
    assert len(evaluator.asked("evaluate")) == 2  # 290 is no further multiple of 100
    here.learner.always["status"] = learner_status(300, version=3)
    here.turns(2)
    assert evaluator.asked("evaluate")[-1] == (300,)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_an_evaluation_that_is_lost_is_asked_for_again_and_the_death_counts_once(fake, run, how):
    here = run(EVALUATING, actors=1).begin(learner_status(250, version=1))
    (first,) = fake.of("EvalWorker")
    assert first.asked("evaluate") == [(250,)]
    if how == "dies":
        first.die()
    else:
        first.always["status"] = replace(WORKER, hung="environment 0 has not returned")
    here.turns(1.5)
    assert first.killed
    assert len(here.launch.evaluator._restarts._deaths) == 1
    here.turns(4)
    first, second = fake.of("EvalWorker")
    assert second.asked("evaluate") == [(250,)]
    assert here.learner.asked("set_workers")[-1][0]["evaluator"] is second
    second.answer("evaluate", evaluated(1))
    here.turns(2)
    assert [line["eval/return"] for line in read_metrics(here.run_dir) if "eval/return" in line] == [2.0]
    assert here.launch.memory.evaluated == 250
    assert len(here.launch.evaluator._restarts._deaths) == 1


def test_what_an_evaluation_raises_ends_the_run(fake, run):
    here = run(EVALUATING, actors=1).begin(learner_status(250, version=1))
    fake.of("EvalWorker")[0].answer("evaluate", raised(ValueError("no such room")))
    with pytest.raises(PartFailed, match=r"^evaluator: no such room$"):
        here.turns(2)


# requests, files


def request(run_dir: Path, name: str, actors: int) -> None:
    replace_text(run_dir / running.CONTROL_FILE, json.dumps({"id": name, "actors": actors}))


def test_the_number_of_workers_follows_requests(run):
    here = run(actors=2, replay_shards=2, max_actors=4).begin()
    request(here.run_dir, "one", 4)
    here.turns(3)
    assert here.launch.pool.running == 4
    assert (here.status().control, here.status().refusal, here.status().actors) == ("one", None, 4)
    for name, actors in (("two", 5), ("three", 1)):
        request(here.run_dir, name, actors)
        here.turns(2)
        assert here.status().control == name
        assert here.status().refusal == (
            f"actors={actors} must be 2 (one for each replay shard) to 4 (max_actors, which the replay was made for)"
        )
        assert here.launch.pool.size == 4
    request(here.run_dir, "four", 3)
    here.turns(3)
    assert (here.launch.pool.size, here.status().refusal) == (3, None)
    here.launch.pool.resize(2)  # an old request is not carried out again
    here.turns(2)
    assert here.launch.pool.size == 2


def test_no_worker_is_started_for_a_run_that_ends(fake, run):
    here = run(actors=1).begin()
    here.launch.pool._sleep = fake.sleep

    def asleep() -> None:
        request(here.run_dir, "late", 2)
        if here.status().control == "late":
            here.learner.calls[0].answer(Finished("stopped", Counters(), 0, "name"))

    fake.while_asleep = asleep
    here.launch.close(here.writer, here.live, done=False)
    assert here.status().refusal == "the run is ending; actors=2 comes too late"
    assert len(fake.of("RolloutWorker")) == 1


def test_a_damaged_request_is_passed_over(run, caplog):
    here = run(actors=2).begin()
    (here.run_dir / running.CONTROL_FILE).write_text("{")
    here.turns(2)
    assert "event=request_damaged" in caplog.text
    assert here.launch.pool.size == 2
    request(here.run_dir, "one", 1)
    here.turns(2)
    assert here.launch.pool.size == 1


def test_a_request_of_an_earlier_driver_is_not_carried_out(run):
    first = run(actors=2)
    request(first.run_dir, "old", 1)
    here = run(actors=2).begin()
    assert here.launch.pool.size == 2


def test_the_addresses_of_metrics_are_where_prometheus_finds_them(fake, run):
    here = run(actors=2).begin()
    path = here.run_dir / discovery.TARGETS_FILE
    assert json.loads(path.read_text()) == []
    here.launch.page = "http://127.0.0.1:90/metrics"
    here.learner.always["status"] = replace(learner_status(0), metrics="http://127.0.0.1:91/metrics")
    here.worker(1).always["status"] = replace(WORKER, metrics="http://127.0.0.1:92/metrics")
    here.turns(3)
    groups = json.loads(path.read_text())
    targets = {group["labels"]["part"]: group["targets"] for group in groups}
    assert targets == {"driver": ["127.0.0.1:90"], "learner": ["127.0.0.1:91"], "actor-1": ["127.0.0.1:92"]}
    assert groups[0]["labels"] == {
        "run": str(here.run_dir), "role": "actor", "part": "actor-1", "instance": "actor-1"
    }  # fmt: skip
    assert json.loads(here.launch.targets.text()) == groups
    assert "metrics http://127.0.0.1:90/metrics; all pages: http://127.0.0.1:90/targets" in here.status().notes[1]
    shard = fake.of("ShardActor")[0]
    shard.always["status"] = replace(shard.always["status"], metrics="http://127.0.0.1:93/metrics")
    here.turns(2)
    assert {group["labels"]["part"] for group in json.loads(path.read_text())} == {*targets, "shard-0"}


def test_deaths_are_counted_by_role_over_all_drivers(fake, run):
    here = run(actors=2).begin()
    here.worker(1).die()
    here.learner.die()
    shard = fake.of("ShardActor")[0]
    shard.always["status"] = replace(shard.always["status"], starts=3)  # its keeper has started two more servers
    here.turns(3)
    counted = {"actor": 1, "learner": 1, "replay": 2, "evaluator": 0}
    assert here.launch.figures.restarts == counted
    again = run(actors=2).begin()
    assert again.launch.figures.restarts == counted
    again.worker(0).die()
    again.turns(2)
    assert again.launch.figures.restarts == {**counted, "actor": 2}


def test_figures_of_the_run(fake, run):
    here = run(actors=2, config=EVALUATING).begin(learner_status(70))
    figures = here.launch.figures
    assert (figures.state, figures.env_steps, figures.rows) == ("running", here.launch.env_steps, 70)
    assert figures.asked_env_steps == CONFIG.steps
    assert figures.wanted == {"actor": 2, "learner": 1, "replay": 1, "evaluator": 1}
    assert figures.running["learner"] == figures.running["replay"] == 1
    assert figures.returns == {}
    here.launch.write(here.writer, here.live, {"train/return": 3.0, "train/length": 5})
    said = ("level=WARNING logger=x event=a", "level=INFO logger=x event=b", "level=ERROR logger=x event=c")
    here.learner.always["status"] = replace(learner_status(70), log=said)
    here.turns(3)
    assert here.launch.figures.returns == {"train": 3.0}
    assert here.launch.figures.log_lines["WARNING"] == here.launch.figures.log_lines["ERROR"] > 0


def test_lines_of_metrics_say_what_the_time_went_to(fake, run):
    config = replace(CONFIG, log_every=10)
    loop = {"metrics": {"consistency_loss": 1.0}, "counters": Counters(rows=40, updates=5)}
    here = run(actors=2, config=config).begin()
    spent = {"acting": 1.0, "environment": 3.0, "replay": 0.0}
    here.worker(1).always["status"] = replace(WORKER, figures=Figures(seconds=spent))
    here.learner.always["status"] = learner_status(**{"rows": 40, **loop, "seconds": {"rows": 3.0, "compute": 1.0}})
    here.turns(3)
    here.learner.always["status"] = learner_status(**{"rows": 90, **loop, "counters": Counters(rows=90, updates=25),
                                                      "seconds": {"rows": 3.0, "compute": 2.0}})  # fmt: skip
    here.turns(3)
    first, second = (line for line in read_metrics(here.run_dir) if "counters/updates" in line)
    assert "time/updates_per_s" not in first  # of a life before, perhaps
    assert second["time/updates_per_s"] > 0
    assert (first["time/learner_rows_ratio"], second["time/learner_rows_ratio"]) == (0.75, 0.0)
    assert second["time/learner_compute_ratio"] == 1.0
    assert first["time/actors_environment_ratio"] == 0.75
    assert "time/actors_environment_ratio" not in second  # no time has passed for them


def test_a_trace_is_made_by_the_first_learner_alone(fake, run):
    here = run(actors=1)
    here.launch._profile = 5
    here.begin()
    here.learner.die()
    here.turns(4)
    assert [actor.args[0].profile for actor in fake.of("LearnerWorker")] == [5, 0]


def test_every_part_logs_at_the_level_of_the_run(fake, run):
    here = run(actors=2, config=EVALUATING)
    here.launch.log_level = logging.DEBUG
    here.begin()
    kinds = ("ShardActor", "LearnerWorker", "RolloutWorker", "EvalWorker")
    parts = [actor for kind in kinds for actor in fake.of(kind)]
    assert len(parts) == 5
    assert {actor.args[0].log_level for actor in parts} == {logging.DEBUG}


def test_the_status_says_who_waits(fake, run):
    here = run(actors=2)
    here.launch.show(here.live)
    assert here.status().waits == "everybody waits for the learner, which starts"
    here.begin(learner_status(0, stage="compiling"))
    assert here.status().waits == "the learner is compiling"
    assert here.status().waits in here.live.progress.notes
    assert here.status().numbers["asked_env_steps"] == CONFIG.steps


# the end


def test_a_run_ends_when_its_steps_are_done_and_its_learner_has(fake, run):
    here = run(actors=1)
    here.launch.pool._sleep = fake.sleep
    states = []

    def asleep() -> None:
        for life, learner in enumerate(fake.of("LearnerWorker")):
            learner.always["status"] = learner_status(1010)
            if learner.asked("finish") and not life and not learner.dead:
                states.append(here.status().state)
                learner.die()  # the next one is told too
            elif learner.asked("finish") and life:
                assert learner.asked("count")[-1] == (1010, 0)
                learner.calls[0].answer(Finished("finished", Counters(rows=1020, updates=1000), 3, "name"))

    fake.while_asleep = asleep
    assert here.launch.run(here.writer, here.live, lambda: False)
    assert states == ["stopping"]
    assert [len(actor.asked("finish")) for actor in fake.of("LearnerWorker")] == [1, 1]
    assert all(actor.asked("stop") == [] for actor in fake.of("LearnerWorker"))
    assert here.worker(0).asked("close")
    assert fake.of("LearnerWorker")[0].asked("set_workers")[-1] == ({},)
    status = here.status()
    assert (status.state, status.numbers["rows"], status.numbers["updates"]) == ("finished", 1020, 1000)
    assert fake.of("ShardActor")[0].asked("close") == [()]
    assert Memory.load(here.run_dir).env_steps == 1020


@pytest.mark.parametrize("done", [True, False])
def test_an_evaluation_that_goes_on_is_waited_for_where_the_run_is_done(fake, run, done):
    here = run(EVALUATING, actors=1).begin(learner_status(250, version=1))
    here.launch.pool._sleep = fake.sleep
    asked = next(ref for ref in fake.of("EvalWorker")[0].calls if ref.method == "evaluate")
    here.learner.answer("run", Finished("finished", Counters(rows=250), 1, "name"))
    until = fake.now + 30

    def asleep() -> None:
        fake.now += 1
        if fake.now >= until:
            asked.answer(evaluated(1))

    fake.while_asleep = asleep
    here.launch.page = "http://127.0.0.1:90/metrics"
    here.turns(1)
    assert json.loads(here.launch.targets.text()) != []
    here.launch.close(here.writer, here.live, done)
    assert json.loads(here.launch.targets.text()) == []
    assert here.launch.figures.state == ("finished" if done else "stopped")
    assert (fake.now >= until) == done
    assert [line["eval/return"] for line in read_metrics(here.run_dir) if "eval/return" in line] == [2.0] * done


def test_a_run_that_is_stopped_lets_its_learner_write_a_checkpoint(fake, run):
    here = run(actors=1)
    here.launch.pool._sleep = fake.sleep

    def asleep() -> None:
        if (learners := fake.of("LearnerWorker")) and learners[0].asked("stop"):
            learners[0].calls[0].answer(Finished("stopped", Counters(rows=5), 0, "name"))

    fake.while_asleep = asleep
    assert not here.launch.run(here.writer, here.live, lambda: bool(fake.of("RolloutWorker")))
    assert fake.of("LearnerWorker")[0].asked("finish") == []
    assert (here.status().state, here.status().numbers["rows"]) == ("stopped", 5)


def test_a_last_checkpoint_that_does_not_come_is_not_waited_for_without_end(fake, run):
    here = run(actors=1).begin(learner_status(5))
    here.launch.pool._sleep = fake.sleep

    def asleep() -> None:
        fake.now += 1

    fake.while_asleep = asleep
    with pytest.raises(PartFailed, match="has not written its last checkpoint in time"):
        here.launch.close(here.writer, here.live, done=False)
    assert here.learner.asked("stop") == [()]


@pytest.mark.parametrize("save", [True, False])
def test_a_run_that_fails_asks_the_learner_for_a_checkpoint(fake, run, save):
    here = run(actors=1).begin(learner_status(5))
    until = fake.now + 1

    def asleep() -> None:
        if fake.now >= until:
            here.learner.calls[0].answer(Finished("stopped", Counters(rows=5), 0, "name"))

    fake.while_asleep = asleep
    here.launch.fail(here.live, save)
    assert here.learner.asked("stop") == [()] * save
    assert (fake.now >= until) == save
    assert here.launch.learner.result == (Finished("stopped", Counters(rows=5), 0, "name") if save else None)
    assert here.status().state == here.launch.figures.state == ("failed" if save else "stopped")


def test_a_learner_that_does_not_end_is_not_waited_for_without_end(fake, run):
    here = run(actors=1).begin(learner_status(5))

    def asleep() -> None:
        fake.now += 1

    fake.while_asleep = asleep
    began = fake.now
    here.launch.fail(here.live, save=True)
    assert 60 <= fake.now - began < 65


@pytest.mark.parametrize("how", [DEATH, raised(ValueError("not finite"))])
def test_a_run_that_fails_with_its_learner_ends_at_once(fake, run, how):
    here = run(actors=1).begin(learner_status(5))
    here.learner.answer("run", how)
    began = fake.now
    here.launch.fail(here.live, save=True)
    assert fake.now - began < 1.0
    assert len(fake.of("LearnerWorker")) == 1


@pytest.mark.parametrize("save", [True, False])
def test_whoever_watches_sees_that_a_run_has_failed(run, save):
    here = run(actors=1).begin()
    here.launch.page = "http://127.0.0.1:90/metrics"
    here.turns(1)
    before = here.launch.targets.text()
    here.learner.answer("run", DEATH)
    here.launch.fail(here.live, save)
    assert here.launch.targets.text() == (before if save else "[]")


def test_a_driver_tells_how_long_ago_it_came_round(fake, run):
    here = run(actors=1).begin()
    assert here.launch.figures_now().turn_age <= 1.0
    fake.now += 700
    assert here.launch.figures_now().turn_age >= 700


def test_levels_are_read_where_a_line_begins(fake, run):
    here = run(actors=1).begin()
    here.launch._write_log("learner", ["level=INFO logger=x said='level=ERROR level=WARNING'", "level=ERROR logger=x"])
    here.turns(1)
    assert here.launch.figures.log_lines == {"ERROR": 1}


def test_nothing_is_left_at_the_end(fake, run):
    here = run(EVALUATING, actors=2, learners=2).begin(learner_status(5))
    here.launch.kill()
    assert {actor.kind for actor in fake.actors} == {"ShardActor", "LearnerWorker", "RolloutWorker", "EvalWorker"}
    assert all(actor.killed for actor in fake.actors)


# what a driver remembers and checks


def test_what_a_driver_remembers(tmp_path):
    assert Memory.load(tmp_path) == Memory()
    memory = Memory(resets=3, version=7, evaluated=None, env_steps=2**40, shards=["10.0.0.1"])
    memory.save(tmp_path)
    assert Memory.load(tmp_path) == memory
    assert [path.name for path in tmp_path.iterdir()] == ["driver.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"unknown": 1}'])
def test_a_damaged_memory_is_refused(tmp_path, content):
    (tmp_path / "driver.json").write_text(content)
    with pytest.raises(ValueError, match=r"driver\.json is damaged"):
        Memory.load(tmp_path)


@pytest.mark.parametrize(("content", "whole"), [(None, 0), (b"", 0), (b"half", 0), (b"{}\n", 3), (b"{}\n{}\nha", 6)])
def test_a_line_that_a_driver_did_not_finish_is_not_kept(tmp_path, content, whole):
    if content is not None:
        (tmp_path / METRICS_FILE).write_bytes(content)
    assert cluster.whole_lines(tmp_path) == whole


def test_one_driver_at_a_time(tmp_path):
    with cluster.alone_in(tmp_path):
        with pytest.raises(ValueError, match=f"another `telamon launch` or `telamon train` is at work in {tmp_path}"):
            with cluster.alone_in(tmp_path):
                pytest.fail("two are at work")
    with cluster.alone_in(tmp_path):  # the first has ended
        pass


def test_a_second_launch_leaves_the_files_of_the_first_alone(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "connect", lambda *args: nullcontext(Session(HERE, "10.0.0.1", True)))
    monkeypatch.setattr(cluster, "find_spec", lambda *args: SPEC)
    monkeypatch.setattr(cluster.local, "memory", lambda *args: None)
    console = Console(file=io.StringIO())
    with cluster.alone_in(tmp_path), pytest.raises(ValueError, match="another `telamon launch`"):
        cluster.launch(CONFIG, ClusterConfig(), tmp_path, False, console)
    assert not (tmp_path / configs.CONFIG_FILE).exists()


def test_what_a_driver_meets_is_no_second_driver(tmp_path):
    with pytest.raises(BlockingIOError):
        with cluster.alone_in(tmp_path):
            raise BlockingIOError("a pipe is full")


def started(run_dir: Path, **options: Any) -> Path:
    """A run directory as a launch leaves it."""
    found = cluster.check(CONFIG, ClusterConfig(**options), run_dir, resume=False)
    configs.save(CONFIG, run_dir)
    configs.save_cluster(found, run_dir)
    return run_dir


def test_a_resumed_launch_keeps_what_its_files_were_made_for(tmp_path):
    most = ClusterConfig(actors=3).most_actors
    started(tmp_path, actors=3)
    assert configs.load_cluster(tmp_path).max_actors == most
    assert cluster.check(CONFIG, ClusterConfig(actors=2), tmp_path, resume=True).max_actors == most
    with pytest.raises(ValueError, match=rf"differing keys: max_actors \({most} -> {most + 1}\)"):
        cluster.check(CONFIG, ClusterConfig(actors=3, max_actors=most + 1), tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"another cluster; differing keys: replay_shards \(1 -> 2\)"):
        cluster.check(CONFIG, ClusterConfig(actors=3, replay_shards=2), tmp_path, resume=True)
    with pytest.raises(ValueError, match=f"max_actors={most} is less than actors={most + 1}"):
        cluster.check(CONFIG, ClusterConfig(actors=most + 1), tmp_path, resume=True)
    with pytest.raises(ValueError, match="already holds a run"):
        cluster.check(CONFIG, ClusterConfig(actors=3), tmp_path, resume=False)


def test_a_launch_with_a_replay_of_its_own_choice_is_refused(tmp_path):
    config = replace(CONFIG, replay=ReplayConfig(address="127.0.0.1:5000"))
    with pytest.raises(ValueError, match=r"^replay\.address=127\.0\.0\.1:5000 is of `telamon train`"):
        cluster.check(config, ClusterConfig(), tmp_path, resume=False)


def test_a_tls_file_that_is_not_there_is_named(tmp_path):
    for name in ("certificate", "key"):
        (tmp_path / name).write_text("PEM")
    tls = ClusterConfig(
        tls_certificate=str(tmp_path / "certificate"),
        tls_key=str(tmp_path / "key"),
        root_certificate=str(tmp_path / "root"),
    )
    with pytest.raises(FileNotFoundError, match=f"^root_certificate={tmp_path / 'root'} is no file$"):
        cluster.check(CONFIG, tls, tmp_path / "run", resume=False)
    (tmp_path / "root").write_text("PEM")
    cluster.check(CONFIG, tls, tmp_path / "run", resume=False)


def test_films_that_cannot_be_drawn_are_refused_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # restored in the end: the function goes there
    config = replace(CONFIG, task="counting:continuous")
    assert cluster.try_env(config, tmp_path).id == "counting:continuous"
    with pytest.raises(ValueError, match=r"no picture of counting:continuous can be drawn .*--eval\.videos 0"):
        cluster.try_env(replace(config, eval=EvalConfig(videos=1)), tmp_path)


def test_a_trace_of_less_than_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^profile=-1 must be at least 0$"):
        cluster.check(CONFIG, ClusterConfig(), tmp_path / "run", resume=False, profile=-1)


def test_only_what_dead_drivers_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "SHORT_FOLDER", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = (f"telamon-ray-{dead.pid}-abc", f"telamon-ray-{os.getpid()}-abc", "telamon-ray-walker-1", "telamon-walker")
    for name in names:
        (tmp_path / name / "0").mkdir(parents=True)
    session._sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
