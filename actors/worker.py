"""The Ray classes of the actors: rollout workers and the evaluator. The driver applies `ray.remote` with its options.

Calls are in two concurrency groups of one thread each (GROUPS): what takes long, and what must be answered meanwhile.
Nothing is built before `open`, so that an error there arrives as itself and `status` tells how far it is.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

from actors import metrics
from actors.collector import jit_act
from actors.evaluate import Film, Stopped, evaluate
from actors.metrics import ActorMetrics, EvalFigures, EvaluatorMetrics, Figures, figures_of
from actors.rollout import Piece, Rollout, Snapshot, Snapshots
from actors.watchdog import watch
from telamon.agents.base import Agent
from telamon.allocator import keep_freed_memory
from telamon.data import EnvSpec
from telamon.envs.base import BatchedEnv
from telamon.keys import Stream, generator, stream
from telamon.replay import TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from telamon.telemetry.logs import setup_buffer
from telamon.telemetry.process import resident_bytes

log = logging.getLogger(__name__)

GROUPS = {"rollout": 1, "control": 2}
"""Threads of each concurrency group: the option `concurrency_groups` of `ray.remote`."""
PATIENCE = 2.0
"""Seconds that a call in the group `rollout` waits for a snapshot or the replay before it returns."""


def describe(make_env: Callable[[int], BatchedEnv]) -> EnvSpec:
    """What the environments are like, for a driver that has no environment library. Raises EnvError."""
    env = make_env(0)
    try:
        return env.spec
    finally:
        env.close()


@dataclass(frozen=True)
class WorkerSetup:
    """What a rollout worker is made of; travels to it."""

    name: str
    """Its stream in the replay, which its replacement goes on with."""
    index: tuple[int, ...]
    """Of its own streams of randomness; another one for every life of every worker of the run."""
    seed: int
    """The run's."""
    make_agent: Callable[[], Agent]
    make_env: Callable[[int], BatchedEnv]
    """From a seed."""
    endpoint: Endpoint
    """Of the shard that its rows go to."""
    table: str
    spec: TableSpec
    """Of one shard."""
    buffer_ticks: int
    """Ticks that may be unacknowledged before it waits."""
    unroll_ticks: int
    """Ticks that JAX environments may be acted ahead of what the replay has taken: what waits there grows old."""
    acts_at_random: bool
    """Whether it may act uniformly at random until its first snapshot arrives."""
    env_timeout: float
    """Seconds after which one environment that does not return hangs."""
    timeout: float = 60.0
    """Seconds that it waits for the replay while it is being opened."""
    metrics_host: str | None = "127.0.0.1"
    """Where its metrics page listens, on a free port; None: at this node's address in the cluster."""
    log_level: int = logging.INFO
    """Events of this level and above travel with the statuses."""


@dataclass(frozen=True)
class WorkerStatus:
    """How a worker or evaluator stands."""

    name: str
    pid: int
    host: str
    open: bool
    """Whether `open` is done."""
    figures: Figures
    hung: str | None
    """The sentence about the environment that does not return; the process is then of no more use."""
    metrics: str | None
    """URL of its page; None for none."""
    delays: tuple[float, float]
    """Median and 99th percentile of the seconds from the offer of a snapshot to its use, of the last ones."""
    log: tuple[str, ...]
    """Lines since the last status."""
    memory: int = 0
    """Bytes that its process has in use; 0 where nobody has looked."""


@dataclass(frozen=True)
class Closed:
    """What a worker leaves behind."""

    figures: Figures
    unsent: bool
    """Whether rows were left that the replay had not acknowledged in time."""


