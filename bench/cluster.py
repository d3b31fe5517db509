"""What a run on a cluster costs, and how it grows with its workers, measured on launches of this machine. JSON lines.

    python bench/cluster.py [CASE ...] [--seconds 6] [--workers 1 2 4]     all: eight minutes

`jax`, `host`, `slow`: environment steps against rollout workers: gymnax's CartPole, 256 in one jitted unroll;
Gymnasium's, 16 in turn; one that sleeps for 5 ms a step. The agent is a tiny DreamerV3 that hardly trains, so that
neither it nor the rate limiter is what is measured. The workers are added to one launch. `share` is the rate over
that of the same pieces in one process without a replay, measured before and after in a process of its own, times the
workers; `copy_share` the bytes of the rows over what one thread copies there.

`tdmpc2`, `dreamerv3`, `pixels`, `tiny`: launches in which the learner is what is waited for: the share of its time
without a batch although there were rows (`batch_wait_ratio`), how long a snapshot takes to every worker that acts
(`ack`) and from a worker's control thread to its first tick (`use`), bytes on each hop, and when what was there after
the start. `tiny` has the smallest updates: it says how fast batches can come.

`start`: from the command to the first update, with nothing compiled and after a resume.
`calls`: what a thousand workers would cost: the caller's part of a call of Ray, and a second of the driver's pool.
`writers`: what a shard holds for each writer that is connected, and at how many it refuses the next.
`sizes`: bytes of agents of published sizes, from their specs: docs/scaling.md goes on from there.

CPU seconds are of processes by role (`ray` are the raylet and the control store), which other work on the machine
disturbs less than rates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import gymnasium
import jax
import numpy as np
import psutil
import ray
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent))

from actors.metrics import Figures
from actors.pool import Pool
from actors.rollout import Piece, Rollout, Snapshot, Snapshots
from actors.worker import WorkerStatus
from bench.chaos_launch import Run, tiny, works
from bench.replay_limits import Memcpy
from bench.timing import commit
from deploy import local, presets
from deploy.cluster import ONE_THREAD, TURN_SECONDS, Launch, find_spec, prepare
from deploy.config import CheckpointConfig, ClusterConfig, EnvConfig, EvalConfig, ReportConfig, RunConfig, make_agent
from deploy.session import connect
from deploy.shards import Keeper, ShardSetup
from learner.loop import blank
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.data import ActionSpec, ArraySpec, EnvSpec, Rows, RowSpec, WindowSpec
from telamon.keys import Stream, stream
from telamon.replay import TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from telamon.telemetry.live import LiveView
from telamon.telemetry.logs import setup_buffer
from telamon.telemetry.writer import MetricsWriter

PATIENCE = 900.0
SETTLE = 2.0
"""Seconds between the first rows of a worker, and the first update, and a measurement."""
SLEEP = 0.005
ENDLESS = 10**9
CREDIT = 10**6
"""A band that no case comes to the edge of."""


class Slow(gymnasium.Env):
    """Sleeps, and knows nothing."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(SLEEP)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def slow() -> gymnasium.Env:
    """The slow environment, for `make_env`."""
    return gymnasium.wrappers.TimeLimit(Slow(), 200)


SMALLEST = DreamerV3Config(
    units=16, hidden=16, deter=32, stoch=4, classes=4, layers=1, num_bins=21, batch_size=4, batch_length=8,
    train_ratio=1e-3, buffer_size=100_000,
)  # fmt: skip
ENVS = {
    "jax": EnvConfig(num=256),
    "host": EnvConfig(num=16),
    "slow": EnvConfig(num=1),
}
TASKS = {"jax": "gymnax:CartPole-v1", "host": "gym:CartPole-v1", "slow": f"{Path(__file__).resolve()}:slow"}


def config(algorithm: str, task: str, env: EnvConfig, agent: Any, *names: str) -> RunConfig:
    """A run without evaluations, reports and checkpoints, after the presets `names`."""
    made = RunConfig(
        algorithm,
        task,
        steps=ENDLESS,
        env=env,
        eval=EvalConfig(every=0),
        report=ReportConfig(every=0),
        checkpoint=CheckpointConfig(every=ENDLESS),
        agent=agent,
    )  # type: ignore[arg-type]  # a name from a table
    return replace(presets.apply(made, names), steps=ENDLESS, env=env)


# a launch that is looked into


