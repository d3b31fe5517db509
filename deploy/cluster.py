"""A run on Ray: who is started where, who is started again, and who is told what. `telamon launch`.

The driver, this process, owns every other part: they end with it. It decides nothing about learning. Rows go from the
workers to the shards and from there to the learner, snapshots from the learner to the workers; neither passes here.
What the driver does is a loop over what its parts tell: count, write down, start again, evaluate, scale, stop.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import ray
import ray.exceptions
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from rich.console import Console

from actors.collector import Episode
from actors.pool import (
    Arrived,
    Died,
    Event,
    Left,
    PartFailed,
    Pool,
    RestartPolicy,
    Seen,
    Started,
    one_line,
)
from actors.worker import GROUPS as ACTOR_GROUPS
from actors.worker import EvalSetup, EvalWorker, RolloutWorker, WorkerSetup, describe
from deploy import config as configs
from deploy import discovery, loading, local, metrics, openloop, running, screen, video
from deploy.config import FIXED, ClusterConfig, RunConfig, make_agent
from deploy.discovery import Target, Targets
from deploy.files import alone_in, replace_text
from deploy.kept import PLACEMENT_SECONDS, STATUS_PATIENCE, STATUS_SECONDS, Kept, is_ready
from deploy.plan import Plan, make_plan
from deploy.session import LOOPBACK, Session, alive, connect
from deploy.shards import ShardActor, ShardSetup
from deploy.shares import Shares
from learner import checkpoint, limiter
from learner.loop import LearnerSetup
from learner.worker import GROUPS as LEARNER_GROUPS
from learner.worker import LearnerStatus, LearnerWorker
from telamon.data import EnvSpec
from telamon.envs.base import BatchedEnv
from telamon.rpc.security import Endpoint
from telamon.telemetry.live import LiveView, Part, Rates
from telamon.telemetry.logs import PartLogs, setup_logging
from telamon.telemetry.writer import METRICS_FILE, MetricsWriter, read_metrics

LOG = logging.getLogger(__name__)

remote: Any = ray.remote
"""Untyped: its stub knows neither concurrency groups nor most strategies."""

DRIVER_FILE = "driver.json"
"""What the driver must still know after it was killed."""
TOKEN_FILE = "token"
"""Of mode 0600: the bearer token of the run's replay servers."""
TABLE = "run"
REPLAY_RESOURCE = "replay"
"""Nodes that declare it get the replay shards; where none does, the driver's node has them."""
TURN_SECONDS = 0.02
"""Between two looks of the driver. Workers have their next call already, so nobody waits for it."""
FINISH_SECONDS = 600.0
"""For the updates that are still due, and the last checkpoint."""
STOP_SECONDS = 60.0
BUFFER_TICKS = 2
"""That a worker may have unacknowledged. Enough to hide the way to the shard; what waits there for credit grows old."""
CALLS, CALLS_PER_WRITER = 64, 3
"""In progress at once that a shard answers: of the learner and whoever looks, and of each worker."""
ASK_SECONDS = 5.0
"""For workers to say which snapshot they have, when the learner is started again."""
RATED = ("env_steps", "updates", "rows")
"""Numbers of a run whose speed is told."""

LEVEL = re.compile(r"(?:time=\S+ )?level=(WARNING|ERROR)\b")
"""How a line begins that the driver's log is to have too."""

EnvVars = Mapping[str, str]

ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
}
"""Workers that act on a CPU: one core each."""


# what the driver remembers


@dataclass
class Memory:
    """What goes on when a driver was killed and another one resumes; replaced about once a second."""

    resets: int = 0
    """Rows that begin an episode, as far as workers have told: the others are transitions."""
    episodes: int = 0
    lives: int = 0
    """Drivers that this run has had: no two repeat the draws of their workers."""
    capacity: int | None = None
    """Rows of each ring, as the shards' files were made."""
    version: int = 0
    """Highest version of a snapshot that was seen."""
    env_steps: int = 0
    """The highest that was written down: an x-axis does not go back."""
    evaluated: int | None = None
    """Environment steps of the last evaluation; None before the first."""
    reported: int = 0
    logged: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    """Role -> deaths of parts."""
    shards: list[str] = field(default_factory=list)
    """Address of the node that has each shard's files."""

    def save(self, run_dir: Path) -> None:
        replace_text(run_dir / DRIVER_FILE, json.dumps(asdict(self)))

    @classmethod
    def load(cls, run_dir: Path) -> Memory:
        """That of an earlier driver; a fresh one where there is none. Raises ValueError where it is damaged."""
        path = run_dir / DRIVER_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


@dataclass
class Follower:
    """A process of a learner that does as the first one orders. It is asked how it stands, and no answer is no death:
    the first one notices that, and all are started again."""

    name: str
    handle: Any
    status: LearnerStatus | None = None
    """What it said last."""
    asked: Any = None
    asked_at: float = -math.inf

    def look(self, now: float) -> Sequence[str]:
        """Asks, or takes the answer, without waiting. Returns its new log lines."""
        if self.asked is None and now - self.asked_at >= STATUS_SECONDS:
            self.asked, self.asked_at = self.handle.status.remote(), now
        if self.asked is None or not is_ready(self.asked):
            return ()
        asked, self.asked = self.asked, None
        try:
            self.status = ray.get(asked)
        except ray.exceptions.RayError:
            return ()
        return () if self.status is None else self.status.log


# what Ray is asked for


def reserved(cpus: float, gpus: float, tpus: float) -> dict[str, Any]:
    """Options of an actor."""
    return {"num_cpus": cpus, "num_gpus": gpus, **({"resources": {"TPU": tpus}} if tpus else {})}


def acts_on(cluster: ClusterConfig) -> EnvVars:
    """What JAX of a worker is told: one core, unless it has an accelerator."""
    return {} if cluster.actor_gpus or cluster.actor_tpus else ONE_THREAD


