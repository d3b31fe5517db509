"""Broken environments on the host: what is said, what is rebuilt, and that nothing bad reaches a row."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

from telamon.data import ActionSpec, ArraySpec, EnvSpec
from telamon.envs.base import EnvError, Step
from telamon.envs.checks import MAX_REBUILDS, env_seed, to_bounds, unsound
from telamon.envs.counting import EPISODES_PER_REBUILD, Fault, encode, make
from telamon.envs.host import HostEnvs, Transition
from tests.waiting import SECONDS

E = 3
RAISED = "RuntimeError: the counting environment was told to break"

MESSAGES = {
    "raise": RAISED,
    "nan_reward": "reward is nan",
    "inf_obs": "observation 'where' is inf",
    "shape": r"observation 'where' has shape \(2,\), expected \(3,\)",
    "missing": r"observation 'where' is missing \(got 'total'\)",
    "dtype": "observation 'where' has dtype object, expected float32",
}


def action(value: float = 0.5) -> np.ndarray:
    return np.full((E, 2), value, np.float32)


def test_a_row_knows_its_place_and_its_reward_the_action() -> None:
    env = make("continuous", E, seed=0, lengths=(3, 5), terminate_every=2)
    row = env.reset()
    t, episode = np.zeros(E, int), np.zeros(E, int)
    ends = []
    for tick in range(30):
        fresh = row.is_last
        a = action(0.01 * tick)
        row = env.step(a)
        t, episode = np.where(fresh, 0, t + 1), episode + fresh
        np.testing.assert_array_equal(row.obs["where"], np.stack([np.arange(E), episode, t], axis=1))
        np.testing.assert_allclose(row.reward, np.where(fresh, 0, encode(a[0])))
        # By hand: lengths 3 and 5 in turn, environment 1 starting at the second; every second episode terminates.
        length = np.array([(3, 5)[(i + e) % 2] for i, e in enumerate(episode)])
        np.testing.assert_array_equal(row.is_last, t == length)
        np.testing.assert_array_equal(row.is_terminal, row.is_last & (episode % 2 == 1))
        ends.append(row.is_terminal.any())
    assert any(ends)


def test_a_picture_and_an_integer_know_the_place_too() -> None:
    env = make("dict", 2, seed=0, lengths=(5,), size=3, classes=4)
    assert dict(env.spec.obs)["picture"] == ArraySpec((3, 3, 3), "uint8")
    assert dict(env.spec.obs)["phase"] == ArraySpec((), "int32", 4)
    assert env.spec.action == (("push", ActionSpec((2,))), ("button", ActionSpec((2,), (4, 4))))
    rows = [env.reset()]
    pressed = {"push": np.zeros((2, 2), np.float32), "button": np.array([[3, 0], [0, 1]], np.int32)}
    rows += [env.step(pressed) for _ in range(5)]
    for t, row in enumerate(rows):
        np.testing.assert_array_equal(
            row.obs["picture"], np.tile(np.array([[[[0, 0, t]]], [[[1, 0, t]]]]), (1, 3, 3, 1))
        )
        assert row.obs["phase"].tolist() == [t % 4] * 2
    assert rows[1].reward.tolist() == [3, 2]  # by sorted keys: button weighs 1 and 2, push 3 and 4


def test_an_action_is_repeated_and_its_rewards_summed_up_to_the_end() -> None:
    env = make("continuous", 1, seed=0, lengths=(5,), action_repeat=2)
    assert env.spec.episode_length == 3
    env.reset()
    rows = [env.step(np.array([[1, 0]], np.float32)) for _ in range(4)]
    assert [float(r.reward[0]) for r in rows] == [2, 2, 1, 0]
    assert [bool(r.is_last[0]) for r in rows] == [False, False, True, False]
    assert [float(r.obs["where"][0, 2]) for r in rows] == [2, 4, 5, 0]


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_fault_stops_the_run_and_is_named(kind: Any) -> None:
    env = make("continuous", E, 0, faults=[Fault(kind, env=2, episode=1, t=4)])
    env.reset()
    for _ in range(7 + 1 + 3):  # an episode of 7 steps, a reset tick, three good steps
        env.step(action())
    with pytest.raises(EnvError) as caught:
        env.step(action())
    assert caught.match(
        rf"^environment 2 \(counting:continuous\): {MESSAGES[kind]} at step 4 of its episode; env.on_error=rebuild .*"
    )
    assert env.active == 2  # for whoever looks where it stopped
    if kind == "raise":
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("kind", ["raise", "inf_obs", "missing"])
def test_a_fault_at_the_reset_is_named_step_0(kind: Any) -> None:
    env = make("continuous", E, 0, faults=[Fault(kind, env=1, t=0)])
    with pytest.raises(EnvError, match=rf"environment 1 .*{MESSAGES[kind]} at step 0"):
        env.reset()


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_rebuilt_environment_begins_anew_and_the_others_go_on(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    env = make("continuous", E, 0, on_error="rebuild", faults=[Fault(kind, env=1, t=4)])
    sound = make("continuous", E, 0)
    env.reset(), sound.reset()
    for _ in range(3):
        env.step(action()), sound.step(action())
    with caplog.at_level(logging.WARNING):
        row, other = env.step(action()), sound.step(action())
    # Nobody fabricates a row: the broken one's row of this tick is its new first one, the old episode has no last.
    np.testing.assert_array_equal(row.is_first, [False, True, False])
    assert not row.is_last.any()
    np.testing.assert_array_equal(row.obs["where"][1], [1, EPISODES_PER_REBUILD, 0])
    assert row.reward[1] == 0
    for i in (0, 2):
        np.testing.assert_array_equal(row.obs["where"][i], other.obs["where"][i])
        assert row.reward[i] == other.reward[i]
    assert not unsound(row, env.spec)
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("env_rebuilt env=1 id=counting:continuous step=4 reason=")
    assert (env.refused_rows, sound.refused_rows) == (1, 0)
    np.testing.assert_array_equal(env.step(action()).obs["where"][1], [1, EPISODES_PER_REBUILD, 1])


def test_a_fault_on_the_last_row_leaves_no_last_row() -> None:
    env = make("continuous", E, 0, lengths=(2,), on_error="rebuild", faults=[Fault("nan_reward", env=0, t=2)])
    env.reset(), env.step(action())
    row = env.step(action())
    np.testing.assert_array_equal(row.is_last, [False, True, True])
    np.testing.assert_array_equal(row.is_first, [True, False, False])
    np.testing.assert_array_equal(env.step(action()).is_first, [False, True, True])


def test_rebuilding_ends_where_it_does_not_help() -> None:
    forever = [Fault("raise", env=0, t=1, every_rebuild=True)]
    env = make("continuous", E, 0, on_error="rebuild", faults=forever)
    env.reset()
    for _ in range(MAX_REBUILDS):
        assert env.step(action()).is_first[0]
    with pytest.raises(EnvError, match=f"at step 1 of its episode, after {MAX_REBUILDS} rebuilds without one finished"):
        env.step(action())


def test_a_finished_episode_restores_the_patience() -> None:
    # Breaks in its second episode, every time: each rebuild finishes one first.
    env = make("continuous", 1, 0, lengths=(2,), on_error="rebuild", faults=[Fault("raise", 0, 1, 1, True)])
    env.reset()
    rows = [env.step(action()[:1]) for _ in range(8 * MAX_REBUILDS)]
    assert rows[-1].obs["where"][0, 1] > (MAX_REBUILDS + 1) * EPISODES_PER_REBUILD


def test_a_rebuild_that_fails_counts_as_one() -> None:
    made = []

    def one(index: int, rebuild: int) -> Single:
        made.append(rebuild)
        if rebuild in (1, 2):
            raise OSError("no more licenses")
        return Single(fails=rebuild == 0)

    env = HostEnvs(Single.spec, one, 1, "rebuild", {})
    env.reset()
    assert env.step(np.zeros((1, 1), np.float32)).is_first.all()
    assert made == [0, 1, 2, 3]
    assert env.refused_rows == 3


def test_one_that_cannot_even_close_is_thrown_away_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    env = HostEnvs(Single.spec, lambda i, rebuild: Single(fails=rebuild == 0), 1, "rebuild", {})
    env.reset()
    assert env.step(np.zeros((1, 1), np.float32)).is_first.all()
    assert "env_close_failed env=0 id=single" in caplog.text


def test_the_counts_of_rebuilds_are_part_of_the_state() -> None:
    faults = [Fault("raise", env=0, t=1, every_rebuild=True)]

    def until_stop(env: HostEnvs) -> int:
        for tick in range(100):
            try:
                env.step(action())
            except EnvError:
                return tick
        raise AssertionError("it never stopped")

    a, b = (make("continuous", E, 0, on_error="rebuild", faults=faults) for _ in range(2))
    a.reset()
    for _ in range(5):
        a.step(action())
    state = a.get_state()
    assert state is not None
    b.set_state(state)
    assert a.refused_rows == b.refused_rows > 0
    assert until_stop(a) == until_stop(b)


def test_the_environment_being_stepped_can_be_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    release = threading.Event()

    def sleep(_: float) -> None:
        hung.set()
        release.wait(SECONDS)

    monkeypatch.setattr(time, "sleep", sleep)
    env = make("continuous", E, 0, faults=[Fault("hang", env=1, t=1)])
    env.reset()
    thread = threading.Thread(target=env.step, args=(action(),))
    thread.start()
    assert hung.wait(SECONDS)
    assert env.active == 1
    release.set()
    thread.join(SECONDS)
    assert env.active is None


def test_float64_beyond_float32_and_too_large_integers_are_named() -> None:
    env = HostEnvs(Single.spec, lambda i, r: Single(value=np.float64(1e300)), 1, "stop", {})
    with pytest.raises(EnvError, match="observation 'x' is inf"):
        env.reset()
    env = HostEnvs(Single.spec, lambda i, r: Single(count=np.int64(2**40)), 1, "stop", {})
    with pytest.raises(EnvError, match="observation 'n' does not fit int32: it reaches 1099511627776"):
        env.reset()


def test_an_undeclared_key_is_named() -> None:
    env = HostEnvs(Single.spec, lambda i, r: Single(more={"y": 1}), 1, "stop", {})
    with pytest.raises(EnvError, match="observation 'y' was not declared"):
        env.reset()


def test_seeds_differ_by_environment_and_rebuild_and_repeat() -> None:
    seeds = [env_seed(s, i, r) for s in range(5) for i in range(5) for r in range(5)]
    assert len(set(seeds)) == 125
    assert all(0 <= s < 2**31 for s in seeds)
    assert env_seed(3, 4, 1) == env_seed(3, 4, 1)


def test_no_mapped_action_leaves_its_bounds() -> None:
    low, high = np.sort(np.random.default_rng(0).normal(size=(2, 1000)), axis=0)
    for action in (-np.ones(1000), np.ones(1000), np.full(1000, -5), np.full(1000, 5)):
        mapped = to_bounds(action, low, high)  # midpoint plus half-range alone would round past some of them
        np.testing.assert_allclose(mapped, low if action[0] < 0 else high, rtol=1e-12, atol=1e-15)
        assert ((low <= mapped) & (mapped <= high)).all()


def test_unsound_names_the_first_bad_key_of_each_environment() -> None:
    flag = np.zeros(4, bool)
    obs = {"a": np.array([0, np.nan, 0, np.inf], np.float32), "b": np.zeros((4, 2), np.uint8)}
    step = Step(obs, np.array([0, -np.inf, np.nan, 0], np.float32), flag, flag, flag)
    spec = EnvSpec("x", (("a", ArraySpec(())), ("b", ArraySpec((2,), "uint8"))), ActionSpec((1,)), None)
    assert unsound(step, spec) == [(1, "observation 'a' is nan"), (2, "reward is nan"), (3, "observation 'a' is inf")]


def test_a_category_out_of_its_range_is_named() -> None:
    flag = np.zeros(3, bool)
    obs = {"n": np.array([[0, 2], [0, 3], [-1, 9]], np.int32), "far": np.full(3, 99, np.int32)}
    spec = EnvSpec("x", (("n", ArraySpec((2,), "int32", 3)), ("far", ArraySpec((), "int32"))), ActionSpec((1,)), None)
    assert unsound(Step(obs, np.zeros(3, np.float32), flag, flag, flag), spec) == [
        (1, "observation 'n' is 3; its space says 0 to 2"),
        (2, "observation 'n' is -1; its space says 0 to 2"),
    ]


class Single:
    """A `OneEnv` whose faults are given; never ends."""

    spec = EnvSpec("single", (("x", ArraySpec(())), ("n", ArraySpec((), "int32"))), ActionSpec((1,)), None)

    def __init__(self, fails: bool = False, value: Any = 0.0, count: Any = 0, more: Any = None) -> None:
        self.fails = fails
        self.obs = {"x": value, "n": count, **(more or {})}

    def reset(self) -> None:
        pass

    def observe(self) -> dict[str, Any]:
        return self.obs

    def step(self, action: np.ndarray) -> Transition:
        if self.fails:
            raise OSError("the simulator has gone")
        return Transition(0.0, False, False)

    def get_state(self) -> None:
        return None

    def set_state(self, state: Any) -> None:
        raise NotImplementedError

    def render(self) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        if self.fails:
            raise OSError("the simulator has gone")
