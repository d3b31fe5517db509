"""Acting, row by row: what is appended, what is ignored, what is refused, and how it goes on from a saved state."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actors.collector import Collector
from telamon.data import ArraySpec, Counters, Rows, RowSpec, Schedule
from telamon.envs.base import EnvError
from telamon.envs.counting import Counting, Fault, encode, make
from tests.probe import ACTION_SIZE, Probe, State, acted, position

UNEVEN = (3, 7, 5)
PLAN = Schedule("transitions", 0)


class Table:
    """A replay that only takes rows."""

    def __init__(self) -> None:
        self.ticks: list[Rows] = []

    def append(self, rows: Rows) -> None:
        self.ticks.append(rows)


def collector(num_envs=3, agent=Probe, seed=0, kind="continuous", **env):
    batch = make(kind, num_envs, 0, **{"lengths": UNEVEN, "action_size": ACTION_SIZE, **env})
    table = Table()
    return Collector(agent(batch.spec, PLAN), batch, table, seed, Counters()), table


def params(updates: int) -> State:
    return State(jnp.int32(updates), jnp.float32(0.5))


def columns(table: Table, name: str) -> np.ndarray:
    """[ticks, E, ...]."""
    return np.stack([getattr(rows, name) for rows in table.ticks])


def test_one_row_per_environment_and_tick():
    c, table = collector()
    ended = [e for updates in range(40) for e in c.tick(params(updates))]
    where = np.stack([rows.obs["where"] for rows in table.ticks]).astype(int)
    is_first, is_last = columns(table, "is_first"), columns(table, "is_last")
    assert c.counters.rows == where[..., 0].size == 120
    for e in range(3):
        # by hand: episode k of environment e has T = UNEVEN[(e + k) % 3] steps and T + 1 rows
        expected = [(e, k, t) for k in range(10) for t in range(UNEVEN[(e + k) % 3] + 1)][:40]
        assert where[:, e].tolist() == [list(x) for x in expected]
        t = where[:, e, 2]
        length = np.array([UNEVEN[(e + k) % 3] for k in where[:, e, 1]])
        np.testing.assert_array_equal(is_first[:, e], t == 0)
        np.testing.assert_array_equal(is_last[:, e], t == length)
    action = columns(table, "action")
    assert (action[is_last] == 0).all()
    updates, place, ticks = acted(action)
    tick = np.broadcast_to(np.arange(40)[:, None], updates.shape)
    np.testing.assert_array_equal(updates[~is_last], tick[~is_last])
    np.testing.assert_array_equal(place[~is_last], position(where)[~is_last])
    # the carry began anew with every episode
    np.testing.assert_array_equal(ticks[~is_last], where[..., 2][~is_last])
    # the reward on entering an observation is that of the action before; 0 on a reset, whatever the action was
    reward = columns(table, "reward")
    paid = np.where(is_first[1:], 0, action[:-1] @ np.arange(1, ACTION_SIZE + 1))
    np.testing.assert_allclose(reward[1:], paid, atol=1e-6)
    # episodes: as walked over the rows, and the rows that stand
    lengths = {e: [x.length for x in ended if x.env == e] for e in range(3)}
    assert all(lengths[e] == [UNEVEN[(e + k) % 3] for k in range(len(lengths[e]))] for e in range(3))
    assert c.counters.episodes == len(ended)
    first = next(x for x in ended if x.env == 1)
    assert first.total_reward == pytest.approx(reward[:8, 1].astype(float).sum())


def test_a_transition_counts_when_it_is_seen():
    c, _ = collector(1, lengths=(3,))
    seen = []
    for _ in range(9):
        ended = c.tick(None)
        seen.append((c.counters.transitions, c.counters.rows, len(ended)))
    # three transitions, the third of which ends the episode; then the is_last row's tick resets
    assert seen == [(1, 1, 0), (2, 2, 0), (3, 3, 1), (3, 4, 0), (4, 5, 0), (5, 6, 0), (6, 7, 1), (6, 8, 0), (7, 9, 0)]


def test_without_parameters_actions_are_random_and_belong_to_their_tick():
    c, table = collector(2, lengths=(100,))
    for _ in range(50):
        c.tick(None)
    action = columns(table, "action")
    assert np.unique(action).size == action.size
    assert -1 <= action.min() < -0.95
    assert 0.95 < action.max() <= 1
    again, twin = collector(2, lengths=(100,))
    state = c.get_state()
    state["tick"] = np.int64(30)
    assert again.set_state({k: v for k, v in state.items() if k != "env"})
    again.tick(None)
    np.testing.assert_array_equal(twin.ticks[0].action, table.ticks[30].action)
    other, another = collector(2, lengths=(100,), seed=1)
    other.tick(None)
    assert not (another.ticks[0].action == table.ticks[0].action).any()


def test_random_discrete_actions_cover_their_classes():
    c, table = collector(2, kind="discrete", classes=3, lengths=(100,))
    for _ in range(50):
        c.tick(None)
    action = columns(table, "action")
    assert action.dtype == np.int32
    assert np.bincount(action.ravel(), minlength=4).tolist()[3:] == [0]
    assert (np.bincount(action.ravel())[:3] > 90).all()  # of 400, 133 are expected


@dataclass(frozen=True)
class Twofold(Probe):
    """Acts in `counting:dict`: pushes as Probe acts, and presses the buttons 0, 1, 2, ... its step modulo 3."""

    @property
    def row_spec(self) -> RowSpec:
        return RowSpec(self.env.obs, self.env.action_arrays)

    def act(self, *args):
        push, carry, _ = super().act(*args)
        button = (carry[:, None] + jnp.arange(ACTION_SIZE)[None]) % 3
        return {"push": push, "button": button}, carry, {}


def test_a_dict_action_is_stored_and_applied_part_by_part():
    c, table = collector(agent=Twofold, kind="dict")
    for _ in range(20):
        c.tick(None)
    assert np.unique([rows.action["button"] for rows in table.ticks]).tolist() == [0, 1, 2]
    assert np.unique([rows.action["push"] for rows in table.ticks]).size > 200
    for updates in range(20):
        c.tick(params(updates))
    is_first, is_last, reward = (columns(table, k) for k in ("is_first", "is_last", "reward"))
    action = {k: np.stack([rows.action[k] for rows in table.ticks]) for k in ("push", "button")}
    assert (action["push"].dtype, action["button"].dtype) == (np.float32, np.int32)
    assert is_last[:20].any()
    assert is_last[20:].any()
    for part in action.values():
        assert (part[is_last] == 0).all()
    t = np.stack([rows.obs["where"] for rows in table.ticks])[20:, 0, 2].astype(int)
    goes_on = np.arange(20) > np.flatnonzero(t == 0)[0]  # the carry began anew with the first episode that Twofold saw
    np.testing.assert_array_equal(
        action["button"][20:, 0, 1][goes_on], np.where(is_last[20:, 0], 0, (t + 1) % 3)[goes_on]
    )
    for tick in range(39):
        for e in range(3):
            paid = encode({k: part[tick, e] for k, part in action.items()})
            assert reward[tick + 1, e] == pytest.approx(0 if is_first[tick + 1, e] else paid, abs=1e-5)


@dataclass(frozen=True)
class Remembering(Probe):
    """Stores its carry with each row."""

    @property
    def row_spec(self) -> RowSpec:
        return RowSpec(self.env.obs, self.env.action.array, (("carry", ArraySpec((), "int32")),))

    def act(self, *args):
        action, carry, _ = super().act(*args)
        return action, carry, {"carry": carry}


def test_latents_go_with_their_rows():
    c, table = collector(2, agent=Remembering, lengths=(4,))
    c.tick(None)
    for updates in range(9):
        c.tick(params(updates))
    carry = np.stack([rows.latents["carry"] for rows in table.ticks])
    assert carry.dtype == np.int32
    # zeros while acting at random; then also on is_last rows, where the action is not used but the latent is
    assert carry[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_no_plan_is_made_for_a_tick_that_only_resets():
    calls = []

    @dataclass(frozen=True)
    class Counted(Probe):
        def act(self, params, carry, obs, is_first, noise, mode):
            jax.debug.callback(lambda: calls.append(1), ordered=True)
            return super().act(params, carry, obs, is_first, noise, mode)

    c, _ = collector(2, agent=Counted, lengths=(4,))
    for _ in range(10):
        c.tick(params(1))
    jax.effects_barrier()
    assert len(calls) == 8
    uneven, _ = collector(2, agent=Counted, lengths=(2, 3))  # one goes on while the other resets
    calls.clear()
    for _ in range(4):
        uneven.tick(params(1))
    jax.effects_barrier()
    assert len(calls) == 4


@pytest.mark.parametrize("ticks", [0, 1, 4, 9, 20])
def test_goes_on_from_a_saved_state_bit_for_bit(ticks):
    whole, table = collector()
    ended = [whole.tick(params(updates)) for updates in range(30)]
    c, _ = collector()
    for updates in range(ticks):
        c.tick(params(updates))
    saved = {k: np.array(v) for k, v in c.get_state().items()}
    other, rest = collector()
    other.counters = c.counters
    assert other.set_state(saved) is True
    assert other.tick_count == ticks
    assert [other.tick(params(updates)) for updates in range(ticks, 30)] == ended[ticks:]
    for ours, theirs in zip(rest.ticks, table.ticks[ticks:], strict=True):
        for name in ("reward", "is_first", "is_last", "is_terminal", "action", "env_id"):
            assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
        for key in ours.obs:
            assert ours.obs[key].tobytes() == theirs.obs[key].tobytes()
    assert other.counters == whole.counters


def test_what_cannot_be_saved_begins_anew(monkeypatch):
    monkeypatch.setattr(Counting, "get_state", lambda self: None)
    c, _ = collector(2)
    fresh = c.get_state()
    for updates in range(5):
        c.tick(params(updates))
    saved = c.get_state()
    assert not [k for k in saved if k.startswith("env/")]
    other, table = collector(2)
    assert other.set_state(fresh) is True  # nothing had begun
    assert other.set_state(saved) is False
    other.tick(params(5))
    assert table.ticks[0].is_first.all()
    _, _, carry = acted(table.ticks[0].action)
    assert carry.tolist() == [0, 0]
    assert other.tick_count == 6


def test_a_termination_is_refused_unless_it_is_learned():
    c, table = collector(2, lengths=(3,), terminate_every=2)
    for _ in range(6):
        c.tick(None)
    with pytest.raises(EnvError) as caught:
        c.tick(None)
    assert str(caught.value) == (
        "environment 0 (counting:continuous) terminated at step 3 of its episode, "
        "but this agent was told that episodes only run out of time; set agent.episodic"
    )
    learning, table = collector(2, lambda spec, plan: Probe(spec, plan, learns_terminations=True),
                                lengths=(3,), terminate_every=2)  # fmt: skip
    for _ in range(9):
        learning.tick(None)
    assert columns(table, "is_terminal")[:, 0].tolist() == [False] * 7 + [True, False]
    assert columns(table, "is_last")[:, 0].tolist() == [False, False, False, True] * 2 + [False]


@pytest.mark.parametrize("kind", ["nan_reward", "inf_obs", "raise"])
def test_a_rebuilt_environment_abandons_its_episode(kind):
    c, table = collector(2, lengths=(7,), on_error="rebuild", faults=[Fault(kind, env=1, episode=0, t=4)])
    ended = [e for updates in range(14) for e in c.tick(params(updates))]
    is_first, is_last = columns(table, "is_first"), columns(table, "is_last")
    assert is_first[:, 1].nonzero()[0].tolist() == [0, 4, 12]
    assert is_last[:, 1].nonzero()[0].tolist() == [11]
    for name in ("reward", "action"):
        assert np.isfinite(columns(table, name)).all()
    assert np.isfinite([rows.obs["where"] for rows in table.ticks]).all()
    # the abandoned episode has no return; the one after it counts from its own first row
    mine = [e for e in ended if e.env == 1]
    assert [e.length for e in mine] == [7]
    assert mine[0].total_reward == pytest.approx(columns(table, "reward")[4:12, 1].astype(float).sum())
    assert c.counters.transitions == 2 * 15 - int(is_first.sum())
