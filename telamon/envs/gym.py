"""Gymnasium environments: `gym:Pendulum-v1`, any registered id, and callables of the user's own that return one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from telamon.data import BARE_ACTION, ActionSpec, ArraySpec, EnvSpec
from telamon.envs.base import Action, ActionPart, Bounds, EnvError, OnError, UnknownEnv
from telamon.envs.checks import LOG_PREFIX, box_action, env_seed, obs_array, to_bounds
from telamon.envs.host import HostEnvs, Transition

BARE_KEY = "obs"
"""The key of an observation that is not a Dict."""

GymEnv = gymnasium.Env[Any, Any]

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def task_names() -> list[str]:
    """All ids registered with gymnasium."""
    return list(gymnasium.registry)


def make(
    name: str, num_envs: int, seed: int, *, action_repeat: int | None = None, on_error: OnError = "stop", **kwargs: Any
) -> HostEnvs:
    """A batch of one registered id; `kwargs` are those of `gymnasium.make`. Raises UnknownEnv, EnvError."""

    def build() -> GymEnv:
        return gymnasium.make(name, disable_env_checker=True, **{**_pictures(name), **kwargs})

    try:
        return _batch(f"gym:{name}", build, num_envs, seed, action_repeat, on_error)
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownEnv(name) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise EnvError(str(error)) from error
    except gymnasium.error.Error as error:  # a missing dependency, for the most part: gymnasium says which
        raise EnvError(str(error)) from error


def make_own(
    factory: Callable[..., Any],
    env_id: str,
    num_envs: int,
    seed: int,
    *,
    action_repeat: int | None = None,
    on_error: OnError = "stop",
    **kwargs: Any,
) -> HostEnvs:
    """A batch of what `factory(**kwargs)` returns, called once per environment. Raises EnvError."""

    def build() -> Any:
        try:
            return factory(**kwargs)
        except Exception as error:  # whatever a user's callable raises: it is named and chained
            raise EnvError(f"{env_id} raised {type(error).__name__}: {error}") from error

    return _batch(env_id, build, num_envs, seed, action_repeat, on_error)


def _pictures(name: str) -> dict[str, str]:
    """The keyword that makes `render` give pictures, where the environment has any."""
    entry = gymnasium.spec(name).entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    modes = getattr(creator, "metadata", {}).get("render_modes", ())
    return {"render_mode": "rgb_array"} if "rgb_array" in modes else {}


def _batch(
    env_id: str, build: Callable[[], Any], num_envs: int, seed: int, action_repeat: int | None, on_error: OnError
) -> HostEnvs:
    first = build()
    if not isinstance(first, gymnasium.Env):
        kind = type(first)
        raise EnvError(
            f"{env_id} gave a {kind.__module__}.{kind.__qualname__}, not a gymnasium.Env, so termination cannot be "
            "told from truncation; derive it from gymnasium.Env"
        )
    repeat = 1 if action_repeat is None else action_repeat
    limit = time_limit(first)
    action_spec, bounds, _ = action_of(first.action_space)
    spec = EnvSpec(
        id=env_id,
        obs=obs_of(first.observation_space),
        action=action_spec,
        episode_length=None if limit is None else math.ceil(limit / repeat),
        action_repeat=repeat,
    )

    def one(index: int, rebuild: int) -> Gym:
        # The first is used, not thrown away: an environment may own a robot, a port or a license.
        return Gym(first if (index, rebuild) == (0, 0) else build(), env_seed(seed, index, rebuild))

    return HostEnvs(spec, one, num_envs, on_error, bounds)


def time_limit(env: GymEnv) -> int | None:
    """Environment steps after which a TimeLimit wrapper truncates; None without one."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            return env._max_episode_steps  # has no public name
        env = env.env
    return None


def obs_of(space: spaces.Space[Any]) -> tuple[tuple[str, ArraySpec], ...]:
    """(key, array) per entry of an observation space, in its own order. Raises EnvError for what has no fixed shape."""
    entries = space.spaces if isinstance(space, spaces.Dict) else {BARE_KEY: space}
    entries = {key: entry for key, entry in entries.items() if not key.startswith(LOG_PREFIX)}
    if not entries:
        raise EnvError("the observation is an empty Dict: there is nothing to learn from")
    return tuple((key, _leaf(key, entry)) for key, entry in entries.items())


def _leaf(key: str, space: spaces.Space[Any]) -> ArraySpec:
    if not isinstance(space, _LEAVES):
        raise EnvError(
            f"observation {key!r} is a {type(space).__name__} space; Box, Discrete, MultiDiscrete, MultiBinary or one "
            "Dict of these can be stored: flatten it with gymnasium.wrappers.FlattenObservation"
        )
    shape = space.shape or ()  # typed as optional, for spaces that are none of these
    if 0 in shape:
        raise EnvError(f"observation {key!r} is an empty Box of shape {shape}: there is nothing to learn from")
    return obs_array(key, shape, space.dtype, *_integer_bounds(space))


