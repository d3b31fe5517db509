"""JAX environments, vmapped: `gymnax:Pendulum-v1`.

`JaxEnv.reset` and `JaxEnv.step` are pure functions of one environment, which a jitted unroll may vmap and scan;
`JaxEnvs` drives them from the host, with one exchange of arrays per tick.

Grids [height, width, channels], as MinAtar's games give them, are too small for a convolutional network that halves an
image four times. They are observed as flat vectors, or, with the option `image`, as enlarged pictures.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces
from gymnax.environments.environment import Environment

from telamon.data import BARE_ACTION, ActionSpec, ArraySpec, EnvSpec
from telamon.envs.base import Action, Bounds, EnvError, OnError, Step, UnknownEnv
from telamon.envs.checks import (
    IMAGE_SIZES,
    LOG_PREFIX,
    Guard,
    box_action,
    check_action,
    check_option,
    obs_array,
    step_from_arrays,
    step_to_arrays,
    to_bounds,
    unsound,
)
from telamon.keys import Stream, stream

BARE_KEY = "obs"
"""The key of an observation that is not a dict."""


def task_names() -> list[str]:
    """All ids registered with gymnax."""
    return list(gymnax.registered_envs)


class Row(NamedTuple):
    """A `Step` as a pytree, of one environment (without the axis E) or of a batch."""

    obs: dict[str, jax.Array]
    reward: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    is_terminal: jax.Array


class State(NamedTuple):
    """One environment between two ticks."""

    inner: Any
    """The environment's own state, of strong types: a weak one would make a jitted step compile twice."""
    last: jax.Array
    """bool []: whether the next tick is a reset tick."""


@dataclass(frozen=True)
class JaxEnv:
    """One gymnax environment as pure functions. Keys are consumed; actions are in agent units."""

    spec: EnvSpec
    action: ActionSpec
    bounds: Bounds
    env: Any
    params: Any

    def reset(self, key: jax.Array) -> tuple[State, Row]:
        """Starts an episode: its is_first row."""
        obs, inner = self.env.reset_env(key, self.params)
        no, yes = jnp.array(False), jnp.array(True)
        return State(_strong(inner), no), Row(self._obs(obs), jnp.zeros((), jnp.float32), yes, no, no)

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Row]:
        """One agent step, or the reset that is due. `action` is in agent units."""
        key_step, key_reset = jax.random.split(key)
        fresh, going = self.reset(key_reset), self._advance(state, action, key_step)
        return jax.tree.map(lambda a, b: jnp.where(state.last, a, b), fresh, going)

    def _advance(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Row]:
        if BARE_ACTION in self.bounds:
            action = to_bounds(action, *(jnp.asarray(b, jnp.float32) for b in self.bounds[BARE_ACTION]))
        inner, row = state.inner, cast(Row | None, None)
        for k in jax.random.split(key, self.spec.action_repeat):
            obs, stepped, reward, terminal, _ = self.env.step_env(k, inner, action, self.params)
            stepped = _strong(stepped)
            last = terminal | self.env.is_truncated(stepped, self.params)
            no = jnp.array(False)
            new = Row(self._obs(obs), reward.astype(jnp.float32), no, last, terminal)
            if row is None:
                inner, row = stepped, new
            else:  # an episode that has ended keeps its last row
                new = new._replace(reward=row.reward + new.reward)
                inner, row = jax.tree.map(partial(jnp.where, row.is_last), (inner, row), (stepped, new))
        assert row is not None  # action_repeat is at least 1
        return State(inner, row.is_last), row

    def _obs(self, obs: Any) -> dict[str, jax.Array]:
        entries = obs if isinstance(obs, Mapping) else {BARE_KEY: obs}
        return {key: _shown(entries[key], array) for key, array in self.spec.obs}


def _shown(value: jax.Array, array: ArraySpec) -> jax.Array:
    if array.dtype == "uint8" and value.dtype != jnp.uint8:
        return picture(value, array.shape[0])
    return value.reshape(array.shape).astype(array.dtype)


