"""The one batched environment interface: E environments that advance in lockstep, one row each per tick.

`reset` starts an episode everywhere; each `step` gives one row per environment. The tick after a row with
`is_last` is a *reset tick*: the action is ignored and the row is the new episode's `is_first` row, reward 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from telamon.data import ActionSpec, EnvSpec

OnError = Literal["stop", "rebuild"]
"""What a broken environment costs: the run, or its episode (it is rebuilt and its row is a new is_first row)."""

Action = np.ndarray | Mapping[str, np.ndarray]
"""[E, *action shape] in agent units, or one such array per key of a dict action."""

ActionPart = ActionSpec | tuple[tuple[str, ActionSpec], ...]
"""`EnvSpec.action`: of one array, or of a dict."""

Bounds = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Key (as in `EnvSpec.actions`) -> the environment's own (low, high) per element; integer parts have none."""

DM_CONTROL_REPEAT = 2
"""The usual action repeat of dm_control tasks, whoever steps and draws them (TD-MPC2's and DreamerV3's)."""
ATARI_REPEAT = 4
"""That of Atari games. Everything else has 1."""


@dataclass(frozen=True)
class Step:
    """What E environments gave at one tick: a row without its action. Arrays are [E, ...]."""

    obs: Mapping[str, np.ndarray]
    reward: np.ndarray
    """float32 [E]; 0 where is_first."""
    is_first: np.ndarray
    is_last: np.ndarray
    is_terminal: np.ndarray


class EnvError(RuntimeError):
    """An environment raised, or gave something that must not reach replay. The message names it and the step."""


class UnknownEnv(EnvError):
    """A backend has no environment of this name; the registry adds the near ones."""


class BatchedEnv(Protocol):
    """E environments in lockstep."""

    spec: EnvSpec
    num_envs: int
    bounds: Bounds
    """What [-1, 1] is mapped to."""
    active: int | None
    """The environment being stepped right now, for a watchdog to name; None between ticks or where all step at once."""
    ticks: int
    """Ticks so far, resets included: tells a watchdog an environment that hangs from one that is often busy."""

    @property
    def refused_rows(self) -> int:
        """Rows so far that had no place in a replay, or never came; each cost its episode, and was replaced."""
        ...

    def reset(self) -> Step:
        """Starts a new episode in every environment: rows with is_first."""
        ...

    def step(self, action: Action) -> Step:
        """Advances by one agent step. Raises EnvError."""
        ...

    def get_state(self) -> dict[str, np.ndarray] | None:
        """Arrays from which `set_state` continues bit for bit; None where the backend cannot say."""
        ...

    def set_state(self, state: Mapping[str, np.ndarray]) -> Step:
        """Continues from `get_state`; returns the row that stood then."""
        ...

    def render(self, index: int = 0) -> np.ndarray:
        """uint8 [height, width, 3] picture of one environment. Raises NotImplementedError where there is none."""
        ...

    def close(self) -> None: ...


def map_action(f: Callable[[Any], Any], action: Any) -> Any:
    """`f` of a bare action, or of each part of a dict action."""
    return {k: f(v) for k, v in action.items()} if isinstance(action, Mapping) else f(action)


def random_action(spec: ActionPart, num_envs: int, rng: np.random.Generator) -> Action:
    """Uniform over the action space, in agent units."""
    if not isinstance(spec, ActionSpec):
        return {key: _random_array(part, num_envs, rng) for key, part in spec}
    return _random_array(spec, num_envs, rng)


def zero_action(spec: ActionPart, num_envs: int) -> Action:
    """Zeros: what rows with is_last hold."""
    if not isinstance(spec, ActionSpec):
        return {key: _zero_array(part, num_envs) for key, part in spec}
    return _zero_array(spec, num_envs)


def _random_array(spec: ActionSpec, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    shape = (num_envs, *spec.shape)
    if spec.classes is None:
        return rng.uniform(-1, 1, shape).astype(np.float32)
    return rng.integers(0, np.reshape(spec.classes, spec.shape), shape, dtype=np.int32)


def _zero_array(spec: ActionSpec, num_envs: int) -> np.ndarray:
    return np.zeros((num_envs, *spec.shape), spec.array.dtype)
