"""What every backend checks alike: spaces at load, actions on the way in, rows on the way out, and who broke."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from telamon.data import BARE_ACTION, ActionSpec, ArraySpec, EnvSpec, as_dtype
from telamon.envs.base import Action, EnvError, OnError, Step
from telamon.keys import Stream, generator

MAX_REBUILDS = 10
"""Rebuilds of one environment without a finished episode in between, after which on_error='rebuild' gives up."""

MAX_CLASSES = 2**16
"""An integer of more values than this is a count and not a category."""

IMAGE_SIZES = range(16, 481)
"""Pixels per side that an environment which draws can be asked for; 480 is what dm_control's buffers hold."""

LOG_PREFIX = "log/"
"""Observation keys that begin like this are for the environment's own records: no replay and no agent sees them."""

log = logging.getLogger(__name__)


def env_seed(seed: int, index: int, rebuild: int = 0) -> int:
    """The seed of environment `index` of a batch after `rebuild` rebuilds, in 0..2**31-1."""
    return int(generator(seed, Stream.ENV, index, rebuild).integers(2**31))


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuses an environment's option that is none of `allowed`. Raises EnvError."""
    if value not in allowed or type(value) not in {type(allowed[0]), type(allowed[-1])}:  # True is no 1
        told = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise EnvError(f"its option {name} is {value!r}; it takes {told}")


def obs_dtype(declared: Any, key: str) -> str:
    """The row's dtype for a declared one: floats -> float32, uint8 and bool kept, other integers -> int32.

    Raises EnvError for anything else (object, strings, complex numbers).
    """
    dtype = np.dtype(declared)
    if dtype in (np.uint8, np.bool_):
        return dtype.name
    if dtype.kind in "fiu":
        return "float32" if dtype.kind == "f" else "int32"
    raise EnvError(f"observation {key!r} has dtype {dtype}, which cannot be stored; give numbers or booleans")


def obs_array(
    key: str, shape: tuple[int, ...], dtype: Any, low: np.ndarray | None = None, high: np.ndarray | None = None
) -> ArraySpec:
    """An observation's array. low, high: smallest and largest value of each entry of one of bounded integers.

    Integers from 0 to a bound, and booleans, are categories; those of an image (three axes) are intensities. An array
    whose entries have different bounds gets the classes of the largest.
    """
    stored = obs_dtype(dtype, key)
    if stored == "float32" or len(shape) > 2:
        return ArraySpec(shape, stored)
    if stored == "bool":
        return ArraySpec(shape, stored, 2)
    if low is None or high is None or np.any(low) or np.max(high) >= MAX_CLASSES:
        return ArraySpec(shape, stored)
    return ArraySpec(shape, stored, int(np.max(high)) + 1)


def box_action(
    low: np.ndarray, high: np.ndarray, dtype: Any, name: str = "the action"
) -> tuple[ActionSpec, tuple[np.ndarray, np.ndarray]]:
    """A continuous action's spec, and its bounds as float64. Raises EnvError for a Box that [-1, 1] cannot map to."""
    if np.dtype(dtype).kind != "f":
        raise EnvError(f"{name} is a Box of {np.dtype(dtype)}; declare integer actions as Discrete or MultiDiscrete")
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    if low.size == 0:
        raise EnvError(f"{name} is an empty Box of shape {low.shape}: there is nothing to control")
    # The largest float32 is how many libraries spell "no bound".
    free = (np.abs(low) >= np.finfo(np.float32).max) | (np.abs(high) >= np.finfo(np.float32).max)
    if free.any() or not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise EnvError(
            f"{name} is an unbounded Box ({_span(low, high)}): [-1, 1] can be mapped to finite bounds only; "
            "give the action space finite low and high"
        )
    if (low >= high).any():
        raise EnvError(f"{name} is an empty Box ({_span(low, high)}): each low must be below its high")
    return ActionSpec(low.shape), (low, high)


