"""The one batched environment interface: E environments that advance in lockstep, one row each per tick.

`reset` starts an episode everywhere; each `step` gives one row per environment. The tick after a row with
`is_last` is a *reset tick*: the action is ignored and the row is the new episode's `is_first` row, reward 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from telamon.data import ActionSpec, EnvSpec

OnError = Literal["stop", "rebuild"]
"""What a broken environment costs: the run, or its episode (it is rebuilt and its row is a new is_first row)."""


DM_CONTROL_REPEAT = 2
"""The usual action repeat of dm_control tasks, whoever steps them (TD-MPC2's); everything else has 1."""


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
    bounds: tuple[np.ndarray, np.ndarray] | None
    """The environment's own (low, high) per action element, to which [-1, 1] is mapped; None for integer actions."""
    active: int | None
    """The environment being stepped right now, for a watchdog to name; None between ticks or where all step at once."""
    ticks: int
    """Ticks so far, resets included: tells a watchdog an environment that hangs from one that is often busy."""

    def reset(self) -> Step:
        """Starts a new episode in every environment: rows with is_first."""
        ...

    def step(self, action: np.ndarray) -> Step:
        """Advances by one agent step. `action` is [E, *spec.action.shape] in agent units. Raises EnvError."""
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


def random_action(spec: ActionSpec, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform over the action space, in agent units: [E, *spec.shape]."""
    shape = (num_envs, *spec.shape)
    if spec.classes is None:
        return rng.uniform(-1, 1, shape).astype(np.float32)
    return rng.integers(0, np.reshape(spec.classes, spec.shape), shape, dtype=np.int32)
