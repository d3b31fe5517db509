"""Atari games: `atari:pong`, names as in DreamerV3's reference (`ms_pacman`, `space_invaders`).

What is seen is the larger of the last two frames, pixel by pixel (many games draw a sprite in every other frame only),
made smaller by Pillow's antialiased bilinear filter, and grey, if asked for, only then: as DreamerV3's reference does
(danijar/dreamerv3, embodied/envs/atari.py). As there, the frame limit counts as a termination, unless
`limit_terminates` is False.
Sticky actions are drawn here and not by the emulator, whose saved states leave out the action that is being repeated.
Differs from it: a game that ends inside an action repeat is seen as it ended, there as it was before the repeat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from ale_py import ALEInterface, ALEState, LoggerMode, roms
from PIL import Image

from telamon.data import ActionSpec, ArraySpec, EnvSpec
from telamon.envs.base import ATARI_REPEAT, Action, OnError, UnknownEnv
from telamon.envs.checks import IMAGE_SIZES, check_option, env_seed
from telamon.envs.host import HostEnvs, Transition

STICKY = 0.25
"""Probability with which a frame repeats the action of the one before, where actions are sticky."""
GREY = np.array([0.299, 0.587, 0.114])
"""Luma of red, green and blue."""

_ALIASES = {"james_bond": "jamesbond"}
_NOOP = 0
_FLAGS = (False, True)


def task_names() -> list[str]:
    """All games that ale-py brings."""
    return sorted(roms.get_all_rom_ids())


def make(
    name: str,
    num_envs: int,
    seed: int,
    *,
    action_repeat: int | None = None,
    on_error: OnError = "stop",
    size: int = 64,
    gray: bool = False,
    sticky: bool = True,
    actions: Literal["all", "needed"] = "all",
    noops: int = 0,
    limit: int = 108_000,
    lives: Literal["unused", "reset"] = "unused",
    limit_terminates: bool = True,
) -> HostEnvs:
    """A batch of one game. Raises UnknownEnv, EnvError.

    size: pixels per side of the image. gray: one channel instead of three.
    sticky: whether actions are, see STICKY. actions: all 18, or those that do something in this game.
    noops: most frames, drawn uniformly, that pass before an episode's first row.
    limit: frames per episode. limit_terminates: whether reaching it counts as a termination, not as a truncation.
    lives: "reset" ends the episode, by a termination, with every life lost.
    """
    rom = _ALIASES.get(name, name)
    if rom not in roms.get_all_rom_ids():
        raise UnknownEnv(name)
    check_option("size", size, IMAGE_SIZES)
    check_option("gray", gray, _FLAGS)
    check_option("sticky", sticky, _FLAGS)
    check_option("actions", actions, ("all", "needed"))
    check_option("noops", noops, range(1000))
    check_option("limit", limit, range(1, 10**9))
    check_option("lives", lives, ("unused", "reset"))
    check_option("limit_terminates", limit_terminates, _FLAGS)
    repeat = ATARI_REPEAT if action_repeat is None else action_repeat

    def one(index: int, rebuild: int) -> Atari:
        return Atari(
            load_rom(rom, env_seed(seed, index, rebuild)),
            env_seed(seed, index, rebuild),
            size=size,
            gray=gray,
            minimal=actions == "needed",
            sticky=STICKY if sticky else 0.0,
            noops=noops,
            limit=limit,
            limit_terminates=limit_terminates,
            ends_with_a_life=lives == "reset",
        )

    probe = load_rom(rom, 0)
    spec = EnvSpec(
        id=f"atari:{name}",
        obs=(("image", ArraySpec((size, size, 1 if gray else 3), "uint8")),),
        action=ActionSpec((), (len(action_set(probe, actions == "needed")),)),
        episode_length=math.ceil(limit / repeat),
        action_repeat=repeat,
    )
    return HostEnvs(spec, one, num_envs, on_error, {})


def load_rom(rom: str, seed: int) -> ALEInterface:
    """An emulator with the game in it."""
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.0)
    path = roms.get_rom_path(rom)
    assert path is not None  # it is one of `get_all_rom_ids`
    ale.loadROM(path)
    return ale


def action_set(ale: ALEInterface, minimal: bool) -> list[Any]:
    """The emulator's own actions, in the order of their classes."""
    return ale.getMinimalActionSet() if minimal else ale.getLegalActionSet()


