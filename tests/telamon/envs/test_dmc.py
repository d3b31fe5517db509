"""Real dm_control tasks, against the suite itself."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from telamon.envs.base import BatchedEnv, EnvError, Step
from telamon.envs.checks import env_seed
from telamon.envs.registry import make_env

pytest.importorskip("dm_control", reason="dm_control is not installed")


def actions(env: BatchedEnv, ticks: int, seed: int = 0) -> np.ndarray:
    shape = (ticks, env.num_envs, *env.spec.action.shape)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def test_a_row_is_what_two_steps_of_the_suite_give() -> None:
    from dm_control import suite

    env = make_env("dmc:walker-walk", 2, seed=3)
    assert env.spec.action_repeat == 2
    assert env.spec.episode_length == 500
    assert [(k, a.shape) for k, a in env.spec.obs] == [("orientations", (14,)), ("height", ()), ("velocity", (9,))]
    raw = [suite.load("walker", "walk", {"random": env_seed(3, i)}) for i in range(2)]
    row = env.reset()
    for i, r in enumerate(raw):
        for key, value in r.reset().observation.items():
            np.testing.assert_array_equal(row.obs[key][i], np.float32(value))
    for a in actions(env, 5):
        row = env.step(a)
        for i, r in enumerate(raw):
            reward = r.step(a[i]).reward
            step = r.step(a[i])
            np.testing.assert_array_equal(row.reward[i], np.float32(reward + step.reward))
            for key, value in step.observation.items():
                np.testing.assert_array_equal(row.obs[key][i], np.float32(value))


def test_the_repeat_stops_at_the_last_step() -> None:
    env = make_env("dmc:cartpole-balance", 1, 0, time_limit=0.05)  # 5 steps of 0.01 s
    assert env.spec.episode_length == 3
    env.reset()
    rows = [env.step(a) for a in actions(env, 4)]
    assert [bool(r.is_last[0]) for r in rows] == [False, False, True, False]
    # About 1 per step while the pole stands: two, two, and one.
    np.testing.assert_allclose([float(r.reward[0]) for r in rows], [2, 2, 1, 0], atol=0.5)
    assert rows[3].is_first[0]


def test_a_termination_is_told_from_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from dm_control.suite import cartpole

    assert not _last(make_env("dmc:cartpole-swingup", 1, 0, time_limit=0.1)).is_terminal[0]
    monkeypatch.setattr(cartpole.Balance, "get_termination", lambda self, physics: 0.0, raising=False)
    assert _last(make_env("dmc:cartpole-swingup", 1, 0, time_limit=0.1)).is_terminal[0]
    # dm_env: a last step with a discount above zero has been cut, not ended.
    monkeypatch.setattr(cartpole.Balance, "get_termination", lambda self, physics: 1.0, raising=False)
    assert not _last(make_env("dmc:cartpole-swingup", 1, 0, time_limit=0.1)).is_terminal[0]


def _last(env: BatchedEnv) -> Step:
    env.reset()
    for a in actions(env, 20):
        row = env.step(a)
        if row.is_last[0]:
            return row
    raise AssertionError("no episode ended")


# Their targets, terrain, gains or constants live in the model, which MuJoCo's own state leaves out.
@pytest.mark.parametrize(
    "task", ["finger-turn-hard", "fish-swim", "lqr-lqr-6-2", "pointmass-hard", "quadruped-escape", "reacher-hard"]
)
def test_a_saved_state_holds_what_the_task_drew_into_its_model(task: str) -> None:
    a, b = make_env(f"dmc:{task}", 1, 0), make_env(f"dmc:{task}", 1, 1)
    a.reset()
    acts = actions(a, 20)
    for x in acts[:8]:
        a.step(x)
    state = a.get_state()
    assert state is not None
    assert any("/model/" in k for k in state)
    want = [*(a.step(x) for x in acts), a.reset(), a.step(acts[0])]
    b.set_state(state)
    got = [*(b.step(x) for x in acts), b.reset(), b.step(acts[0])]
    for w, g in zip(want, got, strict=True):
        np.testing.assert_array_equal(w.reward, g.reward)
        for key in w.obs:
            np.testing.assert_array_equal(w.obs[key], g.obs[key])


def test_a_saved_state_holds_the_second_of_a_pair_of_gaussian_draws() -> None:
    """numpy's RandomState draws them in pairs and keeps one."""
    a, b = (make_env("dmc:cartpole-swingup", 1, seed) for seed in (0, 1))
    a.reset()
    own: Any = a
    own._envs[0]._env.task.random.randn()
    state = a.get_state()
    assert state is not None
    b.set_state(state)
    np.testing.assert_array_equal(a.reset().obs["position"], b.reset().obs["position"])


def test_names_are_those_of_tdmpc2_and_of_the_suite() -> None:
    rows = [make_env(f"dmc:{name}", 1, 0).reset() for name in ("cup-catch", "ball_in_cup-catch")]
    np.testing.assert_array_equal(rows[0].obs["position"], rows[1].obs["position"])
    assert make_env("dmc:pointmass-easy", 1, 0).spec.id == "dmc:pointmass-easy"


def test_the_action_repeat_can_be_chosen() -> None:
    env = make_env("dmc:cartpole-swingup", 1, 0, action_repeat=4)
    assert (env.spec.action_repeat, env.spec.episode_length) == (4, 250)


def test_no_time_limit_is_no_episode_length() -> None:
    assert make_env("dmc:lqr-lqr-2-1", 1, 0).spec.episode_length is None


def test_a_task_that_is_not_there_is_refused_with_near_names() -> None:
    with pytest.raises(EnvError, match="no environment 'dmc:cartpole-swing'; did you mean dmc:cartpole-swingup"):
        make_env("dmc:cartpole-swing", 1, 0)


def test_no_renderer_is_told_from_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from dm_control import _render

    def none(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No OpenGL rendering backend is available.")

    env = make_env("dmc:cartpole-swingup", 1, 0)
    env.reset()
    monkeypatch.setattr(_render, "Renderer", none)
    with pytest.raises(NotImplementedError, match=r"dm_control cannot draw here .No OpenGL.*install libegl1"):
        env.render()


def test_a_picture() -> None:
    from dm_control import _render

    if _render.BACKEND is None or (sys.platform == "linux" and _render.BACKEND == "glfw"):
        pytest.skip("this machine has no renderer that works without a display")
    env = make_env("dmc:cartpole-swingup", 2, 0)
    env.reset()
    picture = env.render(1)
    assert (picture.shape, picture.dtype) == ((384, 384, 3), np.uint8)
    assert picture.std() > 10
    env.close()