class Session:
    """A launch in this process, which goes on while somebody waits for something."""

    def __init__(self, run: Launch, writer: MetricsWriter, live: LiveView, began: float) -> None:
        self.run, self._writer, self._live = run, writer, live
        self._began = began
        self.marks: dict[str, float] = {}
        """What was there for the first time after how many seconds."""
        self._parent = psutil.Process()

    def until(self, reached: Callable[[], bool]) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not reached within {PATIENCE:g} s: {self.run.parts()}")
            self.run.turn()
            self.run.look(self._writer, self._live)
            self._mark()
            time.sleep(TURN_SECONDS)

    def go_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def acting(self, workers: int) -> bool:
        """Whether so many workers have made rows, with a snapshot."""
        figures = [s.figures for s in self.run.pool.statuses().values() if s is not None]
        return len(figures) == workers and all(f.ticks > 0 and f.version is not None for f in figures)

    def look(self) -> Look:
        """Everything that the pages of the parts say, now."""
        run = self.run
        pages = {"learner": run.learner.status.metrics}
        pages |= {shard.name: shard.status.metrics for shard in run.shards}
        pages |= {name: s.metrics for name, s in run.pool.statuses().items() if s is not None}
        values: Counter[tuple[str, str]] = Counter()
        began = time.monotonic()
        for url in pages.values():
            for family in text_string_to_metric_families(urlopen(url).read().decode()):
                for name, labels, value, *_ in family.samples:
                    kind = labels.get("doing") or labels.get("for") or labels.get("side") or labels.get("to") or ""
                    values[name.removeprefix("telamon_"), kind] += value
        return Look((began + time.monotonic()) / 2, values, self._cpu())

    def _mark(self) -> None:
        run, loop = self.run, None if self.run.learner.status is None else self.run.learner.status.loop
        reached = {
            "workers_act": any(s is not None and s.open for s in run.pool.statuses().values()),
            "learner_compiled": loop is not None and loop.stage in ("waiting for rows", "training"),
            "rows": loop is not None and loop.counters.rows > 0,
            "update": loop is not None and loop.counters.updates > 0,
        }
        for name in reached:
            if reached[name] and name not in self.marks:
                self.marks[name] = round(time.monotonic() - self._began, 1)

    def _cpu(self) -> Counter[str]:
        run = self.run
        roles = {"learner": [run.learner.status.pid], "shards": [s.status.pid for s in run.shards]}
        roles["workers"] = [s.pid for s in run.pool.statuses().values() if s is not None]
        roles["driver"] = [os.getpid()]
        roles["ray"] = [p.pid for p in self._parent.children() if p.name() in ("raylet", "gcs_server")]
        seconds: Counter[str] = Counter()
        for role, pids in roles.items():
            for pid in pids:
                spent = psutil.Process(pid).cpu_times()
                seconds[role] += spent.user + spent.system
        return seconds


@dataclass(frozen=True)
class Look:
    """What parts had counted at a moment; the difference of two says what they did."""

    seconds: float
    values: Counter[tuple[str, str]]
    """(metric, its one label that matters or nothing) -> sum over all parts."""
    cpu: Counter[str]
    """Seconds, by role."""

    def since(self, before: Look) -> Look:
        values, cpu = Counter(self.values), Counter(self.cpu)
        values.subtract(before.values)
        cpu.subtract(before.cpu)
        return Look(self.seconds - before.seconds, values, cpu)

    def __getitem__(self, name: str) -> float:
        return self.values[name, ""]


@contextmanager
def launched(run_config: RunConfig, cluster_config: ClusterConfig) -> Iterator[Session]:
    """A launch as `deploy.cluster.launch` makes it, on a cluster of its own, killed in the end."""
    began = time.monotonic()
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))) / "run"
        ray_cpus = cluster_config.most_actors + 4
        session = stack.enter_context(connect(cluster_config, ray_cpus, run_dir / "logs" / "ray"))
        up = round(time.monotonic() - began, 1)
        spec = find_spec(run_config, cluster_config, lambda: False)
        token = "the-token-of-a-benchmark"
        run = Launch(run_config, cluster_config, run_dir, session, spec, token)
        stack.callback(run.kill)
        run_dir.mkdir(exist_ok=True)
        prepare(run, token)
        writer = stack.enter_context(MetricsWriter(run_dir))
        live = stack.enter_context(LiveView("bench", ENDLESS, Console(file=StringIO())))
        run.start(live, lambda: False)
        found = Session(run, writer, live, began)
        found.marks |= {"ray": up, "shards_serve": round(time.monotonic() - began, 1)}
        yield found


