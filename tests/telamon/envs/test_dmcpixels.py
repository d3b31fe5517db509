"""dm_control tasks seen through a camera, against the suite's own pictures."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from telamon.data import ArraySpec
from telamon.envs.base import EnvError
from telamon.envs.checks import env_seed
from telamon.envs.registry import make_env

pytest.importorskip("dm_control", reason="dm_control is not installed")
dmc = pytest.importorskip("telamon.envs.dmc")


@pytest.fixture
def renderer() -> None:
    from dm_control import _render

    if _render.BACKEND is None or (sys.platform == "linux" and _render.BACKEND == "glfw"):
        pytest.skip("this machine has no renderer that works without a display")


@pytest.mark.usefixtures("renderer")
@pytest.mark.parametrize(("task", "camera"), [("walker-walk", 0), ("quadruped-walk", 2)])
def test_a_row_shows_what_the_suite_draws_after_two_steps(task: str, camera: int) -> None:
    env = make_env(f"dmcpixels:{task}", 1, seed=3, size=32)
    assert env.spec.obs == (("image", ArraySpec((32, 32, 3), "uint8")),)
    assert (env.spec.id, env.spec.action_repeat, env.spec.episode_length) == (f"dmcpixels:{task}", 2, 500)
    raw = dmc.suite.load(*task.split("-"), {"random": env_seed(3, 0)})
    raw.reset()
    row = env.reset()
    np.testing.assert_array_equal(row.obs["image"][0], raw.physics.render(32, 32, camera_id=camera))
    row = env.step(np.full((1, *env.spec.action.shape), 0.5, np.float32))
    action = raw.action_spec()
    reward = sum(raw.step(0.25 * action.minimum + 0.75 * action.maximum).reward for _ in range(2))
    np.testing.assert_array_equal(row.obs["image"][0], raw.physics.render(32, 32, camera_id=camera))
    np.testing.assert_array_equal(row.reward[0], np.float32(reward))
    assert row.obs["image"].std() > 10
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((384, 384, 3), np.uint8)
    np.testing.assert_array_equal(picture[::12, ::12], row.obs["image"][0])
    env.close()


@pytest.mark.usefixtures("renderer")
def test_fast_pictures_lack_shadows_and_show_the_same_scene() -> None:
    def first(**kwargs: Any) -> np.ndarray:
        return make_env("dmcpixels:walker-walk", 1, 0, **kwargs).reset().obs["image"][0].astype(float)

    full, fast = first(), first(fast_render=True)
    assert full.shape == fast.shape
    assert 1 < np.abs(full - fast).mean() < 20
    assert np.corrcoef(full.ravel(), fast.ravel())[0, 1] > 0.8


def test_without_a_renderer_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from dm_control import _render

    def none(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No OpenGL rendering backend is available.")

    monkeypatch.setattr(_render, "Renderer", none)
    with pytest.raises(EnvError, match=r"^dmcpixels:walker-walk: dm_control cannot draw here .*install libegl1"):
        make_env("dmcpixels:walker-walk", 1, 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"size": 500}, "its option size is 500; it takes 16 to 480"),
        ({"fast_render": 2}, "its option fast_render is 2; it takes False, True"),
    ],
)
def test_values_out_of_range_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=f"^dmcpixels:walker-walk: {message}$"):
        make_env("dmcpixels:walker-walk", 1, 0, **option)
