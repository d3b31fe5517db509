"""envpool, against itself called by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from telamon.data import ActionSpec, ArraySpec
from telamon.envs.base import EnvError
from telamon.envs.checks import env_seed
from telamon.envs.registry import make_env

envpool = pytest.importorskip("envpool", reason="envpool is not installed")


def test_rows_are_what_repeated_calls_give() -> None:
    env = make_env("envpool:CartpoleSwingup-v1", 2, seed=4, max_episode_steps=5)
    assert (env.spec.action_repeat, env.spec.episode_length) == (2, 3)
    raw = envpool.make_gymnasium(
        "CartpoleSwingup-v1", num_envs=2, seed=[env_seed(4, 0), env_seed(4, 1)], max_episode_steps=5
    )
    row, (obs, _) = env.reset(), raw.reset()
    np.testing.assert_array_equal(row.obs["position"], obs["position"].astype(np.float32))
    rng = np.random.default_rng(0)
    for repeats in (2, 2, 1):  # five steps: the last action is not repeated
        action = rng.uniform(-1, 1, (2, 1)).astype(np.float32)
        row = env.step(action)
        reward = np.zeros(2, np.float32)
        for _ in range(repeats):
            obs, r, _, truncated, _ = raw.step(action.astype(np.float64))
            reward += r
        np.testing.assert_array_equal(row.obs["velocity"], obs["velocity"].astype(np.float32))
        np.testing.assert_array_equal(row.reward, reward)
        np.testing.assert_array_equal(row.is_last, truncated)
    assert row.is_last.all()
    assert not row.is_terminal.any()
    # envpool itself repeats the last reward on the reset row.
    assert (raw.step(np.zeros((2, 1)))[1] > 0).all()
    row = env.step(action)
    assert row.is_first.all()
    assert (row.reward == 0).all()


def test_environments_end_on_their_own() -> None:
    """With uneven episodes, those that go on are repeated and those that have ended are not."""
    env = make_env("envpool:CartPole-v1", 8, 0, action_repeat=2)
    row = env.reset()
    length, lengths = np.zeros(8), []
    for _ in range(80):
        row = env.step(np.random.default_rng(len(lengths)).integers(2, size=8))
        length = np.where(row.is_first, 0, length + row.reward)  # one per environment step
        lengths += list(length[row.is_last])
        assert (row.is_terminal == row.is_last).all()
    assert len(lengths) > 8
    assert {int(n) % 2 for n in lengths} == {0, 1}


def test_the_usual_repeat_is_that_of_the_family() -> None:
    assert make_env("envpool:WalkerWalk-v1", 1, 0).spec.action_repeat == 2
    assert make_env("envpool:Pendulum-v1", 1, 0).spec.action_repeat == 1


def test_an_atari_game_is_seen_with_channels_last_and_as_the_atari_backend_sees_it() -> None:
    pytest.importorskip("ale_py", reason="ale_py is not installed")
    env = make_env("envpool:Pong-v5", 1, 0)
    assert env.spec.obs == (("obs", ArraySpec((64, 64, 3), "uint8")),)
    assert env.spec.action == ActionSpec((), (18,))
    assert (env.spec.action_repeat, env.spec.episode_length) == (4, 27_000)
    other = make_env("atari:pong", 1, 0)
    env.reset(), other.reset()
    for _ in range(20):
        ours, theirs = (e.step(np.zeros(1, np.int32)).obs for e in (env, other))
    difference = np.abs(ours["obs"].astype(float) - theirs["image"])
    assert difference.mean() < 3  # filters differ, and where the ball is
    assert np.median(difference) <= 1
    assert ours["obs"].std(axis=(0, 1, 2)).min() > 20


def test_an_atari_games_repeat_is_one_call_and_its_limit_truncates() -> None:
    env: Any = make_env("envpool:Pong-v5", 1, 0, max_episode_steps=3, action_repeat=2, gray_scale=True, img_width=48)
    assert (env.spec.action_repeat, env.spec.episode_length) == (2, 3)
    assert env.spec.obs == (("obs", ArraySpec((64, 48, 1), "uint8")),)
    assert not env.reset().is_last[0]
    rows = [env.step(np.zeros(1, np.int32)) for _ in range(4)]
    assert [bool(r.is_last[0]) for r in rows] == [False, False, True, False]
    assert not rows[2].is_terminal[0]
    assert env._pool.config["frame_skip"] == 2


def test_images_of_other_families_stay_as_they_are() -> None:
    env = make_env("envpool:CarRacing-v3", 1, 0)
    assert env.spec.obs == (("obs", ArraySpec((96, 96, 3), "uint8")),)
    env.reset()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"frame_skip": 2}, "its option frame_skip is the action repeat; set env.action_repeat instead"),
        ({"noop_max": 0}, "its option noop_max is 0; it takes 1 to 999"),
    ],
)
def test_what_an_atari_game_cannot_take_is_refused(option: dict[str, int], message: str) -> None:
    with pytest.raises(EnvError, match=f"^envpool:Pong-v5: {message}$"):
        make_env("envpool:Pong-v5", 1, 0, **option)


class Broken:
    """An envpool whose environment 1 gives inf at its second step."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.calls = 0

    def reset(self, index: np.ndarray) -> Any:
        return self.pool.reset(index)

    def step(self, action: np.ndarray, index: np.ndarray) -> Any:
        self.calls += 1
        obs, *rest = self.pool.step(action, index)
        if self.calls == 2:
            obs = np.where(np.arange(3)[:, None] == 1, np.inf, obs)
        return obs, *rest


@pytest.mark.parametrize("on_error", ["stop", "rebuild"])
def test_a_bad_row_stops_or_is_reset(on_error: Any) -> None:
    env: Any = make_env("envpool:Pendulum-v1", 3, 0, on_error=on_error)
    env._pool = Broken(env._pool)
    env.reset()
    action = np.zeros((3, 1), np.float32)
    env.step(action)
    if on_error == "stop":
        with pytest.raises(
            EnvError, match=r"environment 1 \(envpool:Pendulum-v1\): observation 'obs' is inf at step 2"
        ):
            env.step(action)
        return
    row = env.step(action)
    assert env.refused_rows == 1
    np.testing.assert_array_equal(row.is_first, [False, True, False])
    assert np.isfinite(row.obs["obs"]).all()
    assert row.reward[1] == 0 > row.reward[0]
    assert not env.step(action).is_first.any()


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(
        EnvError, match="no environment 'envpool:cartpoleswingup'; did you mean envpool:CartpoleSwingup-v1"
    ):
        make_env("envpool:cartpoleswingup", 1, 0)
    env = make_env("envpool:Pendulum-v1", 1, 0)
    env.reset()
    with pytest.raises(NotImplementedError, match="make it with render_mode='rgb_array'"):
        env.render()
    with pytest.raises(NotImplementedError, match="no way to save"):
        env.set_state({})
