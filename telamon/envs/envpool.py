"""envpool tasks, stepped in C++ as one batch: `envpool:CartpoleSwingup-v1`, any id that envpool lists.

envpool's own `frame_skip` counts physics substeps and takes the reward once, so an action is repeated by calling again.
Its environments cannot be saved; after a resume they start new episodes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import envpool
import numpy as np
from envpool.registration import registry

from telamon.data import EnvSpec
from telamon.envs.base import DM_CONTROL_REPEAT, Action, Bounds, EnvError, OnError, Step, UnknownEnv
from telamon.envs.checks import Guard, blank, check_action, env_seed, unsound
from telamon.envs.gym import BARE_KEY, ToNative, action_of, obs_of

_NO_LIMIT = 2**31 - 1
"""How envpool spells "no time limit"."""


def task_names() -> list[str]:
    """All ids of envpool."""
    return envpool.list_all_envs()


def make(
    name: str, num_envs: int, seed: int, *, action_repeat: int | None = None, on_error: OnError = "stop", **kwargs: Any
) -> EnvPool:
    """A batch of one envpool id; `kwargs` are those of `envpool.make`. Raises UnknownEnv, EnvError."""
    if name not in registry.specs:
        raise UnknownEnv(name)
    seeds = [env_seed(seed, i) for i in range(num_envs)]
    with warnings.catch_warnings():  # it builds float32 spaces from float64 limits, and gymnasium says so
        warnings.filterwarnings("ignore", ".*precision lowered by casting.*")
        try:
            pool = envpool.make_gymnasium(name, num_envs=num_envs, seed=seeds, **kwargs)
        except (TypeError, ValueError) as error:  # an option, or a value of one, that it does not take: it says which
            raise EnvError(str(error)) from error
        action_spec, bounds, to_native = action_of(pool.action_space)
        obs = obs_of(pool.observation_space)
    if pool.config.get("max_num_players", 1) != 1:
        raise EnvError(f"envpool:{name} has {pool.config['max_num_players']} players; one is supported")
    usual = DM_CONTROL_REPEAT if registry.specs[name][0] == "envpool.mujoco.dmc" else 1
    repeat = usual if action_repeat is None else action_repeat
    limit = pool.config["max_episode_steps"]
    spec = EnvSpec(
        id=f"envpool:{name}",
        obs=obs,
        action=action_spec,
        episode_length=None if limit == _NO_LIMIT else math.ceil(limit / repeat),
        action_repeat=repeat,
    )
    return EnvPool(spec, pool, to_native, bounds, num_envs, on_error)


class EnvPool:
    """A `BatchedEnv` over an envpool in synchronous mode."""

    def __init__(
        self,
        spec: EnvSpec,
        pool: Any,
        to_native: ToNative,
        bounds: Bounds,
        num_envs: int,
        on_error: OnError,
    ) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.bounds = bounds
        self.active: int | None = None
        self.ticks = 0
        self._pool = pool
        self._to_native = to_native
        self._guard = Guard(spec, num_envs, on_error)
        self._last: np.ndarray | None = None

    def reset(self) -> Step:
        rows = blank(self.spec, self.num_envs)
        self._restart(np.arange(self.num_envs), rows)
        return self._settled(rows)

    def step(self, action: Action) -> Step:
        if self._last is None:
            raise ValueError(f"{self.spec.id} was stepped before its first reset; call reset() first")
        check_action(self.spec, self.num_envs, action)
        rows = blank(self.spec, self.num_envs)
        fresh = np.flatnonzero(self._last)
        if fresh.size:
            self._restart(fresh, rows)
        native = self._to_native(action)
        going = np.flatnonzero(~self._last)
        for _ in range(self.spec.action_repeat):
            if not going.size:
                break
            obs, reward, terminated, truncated, info = self._pool.step(native[going], going)
            at = info["env_id"]
            self._put(rows, at, obs)
            rows.reward[at] += reward
            rows.is_last[at] = terminated | truncated
            rows.is_terminal[at] = terminated
            going = going[~rows.is_last[going]]
        return self._settled(rows)

    def _restart(self, index: np.ndarray, rows: Step) -> None:
        """Starts new episodes: their rows are is_first, with reward 0 (envpool repeats the last one's)."""
        obs, info = self._pool.reset(index)
        at = info["env_id"]
        self._put(rows, at, obs)
        rows.reward[at], rows.is_first[at], rows.is_last[at], rows.is_terminal[at] = 0, True, False, False

    def _put(self, rows: Step, at: np.ndarray, obs: Any) -> None:
        obs = obs if isinstance(obs, Mapping) else {BARE_KEY: obs}
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes inf, which `unsound` then names
            for key, _ in self.spec.obs:
                rows.obs[key][at] = obs[key]

    def _settled(self, rows: Step) -> Step:
        """The rows of a tick, once every broken environment has stopped the run or started a new episode."""
        while faults := unsound(rows, self.spec):
            for i, what in faults:
                self._guard.fault(i, 0 if rows.is_first[i] else int(self._guard.steps[i]) + 1, what, None)
                self._restart(np.array([i]), rows)
        self._guard.count(rows)
        self.ticks += 1
        self._last = rows.is_last
        return rows

    def get_state(self) -> None:
        return None

    def set_state(self, state: Mapping[str, np.ndarray]) -> Step:
        raise NotImplementedError(f"{self.spec.id} cannot be restored: envpool has no way to save; reset it instead")

    def render(self, index: int = 0) -> np.ndarray:
        try:
            return self._pool.render(index)[0]
        except RuntimeError as error:  # made without a render mode
            raise NotImplementedError(
                f"{self.spec.id} gives no pictures; make it with render_mode='rgb_array'"
            ) from error

    def close(self) -> None:
        self._pool.close()
