"""JAX environments: the pure functions, episode ends, one compilation, and what breaks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.data import ArraySpec
from telamon.envs.base import EnvError
from telamon.envs.registry import make_env

gymnax = pytest.importorskip("gymnax", reason="gymnax is not installed")
envs = pytest.importorskip("telamon.envs.jax")


class Counter(gymnax.environments.environment.Environment):
    """Counts; terminates at 3 if told to by its action. Its observation is a dict out of JAX's order."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def reset_env(self, key: jax.Array, params: Any) -> Any:
        state = gymnax.environments.environment.EnvState(time=0)
        return self.observed(state, jnp.zeros(1)), state

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> Any:
        time = state.time + (0.5 if self.kind == "drifts" else 1)
        state = state.replace(time=time)
        reward = jnp.where(time == 2, jnp.nan, action[0]) if self.kind == "nan" else action[0]
        return self.observed(state, action), state, reward, (time >= 3) & (action[0] > 0), {}

    def observed(self, state: Any, action: jax.Array) -> dict[str, jax.Array]:
        return {"z": jnp.asarray(state.time, jnp.float32), "a": action}

    def observation_space(self, params: Any) -> Any:
        one = gymnax.environments.spaces.Box(0, 9, (1,))
        return gymnax.environments.spaces.Dict({"z": one, "a": one})

    def action_space(self, params: Any) -> Any:
        if self.kind == "tuple":
            return gymnax.environments.spaces.Tuple(())
        return gymnax.environments.spaces.Box(0.0, np.inf if self.kind == "unbounded" else 4.0, (1,))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gymnax:Counter-KIND` for as long as the test lasts."""
    for kind in ("", "nan", "drifts", "unbounded", "tuple"):
        monkeypatch.setitem(gymnax.registration._registry, f"Counter-{kind}", lambda kind=kind: Counter(kind))
        gymnax.registered_envs.append(f"Counter-{kind}")
    monkeypatch.setattr(Counter, "default_params", gymnax.environments.environment.EnvParams(max_steps_in_episode=5))
    yield
    del gymnax.registered_envs[-5:]


def steps(env: Any, *actions: float) -> list[Any]:
    return [env.reset(), *(env.step(np.full((env.num_envs, 1), a, np.float32)) for a in actions)]


@pytest.mark.usefixtures("counter")
def test_termination_is_told_from_the_time_limit() -> None:
    env = make_env("gymnax:Counter-", 1, 0)
    assert env.spec.obs == (("z", ArraySpec(())), ("a", ArraySpec((1,))))  # its own order, not JAX's
    assert env.spec.episode_length == 5
    # Agent units -1 and 1 are 0 and 4 to the environment.
    rows = steps(env, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1)
    assert [float(r.obs["z"][0]) for r in rows] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0]
    assert list(rows[0].obs) == ["z", "a"]
    assert [float(r.reward[0]) for r in rows] == [0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 0]
    assert [i for i, r in enumerate(rows) if r.is_last[0]] == [5, 9]
    assert [i for i, r in enumerate(rows) if r.is_terminal[0]] == [9]


@pytest.mark.usefixtures("counter")
def test_a_repeated_action_stops_at_the_end() -> None:
    env = make_env("gymnax:Counter-", 2, 0, action_repeat=2)
    assert env.spec.episode_length == 3
    rows = steps(env, 0, 0, 0, 0)  # 2 to the environment; it terminates at 3, in the second step's first half
    assert [float(r.reward[1]) for r in rows] == [0, 4, 2, 0, 4]
    assert [float(r.obs["z"][1]) for r in rows] == [0, 2, 3, 0, 2]
    assert [bool(r.is_terminal[1]) for r in rows] == [False, False, True, False, False]


@pytest.mark.usefixtures("counter")
def test_a_bad_row_stops_or_is_reset() -> None:
    with pytest.raises(EnvError, match=r"environment 0 \(gymnax:Counter-nan\): reward is nan at step 2 of its episode"):
        steps(make_env("gymnax:Counter-nan", 2, 0), -1, -1)
    env = make_env("gymnax:Counter-nan", 2, 0, on_error="rebuild")
    rows = steps(env, -1, -1, -1)
    assert env.refused_rows == 2
    assert rows[2].is_first.all()
    assert not rows[2].is_last.any()
    assert (rows[2].obs["z"] == 0).all()
    assert (rows[2].reward == 0).all()
    assert (rows[3].obs["z"] == 1).all()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("drifts", r"the state\.time is int32\[\] after a reset and float32\[\] after a step; make them the same"),
        ("unbounded", "the action is an unbounded Box"),
        ("tuple", "the action is a Tuple space; give one Box or Discrete space"),
    ],
)
@pytest.mark.usefixtures("counter")
def test_what_cannot_work_is_refused(kind: str, message: str) -> None:
    with pytest.raises(EnvError, match=f"gymnax:Counter-{kind}: {message}"):
        make_env(f"gymnax:Counter-{kind}", 1, 0)


def test_a_gymnax_that_mixes_termination_and_time_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gymnax.environments.environment.Environment, "is_truncated")
    with pytest.raises(EnvError, match=r"one 'done' for termination and time limit; install gymnax>=1.0"):
        make_env("gymnax:Pendulum-v1", 1, 0)


def test_nothing_is_compiled_twice() -> None:
    env = make_env("gymnax:CartPole-v1", 2, 0)
    for _ in range(2):
        env.reset()
        for _ in range(3):
            env.step(np.zeros(2, np.int64))
        state = env.get_state()
        assert state is not None
        env.set_state(state)
        env.step(np.zeros(2, np.int32))
    assert env._step._cache_size() == env._reset._cache_size() == 1


def test_a_jitted_unroll_of_the_pure_functions_gives_the_same_rows() -> None:
    """What fused collection builds on: vmap, scan and the same keys, without the host in between."""
    host = make_env("gymnax:Pendulum-v1", 2, 0, max_steps_in_episode=4)
    pure = envs.make_pure("Pendulum-v1", max_steps_in_episode=4)
    actions = np.random.default_rng(0).uniform(-1, 1, (9, 2, 1)).astype(np.float32)
    want = [host.reset(), *(host.step(a) for a in actions)]
    base = host._keys

    def at(tick: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.fold_in, (0, None))(base, tick)

    @jax.jit
    def unroll() -> Any:
        state, first = jax.vmap(pure.reset)(at(0))

        def tick(state: Any, x: Any) -> Any:
            action, i = x
            return jax.vmap(pure.step)(state, action, at(i))

        return first, jax.lax.scan(tick, state, (actions, jnp.arange(1, 10)))[1]

    first, later = unroll()
    np.testing.assert_allclose(first.obs["obs"], want[0].obs["obs"], rtol=1e-6)
    for name in ("reward", "is_first", "is_last", "is_terminal"):
        np.testing.assert_allclose(
            getattr(later, name), np.stack([getattr(w, name) for w in want[1:]]), rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(later.obs["obs"], np.stack([w.obs["obs"] for w in want[1:]]), rtol=1e-5, atol=1e-6)
    assert np.asarray(later.is_last).sum() == 2 * 2


def test_a_grid_is_a_flat_vector_or_a_picture() -> None:
    flat, shown = (envs.make_pure("Breakout-MinAtar", **kw) for kw in ({}, {"image": True, "size": 80}))
    assert flat.spec.obs == (("obs", ArraySpec((400,))),)
    assert shown.spec.obs == (("obs", ArraySpec((80, 80, 3), "uint8")),)

    @jax.jit
    def seen(key: jax.Array) -> list[jax.Array]:
        state, _ = flat.reset(key)
        return [
            flat.env.get_obs(state.inner),
            *(pure.step(state, jnp.int32(0), key)[1].obs["obs"] for pure in (flat, shown)),
            *(pure.reset(key)[1].obs["obs"] for pure in (flat, shown)),
        ]

    grid, vector, image, first_vector, first_image = seen(jax.random.key(0))
    assert grid.shape == (10, 10, 4)
    np.testing.assert_array_equal(first_vector, grid.reshape(400))
    for lit, pixels in ((vector, image), (first_vector, first_image)):
        assert (pixels.shape, pixels.dtype) == ((80, 80, 3), np.uint8)
        assert 0 < lit.sum() < 400
        np.testing.assert_array_equal(pixels[::8, ::8].any(-1), lit.reshape(10, 10, 4).any(-1))


def test_a_grid_is_shown_cell_by_cell_in_a_colour_per_channel() -> None:
    grid = np.zeros((2, 3, 3), np.float32)
    grid[0, 0, 0] = grid[0, 1, 1] = grid[1, 2, 2] = 1
    grid[1, 0] = [1, 0, 0.5]
    picture = jax.jit(envs.picture, static_argnums=1)
    shown = np.asarray(picture(grid, 6))
    assert (shown.shape, shown.dtype) == ((6, 6, 3), np.uint8)
    cells = [[[255, 0, 0], [0, 255, 0], [0, 0, 0]], [[255, 0, 128], [0, 0, 0], [0, 0, 255]]]
    np.testing.assert_array_equal(shown, np.repeat(np.repeat(cells, 3, axis=0), 2, axis=1))
    # one channel, or none, is white; ten have ten colours
    np.testing.assert_array_equal(picture(np.eye(2, dtype=np.float32), 2), 255 * np.eye(2)[..., None].repeat(3, -1))
    ten = np.asarray(picture(np.eye(10, dtype=np.float32).reshape(2, 5, 10), 10)).reshape(100, 3)
    assert len(np.unique(ten, axis=0)) == 10


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("CartPole-v1", {"image": True}, r"observation 'obs' of shape \(4,\) is no grid to be shown"),
        (
            "Pong-misc",
            {"image": True},
            r"observation 'obs' lies in \[0, 2\], and a grid is shown of values in \[0, 1\]",
        ),
        ("Breakout-MinAtar", {"image": 1}, "its option image is 1; it takes False, True"),
        ("Breakout-MinAtar", {"image": True, "size": 5}, "its option size is 5; it takes 16 to 480"),
    ],
)
def test_what_cannot_be_shown_is_refused(name: str, option: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=f"gymnax:{name}: {message}"):
        make_env(f"gymnax:{name}", 1, 0, **option)


def test_an_integer_is_a_category_unless_it_is_declared_as_a_quantity() -> None:
    assert make_env("gymnax:FrozenLake-misc", 1, 0).spec.obs == (("obs", ArraySpec((), "int32", 16)),)
    assert make_env("gymnax:FourRooms-misc", 1, 0).spec.obs == (("obs", ArraySpec((4,), "float32")),)


def test_there_is_no_picture() -> None:
    with pytest.raises(NotImplementedError, match="gives no pictures"):
        make_env("gymnax:Pendulum-v1", 1, 0).render()
