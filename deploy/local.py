"""One machine, one process: environments, replay and learner, strictly synchronous and bit-reproducible.

The replay is embedded, or a service of its own: the loop sees the `Replay` protocol alone.

The loop does one thing per turn: an update that is due, an evaluation that is due, or a tick of the environments.
Whatever decides is a counter, so a run that is resumed anywhere repeats what an uninterrupted one does.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation, TraceAnnotation
from rich.console import Console

from actors.collector import Collector, Episode, jit_act
from actors.evaluate import Film, Stopped, evaluate
from actors.watchdog import watch
from deploy import config as configs
from deploy import openloop, running, video
from deploy.config import RunConfig, make_agent
from deploy.files import alone_in
from deploy.shares import Shares
from deploy.standing import Standing
from learner import checkpoint, update
from learner.batches import fresh_latents
from learner.tracing import FOLDER as TRACES
from learner.tracing import Trace, tracing
from replay_server.store import Store, table_bytes
from telamon.agents.base import Agent, Report
from telamon.data import Clock, Counters, TrainRatio
from telamon.envs.base import BatchedEnv
from telamon.envs.registry import make_env
from telamon.keys import Stream, generator, stream
from telamon.replay import Replay, TableSpec
from telamon.telemetry.live import LiveView
from telamon.telemetry.logs import setup_logging
from telamon.telemetry.stopwatch import Stopwatch
from telamon.telemetry.writer import MetricsWriter

if TYPE_CHECKING:  # which needs the extra `service`
    from deploy.page import Page

log = logging.getLogger(__name__)

GIB = 2**30
SHORTEST = 4
"""Agent steps per episode, on average, that a replay for a whole run is made for."""
EMPTY = "empty"
"""Mark of a replay service's table before the first row of a run."""
OWN_MARK = re.compile(rf"\d{{12}}-\d{{12}}|{EMPTY}")
"""Names of the marks that a run makes; a service may make others."""
Doing = Literal["rows", "batch", "compute", "write_back", "evaluation", "report", "checkpoint", "other"]
"""What the loop does; `rows`: a tick of the environments, `batch`: a draw from the replay."""
REPORTS = "report"
"""Where in a run directory the pictures of reports are."""


def build_env(config: RunConfig, num_envs: int, seed: int) -> BatchedEnv:
    """`num_envs` of the run's environments. Raises EnvError."""
    c = config.env
    return make_env(config.task, num_envs, seed, action_repeat=c.action_repeat, on_error=c.on_error, **c.options)


def env_seed(config: RunConfig, run_dir: Path) -> int:
    """The run's own seed, except where it goes on with environments that could not be saved: there every resume has
    another, or the same first episodes would be seen again."""
    directory = run_dir / "checkpoints"
    for name in checkpoint.names(directory):
        try:
            meta = checkpoint.read_meta(directory, name)
        except ValueError:
            continue  # `restore` passes over it too, and says so
        rows = meta["counters"]["rows"]
        if rows == 0 or meta["env_saved"]:
            break
        return int(generator(config.seed, Stream.ENV, rows).integers(2**31))
    return config.seed


def capacity(config: RunConfig, agent: Agent, num_envs: int) -> int:
    """Rows per environment, of `num_envs`: what the agent's preset keeps, or what the whole run can give, if less."""
    transitions = math.ceil(config.steps / agent.env.action_repeat / num_envs)
    longest = agent.env.episode_length
    # An episode has one row more than transitions. Truncations before the announced limit are not allowed for, nor
    # terminations in less than SHORTEST steps on average: they cost the oldest rows of a run's last part, where twice
    # the memory would be the price of holding them.
    shortest = SHORTEST if longest is None or agent.learns_terminations else longest
    run = transitions + math.ceil(transitions / shortest) + 1
    return min(agent.capacity(num_envs), max(run, agent.window_spec.length))