def picture(grid: jax.Array, size: int) -> jax.Array:
    """A grid [height, width] or [height, width, channels] of values in [0, 1] as a uint8 image [size, size, 3].

    Cells are squares of (almost) equal sides. Each channel has its own hue, one alone is white; where several are lit,
    the brightest of each primary colour shows.
    """
    grid = grid.reshape(*grid.shape[:2], -1)
    height, width, channels = grid.shape
    hues = [colorsys.hsv_to_rgb(i / channels, float(channels > 1), 1.0) for i in range(channels)]
    lit = (grid[..., None] * jnp.asarray(hues, jnp.float32)[None, None]).max(axis=2)
    pixels = np.arange(size)
    lit = lit[pixels * height // size][:, pixels * width // size]
    return jnp.rint(255 * lit.clip(0, 1)).astype(jnp.uint8)


def _keys(base: jax.Array, tick: jax.Array) -> jax.Array:
    """The key of each environment [E] for one tick."""
    return jax.vmap(jax.random.fold_in, (0, None))(base, tick)


def _strong(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def make_pure(
    name: str, *, action_repeat: int | None = None, image: bool = False, size: int = 64, **kwargs: Any
) -> JaxEnv:
    """One gymnax environment; `image` and `size` as in `make`, `kwargs` replace its default parameters.

    Raises UnknownEnv, EnvError.
    """
    if name not in gymnax.registered_envs:
        raise UnknownEnv(name)
    check_option("image", image, (False, True))
    check_option("size", size, IMAGE_SIZES)
    if not hasattr(Environment, "is_truncated"):
        raise EnvError(
            f"gymnax {version('gymnax')} reports one 'done' for termination and time limit; install gymnax>=1.0, "
            "which tells them apart"
        )
    env, params = gymnax.make(name)
    own = [f.name for f in fields(params)]
    unknown = next((k for k in kwargs if k not in own), None)
    if unknown is not None:
        raise EnvError(f"it takes no option {unknown!r}, only image, size, {', '.join(own)}")
    params = params.replace(**kwargs)
    key = jax.random.key(0)
    repeat = 1 if action_repeat is None else action_repeat
    action_spec, bounds = _action_of(env.action_space(params))
    spec = EnvSpec(
        id=f"gymnax:{name}",
        obs=_obs_of(env, params, key, size if image else None),
        action=action_spec,
        episode_length=math.ceil(params.max_steps_in_episode / repeat),
        action_repeat=repeat,
    )
    pure = JaxEnv(spec, action_spec, bounds, env, params)
    _check_stable(pure, key)
    return pure


def _obs_of(env: Any, params: Any, key: jax.Array, size: int | None) -> tuple[tuple[str, ArraySpec], ...]:
    """The observation as tracing shows it (declared ones are not always right), in the environment's own key order.

    size: pixels per side of the picture that a grid becomes; None for none.
    """
    entries: dict[str, ArraySpec] = {}
    space = env.observation_space(params)
    declared = space.spaces if isinstance(space, spaces.Dict) else {BARE_KEY: space}

    def reset(key: jax.Array) -> None:
        obs, _ = env.reset_env(key, params)
        for name, value in (obs if isinstance(obs, Mapping) else {BARE_KEY: obs}).items():
            if not name.startswith(LOG_PREFIX):
                entries[name] = _array_of(name, value, declared[name], size)

    jax.eval_shape(reset, key)  # read from inside: a returned dict comes back with its keys sorted
    return tuple(entries.items())


def _array_of(name: str, value: jax.Array, space: Any, size: int | None) -> ArraySpec:
    if size is not None:
        if value.ndim not in (2, 3):
            raise EnvError(
                f"observation {name!r} of shape {value.shape} is no grid to be shown; leave its option image"
            )
        if not (np.min(space.low) >= 0 and np.max(space.high) <= 1):
            raise EnvError(
                f"observation {name!r} lies in [{np.min(space.low):g}, {np.max(space.high):g}], and a grid is shown of "
                "values in [0, 1]; leave its option image"
            )
        return ArraySpec((size, size, 3), "uint8")
    flat = value.ndim > 2 and value.dtype != jnp.uint8
    quantity = jnp.issubdtype(space.dtype, jnp.floating)  # whatever its values are stored in
    return obs_array(
        name,
        (value.size,) if flat else value.shape,
        np.float32 if quantity else value.dtype,
        *_integer_bounds(space),
    )


def _integer_bounds(space: Any) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """The smallest and the largest value of each entry of an integer space; None twice for what has none."""
    match space:
        case spaces.Discrete():
            return np.zeros(()), np.asarray(space.n - 1)
        case spaces.Box():
            return np.asarray(space.low), np.asarray(space.high)
    return None, None


def _action_of(space: Any) -> tuple[ActionSpec, Bounds]:
    if isinstance(space, spaces.Discrete):
        return ActionSpec((), (int(space.n),)), {}
    if isinstance(space, spaces.Box):
        spec, bounds = box_action(
            np.broadcast_to(space.low, space.shape), np.broadcast_to(space.high, space.shape), space.dtype
        )
        return spec, {BARE_ACTION: bounds}
    raise EnvError(f"the action is a {type(space).__name__} space; give one Box or Discrete space")


def _check_stable(pure: JaxEnv, key: jax.Array) -> None:
    """Refuses a state that changes its types from a reset to a step: nothing could carry it. Raises EnvError."""
    state, _ = jax.eval_shape(pure.reset, key)
    action = jax.ShapeDtypeStruct(pure.action.shape, pure.action.array.dtype)
    stepped, _ = jax.eval_shape(pure._advance, state, action, key)
    named = jax.tree_util.tree_leaves_with_path(state.inner)
    for (path, before), after in zip(named, jax.tree.leaves(stepped.inner), strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise EnvError(
                f"the state{jax.tree_util.keystr(path)} is {before.dtype}{list(before.shape)} after a reset and "
                f"{after.dtype}{list(after.shape)} after a step; make them the same"
            )


def make(
    name: str, num_envs: int, seed: int, *, action_repeat: int | None = None, on_error: OnError = "stop", **kwargs: Any
) -> JaxEnvs:
    """A batch of one gymnax id. Raises UnknownEnv, EnvError.

    kwargs: `image` (whether a grid is shown as a picture), `size` (its pixels per side, 64); the others replace the
    environment's default parameters.
    """
    return JaxEnvs(make_pure(name, action_repeat=action_repeat, **kwargs), num_envs, seed, on_error)


class JaxEnvs:
    """A `BatchedEnv` over a vmapped `JaxEnv`. Environment i draws from its own stream, whatever `num_envs` is.

    A jitted unroll may advance it in place of `step`: `start`, then `advance` inside, then `take` of what it gave.
    """

    def __init__(self, pure: JaxEnv, num_envs: int, seed: int, on_error: OnError) -> None:
        self.spec = pure.spec
        self.num_envs = num_envs
        self.bounds = pure.bounds
        self.active: int | None = None
        self._dtype = pure.action.array.dtype
        self.ticks = 0
        self.rebuilds = on_error == "rebuild"
        """Whether a broken environment is reset on its own, which only the host can do."""
        self._guard = Guard(pure.spec, num_envs, on_error)
        self._pure = pure
        self._keys = jnp.stack([stream(seed, Stream.ENV, i) for i in range(num_envs)])
        self._tick = 0
        self._state: State | None = None
        self._row: Step | None = None

        self._reset = jax.jit(lambda base, tick: jax.vmap(pure.reset)(_keys(base, tick)))
        self._step = jax.jit(self.advance)
        self._reset_one = jax.jit(
            lambda key, tick, rebuild: pure.reset(jax.random.fold_in(jax.random.fold_in(key, tick), rebuild))
        )

    @property
    def refused_rows(self) -> int:
        return self._guard.refused_rows

    def reset(self) -> Step:
        return self._settled(*self._reset(self._keys, np.uint32(self._tick)))

    def step(self, action: Action) -> Step:
        if self._state is None:
            raise ValueError(f"{self.spec.id} was stepped before its first reset; call reset() first")
        check_action(self.spec, self.num_envs, action)
        native = np.asarray(action, self._dtype)
        return self._settled(*self._step(self._keys, np.uint32(self._tick), self._state, native))

    def start(self) -> tuple[jax.Array, State, Row]:
        """Resets for an unroll, which is given (keys [E], states, rows) on the device and keeps them from now on."""
        if self.ticks:
            raise ValueError(f"{self.spec.id} has begun already; an unroll starts with fresh environments")
        state, row = self._reset(self._keys, np.uint32(0))
        self.take(self._to_host(row))
        return self._keys, state, row

    def advance(self, keys: jax.Array, tick: jax.Array, state: State, action: jax.Array) -> tuple[State, Row]:
        """One agent step of all environments, pure. tick: uint32 [], that of `start` is 0; action [E, ...]."""
        return jax.vmap(self._pure.step)(state, action, _keys(keys, tick))

    def take(self, rows: Step) -> None:
        """Takes in the rows of one tick of an unroll. Raises EnvError as `step`."""
        for i, what in unsound(rows, self.spec):
            self._guard.fault(i, 0 if rows.is_first[i] else int(self._guard.steps[i]) + 1, what, None)
        self._guard.count(rows)
        self.ticks += 1
        self._tick += 1

    def _settled(self, state: State, row: Row) -> Step:
        """The rows of a tick, once every broken environment has stopped the run or started a new episode."""
        rows = self._to_host(row)
        while faults := unsound(rows, self.spec):
            for i, what in faults:
                at = 0 if rows.is_first[i] else int(self._guard.steps[i]) + 1
                rebuild = self._guard.fault(i, at, what, None)
                new = self._reset_one(self._keys[i], np.uint32(self._tick), np.uint32(rebuild))
                state, row = jax.tree.map(lambda all_, one, i=i: all_.at[i].set(one), (state, row), new)
            rows = self._to_host(row)
        self._guard.count(rows)
        self.ticks += 1
        self._tick += 1
        self._state, self._row = state, rows
        return rows

    def _to_host(self, row: Row) -> Step:
        obs, *rest = jax.device_get(row)
        return Step({key: obs[key] for key, _ in self.spec.obs}, *rest)  # JAX sorts a dict's keys

    def get_state(self) -> dict[str, np.ndarray]:
        if self._row is None:
            raise ValueError(f"{self.spec.id} has no state before its first reset; call reset() first")
        leaves = jax.device_get(jax.tree.leaves(self._state))
        return {
            **self._guard.get_state(),
            **step_to_arrays(self._row),
            "keys": np.array(jax.random.key_data(self._keys)),
            "tick": np.array(self._tick),
            **{f"state/{i}": np.array(leaf) for i, leaf in enumerate(leaves)},
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> Step:
        self._guard.set_state(state)
        self._keys = jax.random.wrap_key_data(jnp.array(state["keys"]))
        self._tick = int(state["tick"])
        shapes, _ = jax.eval_shape(self._reset, self._keys, np.uint32(0))
        leaves = [jnp.array(state[f"state/{i}"]) for i in range(len(jax.tree.leaves(shapes)))]
        self._state = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        self._row = step_from_arrays(self.spec, state)
        return step_from_arrays(self.spec, state)

    def render(self, index: int = 0) -> np.ndarray:
        raise NotImplementedError(f"{self.spec.id} gives no pictures")

    def close(self) -> None:
        pass
