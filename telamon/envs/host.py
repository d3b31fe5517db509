"""Environments that step one at a time on the host, as one batch: reset ticks, action repeat, checks, rebuilds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from telamon.data import EnvSpec
from telamon.envs.base import Action, Bounds, EnvError, OnError, Step, map_action, zero_action
from telamon.envs.checks import (
    Guard,
    blank,
    check_action,
    log,
    put_obs,
    step_from_arrays,
    step_to_arrays,
    unsound,
)


class Transition(NamedTuple):
    """What one environment gave for one action, its observation apart."""

    reward: float
    last: bool
    """Terminated or truncated."""
    terminal: bool
    """A true termination."""


class OneEnv(Protocol):
    """One environment, without action repeat, reset ticks or checks: all that an adapter has to write."""

    def reset(self) -> None:
        """Starts an episode."""
        ...

    def step(self, action: Action) -> Transition:
        """Applies an action, without the axis E, in agent units ([-1, 1], or integers)."""
        ...

    def observe(self) -> Mapping[str, Any]:
        """What is seen now. Asked for once per row: what is between two repetitions need not be drawn."""
        ...

    def get_state(self) -> dict[str, np.ndarray] | None: ...

    def set_state(self, state: Mapping[str, np.ndarray]) -> None: ...

    def render(self) -> np.ndarray: ...

    def close(self) -> None: ...


Fault = tuple[str, Exception | None]
"""What went wrong, and the exception that said so."""


def _named(error: Exception) -> Fault:
    # An adapter's own EnvError is already a plain sentence.
    return str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}", error


class HostEnvs:
    """A `BatchedEnv` of `num_envs` environments made by `make(index, rebuild)` and stepped in a loop.

    Rewards are summed over `spec.action_repeat` repetitions of an action, which stop at an episode's end.
    """

    def __init__(
        self,
        spec: EnvSpec,
        make: Callable[[int, int], OneEnv],
        num_envs: int,
        on_error: OnError,
        bounds: Bounds,
    ) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.bounds = bounds
        self.active: int | None = None
        self.ticks = 0
        self._make = make
        self._envs = [make(i, 0) for i in range(num_envs)]
        self._guard = Guard(spec, num_envs, on_error)
        self._row: Step | None = None

    @property
    def refused_rows(self) -> int:
        return self._guard.refused_rows

    def reset(self) -> Step:
        return self._tick(zero_action(self.spec.action, self.num_envs), np.ones(self.num_envs, bool))

    def step(self, action: Action) -> Step:
        if self._row is None:
            raise ValueError(f"{self.spec.id} was stepped before its first reset; call reset() first")
        check_action(self.spec, self.num_envs, action)
        return self._tick(action, self._row.is_last)

    def _tick(self, action: Action, fresh: np.ndarray) -> Step:
        rows = blank(self.spec, self.num_envs)
        self.ticks += 1
        for i in range(self.num_envs):
            self.active = i
            self._settle(i, self._attempt(i, None if fresh[i] else map_action(itemgetter(i), action), rows), rows)
        for i, what in unsound(rows, self.spec):
            self.active = i
            self._settle(i, (what, None), rows)
        self.active = None
        self._guard.count(rows)
        self._row = rows
        return rows

    def _attempt(self, i: int, action: Action | None, rows: Step) -> Fault | None:
        """Resets (`action` None) or steps environment `i` into its row; returns what went wrong, if anything did."""
        rows.is_first[i] = action is None
        try:
            if action is None:
                self._envs[i].reset()
                reward, last, terminal = 0.0, False, False
            else:
                reward, last = 0.0, False
                for _ in range(self.spec.action_repeat):
                    r, last, terminal = self._envs[i].step(action)
                    reward += r
                    if last:
                        break
            obs = self._envs[i].observe()
        except Exception as error:  # noqa: BLE001  # whatever a user's environment raises: it is named, chained and settled
            return _named(error)
        rows.reward[i], rows.is_last[i], rows.is_terminal[i] = reward, last, terminal
        fault = put_obs(rows.obs, i, obs, self.spec)
        return None if fault is None else (fault, None)

    def _settle(self, i: int, fault: Fault | None, rows: Step) -> None:
        """Stops, or rebuilds environment `i` until its reset gives a sound row, as often as the guard allows."""
        step = 0 if rows.is_first[i] else int(self._guard.steps[i]) + 1
        while fault is not None:
            rebuild = self._guard.fault(i, step, *fault)
            self._close(i)
            step = 0
            try:
                self._envs[i] = self._make(i, rebuild)
            except Exception as error:  # noqa: BLE001  # as above: the next rebuild may work, and the guard bounds their number
                fault = _named(error)
                continue
            fault = self._attempt(i, None, rows)
            if fault is None:
                fault = next(((what, None) for j, what in unsound(rows, self.spec) if j == i), None)

    def _close(self, i: int) -> None:
        try:
            self._envs[i].close()
        except Exception as error:  # noqa: BLE001  # a broken environment may be unable to close: it is being thrown away
            log.warning("env_close_failed env=%d id=%s reason=%r", i, self.spec.id, str(error))

    def get_state(self) -> dict[str, np.ndarray] | None:
        if self._row is None:
            raise ValueError(f"{self.spec.id} has no state before its first reset; call reset() first")
        state = {**self._guard.get_state(), **step_to_arrays(self._row)}
        for i, env in enumerate(self._envs):
            own = env.get_state()
            if own is None:
                return None
            state |= {f"env/{i}/{k}": v for k, v in own.items()}
        return state

    def set_state(self, state: Mapping[str, np.ndarray]) -> Step:
        for i, env in enumerate(self._envs):
            prefix = f"env/{i}/"
            env.set_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        self._guard.set_state(state)
        self._row = step_from_arrays(self.spec, state)
        return step_from_arrays(self.spec, state)

    def render(self, index: int = 0) -> np.ndarray:
        return self._envs[index].render()

    def close(self) -> None:
        for env in self._envs:
            env.close()
