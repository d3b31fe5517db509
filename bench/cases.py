"""The peers' case: 24 observations, 6 actions, episodes of 500 steps, batches of 256."""

from __future__ import annotations

import argparse

import numpy as np

from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import PRESETS, TDMPC2Config
from telamon.data import ActionSpec, ArraySpec, EnvSpec, Window

OBS, ACTION = 24, 6


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that both benchmarks have."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--preset", type=int, nargs="+", default=[1, 5], help="sizes in millions of parameters")
    p.add_argument("--recipe", choices=("paper", "latest"), default="paper")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--obs", type=int, default=OBS)
    p.add_argument("--action", type=int, default=ACTION)
    p.add_argument("--repetitions", type=int, default=20)
    return p


def agent(options: argparse.Namespace, preset: int, **config: object) -> TDMPC2:
    spec = EnvSpec("bench", (("obs", ArraySpec((options.obs,))),), ActionSpec((options.action,)), 500, 2)
    sizes = {**PRESETS[preset], "recipe": options.recipe, "dtype": options.dtype, **config}
    return TDMPC2(TDMPC2Config(**sizes), spec)


def window(agent: TDMPC2, seed: int = 0) -> Window:
    """A batch of random rows."""
    rng = np.random.default_rng(seed)
    shape = (agent.batch_size, agent.window_spec.length)
    flags = np.zeros(shape, bool)
    return Window(
        env_id=np.zeros(shape[0], np.int32),
        first_row=np.zeros(shape[0], np.int64),
        obs={k: rng.standard_normal((*shape, *a.shape), np.float32) for k, a in agent.env.obs},
        reward=rng.uniform(0, 1, shape).astype(np.float32),
        is_first=flags, is_last=flags, is_terminal=flags,
        action=rng.uniform(-1, 1, (*shape, *agent.env.action.shape)).astype(np.float32),
    )  # fmt: skip
