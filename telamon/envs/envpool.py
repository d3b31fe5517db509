"""envpool tasks, stepped in C++ as one batch: `envpool:CartpoleSwingup-v1`, any id that envpool lists.

envpool's own `frame_skip` counts physics substeps and takes the reward once, so an action is repeated by calling again;
but an Atari game's counts frames, sums their rewards and shows the larger of the last two, so there it is the repeat.
Its environments cannot be saved; after a resume they start new episodes.

Atari games have the defaults of `atari:` (`_ATARI`). They differ from those in: OpenCV's area filter makes the picture
smaller; at least one no-op passes before an episode; the time limit (`max_episode_steps`, in agent steps) truncates.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import envpool
import numpy as np
from envpool.registration import registry

from telamon.data import ArraySpec, EnvSpec
from telamon.envs.base import ATARI_REPEAT, DM_CONTROL_REPEAT, Action, Bounds, EnvError, OnError, Step, UnknownEnv
from telamon.envs.checks import Guard, blank, check_action, check_option, env_seed, unsound
from telamon.envs.gym import BARE_KEY, ToNative, action_of, obs_of

_NO_LIMIT = 2**31 - 1
"""How envpool spells "no time limit"."""


_ATARI = {
    "stack_num": 1,
    "img_height": 64,
    "img_width": 64,
    "gray_scale": False,
    "noop_max": 1,
    "use_fire_reset": False,
    "full_action_space": True,
    "repeat_action_probability": 0.25,
}

_REPEATS = {"envpool.mujoco.dmc": DM_CONTROL_REPEAT, "envpool.atari": ATARI_REPEAT}
"""The usual action repeat by family."""


def task_names() -> list[str]:
    """All ids of envpool."""
    return envpool.list_all_envs()


def make(
    name: str, num_envs: int, seed: int, *, action_repeat: int | None = None, on_error: OnError = "stop", **kwargs: Any
) -> EnvPool:
    """A batch of one envpool id; `kwargs` are those of `envpool.make`. Raises UnknownEnv, EnvError."""
    if name not in registry.specs:
        raise UnknownEnv(name)
    family = registry.specs[name][0]
    is_atari = family == "envpool.atari"
    repeat = _REPEATS.get(family, 1) if action_repeat is None else action_repeat
    if is_atari:
        if "frame_skip" in kwargs:
            raise EnvError("its option frame_skip is the action repeat; set env.action_repeat instead")
        kwargs = {**_ATARI, **kwargs, "frame_skip": repeat}
        check_option("noop_max", kwargs["noop_max"], range(1, 1000))  # with 0, envpool ends the process
    seeds = [env_seed(seed, i) for i in range(num_envs)]
    with warnings.catch_warnings():  # it builds float32 spaces from float64 limits, and gymnasium says so
        warnings.filterwarnings("ignore", ".*precision lowered by casting.*")
        try:
            pool = envpool.make_gymnasium(name, num_envs=num_envs, seed=seeds, **kwargs)
        except (TypeError, ValueError) as error:  # an option, or a value of one, that it does not take: it says which
            raise EnvError(str(error)) from error
        action_spec, bounds, to_native = action_of(pool.action_space)
        obs = tuple((key, _images_last(array)) for key, array in obs_of(pool.observation_space))
    if pool.config.get("max_num_players", 1) != 1:
        raise EnvError(f"envpool:{name} has {pool.config['max_num_players']} players; one is supported")
    calls = 1 if is_atari else repeat
    limit = pool.config["max_episode_steps"]
    spec = EnvSpec(
        id=f"envpool:{name}",
        obs=obs,
        action=action_spec,
        episode_length=None if limit == _NO_LIMIT else math.ceil(limit / calls),
        action_repeat=repeat,
    )
    return EnvPool(spec, pool, to_native, bounds, num_envs, on_error, calls)


def _images_last(array: ArraySpec) -> ArraySpec:
    """An image's array with its channels last; envpool's Atari and ViZDoom put them first, its other families last."""
    if array.dtype != "uint8" or len(array.shape) != 3 or array.shape[0] >= array.shape[2]:
        return array
    channels, height, width = array.shape
    return replace(array, shape=(height, width, channels))


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
        calls: int,
    ) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.bounds = bounds
        self.active: int | None = None
        self.ticks = 0
        self._pool = pool
        self._to_native = to_native
        self._calls = calls
        self._guard = Guard(spec, num_envs, on_error)
        self._last: np.ndarray | None = None

    @property
    def refused_rows(self) -> int:
        return self._guard.refused_rows

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
        for _ in range(self._calls):
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
            for key, array in self.spec.obs:
                turned = obs[key].shape[1:] != array.shape  # channels first, see `_images_last`
                rows.obs[key][at] = np.moveaxis(obs[key], 1, -1) if turned else obs[key]

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
