"""The peers' case: 24 observations, 6 actions; batches of each agent's own size."""

from __future__ import annotations

import argparse

import numpy as np

from telamon.agents.base import Agent
from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import WIDTHS, DreamerV3Config, size
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import PRESETS, TDMPC2Config
from telamon.data import ActionSpec, ArraySpec, EnvSpec, Window, as_dtype

OBS, ACTION = 24, 6
IMAGE = (64, 64, 3)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that both benchmarks have."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument(
        "--preset", nargs="+", default=["1", "5", "size1m", "size12m"], choices=[*map(str, PRESETS), *WIDTHS],
        help="TD-MPC2's sizes in millions of parameters, DreamerV3's by name",
    )  # fmt: skip
    p.add_argument("--recipe", choices=("paper", "latest"), default="paper")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--obs", type=int, default=OBS)
    p.add_argument("--action", type=int, default=ACTION)
    p.add_argument("--image", action="store_true", help=f"an image {IMAGE} instead of a vector (DreamerV3)")
    p.add_argument("--repetitions", type=int, default=20)
    return p


def agent(options: argparse.Namespace, preset: str, **config: object) -> Agent:
    """`config`: further fields of TD-MPC2's."""
    obs = ArraySpec(IMAGE, "uint8") if options.image else ArraySpec((options.obs,))
    spec = EnvSpec("bench", (("obs", obs),), ActionSpec((options.action,)), 500, 2)
    shared = {"recipe": options.recipe, "dtype": options.dtype}
    if preset in WIDTHS:
        return DreamerV3(DreamerV3Config(**size(preset), **shared), spec)
    sizes = {str(name): values for name, values in PRESETS.items()}[preset]
    return TDMPC2(TDMPC2Config(**sizes, **shared, **config), spec)


def window(agent: Agent, seed: int = 0) -> Window:
    """A batch of random rows, with zeros for latents."""
    rng = np.random.default_rng(seed)
    spec = agent.window_spec
    shape = (agent.batch_size, spec.length)
    flags = np.zeros(shape, bool)
    served = (agent.batch_size, spec.context)
    return Window(
        env_id=np.zeros(shape[0], np.int32),
        first_row=np.zeros(shape[0], np.int64),
        obs={k: rng.standard_normal((*shape, *a.shape), np.float32).astype(a.dtype) for k, a in agent.env.obs},
        reward=rng.uniform(0, 1, shape).astype(np.float32),
        is_first=flags, is_last=flags, is_terminal=flags,
        action=rng.uniform(-1, 1, (*shape, *agent.env.action.shape)).astype(np.float32),
        latents={k: np.zeros((*served, *a.shape), as_dtype(a.dtype)) for k, a in agent.row_spec.latents},
    )  # fmt: skip
