"""What every backend promises alike: the contract of telamon.envs.base, on one or two environments of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from telamon.data import ActionSpec, as_dtype
from telamon.envs.base import Action, BatchedEnv, Step, map_action, random_action
from telamon.envs.registry import make_env

E = 2
WALKER = ("orientations", "height", "velocity")
"""dm_control's own order, which is not the alphabet's."""


@dataclass(frozen=True)
class Case:
    env_id: str
    library: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Short episodes."""
    keys: tuple[str, ...] = ("obs",)
    length: int | None = None
    """Agent steps of every episode, where all are cut by their time limit."""
    random_resets: bool = True
    saves: bool = True
    repeat: int = 1


CASES = [
    Case("counting:continuous", "numpy", {"lengths": (5,)}, ("where", "total"), 5, random_resets=False),
    Case("counting:discrete", "numpy", {"lengths": (5,), "action_repeat": 2}, ("where", "total"), 3, False, repeat=2),
    Case("counting:dict", "numpy", {"lengths": (5,)}, ("where", "total", "picture", "phase"), 5, random_resets=False),
    # 0.01 s per environment step: 10 of them, and 5 agent steps.
    Case("dmc:cartpole-swingup", "dm_control", {"time_limit": 0.1}, ("position", "velocity"), 5, repeat=2),
    Case("dmc:walker-walk", "dm_control", {"time_limit": 0.25}, WALKER, 5, repeat=2),
    Case(
        "dmcpixels:walker-walk",
        "dm_control",
        {"time_limit": 0.25, "size": 32, "fast_render": True},
        ("image",),
        5,
        repeat=2,
    ),
    Case(
        "atari:pong", "ale_py", {"limit": 18, "limit_terminates": False}, ("image",), 5, random_resets=False, repeat=4
    ),
    Case("gym:Pendulum-v1", "gymnasium", {"max_episode_steps": 5}, length=5, saves=False),
    Case("gym:CartPole-v1", "gymnasium", saves=False),
    Case("examples.point_mass_env:make_env", "gymnasium", length=100, saves=False),
    Case("examples.dict_env:make_env", "gymnasium", {}, ("camera", "lit", "speed"), 64, saves=False),
    Case("gymnax:Pendulum-v1", "gymnax", {"max_steps_in_episode": 7, "action_repeat": 2}, length=4, repeat=2),
    Case("gymnax:CartPole-v1", "gymnax"),
    Case("envpool:WalkerWalk-v1", "envpool", {"max_episode_steps": 9}, WALKER, 5, saves=False, repeat=2),
    Case("envpool:CartPole-v1", "envpool", saves=False),
]


@pytest.fixture(params=CASES, ids=lambda c: c.env_id)
def case(request: pytest.FixtureRequest) -> Case:
    pytest.importorskip(request.param.library, reason=f"{request.param.library} is not installed")
    if request.param.env_id.startswith("dmcpixels:"):
        skip_without_renderer()
    return request.param


def skip_without_renderer() -> None:
    try:
        make_env("dmc:cartpole-swingup", 1, 0).render()
    except NotImplementedError:
        pytest.skip("this machine has no renderer that works without a display")


def make(case: Case, seed: int = 0, num_envs: int = E) -> BatchedEnv:
    return make_env(case.env_id, num_envs, seed, **case.kwargs)


def actions(env: BatchedEnv, ticks: int, seed: int = 0) -> list[Action]:
    rng = np.random.default_rng(seed)
    return [random_action(env.spec.action, env.num_envs, rng) for _ in range(ticks)]


def ticks_for(case: Case) -> int:
    """Enough for every environment to end an episode and begin another."""
    return 110 if case.length is None or case.length > 50 else 15


def unroll(env: BatchedEnv, ticks: int, seed: int = 0) -> list[Step]:
    return [env.reset(), *(env.step(a) for a in actions(env, ticks, seed))]


