"""One machine, one process: environments, embedded replay and learner, strictly synchronous and bit-reproducible.

The loop does one thing per turn: an update that is due, an evaluation that is due, or a tick of the environments.
Whatever decides is a counter, so a run that is resumed anywhere repeats what an uninterrupted one does.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from actors.collector import Collector, Episode, jit_act
from actors.evaluate import evaluate
from actors.watchdog import watch
from deploy import config as configs
from deploy.config import RunConfig, make_agent
from learner import checkpoint, update
from replay_server.store import Store, table_bytes
from telamon.agents.base import Agent
from telamon.data import Counters
from telamon.envs.base import BatchedEnv
from telamon.envs.registry import make_env
from telamon.keys import Stream, generator, stream
from telamon.telemetry.live import LiveView
from telamon.telemetry.logs import setup_logging
from telamon.telemetry.writer import MetricsWriter

log = logging.getLogger(__name__)

GIB = 2**30
SYNC_EVERY = 10
"""Updates of a burst between two looks at the device: few enough that Ctrl-C is answered at once."""


class NonFiniteUpdate(RuntimeError):
    """Too many updates in a row were not finite."""


def build_env(config: RunConfig, num_envs: int, seed: int) -> BatchedEnv:
    return make_env(
        config.task, num_envs, seed, action_repeat=config.env.action_repeat, on_error=config.env.on_error
    )


def capacity(config: RunConfig, agent: Agent) -> int:
    """Rows per environment: what the agent's preset keeps, or what the whole run can give, if that is less."""
    transitions = math.ceil(config.steps / agent.env.action_repeat / config.env.num)
    longest = agent.env.episode_length
    run = transitions * 2 if longest is None else transitions + math.ceil(transitions / longest) + 1
    return min(agent.capacity(config.env.num), max(run, agent.window_spec.length))


def memory(config: RunConfig, agent: Agent) -> dict[str, int]:
    """Predicted bytes: the full replay table, and parameters with targets and optimiser.

    Raises ValueError with the largest capacity that would fit, where they exceed the limit.
    """
    state = jax.eval_shape(agent.init, jax.random.key(0))
    rows = capacity(config, agent)
    predicted = {
        "replay": table_bytes(agent.row_spec, config.env.num, rows),
        "train state": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)),
    }
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = 0.8 * machine if config.memory_limit is None else config.memory_limit * GIB
    if sum(predicted.values()) > limit:
        fits = max(0, int((limit - predicted["train state"]) / agent.row_spec.nbytes / config.env.num))
        raise ValueError(
            f"replay of {rows:,} rows x {config.env.num} environments needs {predicted['replay'] / GIB:.2f} GiB beside "
            f"{predicted['train state'] / GIB:.2f} GiB of train state, above the limit of {limit / GIB:.2f} GiB; "
            f"{fits:,} rows per environment would fit: lower agent.buffer_size or raise memory_limit"
        )
    return predicted


@dataclass
class Progress:
    """The loop's own counters beside `Counters`."""

    evaluations: int = 0
    logged: int = 0
    """Environment steps at the last line of losses, in units of log_every."""
    checkpoints: int = 0
    """Environment steps at the last checkpoint, in units of checkpoint.every."""