class Atari:
    """One game (`OneEnv`). What is random in episode k is drawn from `seed` and k: the first draw is of the frames to
    wait for, the n-th after it of whether frame n repeats the action before.
    """

    def __init__(
        self,
        ale: ALEInterface,
        seed: int,
        *,
        size: int,
        gray: bool,
        minimal: bool,
        sticky: float,
        noops: int,
        limit: int,
        limit_terminates: bool,
        ends_with_a_life: bool,
    ) -> None:
        self._ale = ale
        self._seed = seed
        self._size = size
        self._gray = gray
        self._actions = action_set(ale, minimal)
        self._sticky = sticky
        self._noops = noops
        self._limit = limit
        self._limit_terminates = limit_terminates
        self._ends_with_a_life = ends_with_a_life
        self._episode = -1
        self._frames = 0
        self._lives = 0
        self._done = _NOOP
        """The class of the action of the last frame."""
        self._random = np.random.default_rng(seed)
        self._screens = np.zeros((2, *ale.getScreenDims(), 3), np.uint8)
        """The last two; that of an odd frame is the second."""

    def reset(self) -> None:
        self._episode += 1
        self._random = np.random.Generator(np.random.PCG64((self._seed, self._episode)))
        self._ale.reset_game()
        for _ in range(int(self._random.random() * (self._noops + 1))):
            self._ale.act(_NOOP)
            if self._ale.game_over():
                self._ale.reset_game()
        self._frames = 0
        self._done = _NOOP
        self._lives = self._ale.lives()
        self._ale.getScreenRGB(self._screens[0])
        self._screens[1] = self._screens[0]

    def step(self, action: Action) -> Transition:
        assert isinstance(action, np.ndarray | np.integer)
        if self._random.random() >= self._sticky:
            self._done = int(action)
        reward = self._ale.act(self._actions[self._done])
        self._frames += 1
        self._ale.getScreenRGB(self._newest)
        lives = self._ale.lives()
        died = self._ends_with_a_life and 0 < lives < self._lives
        self._lives = lives
        over = self._ale.game_over() or died
        cut = self._frames >= self._limit
        return Transition(float(reward), over or cut, over or (cut and self._limit_terminates))

    def observe(self) -> dict[str, np.ndarray]:
        seen = Image.fromarray(self._screens.max(axis=0))
        image = np.asarray(seen.resize((self._size, self._size), Image.Resampling.BILINEAR))
        if self._gray:
            image = (image * GREY[None, None]).sum(-1, keepdims=True).astype(np.uint8)
        return {"image": image}

    @property
    def _newest(self) -> np.ndarray:
        return self._screens[self._frames % 2]

    def get_state(self) -> dict[str, np.ndarray]:
        """The emulator, and what the next frame, observation and episode depend on."""
        return {
            "ale": np.frombuffer(self._ale.cloneState(include_rng=True).serialize(), np.uint8),
            "screen": self._newest.copy(),
            "counts": np.array([self._seed, self._episode, self._frames, self._lives, self._done]),
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._ale.restoreState(ALEState(state["ale"].tobytes()))
        self._seed, self._episode, self._frames, self._lives, self._done = (int(x) for x in state["counts"])
        bits = np.random.PCG64((self._seed, self._episode))
        self._random = np.random.Generator(bits.advance(1 + self._frames))  # so many draws were made
        self._newest[...] = state["screen"]

    def render(self) -> np.ndarray:
        return self._newest.copy()

    def close(self) -> None:
        pass