def assert_equal(a: Step, b: Step) -> None:
    assert list(a.obs) == list(b.obs)
    for key in a.obs:
        np.testing.assert_array_equal(a.obs[key], b.obs[key], err_msg=key)
    for name in ("reward", "is_first", "is_last", "is_terminal"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_rows_are_those_of_the_spec(case: Case) -> None:
    env = make(case)
    assert hash(env.spec) == hash(make(case, seed=1).spec)
    assert env.spec.id == case.env_id
    assert env.spec.action_repeat == case.repeat
    assert tuple(k for k, _ in env.spec.obs) == case.keys
    assert env.active is None
    for step in unroll(env, 4):
        assert tuple(step.obs) == case.keys
        for key, array in env.spec.obs:
            assert step.obs[key].shape == (E, *array.shape)
            assert step.obs[key].dtype == as_dtype(array.dtype)
        assert (step.reward.shape, step.reward.dtype) == ((E,), np.float32)
        for flag in (step.is_first, step.is_last, step.is_terminal):
            assert (flag.shape, flag.dtype) == ((E,), np.bool_)
        assert env.active is None
    env.close()


def test_one_row_per_tick_and_a_reset_tick_after_each_end(case: Case) -> None:
    env = make(case)
    steps = unroll(env, ticks_for(case))
    assert steps[0].is_first.all()
    for before, after in itertools.pairwise(steps):
        np.testing.assert_array_equal(after.is_first, before.is_last)
    for step in steps:
        assert not (step.is_first & step.is_last).any()
        assert not (step.is_terminal & ~step.is_last).any()
        assert (step.reward[step.is_first] == 0).all()
    last = np.array([s.is_last for s in steps])
    assert last.any(axis=0).all()
    if case.length is not None:  # an episode of T steps has T+1 rows
        assert env.spec.episode_length == case.length
        want = [t % (case.length + 1) == case.length for t in range(len(steps))]
        np.testing.assert_array_equal(last, np.array([want] * E).T)
        assert not any(s.is_terminal.any() for s in steps)
    else:
        assert any(s.is_terminal.any() for s in steps)


def test_seeds_repeat_and_tell_environments_apart(case: Case) -> None:
    ticks = ticks_for(case)
    a, b = unroll(make(case), ticks), unroll(make(case), ticks)
    for x, y in zip(a, b, strict=True):
        assert_equal(x, y)
    if not case.random_resets:
        return
    # Across environments, episodes and seeds, no two episodes begin alike.
    other = make(case, seed=1).reset()
    begun = [s.obs[k][i].ravel() for s in (*a, other) for i in np.flatnonzero(s.is_first) for k in case.keys[:1]]
    assert len(begun) > 2 * E
    assert len(np.unique(np.stack(begun), axis=0)) == len(begun)


def test_an_environment_does_not_depend_on_its_neighbours(case: Case) -> None:
    few, many = make(case, num_envs=1).reset(), make(case, num_envs=3).reset()
    for key in case.keys:
        np.testing.assert_array_equal(few.obs[key][0], many.obs[key][0])


def test_the_action_of_a_reset_tick_is_ignored(case: Case) -> None:
    a, b = make(case), make(case)
    row = a.reset()
    b.reset()
    for x in actions(a, ticks_for(case)):
        fresh = row.is_last
        row = a.step(x)
        zeroed = map_action(lambda part, fresh=fresh: (part.T * ~fresh).T.astype(part.dtype), x)
        assert_equal(row, b.step(zeroed))


def test_a_row_is_never_written_again(case: Case) -> None:
    env = make(case)
    first = env.reset()
    copy = {k: v.copy() for k, v in first.obs.items()}
    for a in actions(env, 3):
        env.step(a)
    for key, value in copy.items():
        np.testing.assert_array_equal(first.obs[key], value)
    assert first.is_first.all()


@pytest.mark.parametrize("ticks", [2, 5])  # in the middle of an episode, and on the last row of the short ones
def test_a_saved_state_continues_bit_for_bit(case: Case, ticks: int) -> None:
    env = make(case)
    row = unroll(env, ticks)[-1]
    state = env.get_state()
    if not case.saves:
        assert state is None
        with pytest.raises(NotImplementedError):
            env.set_state({})
        return
    assert all(isinstance(v, np.ndarray) and v.dtype != object for v in state.values())
    later = actions(env, ticks_for(case), seed=1)
    want = [env.step(a) for a in later]
    other = make(case, seed=9)
    assert_equal(other.set_state(state), row)
    for step, a in zip(want, later, strict=True):
        assert_equal(other.step(a), step)
    # It can be taken and set again: the state was copied, not lent.
    assert_equal(env.set_state(state), row)
    assert_equal(env.step(later[0]), want[0])


def test_what_no_agent_should_give_is_refused(case: Case) -> None:
    env = make(case)
    good = actions(env, 1)[0]
    with pytest.raises(ValueError, match="stepped before its first reset"):
        env.step(good)
    env.reset()
    with pytest.raises(ValueError, match=rf"takes .* actions \({E},.*got"):
        env.step(map_action(lambda a: a[:1], good))
    if not isinstance(env.spec.action, ActionSpec):
        first, second = (key for key, _ in env.spec.action)
        with pytest.raises(ValueError, match=f"takes a dict of {first}, {second} as its action, got one array"):
            env.step(good[first])
        with pytest.raises(
            ValueError, match=f"takes a dict of {first}, {second} as its action, got a dict of {first}$"
        ):
            env.step({first: good[first]})
        integers = next(key for key, part in env.spec.action if part.classes)
        with pytest.raises(ValueError, match=rf"element 0 of action '{integers}' for environment 0 .* is 99"):
            env.step({**good, integers: np.full_like(good[integers], 99)})
        return
    with pytest.raises(ValueError, match="takes one array as its action, got a dict of action"):
        env.step({"action": good})
    if env.spec.action.classes is None:
        bad = good.copy()
        bad[1, 0] = np.nan
        with pytest.raises(ValueError, match=rf"element 0 of the action for environment 1 \({case.env_id}\) is nan"):
            env.step(bad)
    else:
        bad = np.full_like(good, 99)
        with pytest.raises(ValueError, match=r"element 0 of the action for environment 0 .* is 99"):
            env.step(bad)
        with pytest.raises(ValueError, match="int32 actions"):
            env.step(good.astype(np.float32))