def memory(config: RunConfig, agent: Agent, num_envs: int) -> dict[str, int]:
    """Predicted bytes on this machine: the full replay of `num_envs`, and parameters with targets and optimiser.

    Raises ValueError with the largest buffer that would fit, where they exceed the limit.
    """

    def table(buffer_size: int) -> int:
        if config.replay.address is not None:
            return 0  # the service has a limit of its own
        smaller = replace(config, agent=replace(config.agent, buffer_size=buffer_size))
        return table_bytes(agent.row_spec, num_envs, capacity(smaller, make_agent(smaller, agent.env), num_envs))

    state = jax.eval_shape(agent.init, jax.random.key(0))
    predicted = {
        "replay": table(config.agent.buffer_size),
        "train state": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)),
    }
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = 0.8 * machine if config.memory_limit is None else config.memory_limit * GIB
    if sum(predicted.values()) > limit:
        fits = bisect_right(range(1, config.agent.buffer_size), limit - predicted["train state"], key=table)
        way_out = f"agent.buffer_size={fits} is the largest that fits" if fits else "no agent.buffer_size fits"
        raise ValueError(
            f"a replay of {predicted['replay'] / GIB:.3g} GiB beside {predicted['train state'] / GIB:.3g} GiB of "
            f"parameters and optimiser exceeds the limit of {limit / GIB:.3g} GiB; {way_out}, or raise memory_limit"
        )
    return predicted


def sizes(config: RunConfig, agent: Agent, predicted: Mapping[str, int]) -> str:
    """What `memory` predicts, and what a replay service will need, in words."""
    here = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in predicted.items() if size)
    if config.replay.address is None:
        return f"memory when full: {here}"
    there = table_bytes(agent.row_spec, config.env.num, capacity(config, agent, config.env.num))
    return f"memory when full: {here}; at {config.replay.address}: replay {there / GIB:.2f} GiB"


@contextmanager
def open_replay(config: RunConfig, run_dir: Path, agent: Agent) -> Iterator[Replay]:
    """The run's table, embedded or at the service that the config names.

    Raises ValueError, among others for a table there of another run, PermissionError for a wrong token, TimeoutError.
    """
    rows = capacity(config, agent, config.env.num)
    c = config.replay
    if c.address is None:
        rng = generator(config.seed, Stream.REPLAY)
        yield Store(agent.row_spec, agent.window_spec, config.env.num, rows, rng, run_dir / "replay")
        return
    try:
        from telamon.rpc import client, security
    except ImportError as error:
        text = "replay.address needs the extra `service` (pip install 'telamon[service]')"
        raise ValueError(f"{text}: {error}") from error
    endpoint = security.Endpoint(
        c.address,
        security.read_token(None if c.token_file is None else Path(c.token_file), os.environ),
        None if c.root_certificate is None else Path(c.root_certificate).read_bytes(),
    )
    try:
        replay = client.Client(
            endpoint,
            c.table or table_name(run_dir),
            TableSpec(agent.row_spec, agent.window_spec, rows, config.env.num),
            stream="local",
            num_envs=config.env.num,
            # the words that `generator` seeds with: the service draws what an embedded replay would
            seed=int(Stream.REPLAY) << 32 | config.seed % 2**32,
            timeout=c.timeout,
        )
    except LookupError as error:
        raise ValueError(f"{error}; give this run another replay.table") from error
    with replay:
        yield replay


def check_table(replay: Replay) -> None:
    """Refuses to begin a run with rows of another one. Raises ValueError."""
    if rows := replay.stats().rows:
        raise ValueError(f"the replay service's table holds {rows} rows of another run; give a new replay.table")