class _Part:
    """What both kinds of worker have in common."""

    def __init__(self, name: str, log_level: int) -> None:
        keep_freed_memory()
        self._name = name
        self._log = setup_buffer(level=log_level)
        self._snapshots = Snapshots()
        self._stopped = threading.Event()
        self._hung: str | None = None
        self._metrics: str | None = None
        self._open = False
        self._stack = ExitStack()

    def _agent(self, make: Callable[[], Agent], env: BatchedEnv) -> Agent:
        agent = make()
        if agent.env != env.spec:
            raise ValueError(
                f"{self._name} has environments {env.spec}, but the run was started with {agent.env}; "
                "give every node the same environment"
            )
        return agent

    def _show(self, register: Callable[[Any], object], host: str | None) -> None:
        """Opens the page. host: None for this node's address in the cluster."""
        address = ray.util.get_node_ip_address() if host is None else host
        self._metrics = self._stack.enter_context(metrics.serving(register, address))

    def _watch(self, env: BatchedEnv, timeout: float) -> Any:
        """Notes an environment that hangs: whoever looks at the status ends this process."""

        def hangs(code: int) -> None:
            self._hung = (
                f"environment {env.active} ({env.spec.id}) has not returned for {timeout:g} s; the bound is env.timeout"
            )

        return watch(env, timeout, stop=hangs)

    def _offer(self, version: int, refs: Sequence[Any]) -> int:
        """Copies parameters out of the object store, which aliasing would keep pinned, and offers them."""
        if self._snapshots.newest is None or version > self._snapshots.newest:
            shared = ray.get(refs[0])
            self._snapshots.offer(Snapshot(version, jax.tree.map(jnp.array, shared)))
        return version

    def _status(self, figures: Figures) -> WorkerStatus:
        delays = list(self._snapshots.delays) or [0.0]
        p50, p99 = np.percentile(delays, [50, 99])
        return WorkerStatus(
            self._name, os.getpid(), socket.gethostname(), self._open, figures, self._hung, self._metrics,
            (float(p50), float(p99)), tuple(self._log.drain()), resident_bytes(),
        )  # fmt: skip


class RolloutWorker(_Part):
    """Owns a batch of environments; acts in them piece by piece and appends the rows to its shard."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup.name, setup.log_level)
        self._setup = setup
        self._rollout: Rollout | None = None
        self._client: Client | None = None

    @ray.method(concurrency_group="rollout")
    def open(self) -> int:
        """Builds everything; the number of environments.

        Raises EnvError, ValueError for an environment that is not the run's, and what Client raises.
        """
        s, stack = self._setup, self._stack
        self._show(lambda registry: ActorMetrics(self._figures, registry), s.metrics_host)
        env = s.make_env(int(generator(s.seed, Stream.ENV, *s.index).integers(2**31)))
        stack.callback(env.close)
        agent = self._agent(s.make_agent, env)
        stack.enter_context(self._watch(env, s.env_timeout))
        self._client = Client(
            s.endpoint, s.table, s.spec, stream=s.name, num_envs=env.num_envs,
            timeout=s.timeout, buffer_ticks=s.buffer_ticks,
        )  # fmt: skip
        self._rollout = Rollout(
            agent, env, self._client, s.seed, s.index, self._snapshots,
            acts_at_random=s.acts_at_random, patience=PATIENCE, stopped=self._stopped.is_set,
            unroll_ticks=s.unroll_ticks,
        )  # fmt: skip
        self._open = True
        log.info("event=start name=%s env=%s num_envs=%d address=%s", s.name, env.spec.id, env.num_envs,
                 s.endpoint.address)  # fmt: skip
        return env.num_envs

    @ray.method(concurrency_group="rollout")
    def rollout(self, ticks: int) -> Piece:
        """As `Rollout.run`."""
        assert self._rollout is not None  # the pool opens it first
        return self._rollout.run(ticks)

    @ray.method(concurrency_group="rollout")
    def close(self, timeout: float) -> Closed:
        """Sends what was appended, as far as `timeout` seconds allow, and releases everything."""
        sent = True
        if self._rollout is not None and self._client is not None:
            deadline = time.monotonic() + timeout
            while not (sent := self._rollout.flush()) and time.monotonic() < deadline:
                pass
            if sent:
                self._client.close()
        self._stack.close()
        return Closed(self._figures(), not sent)

    @ray.method(concurrency_group="control")
    def set_params(self, version: int, refs: Sequence[Any]) -> int:
        """Offers a snapshot, to be used from the next tick on. refs: one reference to the parameters, numpy leaves."""
        return self._offer(version, refs)

    @ray.method(concurrency_group="control")
    def status(self) -> WorkerStatus:
        return self._status(self._figures())

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Lets every call in the group `rollout` return soon, and do nothing from now on but `close`."""
        self._stopped.set()

    def _figures(self) -> Figures:
        rollout, client, snapshots = self._rollout, self._client, self._snapshots
        if rollout is None or client is None:
            return Figures(newest=snapshots.newest)
        # looked at in this order, so that no snapshot is used before it was offered
        version = None if rollout.snapshot is None else rollout.snapshot.version
        return replace(
            figures_of(rollout.source),
            resets=rollout.resets,
            lost_rows=client.lost_rows,
            version=version,
            newest=snapshots.newest,
            delays=snapshots.waited.counted,
        )