class Run:
    """A run in its directory. `train` continues from wherever the counters stand."""

    def __init__(self, config: RunConfig, run_dir: Path, agent: Agent, env: BatchedEnv) -> None:
        self.config, self.run_dir, self.agent, self.env = config, run_dir, agent, env
        self.counters, self.progress = Counters(), Progress()
        self.replay = Store(
            agent.row_spec, agent.window_spec, config.env.num, capacity(config, agent),
            generator(config.seed, Stream.REPLAY), run_dir / "replay",
        )  # fmt: skip
        self.schedule = agent.schedule(config.env.num)
        self.collector = Collector(agent, env, self.replay, config.seed, self.counters)
        self.state = update.init(agent, stream(config.seed, Stream.INIT))
        self._update = update.make_update(agent)
        self._eval_act = jit_act(agent, config.eval.episodes, "eval")
        self._update_key = stream(config.seed, Stream.UPDATE)
        self.metrics: Mapping[str, Any] = {}
        self.metrics_length = 0

    @property
    def env_steps(self) -> int:
        return self.counters.transitions * self.agent.env.action_repeat

    def updates_due(self) -> int:
        done = {"rows": self.counters.rows, "transitions": self.counters.transitions}
        return self.schedule.due(done[self.schedule.counter]) - self.counters.updates

    # the three things a turn can be

    def update(self) -> None:
        """One gradient step."""
        window = self.replay.sample(self.agent.batch_size)
        index = np.uint32(self.counters.updates)
        self.state, self.metrics, _ = self._update(self.state, window, self._update_key, index)
        self.counters.updates += 1
        if self.updates_due() == 0 or self.counters.updates % SYNC_EVERY == 0:
            self._check_finite()

    def _check_finite(self) -> None:
        streak = int(self.state.streak)
        if streak > 0:
            self.counters.skipped = int(self.state.skipped)
            bad = update.first_non_finite(self.metrics)
            log.warning("event=update_skipped update=%d in_a_row=%d first=%s", self.counters.updates, streak, bad)
            if streak >= self.config.max_skipped:
                raise NonFiniteUpdate(
                    f"{streak} updates in a row were skipped because {bad} was not finite, the last one update "
                    f"{self.counters.updates}; the parameters are those before; the bound is max_skipped"
                )

    def evaluation_due(self) -> bool:
        every = self.config.eval.every
        return every > 0 and self.env_steps >= self.progress.evaluations * every

    def evaluate(self) -> dict[str, float]:
        """Fresh environments and keys by the evaluation's number: nothing of the training run is touched."""
        index, seed = self.progress.evaluations, self.config.seed
        env_seed = int(generator(seed, Stream.EVAL, index).integers(2**31))
        env = build_env(self.config, self.config.eval.episodes, env_seed)
        try:
            params = self.agent.acting_params(self.state.train)
            found = evaluate(self.agent, self._eval_act, params, env, stream(seed, Stream.EVAL, index))
        finally:
            env.close()
        self.progress.evaluations = self.env_steps // self.config.eval.every + 1
        return {
            "eval/return": float(found.total_reward.mean()),
            "eval/return_min": float(found.total_reward.min()),
            "eval/return_max": float(found.total_reward.max()),
            "eval/length": float(found.length.mean()),
        }

    def tick(self) -> list[Episode]:
        params = self.agent.acting_params(self.state.train) if self.counters.updates else None
        return self.collector.tick(params)

    # checkpoints

    def save(self) -> Path:
        """Writes a checkpoint, then drops those beyond `checkpoint.keep`."""
        directory = self.run_dir / "checkpoints"
        name = f"{self.counters.transitions:012d}-{self.counters.updates:012d}"
        self.replay.mark(name)
        meta = {
            "counters": self.counters.as_dict(),
            "progress": asdict(self.progress),
            "metrics_length": self.metrics_length,
            "config": asdict(self.config),
            "env_spec": asdict(self.agent.env),
            "versions": versions(),
        }
        path = checkpoint.save(directory, name, self.state, self.collector.get_state(), meta)
        for old in checkpoint.names(directory)[self.config.checkpoint.keep :]:
            checkpoint.remove(directory, old)
            self.replay.forget(old)
        log.info("event=checkpoint path=%s updates=%d", path, self.counters.updates)
        return path

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
            self.state = found.state
            for f in fields(self.counters):
                setattr(self.counters, f.name, found.meta["counters"][f.name])
            self.progress = Progress(**found.meta["progress"])
            self.metrics_length = found.meta["metrics_length"]
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


