"""Pieces of acting: snapshots, rows that must wait, and JAX environments, which are unrolled on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actors.collector import Collector, Episode
from actors.rollout import LONGEST, Rollout, Snapshot, Snapshots, Unroll, can_unroll
from telamon.data import ArraySpec, Counters, Rows, RowSpec
from telamon.envs.base import EnvError
from telamon.envs.counting import Fault
from tests.actors import parts
from tests.actors.parts import Table, params
from tests.probe import Probe, acted
from tests.waiting import SECONDS

# Snapshots


def test_the_newest_snapshot_wins_and_an_older_one_is_ignored():
    now = iter([0.0, 1.0, 5.0, 6.0, 6.5])
    snapshots = Snapshots(clock=lambda: next(now))
    assert snapshots.take() is None
    assert (snapshots.newest, list(snapshots.delays)) == (None, [])
    assert snapshots.offer(Snapshot(3, "c"))
    assert snapshots.offer(Snapshot(5, "e"))
    assert not snapshots.offer(Snapshot(4, "d"))
    assert snapshots.take() == Snapshot(5, "e")
    assert snapshots.take() is None
    assert not snapshots.offer(Snapshot(5, "again"))
    assert snapshots.newest == 5
    assert snapshots.offer(Snapshot(6, "f"))
    assert snapshots.take() == Snapshot(6, "f")
    assert list(snapshots.delays) == [4.0, 0.5]


def test_waiting_for_a_snapshot_ends_with_it_or_with_the_time():
    snapshots = Snapshots()
    assert not snapshots.wait(0.01)
    snapshots.offer(Snapshot(0, "a"))
    assert snapshots.wait(SECONDS)


# Rollouts of environments on the host


class Away(Table):
    """A replay of which some appends and flushes raise, after the row was kept."""

    def __init__(self, append: dict[int, Exception] | None = None, flush: dict[int, Exception] | None = None) -> None:
        super().__init__()
        self.errors = {"append": append or {}, "flush": flush or {}}
        self.calls = {"append": 0, "flush": 0}
        self.timeouts: list[float | None] = []

    def append(self, rows: Rows, timeout: float | None = None) -> None:
        super().append(rows, timeout)
        self._raise("append", timeout)

    def flush(self, timeout: float | None = None) -> None:
        self._raise("flush", timeout)

    def _raise(self, call: str, timeout: float | None) -> None:
        number, self.calls[call] = self.calls[call], self.calls[call] + 1
        self.timeouts.append(timeout)
        if number in self.errors[call]:
            raise self.errors[call][number]


def rollout(table: Table | None = None, *, env: dict[str, Any] | None = None, **options: Any) -> Rollout:
    batch = parts.make_env(0, **(env or {}))
    defaults = {
        "seed": 3, "index": (0, 0), "snapshots": Snapshots(), "acts_at_random": True, "patience": SECONDS,
        "stopped": lambda: False, **options,
    }  # fmt: skip
    return Rollout(parts.make_agent(), batch, table or Table(), **defaults)


def test_a_piece_says_what_it_did():
    table = Table()
    r = rollout(table)
    piece = r.run(20)
    assert (piece.ticks, piece.rows, piece.ended) == (20, 40, "done")
    # by hand: episodes of 7 steps have 8 rows; reset rows at ticks 0, 8 and 16; the 21st observation was seen too
    assert piece.resets == 6
    assert piece.transitions == 2 * (21 - 3)
    assert [(e.env, e.length) for e in piece.episodes] == [(0, 7), (1, 7)] * 2
    assert (piece.first_version, piece.last_version, piece.lag) == (None, None, 0)
    assert 0 < piece.wait_seconds < piece.seconds
    again = r.run(4)  # ticks 20 to 23: the last of these is the row that ends an episode, and the next one is seen
    assert (again.ticks, again.rows, again.resets, again.transitions) == (4, 8, 0, 2 * 3)
    assert (r.ticks, r.counters.rows, r.resets) == (24, 48, 6)
    assert [int(x) for x in table.columns("is_first")[:, 0].nonzero()[0]] == [0, 8, 16]


def test_a_snapshot_is_used_from_the_next_tick_on():
    table, snapshots = Table(), Snapshots()
    # asked before every tick: offers a snapshot before ticks 3 and 5, and an older one before tick 7
    offers = {3: Snapshot(10, params(100)), 5: Snapshot(12, params(120)), 7: Snapshot(11, params(110))}
    ticks = itertools.count()
    stopped = lambda: (tick := next(ticks)) in offers and snapshots.offer(offers[tick]) and False
    r = rollout(table, snapshots=snapshots, stopped=stopped, env={"lengths": (50,)})
    piece = r.run(10)
    updates, _, _ = acted(table.columns("action"))
    assert updates[3:, 0].tolist() == [100] * 2 + [120] * 5
    assert (piece.first_version, piece.last_version) == (None, 12)
    assert r.snapshot is not None
    assert r.snapshot.version == 12
    assert r.run(2).first_version == 12


def test_the_lag_is_in_versions_that_had_arrived():
    snapshots = Snapshots()
    snapshots.offer(Snapshot(3, params(3)))

    class Publishing(Table):
        def append(self, rows: Rows, timeout: float | None = None) -> None:
            super().append(rows)
            if len(self.ticks) == 4:
                snapshots.offer(Snapshot(8, params(8)))

    r = rollout(Publishing(), snapshots=snapshots)
    assert r.run(3).lag == 0
    piece = r.run(2)
    assert (piece.lag, piece.first_version, piece.last_version) == (5, 3, 8)


class Patient(Snapshots):
    """Waits for a shorter time than it says."""

    def wait(self, timeout: float) -> bool:
        assert timeout == SECONDS
        return super().wait(0.01)


def test_without_a_snapshot_it_acts_only_if_it_may():
    table, snapshots = Table(), Patient()
    r = rollout(table, snapshots=snapshots, acts_at_random=False)
    piece = r.run(5)
    assert (piece.ticks, piece.rows, piece.ended) == (0, 0, "snapshot")
    assert piece.wait_seconds > 0
    assert table.ticks == []
    snapshots.offer(Snapshot(0, params(7)))
    assert r.run(5).ended == "done"
    updates, _, _ = acted(table.columns("action"))
    assert (updates == 7).all()


@pytest.mark.parametrize("waits_for", ["replay", "snapshot"])
def test_it_compiles_its_policy_once_while_it_has_to_wait(waits_for, monkeypatch):
    prepared = []
    monkeypatch.setattr(Collector, "prepare", lambda self: prepared.append(1))
    table = Away(append={1: TimeoutError("no credit")}, flush=dict.fromkeys(range(2), TimeoutError("still none")))
    r = rollout(table, acts_at_random=waits_for == "replay", snapshots=Patient())
    if waits_for == "replay":
        r.run(5)
        assert prepared == []
    for _ in range(2):
        assert r.run(5).ended == waits_for
        assert prepared == [1]


def test_it_compiles_nothing_more_than_it_will_use(monkeypatch):
    monkeypatch.setattr(Collector, "prepare", lambda self: pytest.fail("it was compiled already"))
    r = rollout(Away(append={1: TimeoutError("no credit")}))
    r._snapshots.offer(Snapshot(0, params(0)))
    assert [r.run(5).ended for _ in range(2)] == ["replay", "done"]


def test_it_stops_between_two_ticks():
    answers = iter([False, False, True, True])
    r = rollout(stopped=lambda: next(answers))
    piece = r.run(10)
    assert (piece.ticks, piece.ended) == (2, "stopped")
    assert r.run(10).ticks == 0


def test_a_piece_of_slow_ticks_ends_when_its_patience_does():
    now = itertools.count()
    r = rollout(patience=3.0, clock=lambda: float(next(now)))
    piece = r.run(10_000)
    # the clock is read at the beginning and before every tick but the first: at 4 s the patience is over
    assert (piece.ticks, piece.ended) == (4, "time")


@pytest.mark.parametrize("error", [TimeoutError("no credit"), OSError("no space")])
def test_a_row_that_must_wait_is_not_appended_again(error):
    table = Away(append={2: error}, flush={0: TimeoutError("still none")})
    r = rollout(table, patience=1.5)
    piece = r.run(10)
    assert (piece.ticks, piece.rows, piece.ended) == (3, 6, "replay")
    # nothing more is appended to a buffer that is full
    piece = r.run(10)
    assert (piece.ticks, piece.ended) == (0, "replay")
    assert r.run(10).ticks == 10
    assert table.calls == {"append": 13, "flush": 2}
    assert set(table.timeouts) == {1.5}
    t = np.stack([rows.obs["where"] for rows in table.ticks])[:, 0, 2]
    assert t.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [PermissionError("wrong token"), ValueError("refused"), RuntimeError("superseded")])
def test_what_waiting_does_not_mend_is_raised(error):
    with pytest.raises(type(error), match=str(error)):
        rollout(Away(append={2: error})).run(10)
    r = rollout(Away(append={2: TimeoutError("away")}, flush={0: error}))
    r.run(10)
    with pytest.raises(type(error), match=str(error)):
        r.run(10)


def test_flush_tells_whether_all_has_arrived():
    r = rollout(Away(flush={0: TimeoutError("away")}))
    r.run(3)
    assert not r.flush()
    assert r.flush()


def test_an_environment_that_breaks_ends_the_rollout_with_its_sentence():
    with pytest.raises(EnvError, match=r"environment 1 .*told to break at step 4 of its episode"):
        rollout(env={"faults": [Fault("raise", env=1, t=4)]}).run(10)


def test_no_two_lives_of_workers_draw_alike():
    drawn = []
    for seed, index in [(3, (0, 0)), (3, (0, 1)), (3, (1, 0)), (4, (0, 0)), (3, ())]:
        table, snapshots = Table(), Snapshots()
        r = rollout(table, seed=seed, index=index, snapshots=snapshots, env={"lengths": (50,)})
        r.run(4)  # at random
        snapshots.offer(Snapshot(0, params(1)))
        r.run(4)  # by a policy with noise in the last element
        drawn.append(table.columns("action"))
    for a, b in itertools.combinations(drawn, 2):
        assert not np.isin(a[:4], b[:4]).any()
        assert not np.isin(a[4:, :, 3], b[4:, :, 3]).any()


# JAX environments


@dataclass(frozen=True)
class Drifting(Probe):
    """For any JAX environment with a continuous action: acts on what it sees, what it carries and its noise."""

    def initial_carry(self, num_envs: int) -> jax.Array:
        return jnp.zeros(num_envs)

    @property
    def row_spec(self) -> RowSpec:
        return RowSpec(self.env.obs, self.env.action.array, (("carry", ArraySpec((), "bfloat16")),))

    def act(self, params, carry, obs, is_first, noise, mode):
        carry = jnp.where(is_first, 0.0, carry + 1)
        seen = jnp.concatenate([jnp.reshape(v, (carry.size, -1)) for _, v in sorted(obs.items())], -1).sum(-1)
        action = jnp.tanh(0.3 * seen + 0.1 * carry + noise + 0.01 * params.updates)
        width = self.env.action.shape[0]
        return jnp.tile(action[:, None], (1, width)), carry, {"carry": carry.astype(jnp.bfloat16)}


@pytest.fixture
def jax_envs() -> Any:
    pytest.importorskip("gymnax", reason="gymnax is not installed")
    from telamon.envs import jax as module

    return module


@pytest.fixture
def pendulum(jax_envs: Any) -> Any:
    """Makes a batch of three, with episodes of 7 steps."""
    return lambda seed=5, **options: jax_envs.make("Pendulum-v1", 3, seed, max_steps_in_episode=7, **options)


PLANS = [None] * 10 + [0] * 25 + [50] * 20
"""Updates of the parameters of each tick; None: at random."""


def collected(env: Any, index: tuple[int, ...] = (2, 1)) -> tuple[Table, Counters, list[Episode]]:
    table, counters = Table(), Counters()
    c = Collector(Drifting(env.spec, parts.PLAN), env, table, 3, counters, index)
    return table, counters, [e for plan in PLANS for e in c.tick(None if plan is None else params(plan))]


def unrolled(env: Any, ahead: int, index: tuple[int, ...] = (2, 1)) -> tuple[Table, Unroll, list[Episode]]:
    """The same, at most `ahead` ticks at a time."""
    table = Table()
    u = Unroll(Drifting(env.spec, parts.PLAN), env, table, 3, Counters(), index)
    ended = []
    for plan, ticks in itertools.groupby(PLANS):
        left = len(list(ticks))
        while left:
            assert u.waiting == 0
            block = min(left, ahead)
            for i in range(block):
                ended += u.tick(None if plan is None else params(plan), block - i)
                assert u.waiting == block - i - 1
            left -= block
    return table, u, ended


def run(source: Collector | Unroll, ticks: int) -> None:
    for _ in range(ticks):
        source.tick(params(0))


def test_an_unroll_makes_the_rows_of_a_collector(pendulum):
    expected, counters, episodes = collected(pendulum())
    for ahead in (3, LONGEST):
        table, u, ended = unrolled(pendulum(), ahead)
        assert u.counters == counters
        assert [(e.env, e.length) for e in ended] == [(e.env, e.length) for e in episodes]
        np.testing.assert_allclose(
            [e.total_reward for e in ended], [e.total_reward for e in episodes], rtol=1e-4, atol=1e-4
        )
        for name in ("env_id", "is_first", "is_last", "is_terminal"):
            np.testing.assert_array_equal(table.columns(name), expected.columns(name))
        # random actions are the same numbers; the rest is the same program, fused otherwise
        np.testing.assert_array_equal(table.columns("action")[:10], expected.columns("action")[:10])
        for name in ("action", "reward"):
            np.testing.assert_allclose(table.columns(name), expected.columns(name), rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(table.ticks, expected.ticks, strict=True):
            assert list(ours.obs) == list(theirs.obs)
            np.testing.assert_allclose(ours.obs["obs"], theirs.obs["obs"], rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(ours.latents["carry"], theirs.latents["carry"])
            assert {k: v.dtype for k, v in ours.latents.items()} == {k: v.dtype for k, v in theirs.latents.items()}
            assert (ours.action.dtype, ours.reward.dtype) == (theirs.action.dtype, theirs.reward.dtype)
    other, _, _ = unrolled(pendulum(), LONGEST, index=(2, 2))
    assert not np.isin(other.columns("action")[other.columns("action") != 0], expected.columns("action")).any()


def test_an_unroll_is_no_longer_than_it_may_be(pendulum):
    """What waits behind it was acted with parameters that grow old."""
    env = pendulum()
    u = Unroll(Drifting(env.spec, parts.PLAN), env, Table(), 3, Counters(), (0, 0), longest=4)
    u.tick(params(1), LONGEST)
    assert u.waiting == 3


def test_an_unroll_of_any_length_is_one_program_that_keeps_its_memory(pendulum):
    env = pendulum()
    u = Unroll(Drifting(env.spec, parts.PLAN), env, Table(), 3, Counters(), (0, 0))
    for plan in (None, params(1)):
        for ahead in (1, 3, LONGEST, 10 * LONGEST):
            u.tick(plan, ahead)
            while u.waiting:
                u.tick(plan)
    assert u._by_policy._cache_size() == u._at_random._cache_size() == 1
    before = jax.tree.leaves(u._acting)
    u.tick(params(2))
    assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.parametrize(("make", "program"), [(Collector, "act"), (Unroll, "by_policy")])
def test_what_was_prepared_is_not_compiled_again(pendulum, caplog, make, program):
    env = pendulum()
    source = make(Drifting(env.spec, parts.PLAN), env, Table(), 3, Counters(), (0, 0))
    compiled = lambda: caplog.text.count(f"Compiling jit({program})")
    with jax.log_compiles():
        source.prepare()
        assert compiled() == 1
        source.tick(None)
        while make is Unroll and source.waiting:
            source.tick(None)
        source.tick(jax.tree.map(jnp.array, parts.on_host(3)))
        assert compiled() == 1


def test_rollouts_of_jax_environments_are_unrolled_and_swap_between_unrolls(pendulum):
    env, table, snapshots = pendulum(), Table(), Snapshots()
    r = Rollout(
        Drifting(env.spec, parts.PLAN), env, table, 3, (0, 0), snapshots,
        acts_at_random=False, patience=SECONDS, stopped=lambda: False,
    )  # fmt: skip
    assert isinstance(r.source, Unroll)
    snapshots.offer(Snapshot(1, params(0)))
    piece = r.run(LONGEST + 5)
    assert (piece.ticks, piece.rows, piece.first_version, piece.last_version) == (LONGEST + 5, 3 * (LONGEST + 5), 1, 1)
    assert r.source.waiting == 0  # not one tick more than it was asked for
    snapshots.offer(Snapshot(2, params(0)))
    assert r.run(1).first_version == 2


def test_rows_that_were_unrolled_wait_for_the_replay_and_for_nobody_else(pendulum):
    env, table, snapshots = pendulum(), Away(append={4: TimeoutError("no credit")}), Snapshots()
    r = Rollout(
        Drifting(env.spec, parts.PLAN), env, table, 3, (0, 0), snapshots,
        acts_at_random=False, patience=SECONDS, stopped=lambda: False,
    )  # fmt: skip
    snapshots.offer(Snapshot(1, params(0)))
    piece = r.run(20)
    assert (piece.ticks, piece.ended) == (5, "replay")
    snapshots.offer(Snapshot(2, params(0)))
    piece = r.run(20)  # 15 ticks were made already, with the first snapshot
    assert (piece.ticks, piece.first_version, piece.last_version) == (20, 1, 2)
    assert piece.lag == 1
    env, whole = pendulum(), Table()
    u = Unroll(Drifting(env.spec, parts.PLAN), env, whole, 3, Counters(), (0, 0))
    for _ in range(25):
        u.tick(params(0), 1)
    for name in ("is_first", "action", "reward"):
        np.testing.assert_allclose(table.columns(name), whole.columns(name), rtol=1e-5, atol=1e-5)


@pytest.fixture
def breaking(jax_envs: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes two environments of which one gives a reward of NaN at its third step; or ones that terminate."""
    import gymnax
    from gymnax.environments import environment, spaces

    class Breaking(environment.Environment):
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def reset_env(self, key: jax.Array, params: Any) -> Any:
            which = jax.random.uniform(key) < 0.5
            state = State(time=0, which=which)
            return jnp.zeros(1), state

        def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> Any:
            state = state.replace(time=state.time + 1)
            third = state.time == 3
            reward = jnp.where(third & state.which & (self.kind == "nan"), jnp.nan, action[0])
            return jnp.ones(1) * state.time, state, reward, third & (self.kind == "ends"), {}

        def observation_space(self, params: Any) -> Any:
            return spaces.Box(0, 9, (1,))

        def action_space(self, params: Any) -> Any:
            return spaces.Box(-1.0, 1.0, (1,))

    from flax import struct

    @struct.dataclass
    class State(environment.EnvState):
        which: jax.Array

    names = ("Breaking-nan", "Breaking-ends")
    for name in names:
        monkeypatch.setitem(gymnax.registration._registry, name, partial(Breaking, name.partition("-")[2]))
        gymnax.registered_envs.append(name)
    monkeypatch.setattr(Breaking, "default_params", environment.EnvParams(max_steps_in_episode=5))
    yield lambda kind, **options: jax_envs.make(f"Breaking-{kind}", 4, 0, **options)
    for name in names:
        gymnax.registered_envs.remove(name)


