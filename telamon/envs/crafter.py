"""Crafter: `crafter:reward` and, without its reward, `crafter:noreward` (arXiv:2109.06780).

Its environments cannot be saved, and a seed does not repeat them: they go through sets of objects in an order that
differs from process to process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import crafter
import numpy as np

from telamon.data import ActionSpec, ArraySpec, EnvSpec
from telamon.envs.base import Action, OnError, UnknownEnv
from telamon.envs.checks import IMAGE_SIZES, check_option, env_seed
from telamon.envs.host import HostEnvs, Transition

NAMES = ("reward", "noreward")
"""Whether achievements and health pay."""

LENGTH = 10_000
"""Steps after which an episode is cut."""


def task_names() -> list[str]:
    """With and without a reward."""
    return list(NAMES)


def make(
    name: str,
    num_envs: int,
    seed: int,
    *,
    action_repeat: int | None = None,
    on_error: OnError = "stop",
    size: int = 64,
) -> HostEnvs:
    """A batch of Crafter's worlds. Raises UnknownEnv, EnvError. size: pixels per side of the image."""
    if name not in NAMES:
        raise UnknownEnv(name)
    check_option("size", size, IMAGE_SIZES)
    repeat = 1 if action_repeat is None else action_repeat

    def one(index: int, rebuild: int) -> Crafter:
        return Crafter(
            crafter.Env(size=(size, size), reward=name == "reward", length=LENGTH, seed=env_seed(seed, index, rebuild))
        )

    spec = EnvSpec(
        id=f"crafter:{name}",
        obs=(("image", ArraySpec((size, size, 3), "uint8")),),
        action=ActionSpec((), (len(crafter.Env(seed=0).action_names),)),
        episode_length=math.ceil(LENGTH / repeat),
        action_repeat=repeat,
    )
    return HostEnvs(spec, one, num_envs, on_error, {})


class Crafter:
    """One world (`OneEnv`). A death terminates, the end of the day count truncates."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._image = np.zeros(0, np.uint8)

    def reset(self) -> None:
        self._image = self._env.reset()

    def step(self, action: Action) -> Transition:
        assert isinstance(action, np.ndarray | np.integer)
        self._image, reward, done, info = self._env.step(int(action))
        return Transition(float(reward), done, done and info["discount"] == 0)

    def observe(self) -> dict[str, np.ndarray]:
        return {"image": self._image}

    def get_state(self) -> None:
        return None

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        raise NotImplementedError("a world of Crafter cannot be restored; reset it instead")

    def render(self) -> np.ndarray:
        return np.asarray(self._env.render((384, 384)))

    def close(self) -> None:
        pass