def _integer_bounds(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """The smallest and the largest value of each entry; None twice for what is not made of bounded integers."""
    match space:
        case spaces.Discrete():
            return np.asarray(int(space.start)), np.asarray(int(space.start) + int(space.n) - 1)
        case spaces.MultiDiscrete():
            start = np.asarray(space.start, np.int64)
            return start, start + np.asarray(space.nvec, np.int64) - 1
        case spaces.MultiBinary():
            return np.zeros(space.shape), np.ones(space.shape)
        case spaces.Box() if space.is_bounded():
            return space.low, space.high
    return None, None


ToNative = Callable[[Any], Any]
"""From agent units to a space's own; of one environment's action, or of a batch."""


def action_of(space: spaces.Space[Any]) -> tuple[ActionPart, Bounds, ToNative]:
    """An action space's spec, its bounds, and the map from agent units to its own. Raises EnvError."""
    if not isinstance(space, spaces.Dict):
        spec, bounds, to_native = _action_leaf("the action", space)
        return spec, {} if bounds is None else {BARE_ACTION: bounds}, to_native
    if not space.spaces:
        raise EnvError("the action is an empty Dict: there is nothing to control")
    leaves = {key: _action_leaf(f"action {key!r}", entry) for key, entry in space.spaces.items()}
    return (
        tuple((key, spec) for key, (spec, _, _) in leaves.items()),
        {key: bounds for key, (_, bounds, _) in leaves.items() if bounds is not None},
        lambda a: {key: to_native(a[key]) for key, (_, _, to_native) in leaves.items()},
    )


def _action_leaf(
    name: str, space: spaces.Space[Any]
) -> tuple[ActionSpec, tuple[np.ndarray, np.ndarray] | None, ToNative]:
    match space:
        case spaces.Box():
            spec, (low, high) = box_action(space.low, space.high, space.dtype, name)
            return spec, (low, high), lambda a: to_bounds(a, low, high).astype(space.dtype)
        case spaces.Discrete():
            return ActionSpec((), (int(space.n),)), None, lambda a: a + np.asarray(space.start, space.dtype)
        case spaces.MultiDiscrete():
            classes = tuple(int(n) for n in space.nvec.ravel())
            return ActionSpec(space.shape, classes), None, lambda a: (a + space.start).astype(space.dtype)
        case spaces.MultiBinary():
            return ActionSpec(space.shape, (2,) * math.prod(space.shape)), None, lambda a: a.astype(space.dtype)
    raise EnvError(
        f"{name} is a {type(space).__name__} space; give one Box, Discrete, MultiDiscrete or MultiBinary space, "
        "or one Dict of these"
    )


class Gym:
    """One Gymnasium environment (`OneEnv`). Its first reset takes `seed`; later ones go on from there."""

    def __init__(self, env: GymEnv, seed: int) -> None:
        self._env = env
        self._seed: int | None = seed
        self._seen: Any = None
        self._bare = not isinstance(env.observation_space, spaces.Dict)
        _, _, self._to_native = action_of(env.action_space)

    def reset(self) -> None:
        result = self._env.reset(seed=self._seed)
        self._seed = None
        if not (isinstance(result, tuple) and len(result) == 2):
            raise EnvError("reset did not return (observation, info)")
        self._seen = result[0]

    def step(self, action: Action) -> Transition:
        try:
            self._seen, reward, terminated, truncated, _ = self._env.step(self._to_native(action))
        except ValueError as error:
            # Raised here, or by whichever of gymnasium's own wrappers meets the tuple first.
            if "values to unpack (expected 5" not in str(error):
                raise
            raise EnvError(
                "step did not return (observation, reward, terminated, truncated, info), so termination cannot be told "
                "from truncation; return the two apart"
            ) from error
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                raise EnvError(f"{name} is {value!r}, expected a boolean")
        return Transition(np.asarray(reward).item(), bool(terminated or truncated), bool(terminated))

    def observe(self) -> Mapping[str, Any]:
        if self._bare:
            return {BARE_KEY: self._seen}
        if not isinstance(self._seen, Mapping):
            raise EnvError(f"the observation is a {type(self._seen).__name__}, expected a dict")
        return self._seen

    def get_state(self) -> None:
        return None  # Gymnasium has no way to save an environment

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        raise NotImplementedError("a Gymnasium environment cannot be restored; reset it instead")

    def render(self) -> np.ndarray:
        picture = self._env.render() if self._env.render_mode == "rgb_array" else None
        if picture is None:
            raise NotImplementedError("this environment gives no pictures; make it with render_mode='rgb_array'")
        return np.asarray(picture)

    def close(self) -> None:
        self._env.close()
