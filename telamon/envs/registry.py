"""From an environment's name to a batch of it. Loads an environment library only when one of its names is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from telamon.envs.base import BatchedEnv, EnvError, OnError


@dataclass(frozen=True)
class Backend:
    """A module with `make(name, num_envs, seed, *, action_repeat, on_error, **kwargs)` and `task_names()`."""

    module: str
    library: str | None
    """The top-level package that the module needs; None for none."""
    extra: str | None
    """The pip extra that installs it."""
    example: str

    @property
    def installed(self) -> bool:
        return self.library is None or importlib.util.find_spec(self.library) is not None


BACKENDS = {
    "dmc": Backend("telamon.envs.dmc", "dm_control", "dmc", "dmc:cartpole-swingup"),
    "gym": Backend("telamon.envs.gym", "gymnasium", "gym", "gym:Pendulum-v1"),
    "gymnax": Backend("telamon.envs.jax", "gymnax", "jaxenvs", "gymnax:Pendulum-v1"),
    "envpool": Backend("telamon.envs.envpool", "envpool", "envpool", "envpool:CartpoleSwingup-v1"),
    "counting": Backend("telamon.envs.counting", None, None, "counting:continuous"),
}


def make_env(
    env_id: str,
    num_envs: int,
    seed: int,
    *,
    action_repeat: int | None = None,
    on_error: OnError = "stop",
    **kwargs: Any,
) -> BatchedEnv:
    """A batch of `num_envs` environments that advance in lockstep.

    env_id: BACKEND:NAME, or PACKAGE.MODULE:CALLABLE or PATH.py:CALLABLE for a callable that returns a gymnasium.Env.
    seed: each environment's own seed follows from it and the environment's index.
    action_repeat: None for the backend's usual one (2 for dm_control tasks, else 1).
    kwargs: whatever the environment itself takes.

    Raises EnvError for an unknown name, a library that is not installed, or an environment that cannot work.
    """
    for name, value, low in (("num_envs", num_envs, 1), ("seed", seed, 0), ("env.action_repeat", action_repeat, 1)):
        if value is not None and value < low:
            raise ValueError(f"{name} is {value}; it must be at least {low}")
    prefix, colon, name = env_id.partition(":")
    try:
        if prefix in BACKENDS:
            module = _load(BACKENDS[prefix])
            try:
                return module.make(
                    name, num_envs, seed, action_repeat=action_repeat, on_error=on_error, **kwargs
                )
            except KeyError as error:
                raise EnvError(_unknown(env_id)) from error
        if not colon:
            raise EnvError(_unknown(env_id))
        factory = _find(env_id)
        gym = _load(BACKENDS["gym"])
        return gym.make_own(
            factory, env_id, num_envs, seed, action_repeat=action_repeat, on_error=on_error, **kwargs
        )
    except EnvError as error:
        message = str(error)
        raise EnvError(message if env_id in message else f"{env_id}: {message}") from error
