"""Whole runs in this process: `deploy.local` with a probe agent on counting environments, stopped where a test says."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from actors import collector
from deploy import local
from deploy.config import CheckpointConfig, EnvConfig, EvalConfig, RunConfig
from learner import update
from telamon.agents.base import Agent
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.data import EnvSpec, Schedule, TrainRatio, Window
from telamon.envs import counting
from telamon.telemetry.writer import WALL_CLOCK
from tests.probe import ACTION_SIZE, LENGTH, Probe, Remembering


def compiled_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` with one result per arguments, which is compiled fast rather than to fast code."""

    @lru_cache
    def build(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "jit", partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0}))
            return make(*args)

    return build


make_update = compiled_once(update.make_update)
make_report = compiled_once(update.make_report)
jit_act = compiled_once(collector.jit_act)

TINY = TDMPC2Config(
    enc_dim=16, mlp_dim=16, latent_dim=16, num_enc_layers=1, num_q=2, num_bins=21, horizon=2, batch_size=8,
    num_samples=16, num_elites=4, num_pi_trajs=4, iterations=1, seed_steps=30,
)  # fmt: skip
"""A TD-MPC2 that compiles and runs as fast as one can."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the run does can catch it."""


Stopped = Callable[[local.Run], bool]
"""Asked once a turn, and once a tick of an evaluation."""


def never(run: local.Run) -> bool:
    return False


def stop(run: local.Run) -> bool:
    return True


def kill(run: local.Run) -> bool:
    raise Killed


def after(turns: int, then: Stopped) -> Stopped:
    """Lets `turns` turns pass and then answers with `then`."""
    left = iter(range(turns))
    return lambda run: next(left, None) is None and then(run)


def once(reached: Callable[[local.Run], bool], then: Stopped) -> Stopped:
    """Answers with `then` once the run has `reached` a state."""
    return lambda run: reached(run) and then(run)


class Harness:
    """Makes runs of one kind; each `run` is what a new process would do. Changes of other modules end with the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: RunConfig, make_agent: Callable[[EnvSpec], Agent]):
        # each Run jits anew; here all share what was compiled once
        monkeypatch.setattr(update, "make_update", make_update)
        monkeypatch.setattr(update, "make_report", make_report)
        monkeypatch.setattr(collector, "jit_act", jit_act)
        monkeypatch.setattr(local, "jit_act", jit_act)
        self.config, self.make_agent = config, make_agent

    @contextmanager
    def open(self, run_dir: Path, **changed: Any) -> Iterator[local.Run]:
        """A run that has not begun."""
        config = replace(self.config, **changed)
        env = local.build_env(config, config.env.num, config.seed)
        run_dir.mkdir(exist_ok=True)
        agent = self.make_agent(env.spec)
        with local.open_replay(config, run_dir, agent) as replay:
            yield local.Run(config, run_dir, agent, env, replay)
        env.close()

    def run(self, run_dir: Path, resume: bool = False, stopped: Stopped = never, **changed: Any) -> local.Run:
        """Executes a run and returns it as it stands then; `stopped` may raise Killed."""
        with self.open(run_dir, **changed) as run:
            try:
                local.execute(run, resume, Console(file=io.StringIO()), lambda: stopped(run))
            except Killed:
                pass
            return run


def probing(
    monkeypatch: pytest.MonkeyPatch,
    *,
    lengths: Sequence[int] = (7,),
    num_envs: int = 1,
    random: int = 20,
    every: int = 25,
    env: dict[str, Any] | None = None,
    agent: dict[str, Any] | None = None,
    kind: type[Probe] = Probe,
    **config: Any,
) -> Harness:
    """Runs of a probe on counting environments: `random` ticks of a random phase, a checkpoint `every` steps.

    env, agent, config: further arguments of the environments, the Probe and the RunConfig. kind: of probe; Remembering
    has no random phase and starts with a quarter of `random` windows.
    """
    options = {"lengths": lengths, "action_size": ACTION_SIZE, **(env or {})}
    make = lambda name, n, seed, **kwargs: counting.make("continuous", n, seed, **{**kwargs, **options})
    monkeypatch.setattr(local, "make_env", make)
    plans = {
        Probe: Schedule("transitions", start=num_envs * random, lead=num_envs),
        Remembering: TrainRatio(0.6, start=random // 4, window=LENGTH + 1),
    }
    defaults = {
        "steps": 60, "log_every": 5, "env": EnvConfig(num=num_envs), "eval": EvalConfig(every=0),
        "checkpoint": CheckpointConfig(every=every),
    }  # fmt: skip
    return Harness(
        monkeypatch,
        RunConfig("tdmpc2", "counting:continuous", **{**defaults, **config}),
        lambda spec: kind(spec, **{"plan": plans[kind], **(agent or {})}),
    )


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the wall clock says."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)} for row in rows]


def rows(run: local.Run) -> list[dict[str, np.ndarray]]:
    """Every row that the replay holds, by environment and column."""
    ring = run.replay._content.ring
    return [{name: ring.held(name, env) for name in ring.specs} for env in range(ring.num_envs)]


def next_windows(run: local.Run) -> Window:
    """What training would be served next; the replay stays as it is."""
    copied = copy.copy(run.replay)  # its lock cannot be copied, and is not needed
    copied._content, copied._rngs = copy.deepcopy((run.replay._content, run.replay._rngs))
    return copied.sample(64)


def assert_same(run: local.Run, twin: local.Run) -> None:
    """Two finished runs are equal bit for bit: metrics, parameters, counters, replay, and what is drawn next."""
    assert lines(run.run_dir) == lines(twin.run_dir)
    for a, b in zip(jax.tree.leaves(run.state), jax.tree.leaves(twin.state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert run.counters == twin.counters
    assert run.progress == twin.progress
    assert run.clock == twin.clock
    for ours, theirs in zip(rows(run), rows(twin), strict=True):
        for name in ours:
            assert ours[name].tobytes() == theirs[name].tobytes(), name
    # copies, so that each may be compared again
    one, two = next_windows(run), next_windows(twin)
    assert one.first_row.tobytes() == two.first_row.tobytes()
    assert one.env_id.tobytes() == two.env_id.tobytes()
