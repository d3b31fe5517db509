"""Gymnasium spaces and episode ends, with environments small enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from telamon.data import ActionSpec, ArraySpec
from telamon.envs.base import EnvError
from telamon.envs.registry import make_env

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
spaces = gymnasium.spaces
gym = pytest.importorskip("telamon.envs.gym")

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Tiny(gymnasium.Env):
    """Gives what it is told to, and keeps the actions it gets."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # gymnasium's own spelling

    def __init__(
        self, obs: Any = BOX, act: Any = BOX, result: Any = None, first: Any = None, reset: Any = None
    ) -> None:
        self.observation_space, self.action_space = obs, act
        self.first = obs.sample() if first is None else first
        self.result = result or (lambda t: (self.first, 0.0, False, False, {}))
        self.reset_result = (self.first, {}) if reset is None else reset
        self.got: list[Any] = []
        self.seeds: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.t = 0
        return self.reset_result

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        self.got.append(action)
        self.t += 1
        return self.result(self.t)


def batch(env: Any, **kwargs: Any) -> Any:
    return gym.make_own(lambda: env, "mine:make", 1, 0, **kwargs)


def stepped(env: Any, action: Any, **kwargs: Any) -> Any:
    """The row after one action, and the environment's own action."""
    b = batch(env, **kwargs)
    b.reset()
    row = b.step(np.asarray([action]))
    return row, env.got[-1]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(-1, 1, (3,), np.float64), ArraySpec((3,), "float32")),
        (spaces.Box(-1, 1, (), np.float32), ArraySpec((), "float32")),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), ArraySpec((4, 4, 3), "uint8")),
        (spaces.Box(0, 9, (2,), np.int64), ArraySpec((2,), "int32", 10)),
        (spaces.Box(np.array([0, 0]), np.array([4, 9]), dtype=np.int16), ArraySpec((2,), "int32", 10)),
        (spaces.Box(0, 255, (4,), np.uint8), ArraySpec((4,), "uint8", 256)),
        (spaces.Box(0, 2**16, (2,), np.int64), ArraySpec((2,), "int32")),
        (spaces.Box(0, np.inf, (2,), np.int64), ArraySpec((2,), "int32")),
        (spaces.Box(-1, 1, (2,), np.int64), ArraySpec((2,), "int32")),
        (spaces.Box(0, 1, (2,), np.bool_), ArraySpec((2,), "bool", 2)),
        (spaces.Box(0, 1, (2, 2, 2), np.bool_), ArraySpec((2, 2, 2), "bool")),
        (spaces.Box(0, 3, (2, 2, 2), np.int32), ArraySpec((2, 2, 2), "int32")),
        (spaces.Discrete(5), ArraySpec((), "int32", 5)),
        (spaces.Discrete(5, start=1), ArraySpec((), "int32")),
        (spaces.MultiDiscrete([3, 4]), ArraySpec((2,), "int32", 4)),
        (spaces.MultiDiscrete([[3], [4]], start=[[0], [1]]), ArraySpec((2, 1), "int32")),
        (spaces.MultiBinary(3), ArraySpec((3,), "int32", 2)),
    ],
)
def test_observation_dtypes_follow_the_declared_space(space: Any, expected: ArraySpec) -> None:
    env = Tiny(obs=space)
    row = batch(env).reset()
    assert batch(env).spec.obs == (("obs", expected),)
    np.testing.assert_array_equal(row.obs["obs"][0], env.first.astype(expected.dtype))
    assert row.obs["obs"].dtype == expected.dtype


def test_a_dict_keeps_its_own_order() -> None:
    space = spaces.Dict([("z", spaces.Discrete(2)), ("a", BOX)])
    env = Tiny(obs=space, first={"a": np.zeros(2, np.float32), "z": 1})
    assert [k for k, _ in batch(env).spec.obs] == list(space.spaces) == ["z", "a"]
    assert list(batch(env).reset().obs) == ["z", "a"]