@pytest.mark.parametrize("kind", ["nan", "ends"])
def test_what_must_not_be_learned_from_is_refused_as_tick_by_tick(breaking, kind):
    said = []
    for make in (Collector, Unroll):
        env, table = breaking(kind), Table()
        source = make(Drifting(env.spec, parts.PLAN), env, table, 3, Counters(), (0, 0))
        with pytest.raises(EnvError) as caught:
            run(source, 12)
        said.append((str(caught.value), len(table.ticks), source.counters))
    assert said[0] == said[1]
    sentence, rows, _ = said[0]
    assert "step 3 of its episode" in sentence
    assert ("reward is nan" in sentence) == (kind == "nan")
    assert rows % 6 == 3  # an episode of 5 steps has 6 rows; those of t = 0, 1 and 2 are the last


def test_with_rebuilding_jax_environments_act_tick_by_tick(breaking):
    env, table = breaking("nan", on_error="rebuild"), Table()
    assert not can_unroll(env)
    r = Rollout(
        Drifting(env.spec, parts.PLAN), env, table, 3, (0, 0), Snapshots(),
        acts_at_random=True, patience=SECONDS, stopped=lambda: False,
    )  # fmt: skip
    r.run(12)
    assert isinstance(r.source, Collector)
    reward, is_first = table.columns("reward"), table.columns("is_first")
    assert np.isfinite(reward).all()
    broken = is_first[3::6].any(0)
    assert broken.any()  # a third step was given up for a new episode
    assert not broken.all()


def test_an_action_that_is_no_number_is_the_agents_fault(pendulum):
    class Broken(Drifting):
        def act(self, *args):
            action, carry, latents = super().act(*args)
            return action * jnp.where(carry[:, None] == 4, jnp.nan, 1.0), carry, latents

    env, table = pendulum(), Table()
    u = Unroll(Broken(env.spec, parts.PLAN), env, table, 3, Counters(), (0, 0))
    with pytest.raises(ValueError, match=r"for environment 0 \(gymnax:Pendulum-v1\) is nan; the agent broke"):
        run(u, 12)
    assert len(table.ticks) == 4


def test_an_unroll_needs_fresh_environments(pendulum):
    env = pendulum()
    env.reset()
    u = Unroll(Drifting(env.spec, parts.PLAN), env, Table(), 3, Counters(), (0, 0))
    with pytest.raises(ValueError, match="an unroll starts with fresh environments"):
        u.tick(None)
