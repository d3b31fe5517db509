"""CPU microseconds per agent step of each backend, adapter included. One JSON line per environment.

python bench/envs.py [ENV ...]
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from telamon.envs.base import random_action
from telamon.envs.registry import make_env
from telamon.keys import Stream, generator

DEFAULT = (
    "dmc:cartpole-swingup", "dmc:walker-walk", "dmc:humanoid-run",
    "envpool:CartpoleSwingup-v1", "envpool:WalkerWalk-v1", "envpool:HumanoidRun-v1",
    "gym:Pendulum-v1", "gymnax:Pendulum-v1", "examples/point_mass_env.py:make_env",
)  # fmt: skip
NUM_ENVS, WARM_UP, TICKS = 16, 20, 200


def measure(env_id: str) -> dict[str, object]:
    """Steps 16 environments with random actions."""
    env = make_env(env_id, NUM_ENVS, seed=0)
    rng = generator(0, Stream.RANDOM_ACTION)
    actions = [random_action(env.spec.action, NUM_ENVS, rng) for _ in range(WARM_UP + TICKS)]
    env.reset()
    for action in actions[:WARM_UP]:
        env.step(action)
    wall, cpu = time.perf_counter(), time.process_time()
    for action in actions[WARM_UP:]:
        env.step(action)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    saves = env.get_state() is not None
    env.close()
    scale = 1e6 / (TICKS * NUM_ENVS)
    return {
        "env": env_id, "num_envs": NUM_ENVS, "action_repeat": env.spec.action_repeat,
        "cpu_us_per_agent_step": round(cpu * scale, 1), "wall_us_per_agent_step": round(wall * scale, 1),
        "state_saved": saves, "numpy": np.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    for env_id in sys.argv[1:] or DEFAULT:
        print(json.dumps(measure(env_id)), flush=True)