def test_keys_for_the_log_stay_with_the_environment() -> None:
    env = Tiny(obs=spaces.Dict({"log/health": BOX, "a": BOX}), first={"a": GOOD, "log/health": GOOD, "log/other": "x"})
    assert [k for k, _ in batch(env).spec.obs] == ["a"]
    assert list(batch(env).reset().obs) == ["a"]


@pytest.mark.parametrize(
    ("space", "spec", "action", "native"),
    [
        (spaces.Box(-2, 6, (2,), np.float32), ActionSpec((2,)), np.float32([-1, 0.5]), [-2, 4]),
        (spaces.Box(np.float32([0, -0.4]), np.float32([1, 0.4])), ActionSpec((2,)), np.float32([0, 9]), [0.5, 0.4]),
        (
            spaces.Box(-1, 1, (2, 2), np.float32),
            ActionSpec((2, 2)),
            np.float32([[0.1, -7], [1, 0]]),
            [[0.1, -1], [1, 0]],
        ),
        (spaces.Discrete(4, start=10), ActionSpec((), (4,)), np.int32(3), 13),
        (spaces.MultiDiscrete([3, 2]), ActionSpec((2,), (3, 2)), np.int32([2, 1]), [2, 1]),
        (
            spaces.MultiDiscrete([[3], [2]], start=[[1], [5]]),
            ActionSpec((2, 1), (3, 2)),
            np.int32([[2], [0]]),
            [[3], [5]],
        ),
        (spaces.MultiBinary(2), ActionSpec((2,), (2, 2)), np.int32([1, 0]), [1, 0]),
    ],
)
def test_actions_are_mapped_at_the_last_moment(space: Any, spec: ActionSpec, action: Any, native: Any) -> None:
    env = Tiny(act=space)
    assert batch(env).spec.action == spec
    _, got = stepped(env, action)
    np.testing.assert_array_equal(got, np.asarray(native, space.dtype))
    assert np.asarray(got).dtype == space.dtype


def test_a_dict_action_is_mapped_part_by_part() -> None:
    parts = {
        "push": spaces.Box(-2, 6, (2,), np.float32),
        "button": spaces.Discrete(4, start=10),
        "levers": spaces.MultiDiscrete([3, 2]),
        "lamps": spaces.MultiBinary(2),
    }
    env = Tiny(act=spaces.Dict(list(parts.items())))
    b = batch(env)
    assert b.spec.action == (
        ("push", ActionSpec((2,))),
        ("button", ActionSpec((), (4,))),
        ("levers", ActionSpec((2,), (3, 2))),
        ("lamps", ActionSpec((2,), (2, 2))),
    )
    assert list(b.bounds) == ["push"]
    np.testing.assert_array_equal(b.bounds["push"], [[-2, -2], [6, 6]])
    b.reset()
    action = {"lamps": [1, 0], "levers": [2, 1], "button": 3, "push": [-1, 0.5]}
    b.step({k: np.asarray([v], np.float32 if k == "push" else np.int32) for k, v in action.items()})
    (got,) = env.got
    assert {k: np.asarray(v).tolist() for k, v in got.items()} == {
        "push": [-2, 4],
        "button": 13,
        "levers": [2, 1],
        "lamps": [1, 0],
    }
    assert got in env.action_space


def test_bounds_of_minus_one_and_one_leave_an_action_as_it_is() -> None:
    env = Tiny(act=spaces.Box(-1, 1, (1000,), np.float32))
    action = np.random.default_rng(0).uniform(-1, 1, 1000).astype(np.float32)
    np.testing.assert_array_equal(stepped(env, action)[1], action)


@pytest.mark.parametrize(
    ("terminated", "truncated"), [(True, False), (False, True), (True, True), (np.bool_(False), np.bool_(True))]
)
def test_termination_and_truncation_are_told_apart(terminated: Any, truncated: Any) -> None:
    env = Tiny(result=lambda t: (env.first, 1, terminated, truncated, {}))
    row, _ = stepped(env, np.zeros(2, np.float32))
    assert row.is_last[0]
    assert row.is_terminal[0] == terminated