def _span(low: np.ndarray, high: np.ndarray) -> str:
    return f"shape {low.shape}, low {low.min():g}, high {high.max():g}"


def to_bounds(action: Any, low: Any, high: Any) -> Any:
    """Maps agent units to the environment's: [-1, 1] -> [low, high], clipped to these. numpy or JAX arrays.

    Exact where the bounds are [-1, 1]: the midpoint is 0 and the half-range 1.
    """
    return ((low + high) / 2 + (high - low) / 2 * action).clip(low, high)


def check_action(spec: EnvSpec, num_envs: int, action: Action) -> None:
    """Refuses an action that no agent of `spec` should give. Raises ValueError."""
    bare = isinstance(spec.action, ActionSpec)
    parts = action if isinstance(action, Mapping) else {BARE_ACTION: action}
    if isinstance(action, Mapping) == bare or parts.keys() != dict(spec.actions).keys():
        keys = ", ".join(key for key, _ in spec.actions)
        got = f"a dict of {', '.join(parts)}" if isinstance(action, Mapping) else "one array"
        raise ValueError(f"{spec.id} takes {'one array' if bare else f'a dict of {keys}'} as its action, got {got}")
    for key, part in spec.actions:
        _check_part(spec.id, "the action" if bare else f"action {key!r}", part, num_envs, parts[key])


def _check_part(env_id: str, name: str, spec: ActionSpec, num_envs: int, action: np.ndarray) -> None:
    want, dtype = (num_envs, *spec.shape), spec.array.dtype
    if action.shape != want or not np.can_cast(action.dtype, dtype, "same_kind"):
        raise ValueError(f"{env_id} takes {dtype} actions {want} as {name}, got {action.dtype} {action.shape}")
    flat = action.reshape(num_envs, -1)
    good = np.isfinite(flat) if spec.classes is None else (flat >= 0) & (flat < np.array(spec.classes))
    if not good.all():
        i, k = np.argwhere(~good)[0]
        raise ValueError(f"element {k} of {name} for environment {i} ({env_id}) is {flat[i, k]}; the agent broke")


def blank(spec: EnvSpec, num_envs: int) -> Step:
    """A Step to be filled in: fresh arrays every tick, because whoever got the last ones may hold on to them."""
    return Step(
        obs={k: np.empty((num_envs, *a.shape), as_dtype(a.dtype)) for k, a in spec.obs},
        reward=np.zeros(num_envs, np.float32),
        is_first=np.zeros(num_envs, bool),
        is_last=np.zeros(num_envs, bool),
        is_terminal=np.zeros(num_envs, bool),
    )


def put_obs(into: Mapping[str, np.ndarray], index: int, obs: Mapping[str, Any], spec: EnvSpec) -> str | None:
    """Writes one environment's observation; says what is wrong with it, if anything is."""
    for key, array in spec.obs:
        if key not in obs:
            return f"observation {key!r} is missing (got {', '.join(map(repr, obs)) or 'nothing'})"
        value = np.asarray(obs[key])
        fault = _mismatch(key, value.shape, value.dtype, array)
        if fault:
            return fault
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes inf, which `unsound` then names
            into[key][index] = value
        if value.dtype.kind in "iu" and value.dtype != array.dtype and not np.array_equal(into[key][index], value):
            return f"observation {key!r} does not fit {array.dtype}: it reaches {value.min()}..{value.max()}"
    if len(obs) > len(spec.obs):
        extra = next((k for k in obs if k not in dict(spec.obs) and not k.startswith(LOG_PREFIX)), None)
        return None if extra is None else f"observation {extra!r} was not declared"
    return None


def _mismatch(key: str, shape: tuple[int, ...], dtype: np.dtype, array: ArraySpec) -> str | None:
    if shape != array.shape:
        return f"observation {key!r} has shape {shape}, expected {array.shape}"
    if not np.can_cast(dtype, as_dtype(array.dtype), "same_kind"):
        return f"observation {key!r} has dtype {dtype}, expected {array.dtype}"
    return None