def loop(run: Run, writer: MetricsWriter, live: LiveView, stopped: Callable[[], bool]) -> bool:
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

    rate = time.monotonic(), run.env_steps, run.counters.updates
    while not stopped():
        due = run.updates_due()
        if due > 0:
            burst = due > config.env.num
            status("update", f"{due:,} updates due at the end of the random phase" if burst else "training")
            run.update()
        elif run.evaluation_due():
            status("evaluate", f"evaluating {config.eval.episodes} episodes")
            started = time.monotonic()
            write({**run.evaluate(), "time/evaluation_seconds": time.monotonic() - started})
        elif run.env_steps // config.log_every > run.progress.logged and run.metrics:
            run.progress.logged = run.env_steps // config.log_every
            now = time.monotonic()
            seconds = max(now - rate[0], 1e-9)
            speed = {
                "time/env_steps_per_s": (run.env_steps - rate[1]) / seconds,
                "time/updates_per_s": (run.counters.updates - rate[2]) / seconds,
            }
            rate = now, run.env_steps, run.counters.updates
            write({**named(run.metrics), **counts(run), **speed})
        elif run.env_steps // config.checkpoint.every > run.progress.checkpoints:
            run.progress.checkpoints = run.env_steps // config.checkpoint.every
            run.metrics_length = writer.length
            run.save()
        elif run.env_steps >= config.steps:
            return True
        else:
            status("act", "training" if run.counters.updates else "acting at random to fill the replay")
            for episode in run.tick():
                write({"train/return": episode.total_reward, "train/length": episode.length})
    return False


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """An agent's metrics under the writer's groups: losses under `loss/`, the rest under `learner/`."""
    return {(f"loss/{k}" if k.endswith("_loss") else f"learner/{k}"): float(v) for k, v in metrics.items()}


def counts(run: Run) -> dict[str, float]:
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


def open_run_dir(config: RunConfig, run_dir: Path, resume: bool) -> None:
    """Refuses what would lose or mix data. Raises ValueError or FileNotFoundError with one sentence."""
    exists = (run_dir / configs.CONFIG_FILE).exists()
    if exists and not resume:
        raise ValueError(f"{run_dir} already holds a run; add --resume to continue it, or --run-dir for another")
    if resume and not exists:
        raise FileNotFoundError(f"{run_dir} holds no run to resume (no {configs.CONFIG_FILE}); leave --resume away")
    if resume:
        if differing := configs.differing_keys(configs.load(run_dir), config):
            raise ValueError(f"{run_dir} was started with another config; differing keys: {', '.join(differing)}")
    else:
        run_dir.mkdir(parents=True, exist_ok=True)
        configs.save(config, run_dir)


def train(config: RunConfig, run_dir: Path, resume: bool, console: Console) -> int:
    """Trains to the end or to a clean stop; returns the exit code (130 after Ctrl-C, as a shell expects).

    Raises ValueError, EnvError, OSError or NonFiniteUpdate with one sentence.
    """
    with ExitStack() as stack:
        env = build_env(config, config.env.num, config.seed)
        stack.callback(env.close)
        agent = make_agent(config, env.spec)
        predicted = memory(config, agent)
        open_run_dir(config, run_dir, resume)
        setup_logging(run_dir)
        log.info("event=start config=%s versions=%s", json.dumps(asdict(config)), json.dumps(versions()))
        console.print(
            f"{config.algorithm} on {config.task}: memory when full: "
            + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in predicted.items())
            + f"; run directory {run_dir}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        run = Run(config, run_dir, agent, env)
        if resume and (name := run.restore()) is not None:
            console.print(f"resumed from checkpoint {name}: {run.env_steps:,} env steps", highlight=False)
        resume_length = run.metrics_length if resume else None
        writer = stack.enter_context(MetricsWriter(run_dir, resume_length))
        live = stack.enter_context(LiveView(f"{config.algorithm} on {config.task}", config.steps, console))
        stopped = stack.enter_context(stop_on_signal())
        stack.enter_context(watch(env, config.env.timeout))
        finished = loop(run, writer, live, stopped)
        live.update(env_steps=run.env_steps, updates=run.counters.updates, status="writing the last checkpoint")
        run.metrics_length = writer.length
        run.save()
        live.update(status="done" if finished else "stopped")
        log.info("event=stop finished=%s env_steps=%d updates=%d", finished, run.env_steps, run.counters.updates)
    if finished:
        return 0
    console.print(f"stopped at {run.env_steps:,} env steps; repeat the command with --resume to continue", highlight=False)
    return 130
