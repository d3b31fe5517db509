"""Crafter, whose seeds do not repeat and whose states cannot be saved: what the other backends promise is not asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from telamon.data import ActionSpec, ArraySpec
from telamon.envs.base import EnvError
from telamon.envs.registry import make_env

pytest.importorskip("crafter", reason="crafter is not installed")
adapter = pytest.importorskip("telamon.envs.crafter")


def test_rows_are_what_crafter_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "LENGTH", 3)
    env = make_env("crafter:reward", 2, 0, size=32)
    assert env.spec.obs == (("image", ArraySpec((32, 32, 3), "uint8")),)
    assert env.spec.action == ActionSpec((), (17,))
    assert env.spec.episode_length == 3
    rows = [env.reset(), *(env.step(np.zeros(2, np.int32)) for _ in range(4))]
    assert rows[0].is_first.all()
    assert rows[0].obs["image"].std() > 10
    assert not np.array_equal(rows[0].obs["image"][0], rows[0].obs["image"][1])  # each has its own world
    assert [bool(r.is_last[0]) for r in rows] == [False, False, False, True, False]
    assert not rows[3].is_terminal.any()  # cut, not dead
    assert rows[4].is_first.all()
    assert env.get_state() is None
    assert env.render().shape == (384, 384, 3)


@pytest.mark.parametrize(("name", "reward"), [("reward", -0.9), ("noreward", 0.0)])
def test_a_death_terminates_and_health_pays(name: str, reward: float) -> None:
    env: Any = make_env(f"crafter:{name}", 1, 0)
    env.reset()
    env._envs[0]._env._player.health = 0
    row = env.step(np.zeros(1, np.int32))
    assert row.is_last[0]
    assert row.is_terminal[0]
    np.testing.assert_allclose(row.reward, [reward], atol=1e-6)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(EnvError, match="no environment 'crafter:rewards'; did you mean crafter:reward"):
        make_env("crafter:rewards", 1, 0)
    with pytest.raises(EnvError, match=r"^crafter:reward: its option size is 1; it takes 16 to 480$"):
        make_env("crafter:reward", 1, 0, size=1)
