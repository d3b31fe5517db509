"""Evaluation: fresh environments, keys of their own, `mode="eval"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from telamon.agents.base import Agent, PyTree
from telamon.envs.base import BatchedEnv, map_action

FILM_FRAMES = 1000
"""Pictures of a film at most: 384 x 384 pixels each, they are 440 MB until they are encoded."""


class Stopped(Exception):
    """An evaluation was given up; it had changed nothing."""


class Evaluation(NamedTuple):
    """One finished episode per environment."""

    total_reward: np.ndarray
    """float64 [E]."""
    length: np.ndarray
    """int64 [E] agent steps."""


class Film:
    """Collects the pictures of environment 0's episode: `on_tick` of `evaluate`.

    most: pictures of the longest film; what comes after them is not shown.
    """

    def __init__(self, most: int = FILM_FRAMES) -> None:
        self.frames: list[np.ndarray] = []
        """Each uint8 [height, width, 3]."""
        self._most = most

    def __call__(self, env: BatchedEnv) -> None:
        """Raises NotImplementedError where the environment has no picture."""
        if len(self.frames) < self._most:
            self.frames.append(env.render(0))


def evaluate(
    agent: Agent,
    act: Any,
    params: PyTree,
    env: BatchedEnv,
    key: jax.Array,
    on_tick: Callable[[BatchedEnv], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Runs the first episode of every environment of `env`, which must be fresh. Raises Stopped once `stopped()`.

    act: from `collector.jit_act(agent, env.num_envs, "eval")`, made once so that evaluations share its compilation.
    on_tick: called for every observation of environment 0's episode, for pictures.
    """
    step, carry = env.reset(), agent.initial_carry(env.num_envs)
    total, length = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    running = np.ones(env.num_envs, bool)
    tick = 0
    if on_tick is not None:
        on_tick(env)
    while running.any():
        if stopped():
            raise Stopped
        action, carry, _ = act(params, carry, step.obs, step.is_first, key, np.uint32(tick))
        step = env.step(map_action(np.array, action))
        tick += 1
        if on_tick is not None and running[0]:
            on_tick(env)
        # a rebuilt environment begins anew, as its reset row says
        total = np.where(running, np.where(step.is_first, 0, total + step.reward), total)
        length = np.where(running, np.where(step.is_first, 0, length + 1), length)
        running &= ~step.is_last
    return Evaluation(total, length)