# environment steps against workers


class Nowhere:
    """A replay that keeps nothing."""

    def append(self, rows: Rows, timeout: float | None = None) -> None: ...

    def flush(self, timeout: float | None = None) -> None: ...


def floor(name: str, seconds: float) -> dict[str, float]:
    """Rows per second of one worker's pieces without a replay, and bytes that one thread copies."""
    run_config = steps_config(name)
    env = local.build_env(run_config, run_config.env.num, seed=0)
    agent = make_agent(run_config, env.spec)
    snapshots = Snapshots()
    snapshots.offer(Snapshot(1, agent.acting_params(agent.init(stream(0, Stream.INIT)))))
    rollout = Rollout(
        agent, env, Nowhere(), 0, (0,), snapshots, acts_at_random=False, patience=PATIENCE, stopped=lambda: False
    )
    rollout.run(64)
    rows = spent = cpu = 0.0
    while spent < seconds:
        before = time.process_time()
        piece = rollout.run(64)
        rows, spent, cpu = rows + piece.rows, spent + piece.seconds, cpu + time.process_time() - before
    memcpy, rates = Memcpy(), []
    for _ in range(10):
        began = time.perf_counter()
        rates.append(memcpy.call() / (time.perf_counter() - began))
    env.close()
    return {"rows_per_second": rows / spent, "cpu_us_per_row": 1e6 * cpu / rows, "copied": statistics.median(rates)}


def floor_apart(name: str, seconds: float) -> dict[str, float]:
    """`floor` in a process as workers are."""
    command = [sys.executable, __file__, "--floor", name, "--seconds", str(seconds)]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def steps_config(name: str) -> RunConfig:
    """Of a case that measures environment steps."""
    return config("dreamerv3", TASKS[name], ENVS[name], SMALLEST)