# functions that run in other processes


def build_env(config: RunConfig, num_envs: int, folder: Path, seed: int) -> BatchedEnv:
    """The run's environments. A file that holds one is named relative to `folder`, where the command was given."""
    if folder.is_dir():
        os.chdir(folder)
    return local.build_env(config, num_envs, seed)


def try_env(config: RunConfig, folder: Path) -> EnvSpec:
    """What the run's environments are like. Raises EnvError, ValueError where films are wanted and cannot be drawn."""
    make_env = partial(build_env, config, 1, folder)
    if config.eval.videos:
        video.check_pictures(partial(make_env, config.seed))
    return describe(make_env)


def free_address() -> str:
    """This node's address in the cluster, with a port that is free now."""
    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


# the driver


class Launch:
    """A run and its parts, from the first start to the last."""

    def __init__(
        self,
        config: RunConfig,
        cluster: ClusterConfig,
        run_dir: Path,
        session: Session,
        spec: EnvSpec,
        token: str,
        profile: int = 0,
        log_level: int = logging.INFO,
    ) -> None:
        self.config, self.cluster, self.run_dir = config, cluster, run_dir
        self.agent = make_agent(config, spec)
        self.memory = Memory.load(run_dir)
        self.memory.lives += 1
        self.plan: Plan = make_plan(config, cluster, self.agent, self.memory.capacity)
        self.memory.capacity = self.plan.table.capacity
        self.logs = PartLogs(run_dir / "logs")
        self.rows = 0
        """Of the run, as the learner's limiter saw them."""
        self._lag = 0
        """Most versions that a row was acted with behind what its worker had, since the last line of metrics."""
        self._ahead = 0
        """Transitions that workers have told of since the learner said how many rows there are."""
        self.state = "starting"
        self._session, self._token, self._profile, self.log_level = session, token, profile, log_level
        self._host = LOOPBACK if session.own else session.address
        self._policy = RestartPolicy(budget=cluster.restarts)
        self.targets = Targets(run_dir)
        self.page: str | None = None
        """URL of the driver's own metrics."""
        self.figures = metrics.RunFigures(
            config.algorithm, config.task, config.seed, version("telamon"), run_dir, config.steps
        )
        """How the run stood when it was last looked at: its page is read in another thread."""
        self._turned = time.monotonic()
        """When that was."""
        self._returns: dict[str, float] = {}
        self._deaths = Counter(self.memory.restarts)
        """Role -> deaths of parts under earlier drivers, and of workers."""
        self._served: dict[tuple[int, int], int] = {}
        """(shard, start of its keeper) -> servers that it has started."""
        self._said: Counter[str] = Counter()
        """Level -> lines of parts."""
        self._request: running.Request | None = running.requested(run_dir)
        self._refusal: str | None = None
        self._told: Mapping[str, Any] = {}
        """The snapshots' receivers, as the learner knows them."""
        self._group: Any = None
        """Placement group of the learner, where it needs one."""
        self._group_ready: Any = None
        self._group_since: float | None = None
        """Since when there has been no room for it."""
        self._followers: dict[Any, Follower] = {}
        """Job -> handle of the learner's processes but the first."""
        self._ended: list[Any] = []
        """Handles of those of them that have done theirs."""
        self._places: list[str] = []
        """Node of each shard."""
        self._addresses: list[str | None] = [None] * cluster.replay_shards
        self._evaluation: tuple[Any, int] | None = None
        """What was asked of the evaluator, and at how many environment steps."""
        self._reporting: Any = None
        """What was asked of the learner."""
        self._unable: set[str] = set()
        """What reports lack, as far as that was said."""
        self._limited = False
        """Whether anybody limits the rows: until then workers make themselves ready, and no rows."""
        self._heard: Any = None
        """The learner's last status that was taken in."""
        self._looked_at = -math.inf
        self._actors_spent, self._learner_spent = Shares(), Shares()
        """By what, between two lines of metrics."""
        self._rates = Rates()
        self._counted = time.monotonic(), 0, 0
        """When the last of them was written, environment steps and updates then."""
        self.shards = [
            Kept(f"shard-{i}", partial(self._start_shard, i), "open", self._policy)
            for i in range(cluster.replay_shards)
        ]
        self.learner = Kept("learner", self._start_learner, "run", self._policy)
        self.evaluator = Kept("evaluator", self._start_evaluator, None, self._policy)
        self.pool = Pool(self._start_worker, policy=self._policy)

    # who is started where

    def _start_shard(self, number: int, attempt: int) -> Any:
        """On the node that has its files while that is there, else on another one, where it begins empty."""
        nodes, listen = alive(), self._addresses[number]
        homes = [n for n in nodes if REPLAY_RESOURCE in nodes[n]["Resources"]] or [self._session.node]
        homes.sort()
        while len(self._places) < len(self.shards):
            i = len(self._places)
            before = self.memory.shards[i] if i < len(self.memory.shards) else None
            same = [n for n in homes if nodes[n]["NodeManagerAddress"] == before]
            self._places.append(same[0] if same else homes[i % len(homes)])
        if self._places[number] not in nodes:
            moved = homes[number % len(homes)]
            LOG.warning("event=shard_moves shard=%d from=%s to=%s", number, self._places[number], moved)
            self._places[number] = moved
            listen = None
        place = self._places[number]
        host = LOOPBACK if self._session.own else nodes[place]["NodeManagerAddress"]
        self.memory.shards = [nodes[n]["NodeManagerAddress"] if n in nodes else "" for n in self._places]
        c = self.cluster
        writers = math.ceil(c.most_actors / len(self.shards))
        options = ["--flush-every", str(c.flush_every), "--max-calls", str(CALLS + CALLS_PER_WRITER * writers)]
        if c.tls_certificate is not None and c.tls_key is not None:
            options += ["--tls-certificate", c.tls_certificate, "--tls-key", c.tls_key]
        elif c.insecure:
            options += ["--insecure"]
        setup = ShardSetup(
            f"shard-{number}",
            self.run_dir / "replay" / f"shard-{number}",
            listen or f"{host}:0",
            host,
            tuple(options),
            self.log_level,
        )
        actor = remote(num_cpus=1, max_concurrency=4)(ShardActor)
        return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False)).remote(
            setup, self._token
        )

    def _start_learner(self, attempt: int) -> Any:
        """Its processes; the first one's handle. Those of the attempt before are gone, or go now."""
        places = self._places_of_learners()
        if places is None:
            return None
        for handle in (*self._following(), *self._ended):
            ray.kill(handle)
        self._ended.clear()
        c, config = self.cluster, self.config
        self._ask_versions()
        setup = LearnerSetup(
            make_agent=partial(loading.agent_of, self.run_dir),
            run_dir=self.run_dir,
            seed=config.seed,
            endpoints=self._endpoints(),
            table=TABLE,
            spec=self.plan.table,
            limiter=self.plan.limiter,
            timeout=config.replay.timeout,
            checkpoint_every=config.checkpoint.every,
            checkpoint_keep=config.checkpoint.keep,
            max_skipped=config.max_skipped,
            first_version=self.memory.version + 1,
            meta={"config": asdict(config), "env_spec": asdict(self.agent.env), "versions": local.versions()},
            fsdp=c.mesh.fsdp,
            publish_seconds=c.publish_seconds,
            metrics_host=self._host,
            profile=0 if attempt else self._profile,
            log_level=self.log_level,
            size=c.learners,
        )
        on_cpu = c.learner_gpus == 0 and c.learner_tpus == 0
        environment = {**self._compiled("learner"), **({"JAX_PLATFORMS": "cpu"} if on_cpu else {})}
        actor = remote(concurrency_groups=LEARNER_GROUPS, runtime_env={"env_vars": environment})(LearnerWorker)
        resources = reserved(c.learner_cpus, c.learner_gpus, c.learner_tpus)
        if c.learners > 1:
            find = remote(num_cpus=0)(free_address).options(scheduling_strategy=places[0])
            setup = replace(setup, coordinator=ray.get(find.remote(), timeout=STATUS_PATIENCE))
        handles = [
            actor.options(scheduling_strategy=place, **resources).remote(replace(setup, rank=rank))
            for rank, place in enumerate(places)
        ]
        self._followers = {
            handle.run.remote(): Follower(f"learner-{i}", handle) for i, handle in enumerate(handles) if i
        }
        self._told = {}
        return handles[0]

    def _ask_versions(self) -> None:
        """Sees which snapshots have been handed out, so that a new learner's are newer than all of them."""
        asked = {handle.status.remote(): name for name, handle in self._receivers().items()}
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_SECONDS)[0] if asked else []
        for ref in answered:
            try:
                status = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # it takes no snapshot any more
            self._write_log(asked[ref], status.log)
            self.memory.version = max(self.memory.version, status.figures.newest or 0)

    def _places_of_learners(self) -> list[Any] | None:
        """Scheduling strategies: on the driver's node, or wherever the accelerators are, as one group; None while there
        is no room for that. Raises PartFailed when there has been none for too long."""
        c = self.cluster
        if c.learners == 1 and c.learner_gpus == 0 and c.learner_tpus == 0:
            return [NodeAffinitySchedulingStrategy(self._session.node, soft=False)]
        if self._group is None:
            bundle = {"CPU": c.learner_cpus, "GPU": c.learner_gpus, "TPU": c.learner_tpus}
            bundles = [{k: v for k, v in bundle.items() if v}] * c.learners
            self._group = placement_group(bundles, strategy="SPREAD")
            self._group_ready = self._group.ready()
        if not is_ready(self._group_ready):
            self._group_since = self._group_since or time.monotonic()
            if time.monotonic() - self._group_since < PLACEMENT_SECONDS:
                return None
            raise PartFailed(
                f"the cluster has had no room for {c.learners} learners of {c.learner_cpus:g} CPUs, "
                f"{c.learner_gpus:g} GPUs and {c.learner_tpus:g} TPUs each for {PLACEMENT_SECONDS:g} s"
            )
        self._group_since = None
        return [PlacementGroupSchedulingStrategy(self._group, i) for i in range(c.learners)]

    def _start_worker(self, index: int, attempt: int) -> Any:
        config = self.config
        setup = WorkerSetup(
            name=f"actor-{index}",
            index=(index, self.memory.lives, attempt),
            seed=config.seed,
            make_agent=partial(make_agent, config, self.agent.env),
            make_env=partial(build_env, config, config.env.num, Path.cwd()),
            endpoint=self._endpoints()[index % len(self.shards)],
            table=TABLE,
            spec=self.plan.table,
            buffer_ticks=BUFFER_TICKS,
            unroll_ticks=self.plan.unroll_ticks,
            acts_at_random=self.agent.acts_at_random and not self._has_learned(),
            env_timeout=config.env.timeout,
            timeout=config.replay.timeout,
            metrics_host=LOOPBACK if self._session.own else None,
            log_level=self.log_level,
        )
        return self._acting(RolloutWorker, setup.name).remote(setup)

    def _has_learned(self) -> bool:
        """Whether the learner has snapshots to give, or will have once it is back."""
        status = self.learner.status
        published = status is not None and status.loop.snapshots > 0
        return published or bool(checkpoint.names(self.run_dir / "checkpoints"))

    def _start_evaluator(self, attempt: int) -> Any:
        config = self.config
        setup = EvalSetup(
            name="evaluator",
            seed=config.seed,
            make_agent=partial(make_agent, config, self.agent.env),
            make_env=partial(build_env, config, config.eval.episodes, Path.cwd()),
            env_timeout=config.env.timeout,
            encode=video.encode if config.eval.videos else None,
            metrics_host=LOOPBACK if self._session.own else None,
            log_level=self.log_level,
        )
        self._evaluation = None
        return self._acting(EvalWorker, setup.name).remote(setup)

    def _acting(self, kind: type, name: str) -> Any:
        """An actor class of workers, anywhere in the cluster."""
        c = self.cluster
        environment = {**self._compiled(name), **acts_on(c)}
        return remote(
            **reserved(c.actor_cpus, c.actor_gpus, c.actor_tpus), concurrency_groups=ACTOR_GROUPS,
            scheduling_strategy="SPREAD", runtime_env={"env_vars": environment},
        )(kind)  # fmt: skip

    def _compiled(self, part: str) -> EnvVars:
        """Where what a part has compiled is kept, so that its successor need not compile it again.

        Of each part apart, because entries are not written at once, and on this machine alone, because another CPU may
        lack instructions.
        """
        if not self._session.own:
            return {}
        own = {
            "JAX_COMPILATION_CACHE_DIR": str(self.run_dir / "compiled" / part),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        }
        return {name: os.environ.get(name, value) for name, value in own.items()}

    def _endpoints(self) -> tuple[Endpoint, ...]:
        """Of the shards; all have one once they were opened."""
        c = self.cluster
        root = None if c.root_certificate is None else Path(c.root_certificate).read_bytes()
        return tuple(Endpoint(address or "", self._token, root) for address in self._addresses)

    # what the parts tell

    @property
    def env_steps(self) -> int:
        """Of the run. Rows are told by the learner and beginnings of episodes by the workers, each about a second late:
        the difference may go back for a moment, and this does not."""
        told = self.transitions * self.agent.env.action_repeat
        self.memory.env_steps = max(self.memory.env_steps, told)
        return self.memory.env_steps

    def start(self, live: LiveView, stopped: Callable[[], bool]) -> None:
        """Starts all parts; the learner and the workers once every shard has an address."""
        while not all(self._addresses):
            if stopped():
                raise KeyboardInterrupt
            self._poll_shards()
            if time.monotonic() - self._looked_at >= STATUS_SECONDS:
                self._looked_at = time.monotonic()
                self.show(live)
            time.sleep(TURN_SECONDS)
        self.learner.poll()
        self.pool.resize(self.cluster.actors)
        self.state = "running"

    def turn(self) -> list[Episode]:
        """Takes what has happened, does what is due. Returns the episodes that have ended."""
        self._poll_shards()
        self._poll_learner()
        soon = self.env_steps + self._ahead * self.agent.env.action_repeat
        self.pool.held = not self._limited or soon >= self.config.steps
        episodes = self._take(self.pool.poll())
        if self.config.eval.every and self.learner.status is not None:
            self._write_log("evaluator", self.evaluator.poll())
            if self.evaluator.status is not None and self.evaluator.status.hung is not None:
                self.evaluator.died(self.evaluator.status.hung)
        self._tell_receivers()
        return episodes

    def _poll_shards(self) -> None:
        for i, shard in enumerate(self.shards):
            self._write_log(shard.name, shard.poll())
            if shard.status is not None:
                self._served[i, shard.starts] = shard.status.starts
            found = None if shard.status is None else shard.status.address
            if found is not None and found != self._addresses[i]:
                before, self._addresses[i] = self._addresses[i], found
                if before is not None:
                    self._shard_moved(i)

    def _shard_moved(self, number: int) -> None:
        """Lets the learner know, and replaces the shard's workers: a client knows one address."""
        for learner in (self.learner.handle, *self._following()):
            if learner is not None:  # else it is told when it is started
                learner.set_shards.remote(self._endpoints())
        for name, handle in self.pool.handles().items():
            if int(name.rpartition("-")[2]) % len(self.shards) == number:
                LOG.info("event=worker_replaced part=%s reason='its shard has moved'", name)
                ray.kill(handle)

    def _poll_learner(self) -> None:
        self._write_log("learner", self.learner.poll())
        for ref in [ref for ref in self._followers if is_ready(ref)]:
            try:
                ray.get(ref)
                # It has ended as it was told. Its process stays: its death would be one to the first one, which still
                # writes the last checkpoint.
                self._ended.append(self._followers.pop(ref).handle)
            except ray.exceptions.RayError as error:
                if self.learner.handle is not None:
                    self.learner.died(f"another process of its group has died: {one_line(error)}")
                break
        for follower in self._followers.values():
            self._write_log(follower.name, follower.look(time.monotonic()))
        if (status := self.learner.status) is not None and status is not self._heard:
            self._heard, loop = status, status.loop
            self._limited = self._limited or loop.limiter is not None
            self._ahead = 0
            self.rows = max(self.rows, loop.counters.rows)
            self.memory.version = max(self.memory.version, loop.version)
        if self.learner.result is not None:
            self.rows = max(self.rows, self.learner.result.counters.rows)

    def _following(self) -> list[Any]:
        """Handles of the learner's processes but the first."""
        return [follower.handle for follower in self._followers.values()]

    def _take(self, events: Sequence[Event]) -> list[Episode]:
        episodes: list[Episode] = []
        for event in events:
            match event:
                case Arrived(_, piece):
                    self.memory.resets += piece.resets
                    self._ahead += piece.rows - piece.resets
                    self._lag = max(self._lag, piece.lag)
                    self.memory.episodes += len(piece.episodes)
                    episodes += piece.episodes
                case Seen(name, status):
                    self._write_log(name, status.log)
                case Started(name, attempt, seconds):
                    LOG.info("event=worker_acts part=%s attempt=%d seconds=%.1f", name, attempt, seconds)
                case Left(name, closed) if closed is not None and closed.unsent:
                    LOG.warning(
                        "event=rows_dropped part=%s reason='its shard did not take its last rows in time'", name
                    )
                case Died():
                    self._deaths["actor"] += 1
                case Left():
                    pass  # the pool has said so
        return episodes

    def _receivers(self) -> dict[str, Any]:
        """Name -> handle of everyone who takes snapshots."""
        found = dict(self.pool.handles())
        if self.evaluator.handle is not None:
            found[self.evaluator.name] = self.evaluator.handle
        return found

    def _tell_receivers(self) -> None:
        """Lets the learner know who wants its snapshots, whenever that changes."""
        receivers = self._receivers()
        if self.learner.handle is not None and receivers != self._told:
            self.learner.handle.set_workers.remote(receivers)
            self._told = receivers

    def _write_log(self, name: str, lines: Sequence[str]) -> None:
        self.logs.write(name, lines)
        for line in lines:
            if (found := LEVEL.match(line)) is not None:
                self._said[found[1]] += 1
                LOG.warning("event=part_says part=%s line=%r", name, line)

    @property
    def transitions(self) -> int:
        """As far as rows and the beginnings of episodes are known."""
        return max(0, self.rows - self.memory.resets)

    def _count(self) -> None:
        """Tells the learner what the run has done, once the rows are known."""
        if self.learner.handle is not None and self.rows:
            self.learner.handle.count.remote(self.transitions, self.memory.episodes)

    # what is done every second

    def look(self, writer: MetricsWriter, live: LiveView) -> None:
        """Writes down how the run stands, and does what others have asked for since; about once a second."""
        now = time.monotonic()
        if now - self._looked_at < STATUS_SECONDS:
            return
        self._looked_at = now
        self._count()
        self._evaluate(writer, live)
        self._report(writer)
        self._log(writer, live)
        self._obey()
        self._look_at_itself()
        self.memory.save(self.run_dir)
        self.write_targets()
        self.show(live)

    def write(self, writer: MetricsWriter, live: LiveView, metrics: Mapping[str, float]) -> None:
        """Adds a line to the record of the run."""
        writer.write(self.env_steps, metrics)
        live.update(metrics=metrics)
        self._returns |= {of: metrics[f"{of}/return"] for of in ("train", "eval") if f"{of}/return" in metrics}

    def _due(self, last: int | None, every: int) -> bool:
        """Whether a multiple of `every` environment steps was passed since."""
        return every > 0 and local.passed(last, every, self.env_steps)

    def _evaluate(self, writer: MetricsWriter, live: LiveView) -> None:
        """Takes an evaluation that has ended; asks for one that is due. Training goes on meanwhile."""
        if self._evaluation is not None and is_ready(self._evaluation[0]):
            (ref, asked), self._evaluation = self._evaluation, None
            try:
                found = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                raise PartFailed(f"evaluator: {error.cause}") from error.cause
            except ray.exceptions.RayError as error:  # its death is heard of by its status; it is asked again
                LOG.info("event=evaluation_lost reason=%r", one_line(error))
                return
            if found is not None:  # it has no snapshot yet: it is asked again
                self.memory.evaluated = asked
                LOG.info("event=evaluation env_steps=%d return=%g seconds=%.1f", asked, found.returns.mean(),
                         found.seconds)  # fmt: skip
                self.write(writer, live, {
                    **local.evaluated(found.returns, found.lengths), "eval/asked_at_step": asked,
                    "eval/snapshot_version": found.version, "time/evaluation_seconds": found.seconds,
                })  # fmt: skip
                if found.film is not None:
                    video.keep_film(found.film, self.run_dir, asked, self.config.eval.videos)
        ready = self.evaluator.status is not None and self._evaluation is None and self.memory.version > 0
        if ready and self._due(self.memory.evaluated, self.config.eval.every):
            self._evaluation = self.evaluator.handle.evaluate.remote(self.env_steps % 2**32), self.env_steps

    def _report(self, writer: MetricsWriter) -> None:
        """Likewise a look at the world model."""
        if self._reporting is not None and is_ready(self._reporting):
            ref, self._reporting = self._reporting, None
            try:
                found = ray.get(ref)
            except ray.exceptions.RayError as error:  # the learner has died or ended; the next one is asked again
                LOG.info("event=report_lost reason=%r", one_line(error))
                return
            self.memory.reported = step = self.env_steps
            missing = openloop.show(found, step, self.run_dir / local.REPORTS, writer, self.config.report.keep)
            for sentence in missing - self._unable:
                LOG.warning("event=report_incomplete reason=%r", sentence)
            self._unable |= missing
            writer.write(step, {f"report/{k}": float(v) for k, v in found.losses.items()})
        learned = self.learner.status is not None and self.learner.status.loop.counters.updates > 0
        if self._reporting is None and learned and self._due(self.memory.reported, self.config.report.every):
            self._reporting = self.learner.handle.report.remote(self.env_steps % 2**32)

    def _log(self, writer: MetricsWriter, live: LiveView) -> None:
        """A line of losses and of how the parts keep up."""
        status = self.learner.status
        if status is None or not status.loop.metrics or not self._due(self.memory.logged, self.config.log_every):
            return
        self.memory.logged = self.env_steps
        loop, counters = status.loop, status.loop.counters
        line = {
            **local.named(loop.metrics),
            "counters/rows": counters.rows,
            "counters/transitions": self.transitions,
            "counters/updates": counters.updates,
            "counters/skipped_updates": counters.skipped,
            "cluster/actors": self.pool.running,
            "cluster/snapshot_version": loop.version,
            "cluster/snapshot_lag_versions": self._lag,
            "time/batch_wait_ratio": loop.batch_wait_ratio,
        }
        if loop.limiter is not None:
            line["cluster/train_ratio"] = loop.limiter.run_ratio
            line["cluster/train_ratio_minute"] = loop.limiter.recent_ratio
        self._lag = 0
        self.write(writer, live, line | self._times(status))

    def _times(self, learner: LearnerStatus) -> dict[str, float]:
        """Speed, and what workers and learner spent their time on, since the last line."""
        (then, steps, updates), now = self._counted, time.monotonic()
        self._counted = now, self.env_steps, learner.loop.counters.updates
        found = {}
        if updates and now > then:  # in the first line a learner may have made many updates in its life before
            found["time/env_steps_per_s"] = (self.env_steps - steps) / (now - then)
            found["time/updates_per_s"] = (learner.loop.counters.updates - updates) / (now - then)
        spent = {n: s.figures.seconds for n, s in self.pool.statuses().items() if s is not None and s.figures.seconds}
        actors, alone = self._actors_spent.since(spent), self._learner_spent.since({"learner": learner.loop.seconds})
        found |= {f"time/actors_{thing}_ratio": share for thing, share in actors.items()}
        return found | {f"time/learner_{thing}_ratio": share for thing, share in alone.items()}

    def _obey(self) -> None:
        """Takes a new number of workers from whoever has written one into the run directory."""
        try:
            request = running.requested(self.run_dir)
        except ValueError as error:
            LOG.warning("event=request_damaged error=%r", str(error))
            return
        if request is None or request == self._request:
            return
        least, most = len(self.shards), self.cluster.most_actors
        self._request, self._refusal = request, None
        if self.state == "stopping":
            self._refusal = f"the run is ending; actors={request.actors} comes too late"
            return
        if not least <= request.actors <= most:
            self._refusal = (
                f"actors={request.actors} must be {least} (one for each replay shard) to {most} (max_actors, which the "
                "replay was made for)"
            )
            return
        LOG.info("event=scale actors=%d", request.actors)
        self.pool.resize(request.actors)

    def write_targets(self) -> None:
        """Who has a page for Prometheus, and where."""
        statuses = {("replay", shard.name): shard.status for shard in self.shards}
        statuses |= {("actor", name): status for name, status in self.pool.statuses().items()}
        statuses |= {("learner", "learner"): self.learner.status, ("evaluator", "evaluator"): self.evaluator.status}
        statuses |= {("learner", follower.name): follower.status for follower in self._followers.values()}
        urls = {key: status.metrics for key, status in statuses.items() if status is not None}
        urls["driver", "driver"] = self.page
        self.targets.update(Target(role, part, url) for (role, part), url in urls.items() if url is not None)

    def restarts(self) -> dict[str, int]:
        """Role -> deaths of parts in this run."""
        found = self._deaths.copy()
        found["learner"] += self.learner.deaths
        found["evaluator"] += self.evaluator.deaths
        found["replay"] += sum(shard.deaths for shard in self.shards)
        found["replay"] += sum(starts - 1 for starts in self._served.values() if starts)
        return dict(found)

    def figures_now(self) -> metrics.RunFigures:
        """How the run stood when the driver last looked, and how long ago that was. From any thread."""
        return replace(self.figures, turn_age=time.monotonic() - self._turned)

    def _look_at_itself(self) -> None:
        """What the page of metrics says from now on, and what the next driver must know."""
        learners, evaluates = self.cluster.learners, int(self.config.eval.every > 0)
        wanted = {"actor": self.pool.size, "learner": learners, "replay": len(self.shards), "evaluator": evaluates}
        serving = [shard for shard in self.shards if shard.status is not None and shard.status.pid is not None]
        learning = 0 if self.learner.status is None else 1 + len(self._followers)
        self.memory.restarts = self.restarts()
        self._turned = time.monotonic()
        self.figures = replace(
            self.figures, state=self.state, env_steps=self.env_steps, rows=self.rows, episodes=self.memory.episodes,
            returns=dict(self._returns), evaluated=self.memory.evaluated, wanted=wanted,
            running={"actor": self.pool.running, "learner": learning, "replay": len(serving),
                     "evaluator": int(self.evaluator.status is not None)},
            restarts=self.memory.restarts, log_lines=dict(self._said),
        )  # fmt: skip

    # what somebody sees

    def show(self, live: LiveView) -> None:
        """The screen and the status file."""
        now = time.monotonic()
        parts, notes = self._rates.of_parts(self.parts(), now), self.notes()
        waiting = screen.waiting(self.learner.status, self.pool.statuses().values())
        waits = screen.waits(self.learner.status, self._rates.add(waiting, now, "waits"))
        numbers = self.numbers()
        rates = self._rates.add({k: v for k, v in numbers.items() if k in RATED}, now, "run")
        updates = 0 if self.learner.status is None else self.learner.status.loop.counters.updates
        live.update(env_steps=self.env_steps, updates=updates, status=self.state, parts=parts,
                    notes=[waits, *notes] if waits else notes)  # fmt: skip
        status = running.RunStatus(
            seconds=time.time(),
            state=self.state,
            summary=f"{self.env_steps:,} of {self.config.steps:,} env steps, {updates:,} updates",
            actors=self.pool.size,
            parts=parts,
            notes=notes,
            control=None if self._request is None else self._request.id,
            refusal=self._refusal,
            numbers=numbers,
            rates=rates,
            waits=waits,
        )
        running.write(status, self.run_dir)

    def numbers(self) -> dict[str, float]:
        """What a script may want to know."""
        found: dict[str, float] = {
            "env_steps": self.env_steps, "asked_env_steps": self.config.steps, "rows": self.rows,
            "resets": self.memory.resets, **{f"{of}/return": value for of, value in self._returns.items()},
            "version": self.memory.version, "actors_running": self.pool.running,
        }  # fmt: skip
        counters = None
        if self.learner.status is not None:
            loop = self.learner.status.loop
            counters = loop.counters
            found |= {"batch_wait_ratio": loop.batch_wait_ratio, "version": loop.version}
            if loop.limiter is not None:
                found |= {"train_ratio_minute": loop.limiter.recent_ratio, "lead_rows": loop.limiter.lead}
        if self.learner.result is not None:
            counters = self.learner.result.counters
        if counters is not None:
            found |= {
                "updates": counters.updates,
                "train_ratio": limiter.ratio(self.plan.limiter, counters.rows, counters.updates),
            }
        found["asked_ratio"] = self.plan.limiter.ratio
        return {name: value for name, value in found.items() if math.isfinite(value)}  # JSON has no others

    def parts(self) -> list[Part]:
        """Who runs where, and what each does or waits for."""
        evaluated, busy = self.memory.evaluated, self._evaluation is not None
        return [
            screen.learner(self.learner.status, self.learner.starts, self.plan.limiter.ratio),
            *(screen.follower(follower.name, follower.status) for follower in self._followers.values()),
            *(screen.actor(name, status) for name, status in self.pool.statuses().items()),
            *(screen.shard(shard.name, shard.status, shard.starts) for shard in self.shards),
            *([screen.evaluator(self.evaluator.status, evaluated, busy)] if self.config.eval.every else []),
        ]

    def notes(self) -> list[str]:
        """Where everything is."""
        found = [f"logs {self.run_dir / 'logs'}; scale with: telamon scale {self.run_dir} --actors N"]
        if self.page is not None:
            targets = self.page.removesuffix("/metrics") + discovery.PATH
            found.append(f"metrics {self.page}; all pages: {targets}, {self.run_dir / discovery.TARGETS_FILE}")
        return found

    # to the end

    def run(self, writer: MetricsWriter, live: LiveView, stopped: Callable[[], bool]) -> bool:
        """Until the steps are done (True) or `stopped()` (False); the learner has written its last checkpoint then."""
        self.show(live)
        self.start(live, stopped)
        while not (done := self.env_steps >= self.config.steps) and not stopped():
            self._once(writer, live)
        self.close(writer, live, done)
        return done

    def _once(self, writer: MetricsWriter, live: LiveView) -> None:
        self._write_episodes(self.turn(), writer, live)
        self.look(writer, live)
        time.sleep(TURN_SECONDS)

    def _write_episodes(self, episodes: Sequence[Episode], writer: MetricsWriter, live: LiveView) -> None:
        for episode in episodes:
            LOG.debug("event=episode return=%g length=%d", episode.total_reward, episode.length)
            self.write(writer, live, {"train/return": episode.total_reward, "train/length": episode.length})

    def close(self, writer: MetricsWriter, live: LiveView, done: bool) -> None:
        """Lets the workers send their last rows, the learner make the updates due (if `done`) and its checkpoint."""
        self.state = "stopping"
        self.show(live)
        if self.learner.handle is not None:  # no snapshot for those who leave
            self.learner.handle.set_workers.remote({})
        self._write_episodes(self._take(self.pool.stop(STOP_SECONDS)), writer, live)
        deadline = time.monotonic() + (FINISH_SECONDS if done else STOP_SECONDS)
        starts = 0
        while self.learner.result is None:
            if self.learner.starts > starts and self.learner.handle is not None:  # each life is to be told
                starts = self.learner.starts
                self._count()
                end = self.learner.handle.finish if done else self.learner.handle.stop
                end.remote()
            if time.monotonic() > deadline:
                raise PartFailed("the learner has not written its last checkpoint in time; the one before is whole")
            self._once(writer, live)
        while done and self._evaluation is not None and time.monotonic() < deadline:
            self._once(writer, live)
        self.state = "finished" if done else "stopped"
        self._look_at_itself()
        self.show(live)
        self.targets.update(())  # of a run that dies before, they stay: whoever watches is to see that it is gone
        self.memory.save(self.run_dir)
        closing = [shard.handle.close.remote() for shard in self.shards if shard.handle is not None]
        ray.wait(closing, num_returns=len(closing), timeout=STOP_SECONDS)

    def fail(self, live: LiveView, save: bool) -> None:
        """Says that the run has ended early, and lets the learner write a last checkpoint, if `save` and if it can."""
        self.state = "failed" if save else "stopped"
        self._look_at_itself()
        self.show(live)
        if not save:
            self.targets.update(())
        if self.learner.handle is not None and save:
            self.learner.handle.stop.remote()
            deadline = time.monotonic() + STOP_SECONDS
            with suppress(PartFailed):  # it may be what failed
                while self.learner.handle is not None and self.learner.result is None and time.monotonic() < deadline:
                    self._write_log("learner", self.learner.poll())
                    time.sleep(TURN_SECONDS)
        self.memory.save(self.run_dir)

    def kill(self) -> None:
        """Ends every process that is left; shards go by themselves, with their keepers."""
        self.pool.kill()
        for kept in (self.learner, self.evaluator, *self.shards):
            kept.kill()
        for handle in (*self._following(), *self._ended):
            ray.kill(handle)
        self.logs.close()


