"""`telamon check-env`: the report and its text. What it refuses is tested where it is refused."""

from __future__ import annotations

import numpy as np
import pytest

from telamon.data import ArraySpec, EnvSpec
from telamon.envs.base import EnvError
from telamon.envs.check import check_env, to_text
from telamon.envs.counting import Fault


def refuse(spec: EnvSpec) -> None:
    raise ValueError(f"{spec.id} has integer actions")


def test_a_report_says_what_happened() -> None:
    report = check_env(
        "counting:discrete", episodes=3, lengths=(4,), terminate_every=2, agents={"one": refuse, "two": hash}
    )
    assert report.steps == 12
    assert (report.terminations, report.truncations) == (1, 2)
    assert len(report.returns) == 3
    assert (report.obs["where"].low, report.obs["where"].high) == (0, 4)
    # The sum of an episode's rewards is the largest `total` of the observation.
    assert report.obs["total"].high == max(report.returns)
    assert 0 <= report.reward.low <= report.reward.high <= 6
    assert report.saves
    assert report.bounds == {}
    assert report.refusals == {"one": "counting:discrete has integer actions", "two": None}


def test_the_text_holds_what_an_agent_will_see() -> None:
    text = to_text(check_env("counting:continuous", lengths=(4,), action_repeat=2, agents={"tdmpc2": refuse}))
    lines = {line[:12].strip(): line[13:] for line in text.splitlines() if line[:12].strip()}
    assert lines["environment"] == "counting:continuous"
    assert lines["observation"].startswith("where  float32 (3,)  seen 0 to 4")
    assert "\n             total  float32 ()  seen " in text
    assert lines["action"] == "float32 (2,), [-1, 1] mapped to [-1, 1]"
    assert lines["episode"] == "at most 2 agent steps; each action is applied 2 times"
    assert lines["stepped"].startswith("4 agent steps at random; episodes: 0 terminated, 2 truncated; returns ")
    assert lines["resume"] == "exact: its state can be saved"
    assert lines["tdmpc2"] == "refuses: counting:continuous has integer actions"


def test_a_dict_action_is_told_part_by_part() -> None:
    text = to_text(check_env("counting:dict", lengths=(3,), classes=5))
    assert "\naction       push    float32 (2,), [-1, 1] mapped to [-1, 1]\n" in text
    assert "\n             button  int32 (2,), classes per element (5, 5)\n" in text


def test_it_is_bounded_where_no_episode_ends() -> None:
    report = check_env("counting:continuous", lengths=(10**6,), max_steps=20)
    assert (report.steps, report.returns) == (20, ())
    assert "episodes: 0 terminated, 0 truncated" in to_text(report)


@pytest.mark.parametrize("kind", ["shape", "missing", "dtype", "inf_obs", "nan_reward", "raise"])
def test_what_breaks_while_stepping_is_refused(kind: str) -> None:
    with pytest.raises(EnvError, match=r"environment 0 \(counting:continuous\): .* at step 3 of its episode"):
        check_env("counting:continuous", faults=[Fault(kind, t=3)])  # type: ignore[arg-type]  # a parametrised literal


def test_the_example_of_dicts_is_told_key_by_key_and_can_be_learned() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    report = check_env("examples/dict_env.py:make_env")
    text = to_text(report)
    assert report.spec.obs == (
        ("camera", ArraySpec((48, 48, 3), "uint8")),
        ("lit", ArraySpec((), "int32", 3)),
        ("speed", ArraySpec((1,))),
    )
    assert "\n             lit     int32 () of 3 classes  seen 0 to 2\n" in text
    assert "\naction       press  int32 (1,), classes per element (2,)\n" in text
    assert "\n             push   float32 (1,), [-1, 1] mapped to [-1, 1]\n" in text
    # What a policy gets that looks at nothing but the picture and the integer, against one that acts at random.
    from examples.dict_env import make_env

    env, total = make_env(), 0.0
    assert isinstance(env, gymnasium.Env)
    obs, _ = env.reset(seed=0)
    for _ in range(64):
        cart = np.flatnonzero((obs["camera"][16] == 255).all(-1)).mean() / 46
        goal = (obs["lit"] + 0.5) / 3
        push = np.clip(8 * (goal - cart) - 8 * obs["speed"], -1, 1).astype(np.float32)
        pressed = np.array([int(abs(goal - cart) < 1 / 8)], np.int8)
        obs, reward, _, _, _ = env.step({"push": push, "press": pressed})
        total += reward
    assert total > 6
    assert max(report.returns) < 3


def test_the_example_loads_steps_and_says_so() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    by_module, by_path = (
        check_env(f"{target}:make_env") for target in ("examples.point_mass_env", "examples/point_mass_env.py")
    )
    assert by_module.returns == by_path.returns
    assert by_module.spec.episode_length == 100
    assert (by_module.terminations, by_module.truncations) == (0, 2)
    assert 0 <= by_module.reward.low < by_module.reward.high <= 1
    assert "with new episodes: its state cannot be saved" in to_text(by_module)
