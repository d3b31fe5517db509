"""An environment for tests whose data know their own position: any lost, repeated or misplaced row shows.

`where` is (environment, episode, t); `total` is the sum of the episode's rewards; the reward of a step is
`encode(action)`. It can be told to break at an exact place (`Fault`). `counting:dict` also shows its position as a
picture and as an integer, and takes a dict action.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from telamon.data import BARE_ACTION, ActionSpec, ArraySpec, EnvSpec
from telamon.envs.base import Action, ActionPart, Bounds, OnError, UnknownEnv
from telamon.envs.checks import box_action
from telamon.envs.host import HostEnvs, Transition

NAMES = ("continuous", "discrete", "dict")
"""By kind of action."""

PHASES = 4
"""Classes of `counting:dict`'s integer observation, the step modulo so many."""

EPISODES_PER_REBUILD = 1000
"""A rebuilt environment numbers its episodes from here on, so that no position occurs twice."""


def task_names() -> list[str]:
    """The kinds."""
    return list(NAMES)


@dataclass(frozen=True)
class Fault:
    """Breaks environment `env` at step `t` of its episode `episode` (t = 0: at the reset)."""

    kind: Literal["raise", "nan_reward", "inf_obs", "shape", "missing", "dtype", "hang"]
    env: int = 0
    episode: int = 0
    t: int = 1
    every_rebuild: bool = False
    """Whether a rebuilt environment breaks at the same place again."""


def encode(action: Action) -> float:
    """The reward for `action`: its elements, those of a dict by sorted keys, weighted by 1, 2, 3, ..."""
    parts = [action[k] for k in sorted(action)] if isinstance(action, Mapping) else [action]
    flat = np.concatenate([np.ravel(part) for part in parts])
    return float(np.dot(flat, np.arange(1, flat.size + 1)))


def episode_length(lengths: Sequence[int], env: int, episode: int) -> int:
    """Environment steps of an episode: the lengths in turn, each environment starting at its own."""
    return lengths[(env + episode) % len(lengths)]


def make(
    name: str,
    num_envs: int,
    seed: int,
    *,
    action_repeat: int | None = None,
    on_error: OnError = "stop",
    lengths: Sequence[int] = (7,),
    terminate_every: int = 0,
    action_size: int = 2,
    classes: int = 3,
    size: int = 48,
    faults: Sequence[Fault] = (),
) -> HostEnvs:
    """A batch of counting environments; nothing in them is random, so `seed` changes nothing.

    lengths: environment steps per episode, see `episode_length`.
    terminate_every: every so many episodes end by termination, the others by truncation; 0 for never.
    action_size, classes: elements of the action, and classes of each integer one.
    size: pixels per side of the picture (`dict` only).
    """
    if name not in NAMES:
        raise UnknownEnv(name)
    del seed
    repeat = 1 if action_repeat is None else action_repeat
    box, box_bounds = box_action(-np.ones(action_size), np.ones(action_size), np.float32)
    integers = ActionSpec((action_size,), (classes,) * action_size)
    actions: dict[str, tuple[ActionPart, Bounds]] = {
        "continuous": (box, {BARE_ACTION: box_bounds}),
        "discrete": (integers, {}),
        "dict": ((("push", box), ("button", integers)), {"push": box_bounds}),
    }
    action, bounds = actions[name]
    obs = [("where", ArraySpec((3,))), ("total", ArraySpec(()))]
    if name == "dict":
        obs += [("picture", ArraySpec((size, size, 3), "uint8")), ("phase", ArraySpec((), "int32", PHASES))]
    spec = EnvSpec(
        id=f"counting:{name}",
        obs=tuple(obs),
        action=action,
        episode_length=-(-max(lengths) // repeat),
        action_repeat=repeat,
    )

    def one(index: int, rebuild: int) -> Counting:
        mine = tuple(f for f in faults if f.env == index and (rebuild == 0 or f.every_rebuild))
        pixels = size if name == "dict" else None
        return Counting(index, rebuild * EPISODES_PER_REBUILD, tuple(lengths), terminate_every, mine, pixels)

    return HostEnvs(spec, one, num_envs, on_error, bounds)


class Counting:
    """One counting environment (`OneEnv`)."""

    def __init__(
        self,
        index: int,
        offset: int,
        lengths: tuple[int, ...],
        terminate_every: int,
        faults: tuple[Fault, ...],
        pixels: int | None = None,
    ) -> None:
        self._index = index
        self._offset = offset
        self._episode = -1
        self._t = 0
        self._total = 0.0
        self._lengths = lengths
        self._terminate_every = terminate_every
        self._faults = faults
        self._pixels = pixels

    def reset(self) -> None:
        self._episode, self._t, self._total = self._episode + 1, 0, 0.0
        self._run()

    def step(self, action: Action) -> Transition:
        self._t += 1
        self._run()
        reward = encode(action)
        self._total += reward
        last = self._t >= episode_length(self._lengths, self._index, self._episode)
        terminal = last and self._terminate_every > 0 and (self._episode + 1) % self._terminate_every == 0
        return Transition(float("nan") if "nan_reward" in self._due() else reward, last, terminal)

    def observe(self) -> dict[str, Any]:
        where = np.array([self._index, self._offset + self._episode, self._t], np.float32)
        obs: dict[str, Any] = {"where": where, "total": np.float32(self._total)}
        if self._pixels is not None:
            obs["picture"] = np.tile(np.uint8(where % 256), (self._pixels, self._pixels, 1))
            obs["phase"] = np.int32(self._t % PHASES)
        return self._broken(obs)

    def _due(self) -> set[str]:
        """The kinds of fault that are due at this step."""
        return {f.kind for f in self._faults if (f.episode, f.t) == (self._episode, self._t)}

    def _run(self) -> None:
        due = self._due()
        if "raise" in due:
            raise RuntimeError("the counting environment was told to break")
        if "hang" in due:
            time.sleep(3600)

    def _broken(self, obs: dict[str, Any]) -> dict[str, Any]:
        for kind in self._due():
            match kind:
                case "inf_obs":
                    obs["where"] = np.array([np.inf, 0, 0], np.float32)
                case "shape":
                    obs["where"] = obs["where"][:2]
                case "missing":
                    del obs["where"]
                case "dtype":
                    obs["where"] = np.array(["a", "b", "c"], object)
        return obs

    def get_state(self) -> dict[str, np.ndarray]:
        return {"count": np.array([self._offset, self._episode, self._t]), "total": np.array(self._total)}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._offset, self._episode, self._t = (int(x) for x in state["count"])
        self._total = float(state["total"])

    def render(self) -> np.ndarray:
        raise NotImplementedError("a counting environment has no picture")

    def close(self) -> None:
        pass