# from the command line


def launch(
    config: RunConfig,
    cluster: ClusterConfig,
    run_dir: Path,
    resume: bool,
    console: Console,
    profile: int = 0,
    level: int = logging.INFO,
) -> int:
    """Trains on a cluster to the end or to a clean stop; returns the exit code (130 after Ctrl-C).

    profile: updates that the first learner traces. level: of the events in its logs.
    Raises ValueError, EnvError, OSError, PartFailed or NonFiniteUpdate with one sentence; nothing is left running.
    """
    jax.config.update("jax_platforms", "cpu")  # of this process: the accelerators are the learner's
    run_dir = run_dir.resolve()
    cluster = check(config, cluster, run_dir, resume, profile)
    parts = cluster.most_actors * cluster.actor_cpus + cluster.learners * cluster.learner_cpus + cluster.replay_shards
    with ExitStack() as stack:
        if resume:
            stack.enter_context(alone_in(run_dir))
        console.print(f"{config.algorithm} on {config.task}: starting Ray", highlight=False)
        session = stack.enter_context(connect(cluster, math.ceil(parts + cluster.actor_cpus), run_dir / "logs" / "ray"))
        stopped = stack.enter_context(local.stop_on_signal())
        if not (session.own or cluster.insecure or cluster.tls_certificate):
            raise ValueError(
                "replay servers without TLS show token and rows to the network of a cluster; give tls_certificate, "
                "tls_key and root_certificate, or say --insecure"
            )
        token = secrets.token_urlsafe(32)
        run = Launch(config, cluster, run_dir, session, find_spec(config, cluster, stopped), token, profile, level)
        stack.callback(run.kill)
        if not any(REPLAY_RESOURCE in node["Resources"] for node in alive().values()):
            # shards are on this machine, which refuses what does not fit
            local.memory(config, run.agent, cluster.actors * config.env.num)
        if not resume:
            stack.enter_context(alone_in(run_dir))
        host = LOOPBACK if session.own else session.address
        run.page = stack.enter_context(metrics.serving(run.figures_now, run.targets, host, cluster.metrics_port))
        prepare(run, token)
        console.print(
            f"{cluster.actors} workers of {config.env.num} environments, {cluster.replay_shards} replay shards; each "
            f"shard {run.plan.shard_bytes / local.GIB:.2f} GiB when full; run directory {run_dir}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        writer = stack.enter_context(MetricsWriter(run_dir, whole_lines(run_dir) if resume else None))
        live = stack.enter_context(LiveView(f"{config.algorithm} on {config.task}", config.steps, console))
        try:
            finished = run.run(writer, live, stopped)
        except BaseException as error:
            with suppress(OSError, ray.exceptions.RayError):  # the disk or Ray itself may be why
                run.fail(live, isinstance(error, Exception))
            if isinstance(error, ray.exceptions.RayError):
                raise PartFailed(f"Ray itself has failed: {one_line(error)}") from error
            raise
    if finished:
        return 0
    text = f"stopped at {run.env_steps:,} env steps; repeat the command with --resume to continue"
    console.print(text, highlight=False, soft_wrap=True)
    return 130


def check(config: RunConfig, cluster: ClusterConfig, run_dir: Path, resume: bool, profile: int = 0) -> ClusterConfig:
    """Refuses what could not work, before anything is started; the cluster with what must stay as it was.

    Raises ValueError or FileNotFoundError.
    """
    local.check_run_dir(config, run_dir, resume)
    if profile < 0:
        raise ValueError(f"profile={profile} must be at least 0")
    if config.eval.videos:
        video.check_writable()
    if config.replay.address is not None:
        raise ValueError(f"replay.address={config.replay.address} is of `telamon train`; a launch has its own shards")
    if resume:
        before = configs.load_cluster(run_dir)
        cluster = replace(cluster, max_actors=cluster.max_actors or before.max_actors)
        found = [(key, getattr(before, key), getattr(cluster, key)) for key in FIXED]
        if differing := [f"{key} ({old} -> {new})" for key, old, new in found if old != new]:
            raise ValueError(f"{run_dir} was started with another cluster; differing keys: {', '.join(differing)}")
    cluster = replace(cluster, max_actors=cluster.most_actors)  # written down: what the shards' files have room for
    for name in ("tls_certificate", "tls_key", "root_certificate"):
        file = getattr(cluster, name)
        if file is not None and not Path(file).is_file():
            raise FileNotFoundError(f"{name}={file} is no file")
    return cluster


def find_spec(config: RunConfig, cluster: ClusterConfig, stopped: Callable[[], bool]) -> EnvSpec:
    """What a worker's environments are like; this node needs no library for them.

    Raises as `try_env`, PartFailed where the cluster has no room for a worker, KeyboardInterrupt once `stopped()`.
    """
    task = remote(num_cpus=cluster.actor_cpus, runtime_env={"env_vars": acts_on(cluster)}, max_retries=0)(try_env)
    asked, deadline = task.remote(config, Path.cwd()), time.monotonic() + PLACEMENT_SECONDS
    while not ray.wait([asked], timeout=0.1)[0]:
        if stopped():
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise PartFailed(
                f"the cluster has had no room for a worker of {cluster.actor_cpus:g} CPUs for {PLACEMENT_SECONDS:g} s"
            )
    try:
        spec: EnvSpec = ray.get(asked)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    return spec


def prepare(run: Launch, token: str) -> None:
    """Fills the run directory with all that the parts read there."""
    run_dir = run.run_dir
    configs.save(run.config, run_dir)
    configs.save_cluster(run.cluster, run_dir)
    loading.save_spec(run.agent.env, run_dir)
    handle = os.open(run_dir / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    run.write_targets()
    setup_logging(run_dir, run.log_level)
    LOG.info("event=start config=%s cluster=%s versions=%s", json.dumps(asdict(run.config)),
             json.dumps(asdict(run.cluster)), json.dumps(local.versions()))  # fmt: skip
    if (run_dir / METRICS_FILE).exists():
        lines = read_metrics(run_dir)
        run.memory.env_steps = max([run.memory.env_steps, *(int(line["step"]) for line in lines[-1:])])


def whole_lines(run_dir: Path) -> int:
    """Bytes of the metrics that a driver wrote before it ended, without a line that it did not finish."""
    path = run_dir / METRICS_FILE
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
