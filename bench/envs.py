"""CPU microseconds per agent step of each backend, adapter included. One JSON line per environment.

python bench/envs.py [ENV ...]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping

import numpy as np

from telamon.envs.base import random_action
from telamon.envs.registry import make_env
from telamon.keys import Stream, generator

DEFAULT: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("dmc:cartpole-swingup", {}), ("dmc:walker-walk", {}), ("dmc:humanoid-run", {}),
    ("dmcpixels:walker-walk", {}), ("dmcpixels:walker-walk", {"fast_render": True}),
    ("envpool:CartpoleSwingup-v1", {}), ("envpool:WalkerWalk-v1", {}), ("envpool:HumanoidRun-v1", {}),
    ("atari:pong", {}), ("atari:pong", {"size": 96, "gray": True}), ("envpool:Pong-v5", {}),
    ("gym:Pendulum-v1", {}), ("examples/point_mass_env.py:make_env", {}), ("examples/dict_env.py:make_env", {}),
    ("gymnax:Pendulum-v1", {}), ("gymnax:Breakout-MinAtar", {}), ("gymnax:Breakout-MinAtar", {"image": True}),
    ("crafter:reward", {}),
)  # fmt: skip
NUM_ENVS, WARM_UP, TICKS = 16, 20, 200
SECONDS = 5.0
"""CPU time after which fewer ticks do."""


def measure(env_id: str, options: Mapping[str, object]) -> dict[str, object]:
    """Steps 16 environments with random actions."""
    env = make_env(env_id, NUM_ENVS, seed=0, **options)
    rng = generator(0, Stream.RANDOM_ACTION)
    actions = [random_action(env.spec.action, NUM_ENVS, rng) for _ in range(WARM_UP + TICKS)]
    env.reset()
    for action in actions[:WARM_UP]:
        env.step(action)
    wall, cpu, ticks = time.perf_counter(), time.process_time(), 0
    for action in actions[WARM_UP:]:
        env.step(action)
        ticks += 1
        if time.process_time() - cpu > SECONDS:
            break
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    saves = env.get_state() is not None
    env.close()
    scale = 1e6 / (ticks * NUM_ENVS)
    return {
        "env": env_id, "options": options, "num_envs": NUM_ENVS, "action_repeat": env.spec.action_repeat,
        "cpu_us_per_agent_step": round(cpu * scale, 1), "wall_us_per_agent_step": round(wall * scale, 1),
        "state_saved": saves, "numpy": np.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    for env_id, options in [(a, {}) for a in sys.argv[1:]] or DEFAULT:
        print(json.dumps(measure(env_id, options)), flush=True)