def test_the_time_limit_is_found_below_other_wrappers() -> None:
    def wrapped() -> Any:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.wrappers.TimeLimit(Tiny(), 25))

    assert gym.make_own(wrapped, "mine:make", 1, 0, action_repeat=2).spec.episode_length == 13
    assert batch(Tiny()).spec.episode_length is None
    assert make_env("gym:Pendulum-v1", 1, 0).spec.episode_length == 200


def test_only_the_first_reset_is_seeded() -> None:
    env = Tiny(result=lambda t: (env.first, 0.0, True, False, {}))
    b = batch(env)
    b.reset()
    for _ in range(4):
        b.step(np.zeros((1, 2), np.float32))
    assert env.seeds[1:] == [None, None]
    assert isinstance(env.seeds[0], int)


def test_the_first_environment_is_made_once() -> None:
    made: list[Tiny] = []

    def make() -> Tiny:
        made.append(Tiny())
        return made[-1]

    gym.make_own(make, "mine:make", 3, 0)
    assert len(made) == 3


Refusal = tuple[Callable[[], Any], str]

AT_LOAD: dict[str, Refusal] = {
    "unbounded": (
        lambda: Tiny(act=spaces.Box(-np.inf, 1, (2,))),
        r"the action is an unbounded Box \(shape \(2,\), low -inf, high 1\).*give the action space finite low and high",
    ),
    "as good as unbounded": (
        lambda: Tiny(act=spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (1,))),
        "unbounded Box",
    ),
    "no action": (lambda: Tiny(act=spaces.Box(-1, 1, (0,))), r"empty Box of shape \(0,\): there is nothing to control"),
    "no room": (lambda: Tiny(act=spaces.Box(1, 1, (1,))), "an empty Box .*each low must be below its high"),
    "integer box": (lambda: Tiny(act=spaces.Box(0, 3, (1,), np.int32)), "Box of int32; declare .* MultiDiscrete"),
    "composite action": (lambda: Tiny(act=spaces.Tuple([BOX])), "the action is a Tuple space; give one Box, Discrete"),
    "nested action": (
        lambda: Tiny(act=spaces.Dict({"arm": spaces.Dict({"a": BOX})})),
        "action 'arm' is a Dict space; give one .* or one Dict of these$",
    ),
    "bad part": (
        lambda: Tiny(act=spaces.Dict({"arm": spaces.Box(-np.inf, 1, (2,))})),
        "action 'arm' is an unbounded Box",
    ),
    "empty dict action": (
        lambda: Tiny(act=spaces.Dict({})),
        "the action is an empty Dict: there is nothing to control",
    ),
    "composite observation": (
        lambda: Tiny(obs=spaces.Dict({"a": spaces.Dict({"b": BOX})})),
        "observation 'a' is a Dict space; .*FlattenObservation",
    ),
    "text": (lambda: Tiny(obs=spaces.Text(4)), "observation 'obs' is a Text space"),
    "empty observation": (lambda: Tiny(obs=spaces.Box(-1, 1, (0,))), "observation 'obs' is an empty Box"),
    "nothing but the log": (
        lambda: Tiny(obs=spaces.Dict({"log/health": BOX})),
        "the observation is an empty Dict: there is nothing to learn from",
    ),
    "empty dict": (lambda: Tiny(obs=spaces.Dict({}), first={}), "the observation is an empty Dict"),
    "complex": (
        lambda: Tiny(obs=_declared(np.complex64), first=np.zeros(2)),
        "observation 'obs' has dtype complex64, which cannot be stored",
    ),
    "object": (
        lambda: Tiny(obs=_declared(object), first=np.zeros(2)),
        "observation 'obs' has dtype object, which cannot be stored",
    ),
    "not gymnasium": (lambda: Old(), "Old, not a gymnasium.Env, so termination cannot be told from truncation"),
    "raises": (lambda: 1 / 0, "mine:make raised ZeroDivisionError: division by zero"),
}


def _declared(dtype: Any) -> Any:
    """A Box whose dtype gymnasium itself would not take."""
    box = spaces.Box(-1, 1, (2,))
    box.dtype = np.dtype(dtype)
    return box


class Old:
    """The interface before termination and truncation were told apart."""

    observation_space = action_space = BOX

    def reset(self) -> np.ndarray:
        return np.zeros(2)

    def step(self, action: Any) -> Any:
        return np.zeros(2), 0.0, False, {}