def steps(name: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each number of workers."""
    run_config, measured = steps_config(name), []
    floors = [floor_apart(name, given.seconds / 2)]
    with launched(run_config, ClusterConfig(actors=1, max_actors=max(given.workers), band=CREDIT)) as session:
        for workers in given.workers:
            session.run.pool.resize(workers)
            session.until(
                lambda workers=workers: session.acting(workers) and session.run.learner.status.loop.updates > 0
            )
            session.go_on(SETTLE)
            before = session.look()
            session.go_on(given.seconds)
            measured.append((workers, session.look().since(before), os.getloadavg()[0]))
        row = session.run.plan.table.row.nbytes
    floors.append(floor_apart(name, given.seconds / 2))
    alone = statistics.mean(f["rows_per_second"] for f in floors)
    copied = statistics.mean(f["copied"] for f in floors)
    for workers, look, load in measured:
        rows = look["replay_appended_rows_total"]
        rate = rows / look.seconds
        doing = {kind: v for (metric, kind), v in look.values.items() if metric == "actor_seconds_total"}
        yield {
            "case": name, "workers": workers, "envs_per_worker": run_config.env.num,
            "env_steps_per_second": round(look["actor_transitions_total"] / look.seconds),
            "rows_per_second": round(rate),
            "share": round(rate / (workers * alone), 2), "alone": [round(f["rows_per_second"]) for f in floors],
            "bytes_per_row": row, "copy_share": round(rate * row / copied, 4), "doing": shares(doing),
            "cpu_us_per_row": {role: round(1e6 * s / max(1, rows), 2) for role, s in look.cpu.items()},
            "alone_cpu_us_per_row": [round(f["cpu_us_per_row"], 2) for f in floors],
            "cpu_ms_per_second": {role: round(1e3 * s / look.seconds, 1) for role, s in look.cpu.items()},
            "updates": look["learner_updates_total"], "seconds": round(look.seconds, 1), "load": round(load, 1),
        }  # fmt: skip


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of their sum."""
    whole = sum(seconds.values()) or 1.0
    return {name: round(s / whole, 3) for name, s in seconds.items() if s > 0}


# learners


def learners() -> dict[str, tuple[RunConfig, ClusterConfig]]:
    """By case."""
    two = ClusterConfig(actors=2)
    smallest = replace(SMALLEST, train_ratio=1e4)
    dreamer = DreamerV3Config(train_ratio=512.0, buffer_size=50_000)
    planner = TDMPC2Config(seed_steps=200, buffer_size=50_000)
    pixels = replace(dreamer, mults=(2, 4), strided=False, batch_length=16)
    return {
        "tdmpc2": (config("tdmpc2", "gymnax:Pendulum-v1", EnvConfig(num=1), planner, "laptop"), two),
        "dreamerv3": (config("dreamerv3", "gymnax:CartPole-v1", EnvConfig(num=8), dreamer, "size1m"), two),
        "pixels": (
            config("dreamerv3", "gymnax:Catch-bsuite", EnvConfig(num=8, options={"image": True, "size": 20}), pixels,
                   "laptop"),
            two,
        ),
        "tiny": (config("dreamerv3", "gymnax:CartPole-v1", EnvConfig(num=8), smallest), two),
    }  # fmt: skip


def learning(name: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line about a launch whose learner is busy."""
    run_config, cluster_config = learners()[name]
    with launched(run_config, cluster_config) as session:
        run = session.run
        session.until(lambda: session.acting(cluster_config.actors) and run.learner.status.loop.updates > 4)
        session.go_on(2 * SETTLE)
        before = session.look()
        session.go_on(2 * given.seconds)
        look = session.look().since(before)
        session.go_on(2.0)  # for statuses of the time just measured
        published, loop = run.learner.status.published, run.learner.status.loop
        delays = [s.delays for s in run.pool.statuses().values() if s is not None]
        lag = [s.figures.lag for s in run.pool.statuses().values() if s is not None]
        agent, table = run.agent, run.plan.table
        newest = run.memory.version
    updates, rows = look["learner_updates_total"], look["replay_appended_rows_total"]
    waited = {doing: look.values["learner_seconds_total", doing] for doing in ("rows", "batch", "write_back")}
    snapshots = look["learner_snapshot_version"]
    windows, context = updates * agent.batch_size, agent.window_spec.context
    latents = sum(array.nbytes for _, array in table.row.latents)
    trained = agent.batch_size * (agent.window_spec.length - context)
    yield {
        "case": name, "workers": cluster_config.actors, "envs_per_worker": run_config.env.num,
        "updates_per_second": round(updates / look.seconds, 2),
        "update_ms": round(1e3 * look["learner_update_seconds_sum"] / max(1, updates), 1),
        "batch_wait_ratio": round(waited["batch"] / (look.seconds - waited["rows"]), 4),
        "rows_wait_share": round(waited["rows"] / look.seconds, 3),
        "rows_per_second": round(rows / look.seconds, 1), "asked_ratio": run.plan.limiter.ratio,
        "ratio_of_the_time": round(updates * trained / max(1, rows), 2),
        "publishes_per_second": round(snapshots / look.seconds, 2),
        "put_ms": round(1e3 * look.values["learner_beside_seconds_total", "publish"] / max(1, snapshots), 2),
        "ack_ms": [round(1e3 * s, 1) for s in published.ack_seconds],
        "use_ms": [[round(1e3 * s, 1) for s in pair] for pair in delays], "lag": lag, "version": newest,
        "skipped_pushes": look["learner_skipped_pushes_total"],
        "row_bytes": round(look["replay_appended_bytes_total"] / max(1, rows), 1),
        "window_bytes": round(look["replay_sampled_bytes_total"] / max(1.0, look["replay_sampled_windows_total"])),
        "sampled_windows_per_window": round(look["replay_sampled_windows_total"] / max(1.0, windows), 2),
        "write_back_bytes": trained * (latents + 12) if latents else 0, "snapshot_bytes": published.snapshot_bytes,
        "written_rows_per_update": round(look.values["learner_write_back_rows_total", "written"] / max(1, updates), 1),
        "write_back_wait_ms_per_update": round(
            1e3 * waited["write_back"] / max(1, updates), 3),
        "cpu_ms_per_update": {role: round(1e3 * s / max(1, updates), 2) for role, s in look.cpu.items()},
        "cpu_ms_per_second": {role: round(1e3 * s / look.seconds, 1) for role, s in look.cpu.items()},
        "limited": loop.limiter.waits.side, "after_seconds": session.marks,
        "seconds": round(look.seconds, 1), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


# the start


def start(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """From the command to the first update, of the smallest TD-MPC2: what is not the agent's."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        args = ["tdmpc2", "counting:continuous", *tiny(), "--actors", "2", "--eval.every", "0", "--steps", "1000000000"]
        run = Run(Path(folder) / "run", [*args, "--agent.buffer-size", "20000"], dict(os.environ))
        for compiled in (False, True):
            began = time.monotonic()
            run.start()
            rows = run.until(lambda s: s.numbers.get("rows", 0) > 0)
            first = run.until(lambda s, rows=rows: works(s) and s.numbers["updates"] > rows.numbers.get("updates", 0))
            yield {
                "case": "start", "compiled": compiled, "seconds_to_update": round(time.monotonic() - began, 1),
                "updates": first.numbers["updates"], "load": round(os.getloadavg()[0], 1),
            }  # fmt: skip
            assert run.process is not None
            began = time.monotonic()
            run.process.send_signal(signal.SIGINT)
            yield {"case": "stop", "exit_code": run.end(), "seconds": round(time.monotonic() - began, 1)}


# a thousand workers


class Echo:
    """An actor that answers, and one that is busy."""

    def say(self, version: int, refs: Any) -> int:
        return version

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def calls(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The caller's CPU time of calls of Ray, and of a second of a pool."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, connect(ClusterConfig(), 4, Path(folder)):
        make: Any = ray.remote(num_cpus=0)(Echo)
        echoes = [make.remote() for _ in range(2)]
        ref = ray.put(np.zeros(1 << 20, np.uint8))
        ray.get([echo.say.remote(0, [ref]) for echo in echoes])
        yield {"case": "calls", "what": "a push, as the publisher makes it", **calling(echoes, ref, 2000)}
        busy = make.remote()
        refs = [busy.wait.remote(60.0) for _ in range(3000)]
        looks = [timed(lambda: ray.wait(refs, num_returns=len(refs), timeout=0)) for _ in range(10)]
        yield {"case": "calls", "what": "a look at 3,000 calls in flight", "cpu_ms": round(statistics.median(looks), 2)}
        ray.kill(busy)
    for workers in (10, 100, 1000):
        yield {"case": "pool", "workers": workers, "cpu_ms_per_second": round(polling(workers), 1)}


def calling(echoes: Sequence[Any], ref: Any, count: int) -> dict[str, float]:
    """Calls with a reference in a list, whose answers come to a callback."""
    answered: list[None] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(count):
        echoes[i % len(echoes)].say.remote(i, [ref]).future().add_done_callback(lambda done: answered.append(None))
    submitted = time.perf_counter() - wall
    while len(answered) < count:
        time.sleep(0.001)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "calls_per_second": round(count / wall), "submitted_per_second": round(count / submitted),
        "cpu_us_per_call": round(1e6 * cpu / count, 1), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def timed(call: Callable[[], Any]) -> float:
    """CPU milliseconds."""
    began = time.process_time()
    call()
    return 1e3 * (time.process_time() - began)


class Clock:
    """A clock that is moved."""

    now = 0.0


@dataclass(frozen=True, eq=False)
class Ref:
    """A call whose result is there at a time."""

    due: float
    result: Any


class Answers:
    """What a pool needs of Ray, without Ray: workers whose rollouts take half a second each, one after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def ready(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        return [ref for ref in refs if ref.due <= self._clock.now]

    def get(self, ref: Ref) -> Any:
        return ref.result

    def kill(self, handle: Any) -> None: ...


class Method:
    """A method of a handle."""

    def __init__(self, answer: Callable[..., Ref]) -> None:
        self.remote = answer


class Handle:
    """A worker that is always well."""

    def __init__(self, clock: Clock, index: int, attempt: int) -> None:
        status = WorkerStatus(f"actor-{index}", 1, "host", True, Figures(), None, None, (0.0, 0.0), ())
        piece = Piece(100, 100, 0, 100, (), 1, 1, 0, 0.5, 0.0, "done")
        free = 0.001 * index

        def rollout(ticks: int) -> Ref:
            nonlocal free
            free = max(free, clock.now) + 0.5
            return Ref(free, piece)

        self.open = Method(lambda: Ref(clock.now, 1))
        self.status = Method(lambda: Ref(clock.now, status))
        self.rollout = Method(rollout)


def polling(workers: int) -> float:
    """CPU milliseconds of a pool's own code, in a second of its life."""
    clock = Clock()
    pool = Pool(partial(Handle, clock), calls=Answers(clock), clock=lambda: clock.now)
    pool.resize(workers)

    def second() -> None:
        for _ in range(round(1 / TURN_SECONDS)):
            clock.now += TURN_SECONDS
            pool.poll()

    second()
    return statistics.median(timed(second) for _ in range(3))


def writers(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Clients with a stream and an environment each, all of one process, to one server until that refuses one."""
    token = "the-token-of-a-benchmark"
    spec = TableSpec(RowSpec((VECTOR,), ArraySpec((6,))), WindowSpec(4), 1000, 1000)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        keeper = Keeper(ShardSetup("shard", Path(folder), "127.0.0.1:0", "127.0.0.1"), token, setup_buffer())
        stack.callback(keeper.close)
        endpoint = Endpoint(keeper.open(), token)
        server, own = psutil.Process(keeper.status().pid), psutil.Process()
        looks: list[np.ndarray[Any, Any]] = []
        for count in itertools.count():
            if count in (100, 400):
                looks.append(np.array([server.num_threads(), server.memory_info().rss, own.num_threads()]))
            try:
                client = Client(endpoint, "bench", spec, stream=f"w{count}", num_envs=1, timeout=20.0)
                stack.callback(client.close)
                client.append(_row())
            except OSError as error:
                threads, rss, own_threads = (looks[1] - looks[0]) / 300
                yield {
                    "case": "writers", "refused_at": count, "reason": str(error),
                    "server_threads_per_writer": round(threads, 2), "server_kb_per_writer": round(rss / 1e3),
                    "client_threads_per_writer": round(own_threads, 2),
                }  # fmt: skip
                return


def _row() -> Rows:
    """One row of one environment, which begins an episode."""
    yes, no = np.ones(1, bool), np.zeros(1, bool)
    return Rows(np.zeros(1, np.int32), {"obs": np.zeros((1, 24), np.float32)}, np.zeros(1, np.float32), yes, no, no,
                np.zeros((1, 6), np.float32), {})  # fmt: skip


# sizes

VECTOR, PICTURE = ("obs", ArraySpec((24,))), ("image", ArraySpec((64, 64, 3), "uint8"))
SIZES: Mapping[str, tuple[str, Any, str]] = {
    "TD-MPC2 preset 5, vector": ("tdmpc2", VECTOR, "5"),
    "DreamerV3 size12m, vector": ("dreamerv3", VECTOR, "size12m"),
    "DreamerV3 size12m, image": ("dreamerv3", PICTURE, "size12m"),
    "DreamerV3 size200m, vector": ("dreamerv3", VECTOR, "size200m"),
    "DreamerV3 size200m, image": ("dreamerv3", PICTURE, "size200m"),
}
"""Of walker-walk's observations and actions."""


def sizes(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bytes of rows, windows, write-backs, snapshots, gradients and the train state, float32."""
    nbytes = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    for name, (algorithm, obs, preset) in SIZES.items():
        agent_config = {"tdmpc2": TDMPC2Config, "dreamerv3": DreamerV3Config}[algorithm]()
        run_config = config(algorithm, "walker-walk", EnvConfig(), agent_config, preset)
        agent = make_agent(run_config, EnvSpec("walker-walk", (obs,), ActionSpec((6,)), 500, 2))
        state = jax.eval_shape(agent.init, jax.random.key(0))
        window, row = agent.window_spec, agent.row_spec
        latents = sum(array.nbytes for _, array in row.latents)
        trained = agent.batch_size * (window.length - window.context)
        yield {
            "case": "sizes", "agent": name, "row_bytes": row.nbytes, "latent_bytes": latents,
            "window_rows": window.length, "batch": agent.batch_size, "trained_rows": trained,
            "window_bytes": sum(x.nbytes for x in jax.tree.leaves(blank(row, window, 1))),
            "write_back_bytes": trained * (latents + 12) if latents else 0,
            "snapshot_bytes": nbytes(jax.eval_shape(agent.acting_params, state)),
            "parameter_bytes": nbytes(state.params), "state_bytes": nbytes(state),
        }  # fmt: skip


CASES: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    **{name: partial(steps, name) for name in TASKS},
    **{name: partial(learning, name) for name in learners()},
    "start": start,
    "calls": calls,
    "writers": writers,
    "sizes": sizes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=6.0, help="that a number of workers is measured")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--floor", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    if given.floor is not None:
        print(json.dumps(floor(given.floor, given.seconds)))
        return
    known = {"commit": commit(), "cores": psutil.cpu_count(), "jax": version("jax"), "ray": version("ray")}
    for name in given.cases or CASES:
        for line in CASES[name](given):
            print(json.dumps({**line, **known}), flush=True)


if __name__ == "__main__":
    main()