def unsound(step: Step, spec: EnvSpec) -> list[tuple[int, str]]:
    """(environment, what is wrong) for each row with a value that is not finite or a category out of its range."""
    faults: dict[int, str] = {}
    for key, array in spec.obs:
        if array.classes is not None and array.dtype != "bool":
            flat = step.obs[key].reshape(len(step.reward), -1)
            bad = (flat < 0) | (flat >= array.classes)
            for i in np.flatnonzero(bad.any(axis=1)):
                told = f"observation {key!r} is {flat[i][bad[i]][0]}; its space says 0 to {array.classes - 1}"
                faults.setdefault(int(i), told)
    for name, value in (*((f"observation {k!r}", v) for k, v in step.obs.items()), ("reward", step.reward)):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            flat = value.reshape(len(value), -1)
            for i in np.flatnonzero(~np.isfinite(flat).all(axis=1)):
                faults.setdefault(int(i), f"{name} is {flat[i][~np.isfinite(flat[i])][0]}")
    return sorted(faults.items())


class Guard:
    """Counts each environment's steps and rebuilds, and decides what a broken one costs."""

    def __init__(self, spec: EnvSpec, num_envs: int, on_error: OnError) -> None:
        self._spec = spec
        self._on_error = on_error
        self.steps = np.zeros(num_envs, np.int64)
        """Agent steps into the present episode."""
        self.rebuilds = np.zeros(num_envs, np.int64)
        self._in_a_row = np.zeros(num_envs, np.int64)

    def fault(self, index: int, step: int, what: str, cause: Exception | None) -> int:
        """Names a fault at `step` of the episode. Raises EnvError, or logs it and returns this rebuild's number."""
        where = f"environment {index} ({self._spec.id}): {what} at step {step} of its episode"
        if self._on_error == "stop":
            raise EnvError(f"{where}; env.on_error=rebuild would abandon the episode and go on") from cause
        if self._in_a_row[index] == MAX_REBUILDS:
            raise EnvError(
                f"{where}, after {MAX_REBUILDS} rebuilds without one finished episode; mend it, "
                "env.on_error=rebuild is for rare failures"
            ) from cause
        self._in_a_row[index] += 1
        self.rebuilds[index] += 1
        log.warning("env_rebuilt env=%d id=%s step=%d reason=%r", index, self._spec.id, step, what)
        return int(self.rebuilds[index])

    @property
    def refused_rows(self) -> int:
        """As `BatchedEnv` has it: there was a rebuild for each."""
        return int(self.rebuilds.sum())

    def count(self, step: Step) -> None:
        """Takes in the rows of a tick."""
        self.steps = np.where(step.is_first, 0, self.steps + 1)
        self._in_a_row[step.is_last] = 0

    def get_state(self) -> dict[str, np.ndarray]:
        return {
            "guard/steps": self.steps.copy(),
            "guard/rebuilds": self.rebuilds.copy(),
            "guard/in_a_row": self._in_a_row.copy(),
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.steps = state["guard/steps"].copy()
        self.rebuilds = state["guard/rebuilds"].copy()
        self._in_a_row = state["guard/in_a_row"].copy()


def step_to_arrays(step: Step) -> dict[str, np.ndarray]:
    """A pending Step as part of a saved state (copies)."""
    return {
        **{f"step/obs/{k}": v.copy() for k, v in step.obs.items()},
        **{f"step/{k}": getattr(step, k).copy() for k in ("reward", "is_first", "is_last", "is_terminal")},
    }


def step_from_arrays(spec: EnvSpec, state: Mapping[str, np.ndarray]) -> Step:
    """The inverse of `step_to_arrays` (copies)."""
    return Step(
        {k: state[f"step/obs/{k}"].copy() for k, _ in spec.obs},
        *(state[f"step/{k}"].copy() for k in ("reward", "is_first", "is_last", "is_terminal")),
    )