def table_name(run_dir: Path) -> str:
    """The name of a run directory with the characters that a table's name may have."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in run_dir.resolve().name)[-64:]


def passed(last: int | None, every: int, now: int) -> bool:
    """Whether a multiple of `every` was passed since `last`; None: it is the first time."""
    return last is None or now // every > last // every


def evaluated(returns: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """The metrics of an evaluation, from what each of its episodes gave."""
    return {
        "eval/return": float(returns.mean()),
        "eval/return_min": float(returns.min()),
        "eval/return_max": float(returns.max()),
        "eval/length": float(lengths.mean()),
    }


@dataclass
class Progress:
    """Where the loop last did what it does every so many environment steps, in environment steps."""

    evaluated: int | None = None
    """None before the first evaluation, which is due at once."""
    reported: int = 0
    """The last report."""
    logged: int = 0
    """The last line of losses."""
    saved: int = 0
    """The last checkpoint."""

    def due(self, name: str, every: int, now: int) -> bool:
        """Whether a multiple of `every` was passed since."""
        last: int | None = getattr(self, name)
        return passed(last, every, now)


class Run:
    """A run in its directory. `train` continues from wherever the counters stand."""

    def __init__(self, config: RunConfig, run_dir: Path, agent: Agent, env: BatchedEnv, replay: Replay) -> None:
        self.config, self.run_dir, self.agent, self.env, self.replay = config, run_dir, agent, env, replay
        self.counters, self.progress = Counters(), Progress()
        self.schedule = agent.schedule(config.env.num)
        self.clock = Clock()
        """Where a TrainRatio stands."""
        self.collector = Collector(agent, env, self.replay, config.seed, self.counters)
        self.stopwatch = Stopwatch[Doing](get_args(Doing), "other")
        self.state = update.init(agent, stream(config.seed, Stream.INIT))
        self._update = update.make_update(agent)
        self._report = update.make_report(agent)
        self._eval_act = jit_act(agent, config.eval.episodes, "eval")
        self._update_key = stream(config.seed, Stream.UPDATE)
        self.metrics: Mapping[str, Any] = {}
        """Of the last update."""
        self.metrics_length = 0
        self._checkpoint: str | None = None
        """The one that holds the present state, or did until something changed."""
        self.saved = checkpoint.Saved()
        """By this process."""

    @property
    def env_steps(self) -> int:
        return self.counters.transitions * self.agent.env.action_repeat

    @property
    def updates_owed(self) -> int:
        """By the schedule."""
        if isinstance(self.schedule, TrainRatio):
            return self.clock.due - self.counters.updates
        done = {"rows": self.counters.rows, "transitions": self.counters.transitions}
        return self.schedule.due(done[self.schedule.counter]) - self.counters.updates

    def updates_due(self) -> int:
        """None while nothing can be sampled: the first episode may be longer than announced."""
        owed = self.updates_owed
        return owed if owed <= 0 or self.replay.can_sample() else 0

    # the things a turn can be

    def update(self) -> None:
        """One gradient step, and its latents into the replay.

        Raises NonFiniteUpdate after too many in a row that were skipped.
        """
        self.stopwatch.now("batch")
        with TraceAnnotation("batch"):
            window = self.replay.sample(self.agent.batch_size)
        self.stopwatch.now("compute")
        index = np.uint32(self.counters.updates)
        self.state, outcome = self._update(self.state, window, self._update_key, index)
        self.metrics = outcome.metrics
        self.counters.updates += 1
        # waits for the device, so that Ctrl-C is answered at once in the middle of a burst too
        streak = int(outcome.streak)
        self.stopwatch.now("write_back")
        if streak > 0:
            self.counters.skipped = int(outcome.skipped)
            update.check_streak(self.counters.updates, streak, self.metrics, self.config.max_skipped)
        elif outcome.write_back is not None:
            with TraceAnnotation("write_back"):
                self.replay.write_back(fresh_latents(window, self.agent.window_spec.context, outcome.write_back))
        self.stopwatch.now("other")

    def evaluation_due(self) -> bool:
        """Every `eval.every` environment steps, from step 0 on."""
        every = self.config.eval.every
        return every > 0 and self.progress.due("evaluated", every, self.env_steps)

    def evaluate(self, stopped: Callable[[], bool]) -> dict[str, float]:
        """Fresh environments, and keys by the environment step: nothing of the training run is touched.

        Raises Stopped once `stopped()`, NotImplementedError where a film is wanted and the environment has no picture.
        """
        config, index = self.config, self.env_steps
        own_seed = int(generator(config.seed, Stream.EVAL, index).integers(2**31))
        with ExitStack() as stack:
            env = build_env(config, config.eval.episodes, own_seed)
            stack.callback(env.close)
            stack.enter_context(watch(env, config.env.timeout))
            params = self.agent.acting_params(self.state.train)
            key = stream(config.seed, Stream.EVAL, index)
            film = Film() if config.eval.videos else None
            found = evaluate(self.agent, self._eval_act, params, env, key, film, stopped)
        if film is not None and (encoded := video.encode(film.frames)) is not None:
            video.keep_film(encoded, self.run_dir, index, config.eval.videos)
        self.progress.evaluated = self.env_steps
        return evaluated(found.total_reward, found.length)

    def report_due(self) -> bool:
        """Every `report.every` environment steps, once there is something to report on."""
        every = self.config.report.every
        learned = self.counters.updates > 0 and self.replay.can_sample()
        return every > 0 and learned and self.progress.due("reported", every, self.env_steps)

    def report(self) -> Report:
        """A look at replayed windows, with keys by the environment step: nothing of the training run is touched."""
        window = self.replay.sample(self.agent.batch_size, purpose="report")
        key = stream(self.config.seed, Stream.REPORT, self.env_steps)
        self.progress.reported = self.env_steps
        found: Report = self._report(self.state, window, key)
        return found

    def tick(self) -> list[Episode]:
        """One row of every environment; returns the episodes that ended."""
        self.stopwatch.now("rows")
        random = self.agent.acts_at_random and self.counters.updates == 0
        episodes = self.collector.tick(None if random else self.agent.acting_params(self.state.train))
        if isinstance(self.schedule, TrainRatio):
            self.clock = self.schedule.tick(self.clock, self.config.env.num)
        self.stopwatch.now("other")
        return episodes

    # checkpoints

    def save(self) -> None:
        """Writes a checkpoint, then drops those beyond `checkpoint.keep`. Nothing where the present one is saved."""
        directory = self.run_dir / "checkpoints"
        # By what changes with every turn that changes anything, so that two states never share a name.
        name = f"{self.counters.rows:012d}-{self.counters.updates:012d}"
        if name == self._checkpoint:
            return
        began = time.monotonic()
        self.stopwatch.now("checkpoint")
        self.replay.mark(name)
        arrays = {**self.collector.get_state(), **{f"metrics/{k}": np.asarray(v) for k, v in self.metrics.items()}}
        meta = {
            "counters": self.counters.as_dict(),
            "progress": asdict(self.progress),
            "clock": asdict(self.clock),
            "metrics_length": self.metrics_length,
            "config": asdict(self.config),
            "env_spec": asdict(self.agent.env),
            "env_saved": any(k.startswith("env/") for k in arrays),
            "versions": versions(),
        }
        path = checkpoint.save(directory, name, self.state, arrays, meta)
        self._checkpoint = name
        # names sort by progress: what lies ahead is damaged, or this run would have started from there
        kept = [n for n in checkpoint.names(directory) if n <= name][: self.config.checkpoint.keep]
        for old in set(checkpoint.names(directory)) - set(kept):
            checkpoint.remove(directory, old)
        for mark in set(self.replay.marks()) - set(kept):
            if OWN_MARK.fullmatch(mark):
                self.replay.forget(mark)
        now = time.monotonic()
        self.saved = checkpoint.Saved(self.saved.checkpoints + 1, self.saved.seconds + now - began, now)
        self.stopwatch.now("other")
        log.info("event=checkpoint path=%s updates=%d", path, self.counters.updates)

    def begin(self, resume: bool) -> None:
        """Makes sure that a run without a checkpoint starts with an empty table, which a service may not have.

        Raises as `check_table`.
        """
        if self.config.replay.address is None:
            return
        if resume and EMPTY in self.replay.marks():
            self.replay.restore(EMPTY)
        else:
            check_table(self.replay)
            self.replay.mark(EMPTY)

    def restore(self) -> str | None:
        """Continues from the newest checkpoint that is whole; returns its name, None where there is none.

        A damaged one is passed over with a line in the log. Raises ValueError where all are damaged.
        """
        directory = self.run_dir / "checkpoints"
        candidates = checkpoint.names(directory)
        for name in candidates:
            try:
                found = checkpoint.load(directory, name, self.state)
                self.replay.restore(name)
            except (ValueError, OSError) as error:
                log.warning("event=checkpoint_damaged name=%s error=%s", name, error)
                continue
            self._checkpoint, self.state = name, found.state
            for f in fields(self.counters):
                setattr(self.counters, f.name, found.meta["counters"][f.name])
            self.progress = Progress(**found.meta["progress"])
            self.clock = Clock(**found.meta["clock"])
            self.metrics_length = found.meta["metrics_length"]
            self.metrics = {k.removeprefix("metrics/"): v for k, v in found.arrays.items() if k.startswith("metrics/")}
            if not self.collector.set_state(found.arrays):
                log.warning(
                    "event=episodes_abandoned env=%s reason=%s",
                    self.agent.env.id, "its state cannot be saved; new episodes begin",
                )  # fmt: skip
            return name
        if candidates:
            raise ValueError(f"none of the {len(candidates)} checkpoints under {directory} is whole; log.txt says why")
        return None


def versions() -> dict[str, str]:
    """What a checkpoint was made with."""
    packages = ("telamon", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
    return {"python": platform.python_version(), **{p: version(p) for p in packages}}


def loop(run: Run, writer: MetricsWriter, live: LiveView, trace: Trace, stopped: Callable[[], bool]) -> bool:
    """Runs until the steps are done (True) or `stopped()` (False). Every line it writes is a function of counters,
    but for the keys under `time/`."""
    config = run.config

    def write(metrics: Mapping[str, float]) -> None:
        writer.write(run.env_steps, metrics)
        live.update(env_steps=run.env_steps, updates=run.counters.updates, metrics=metrics)

    compiled: set[str] = set()

    def status(kind: str, text: str) -> None:
        live.update(env_steps=run.env_steps, updates=run.counters.updates, status=text if kind in compiled else
                    f"{text} (compiling it, once)")  # fmt: skip
        compiled.add(kind)

    random_phase = run.agent.acts_at_random
    unable: set[str] = set()  # what was said to be missing
    rate = time.monotonic(), run.env_steps, run.counters.updates
    acting, rest = Shares(), Shares()
    while not stopped():
        due = run.updates_due()
        if due > 0:
            burst = random_phase and due > config.env.num
            status("update", f"{due:,} updates due at the end of the random phase" if burst else "training")
            trace.before_update(run.collector.tick_count)
            with StepTraceAnnotation("update", step_num=run.counters.updates):
                run.update()
        elif run.evaluation_due():
            status("evaluate", f"evaluating {config.eval.episodes} episodes")
            started = time.monotonic()
            run.stopwatch.now("evaluation")
            try:
                evaluated = run.evaluate(stopped)
            except Stopped:
                continue
            finally:
                run.stopwatch.now("other")
            seconds = time.monotonic() - started
            log.info("event=evaluation env_steps=%d return=%g seconds=%.1f", run.env_steps, evaluated["eval/return"],
                     seconds)  # fmt: skip
            write({**evaluated, "time/evaluation_seconds": seconds})
        elif run.report_due():
            status("report", "reporting")
            started = time.monotonic()
            run.stopwatch.now("report")
            found = run.report()
            missing = openloop.show(found, run.env_steps, run.run_dir / REPORTS, writer, config.report.keep)
            for sentence in missing - unable:
                log.warning("event=report_incomplete reason=%r", sentence)
            unable |= missing
            losses = {f"report/{k}": float(v) for k, v in found.losses.items()}
            run.stopwatch.now("other")
            write({**losses, "time/report_seconds": time.monotonic() - started})
        elif run.metrics and run.progress.due("logged", config.log_every, run.env_steps):
            run.progress.logged = run.env_steps
            now = time.monotonic()
            seconds = max(now - rate[0], 1e-9)
            speed = {
                "time/env_steps_per_s": (run.env_steps - rate[1]) / seconds,
                "time/updates_per_s": (run.counters.updates - rate[2]) / seconds,
            }
            rate = now, run.env_steps, run.counters.updates
            spent = {"actors": acting.since({"": run.collector.stopwatch.seconds}),
                     "learner": rest.since({"": run.stopwatch.seconds})}  # fmt: skip
            shares = {f"time/{who}_{what}_ratio": s for who, found in spent.items() for what, s in found.items()}
            write({**named(run.metrics), **counts(run), **speed, **shares})
        elif run.progress.due("saved", config.checkpoint.every, run.env_steps):
            run.progress.saved = run.env_steps
            run.metrics_length = writer.length
            run.save()
        elif run.env_steps >= config.steps:
            return True
        else:
            filling = "acting at random to fill the replay" if random_phase else "filling the replay"
            status("act", "training" if run.counters.updates else filling)
            with TraceAnnotation("tick"):
                episodes = run.tick()
            for episode in episodes:
                log.debug("event=episode env=%d return=%g length=%d", *episode)
                write({"train/return": episode.total_reward, "train/length": episode.length})
    return False


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """An agent's metrics under the writer's groups: losses under `loss/`, the rest under `learner/`."""
    return {(f"loss/{k}" if k.endswith("_loss") else f"learner/{k}"): float(v) for k, v in metrics.items()}


def counts(run: Run) -> dict[str, float]:
    """What the run has done and what its replay holds."""
    stats, counters = run.replay.stats(), run.counters
    return {
        "counters/rows": counters.rows,
        "counters/transitions": counters.transitions,
        "counters/updates": counters.updates,
        "counters/skipped_updates": counters.skipped,
        "replay/rows_held": stats.rows_held,
        "replay/episodes": stats.episodes,
    }


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM asks once for a clean stop; a second one interrupts at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    old = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def check_run_dir(config: RunConfig, run_dir: Path, resume: bool) -> None:
    """Refuses what would lose or mix data. Raises ValueError or FileNotFoundError with one sentence."""
    exists = (run_dir / configs.CONFIG_FILE).exists()
    if exists and not resume:
        raise ValueError(f"{run_dir} already holds a run; add --resume to continue it, or --run-dir for another")
    if resume and not exists:
        raise FileNotFoundError(f"{run_dir} holds no run to resume (no {configs.CONFIG_FILE}); leave --resume away")
    if resume and (differing := configs.differing_keys(configs.load(run_dir), config)):
        raise ValueError(f"{run_dir} was started with another config; differing keys: {', '.join(differing)}")


def execute(
    run: Run,
    resume: bool,
    console: Console,
    stopped: Callable[[], bool],
    profile: int = 0,
    page: Page | None = None,
) -> bool:
    """From the start or the last checkpoint to the end (True) or to `stopped()` (False), and one more checkpoint.

    profile: as in `Extras`. page: where Prometheus reads; None for none.
    """
    config = run.config
    live = LiveView(f"{config.algorithm} on {config.task}", config.steps, console)
    standing = Standing(run, live.progress)
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)
    with running.telling(run.run_dir, standing.status) as teller:
        if resume and (name := run.restore()) is not None:
            console.print(f"resumed from checkpoint {name}: {run.env_steps:,} env steps", highlight=False)
        else:
            run.begin(resume)
        resume_length = run.metrics_length if resume else None
        with ExitStack() as stack:
            writer = stack.enter_context(MetricsWriter(run.run_dir, resume_length))
            if page is not None:
                stack.enter_context(page.showing(run, standing))
            stack.enter_context(live)
            trace = stack.enter_context(tracing(profile, run.run_dir / TRACES, say))
            teller.state = "running"
            finished = loop(run, writer, live, trace, stopped)
            teller.state = "stopping"
            live.update(env_steps=run.env_steps, updates=run.counters.updates, status="writing the last checkpoint")
            run.metrics_length = writer.length
            run.save()
            live.update(status="done" if finished else "stopped")
        teller.state = "finished" if finished else "stopped"
    log.info("event=stop finished=%s env_steps=%d updates=%d", finished, run.env_steps, run.counters.updates)
    return finished


@dataclass(frozen=True)
class Extras:
    """What is shown of a run of one process besides, and is no part of the run."""

    profile: int = 0
    """Updates of which JAX writes a trace into RUN/profile, once the loop is warm; 0 for none."""
    metrics_port: int | None = None
    """Port of a page for Prometheus on this machine; 0 for a free one, None for no page."""

    def __post_init__(self) -> None:
        if self.profile < 0:
            raise ValueError(f"profile={self.profile} must be at least 0")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 2**16:
            raise ValueError(f"metrics_port={self.metrics_port} must be 0 to {2**16 - 1}")


@contextmanager
def open_page(run_dir: Path, port: int) -> Iterator[Page]:
    """A page for Prometheus that shows nothing yet but the process.

    Raises ValueError where its libraries are missing, OSError naming the owner of a port that is taken.
    """
    try:
        from deploy.page import opened
    except ImportError as error:
        text = "metrics_port needs the extra `service` (pip install 'telamon[service]')"
        raise ValueError(f"{text}: {error}") from error
    with opened(run_dir.resolve(), port) as page:
        yield page


def train(
    config: RunConfig,
    run_dir: Path,
    resume: bool,
    console: Console,
    extras: Extras = Extras(),
    level: int = logging.INFO,
) -> int:
    """Trains to the end or to a clean stop; returns the exit code (130 after Ctrl-C, as a shell expects).

    level: of the events in its log. Raises ValueError, EnvError, OSError or NonFiniteUpdate with one sentence.
    """
    check_run_dir(config, run_dir, resume)
    with ExitStack() as stack:
        if resume:
            stack.enter_context(alone_in(run_dir))
        env = build_env(config, config.env.num, env_seed(config, run_dir))
        stack.callback(env.close)
        agent = make_agent(config, env.spec)
        predicted = memory(config, agent, config.env.num)
        agent.schedule(config.env.num)  # refuses what could never start, before anything is written
        if config.eval.videos:
            video.check_pictures(lambda: build_env(config, 1, config.seed))  # likewise
        replay = stack.enter_context(open_replay(config, run_dir, agent))
        page = None if extras.metrics_port is None else stack.enter_context(open_page(run_dir, extras.metrics_port))
        if not resume:
            check_table(replay)  # likewise
            stack.enter_context(alone_in(run_dir))
        configs.save(config, run_dir)
        setup_logging(run_dir, level)
        log.info("event=start config=%s versions=%s", json.dumps(asdict(config)), json.dumps(versions()))
        console.print(
            f"{config.algorithm} on {config.task}: {sizes(config, agent, predicted)}; run directory {run_dir}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        run = Run(config, run_dir, agent, env, replay)
        stack.enter_context(watch(env, config.env.timeout))
        if page is not None:
            console.print(f"metrics {page.url}", highlight=False, soft_wrap=True)
        finished = execute(run, resume, console, stack.enter_context(stop_on_signal()), extras.profile, page)
    if finished:
        return 0
    text = f"stopped at {run.env_steps:,} env steps; repeat the command with --resume to continue"
    console.print(text, highlight=False, soft_wrap=True)
    return 130