@pytest.mark.parametrize("name", AT_LOAD)
def test_what_cannot_work_is_refused_at_load(name: str) -> None:
    build, message = AT_LOAD[name]
    with pytest.raises(EnvError, match=message):
        gym.make_own(build, "mine:make", 1, 0)


GOOD = np.zeros(2, np.float32)

AT_STEP: dict[str, Refusal] = {
    "four values": (
        lambda: Tiny(result=lambda t: (GOOD, 0.0, False, {})),
        r"step did not return \(observation, reward, terminated, truncated, info\), so termination cannot be told",
    ),
    "four values below a wrapper": (
        lambda: gymnasium.wrappers.TimeLimit(Tiny(result=lambda t: (GOOD, 0.0, False, {})), 5),
        "step did not return .* at step 1 of its episode",
    ),
    "reset without info": (lambda: Tiny(reset=GOOD), r"reset did not return \(observation, info\) at step 0"),
    "no boolean": (lambda: Tiny(result=lambda t: (GOOD, 0.0, None, False, {})), "terminated is None, expected a bool"),
    "not a dict": (lambda: Tiny(obs=spaces.Dict({"a": BOX}), first=GOOD), "is a ndarray, expected a dict"),
    "shape": (lambda: Tiny(result=lambda t: (np.zeros(3), 0.0, False, False, {})), r"shape \(3,\), expected \(2,\)"),
    "dtype": (
        lambda: Tiny(obs=spaces.Discrete(3), first=0.5),
        "observation 'obs' has dtype float64, expected int32",
    ),
    "category": (
        lambda: Tiny(obs=spaces.Discrete(3), first=3),
        "observation 'obs' is 3; its space says 0 to 2",
    ),
    "objects": (
        lambda: Tiny(result=lambda t: (np.array([None, 1], object), 0.0, False, False, {})),
        "observation 'obs' has dtype object, expected float32",
    ),
    "no reward": (lambda: Tiny(result=lambda t: (GOOD, None, False, False, {})), "TypeError.*NoneType"),
    "two rewards": (lambda: Tiny(result=lambda t: (GOOD, np.zeros(2), False, False, {})), "ValueError"),
}


@pytest.mark.parametrize("name", AT_STEP)
def test_what_breaks_its_promise_is_refused_at_the_step(name: str) -> None:
    build, message = AT_STEP[name]
    with pytest.raises(EnvError, match=f"environment 0 .mine:make.: .*{message}"):
        stepped(build(), GOOD)


def test_other_value_errors_keep_their_own_words() -> None:
    def result(t: int) -> Any:
        raise ValueError("torque is too high")

    with pytest.raises(EnvError, match="ValueError: torque is too high"):
        stepped(Tiny(result=result), GOOD)


def test_pictures() -> None:
    with pytest.raises(NotImplementedError, match="render_mode='rgb_array'"):
        batch(Tiny()).render()


class Drawing(Tiny):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), 7, np.uint8)


def test_a_registered_id_draws_without_being_asked() -> None:
    gymnasium.register("TelamonDrawing-v0", Drawing)
    try:
        env = make_env("gym:TelamonDrawing-v0", 1, 0)
        env.reset()
        np.testing.assert_array_equal(env.render(), np.full((4, 4, 3), 7, np.uint8))
    finally:
        del gymnasium.registry["TelamonDrawing-v0"]


def test_an_unknown_id_and_a_missing_dependency_are_refused() -> None:
    with pytest.raises(EnvError, match="no environment 'gym:Pendulum-v9'; did you mean gym:Pendulum-v1"):
        make_env("gym:Pendulum-v9", 1, 0)

    def needs(**kwargs: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled("pip install the-simulator")

    gymnasium.register("TelamonNeeds-v0", needs)
    try:
        with pytest.raises(EnvError, match=r"^gym:TelamonNeeds-v0: .*pip install the-simulator"):
            make_env("gym:TelamonNeeds-v0", 1, 0)
    finally:
        del gymnasium.registry["TelamonNeeds-v0"]
