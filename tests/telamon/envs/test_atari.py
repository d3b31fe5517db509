"""Atari games, against the emulator stepped by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from telamon.data import ActionSpec, ArraySpec
from telamon.envs.base import EnvError, Step
from telamon.envs.checks import env_seed
from telamon.envs.registry import make_env

ale_py = pytest.importorskip("ale_py", reason="ale_py is not installed")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
atari = pytest.importorskip("telamon.envs.atari")

FIRE = 1


def emulator() -> Any:
    raw = ale_py.ALEInterface()
    raw.setFloat("repeat_action_probability", 0.0)
    raw.loadROM(ale_py.roms.get_rom_path("pong"))
    raw.reset_game()
    return raw


def smaller(frames: list[np.ndarray], size: int) -> np.ndarray:
    picture = Image.fromarray(np.maximum(frames[-2], frames[-1]))
    return np.array(picture.resize((size, size), Image.Resampling.BILINEAR))


def test_rows_are_what_the_emulator_gives() -> None:
    env = make_env("atari:pong", 1, seed=3, limit=14, sticky=False)
    assert (env.spec.action_repeat, env.spec.episode_length) == (4, 4)
    assert env.spec.obs == (("image", ArraySpec((64, 64, 3), "uint8")),)
    assert env.spec.action == ActionSpec((), (18,))
    raw = emulator()
    frames = [raw.getScreenRGB()] * 2
    row = env.reset()
    np.testing.assert_array_equal(row.obs["image"][0], smaller(frames, 64))
    for t, repeats in enumerate((4, 4, 4, 2)):  # 14 frames: the last action is not repeated to the end
        assert not row.is_last[0]
        row = env.step(np.array([2 + t], np.int32))
        reward = 0
        for _ in range(repeats):
            reward += raw.act(ale_py.Action(2 + t))
            frames.append(raw.getScreenRGB())
        np.testing.assert_array_equal(row.obs["image"][0], smaller(frames, 64))
        assert row.reward[0] == reward
    assert row.is_last[0]
    assert not np.array_equal(frames[-1], frames[-2])
    np.testing.assert_array_equal(env.render(), frames[-1])


def test_grey_is_the_luma_of_the_small_picture() -> None:
    colour, grey = (make_env("atari:ms_pacman", 1, 0, gray=g, size=96).reset().obs["image"][0] for g in (False, True))
    assert (colour.shape, grey.shape, grey.dtype) == ((96, 96, 3), (96, 96, 1), np.uint8)
    want = 0.299 * colour[..., 0] + 0.587 * colour[..., 1] + 0.114 * colour[..., 2]
    assert (np.abs(grey[..., 0] - np.floor(want)) <= 1).all()
    assert (grey[..., 0] == np.floor(want)).mean() > 0.99  # a float's last digit
    assert grey.std() > 10


@pytest.mark.parametrize(("limit_terminates", "terminal"), [(True, True), (False, False)])
def test_the_frame_limit_counts_as_it_is_told_to(limit_terminates: bool, terminal: bool) -> None:
    env = make_env("atari:pong", 1, 0, limit=4, limit_terminates=limit_terminates)
    env.reset()
    row = env.step(np.zeros(1, np.int32))
    assert row.is_last[0]
    assert row.is_terminal[0] == terminal


def play(env: Any, ticks: int) -> list[Step]:
    """Serves and does nothing else."""
    return [env.reset(), *(env.step(np.full(env.num_envs, FIRE, np.int32)) for _ in range(ticks))]


def test_a_game_that_is_over_terminates_and_a_life_that_is_lost_only_if_asked_to() -> None:
    whole = play(make_env("atari:breakout", 1, 0, actions="needed", limit_terminates=False), 400)
    lives = play(make_env("atari:breakout", 1, 0, actions="needed", limit_terminates=False, lives="reset"), 400)
    ends, early = (np.flatnonzero([r.is_last[0] for r in rows]) for rows in (whole, lives))
    assert len(ends) >= 1
    assert len(early) > len(ends)
    assert early[0] < ends[0] / 3  # of five lives
    for rows in (whole, lives):
        assert all(r.is_terminal[0] == r.is_last[0] for r in rows)
    for a, b in zip(whole[: early[0]], lives[: early[0]], strict=True):
        np.testing.assert_array_equal(a.obs["image"], b.obs["image"])


def test_sticky_actions_are_the_only_chance_in_a_game_without_noops() -> None:
    def pictures(seed: int, **kwargs: Any) -> np.ndarray:
        env = make_env("atari:pong", 1, seed, **kwargs)
        moves = np.random.default_rng(0).integers(18, size=(40, 1)).astype(np.int32)
        return np.stack([env.reset().obs["image"], *(env.step(a).obs["image"] for a in moves)])

    np.testing.assert_array_equal(pictures(0, sticky=False), pictures(1, sticky=False))
    assert not np.array_equal(pictures(0), pictures(1))


def test_a_quarter_of_the_frames_repeats_the_action_before() -> None:
    env: Any = make_env("atari:pong", 1, 3)
    raw, draws = emulator(), np.random.Generator(np.random.PCG64((env_seed(3, 0), 0)))
    draws.random()  # the first is for no-ops
    env.reset()
    done, repeated = 0, 0
    for wanted in np.random.default_rng(0).integers(18, size=200):
        row = env.step(np.array([wanted], np.int32))
        reward = 0
        for _ in range(4):
            if draws.random() < 0.25:
                repeated += 1
            else:
                done = int(wanted)
            reward += raw.act(ale_py.Action(done))
        assert row.reward[0] == reward
        np.testing.assert_array_equal(env.render(), raw.getScreenRGB())
    assert 150 < repeated < 250  # 200 of 800 expected, standard deviation 12


def test_noops_pass_before_an_episode_begins() -> None:
    env: Any = make_env("atari:pong", 4, 0, noops=30, limit=4)
    waited = []
    env.reset()
    for _ in range(20):
        waited += [e._ale.getEpisodeFrameNumber() for e in env._envs]
        env.step(np.zeros(4, np.int32))  # the only step of the episode
        env.step(np.zeros(4, np.int32))  # its reset tick
    assert 0 <= min(waited) < 5
    assert 25 < max(waited) <= 30
    assert len(set(waited)) > 15


def test_a_saved_state_holds_the_draws_of_later_episodes() -> None:
    a, b = (make_env("atari:pong", 2, seed, noops=30, limit=4, action_repeat=1) for seed in (0, 1))
    a.reset()
    state = a.get_state()
    assert state is not None
    b.set_state(state)
    for _ in range(12):
        x, y = (e.step(np.full(2, 3, np.int32)) for e in (a, b))
        np.testing.assert_array_equal(x.obs["image"], y.obs["image"])
        np.testing.assert_array_equal(a.render(1), b.render(1))


def test_the_actions_that_do_something_are_fewer() -> None:
    assert make_env("atari:pong", 1, 0, actions="needed").spec.action == ActionSpec((), (6,))


def test_names_are_those_of_the_reference() -> None:
    assert make_env("atari:james_bond", 1, 0).spec.id == "atari:james_bond"
    with pytest.raises(EnvError, match="no environment 'atari:Pong'; did you mean atari:pong"):
        make_env("atari:Pong", 1, 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"size": 8}, "its option size is 8; it takes 16 to 480"),
        ({"size": 64.0}, "its option size is 64.0; it takes 16 to 480"),
        ({"gray": 1}, "its option gray is 1; it takes False, True"),
        ({"sticky": "no"}, "its option sticky is 'no'; it takes False, True"),
        ({"actions": "some"}, "its option actions is 'some'; it takes all, needed"),
        ({"noops": -1}, "its option noops is -1; it takes 0 to 999"),
        ({"limit": 0}, "its option limit is 0; it takes 1 to 999999999"),
        ({"lives": "discount"}, "its option lives is 'discount'; it takes unused, reset"),
        ({"limit_terminates": 0}, "its option limit_terminates is 0; it takes False, True"),
    ],
)
def test_values_out_of_range_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=f"^atari:pong: {message}$"):
        make_env("atari:pong", 1, 0, **option)