@dataclass(frozen=True)
class EvalSetup:
    """What an evaluator is made of; travels to it."""

    name: str
    seed: int
    """The run's."""
    make_agent: Callable[[], Agent]
    make_env: Callable[[int], BatchedEnv]
    """From a seed; one environment for each episode of an evaluation."""
    env_timeout: float
    """Seconds after which one environment that does not return hangs."""
    encode: Callable[[Sequence[np.ndarray]], bytes | None] | None = None
    """Makes a film of pictures, uint8 [height, width, 3]; None: no film is wanted."""
    metrics_host: str | None = "127.0.0.1"
    """As `WorkerSetup` has it."""
    log_level: int = logging.INFO
    """As `WorkerSetup` has it."""


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found."""

    index: int
    version: int
    """Of the snapshot that acted."""
    returns: np.ndarray
    """float64 [n]."""
    lengths: np.ndarray
    """int64 [n] agent steps."""
    seconds: float
    film: bytes | None = field(default=None, repr=False)
    """Of the first environment's episode, as EvalSetup.encode made it; None without it."""


class EvalWorker(_Part):
    """Evaluates the newest snapshot in fresh environments, with keys of its own."""

    def __init__(self, setup: EvalSetup) -> None:
        super().__init__(setup.name, setup.log_level)
        self._setup = setup
        self._snapshot: Snapshot | None = None
        self._made: tuple[Agent, Any] | None = None
        """The agent and its jitted `act`, once there was an environment to compare it with."""
        self._figures = EvalFigures()
        self._show(lambda registry: EvaluatorMetrics(lambda: self._figures, registry), setup.metrics_host)

    @ray.method(concurrency_group="rollout")
    def evaluate(self, index: int) -> Evaluated | None:
        """Evaluation number `index`; None where no snapshot has arrived, or it was stopped.

        Raises EnvError, NotImplementedError where a film is wanted and the environment has no picture.
        """
        if self._snapshots.wait(PATIENCE if self._snapshot is None else 0):
            self._snapshot = self._snapshots.take()
        if self._snapshot is None:
            return None
        self._figures = replace(self._figures, version=self._snapshot.version)
        began = time.monotonic()
        s, (version, params) = self._setup, self._snapshot
        film = None if s.encode is None else Film()
        with ExitStack() as stack:
            env = s.make_env(int(generator(s.seed, Stream.EVAL, index).integers(2**31)))
            stack.callback(env.close)
            stack.enter_context(self._watch(env, s.env_timeout))
            if self._made is None:
                agent = self._agent(s.make_agent, env)
                self._made = agent, jit_act(agent, env.num_envs, "eval")
                self._open = True
            agent, act = self._made
            key = stream(s.seed, Stream.EVAL, index)
            try:
                found = evaluate(agent, act, params, env, key, film, self._stopped.is_set)
            except Stopped:
                return None
        seconds = time.monotonic() - began
        self._figures = EvalFigures(
            self._figures.evaluations + 1, self._figures.seconds + seconds, version, float(found.total_reward.mean())
        )
        encoded = None if film is None or s.encode is None else s.encode(film.frames)
        return Evaluated(index, version, found.total_reward, found.length, seconds, encoded)

    @ray.method(concurrency_group="control")
    def set_params(self, version: int, refs: Sequence[Any]) -> int:
        """Offers a snapshot, to be used from the next evaluation on."""
        return self._offer(version, refs)

    @ray.method(concurrency_group="control")
    def status(self) -> WorkerStatus:
        version = None if self._snapshot is None else self._snapshot.version
        return self._status(Figures(version=version, newest=self._snapshots.newest))

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Ends a running evaluation at its next tick, and every later one at its first."""
        self._stopped.set()
