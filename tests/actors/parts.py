"""What rollout workers of tests are made of: a module of its own, which their processes import too."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from actors.worker import EvalSetup, WorkerSetup
from telamon.data import Rows, Schedule
from telamon.envs import counting
from telamon.envs.base import BatchedEnv
from telamon.replay import TableSpec
from telamon.rpc.security import Endpoint
from tests.probe import ACTION_SIZE, Probe, State

PLAN = Schedule("transitions", 0)


def make_env(seed: int, num_envs: int = 2, **options: Any) -> BatchedEnv:
    return counting.make("continuous", num_envs, seed, **{"lengths": (7,), "action_size": ACTION_SIZE, **options})


def make_agent(**options: Any) -> Probe:
    return Probe(make_env(0, 1).spec, PLAN, **options)


def params(updates: int) -> State:
    """Parameters that a Probe shows in its actions."""
    return State(jnp.int32(updates), jnp.float32(0.5))


def on_host(updates: int) -> State:
    """The same as numpy, as a learner publishes them."""
    return State(np.array(updates, np.int32), np.array(0.5, np.float32))


def table_spec(capacity: int = 1000, max_envs: int = 16) -> TableSpec:
    agent = make_agent()
    return TableSpec(agent.row_spec, agent.window_spec, capacity, max_envs)


def worker_setup(endpoint: Endpoint, worker: int = 0, attempt: int = 0, **changed: Any) -> WorkerSetup:
    """`env`: options of its environments; `changed`: other fields."""
    env = changed.pop("env", {})
    values = {
        "seed": 3, "make_agent": make_agent, "make_env": partial(make_env, **env), "endpoint": endpoint, "table": "t",
        "spec": table_spec(), "buffer_ticks": 8, "unroll_ticks": 8, "acts_at_random": True, "env_timeout": 60.0,
        **changed,
    }  # fmt: skip
    return WorkerSetup(f"actor-{worker}", (worker, attempt), **values)


def eval_setup(**changed: Any) -> EvalSetup:
    env = changed.pop("env", {})
    values = {"name": "evaluator", "seed": 3, "make_agent": make_agent, "env_timeout": 60.0, **changed}
    return EvalSetup(make_env=partial(make_env, **{"num_envs": 3, **env}), **values)


class Table:
    """A replay that only takes rows."""

    def __init__(self) -> None:
        self.ticks: list[Rows] = []

    def append(self, rows: Rows, timeout: float | None = None) -> None:
        self.ticks.append(rows)

    def flush(self, timeout: float | None = None) -> None:
        pass

    def columns(self, name: str) -> np.ndarray:
        """[ticks, E, ...]."""
        return np.stack([getattr(rows, name) for rows in self.ticks])
