"""The guarded update, on an agent whose parameters and metrics tell what was done to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner import update
from telamon.data import ActionSpec, EnvSpec, Schedule, Window
from tests.probe import ACTION_SIZE, Probe, Remembering, State

KEY = jax.random.key(5)
AGENT = Probe(EnvSpec("x:y", (), ActionSpec((ACTION_SIZE,)), 7), Schedule("transitions", 0))


def window(reward: float = 1.0) -> Window:
    flags = np.zeros((4, 3), bool)
    return Window(
        env_id=np.zeros(4, np.int32),
        first_row=np.arange(4),
        obs={"where": np.zeros((4, 3, 3), np.float32)},
        reward=np.full((4, 3), reward, np.float32),
        is_first=flags,
        is_last=flags,
        is_terminal=flags,
        action=np.zeros((4, 3, ACTION_SIZE), np.float32),
    )


@pytest.fixture(scope="module")
def step():
    return update.make_update(AGENT)


def values(state: update.LearnerState) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state.train)]


def test_a_sound_update_is_the_agents_own(step):
    state = update.init(AGENT, KEY)
    expected, metrics, _ = AGENT.update(state.train, window(), AGENT.draw_update_noise(jax.random.fold_in(KEY, 3)))
    new, found = step(state, window(), KEY, np.uint32(3))
    np.testing.assert_allclose(new.train.memory, expected.memory, rtol=1e-6)
    assert int(new.train.updates) == 1
    assert (int(new.skipped), int(new.streak)) == (0, 0)
    assert {k: float(v) for k, v in found.metrics.items()} == pytest.approx({k: float(v) for k, v in metrics.items()})
    assert found.write_back is None


def test_every_update_draws_its_own_noise_and_repeats_it(step):
    digests = {}
    for index in (0, 1, 2, 1):
        _, found = step(update.init(AGENT, KEY), window(), KEY, np.uint32(index))
        digests.setdefault(index, []).append(float(found.metrics["digest"]))
    assert len({d[0] for d in digests.values()}) == 3
    assert len(set(digests[1])) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_changes_nothing_but_the_count(step, bad):
    state = step(update.init(AGENT, KEY), window(), KEY, np.uint32(0))[0]
    before = values(state)
    for skipped in (1, 2, 3):
        state, found = step(state, window(bad), KEY, np.uint32(skipped))
        assert values(state) == before
        assert (int(state.skipped), int(state.streak)) == (skipped, skipped)
        assert (int(found.skipped), int(found.streak)) == (skipped, skipped)
        assert update.first_non_finite(found.metrics) == "digest"
    state, found = step(state, window(), KEY, np.uint32(4))
    assert values(state) != before
    assert (int(state.skipped), int(state.streak)) == (3, 0)
    assert (int(found.skipped), int(found.streak)) == (3, 0)
    assert update.first_non_finite(found.metrics) is None


def test_poisoned_parameters_are_never_trained_on(step):
    @dataclass(frozen=True)
    class Reading(Probe):
        def update(self, state, batch, noise):
            new, metrics, write_back = super().update(state, batch, noise)
            return new, {**metrics, "memory": new.memory}, write_back

    agent = Reading(AGENT.env, AGENT.plan)
    state = update.init(agent, KEY)._replace(train=State(jnp.int32(7), jnp.float32(np.nan)))
    state, found = update.make_update(agent)(state, window(), KEY, np.uint32(0))
    assert int(state.train.updates) == 7
    assert int(state.streak) == 1
    assert update.first_non_finite(found.metrics) == "memory"


def test_metrics_keep_their_order(step):
    # sorted, as a dict comes back from jit, "bad_loss" would be first
    _, found = step(update.init(AGENT, KEY), window(), KEY, np.uint32(0))
    assert list(found.metrics) == ["torn", "digest", "newest", "bad_loss", "worse_loss"]


def test_the_first_bad_term_is_the_first_that_was_computed():
    assert update.first_non_finite({"z": 1.0, "b": np.inf, "a": np.nan}) == "b"
    assert update.first_non_finite({"z": 1.0}) is None


def test_the_old_state_is_given_away(step):
    state = update.init(AGENT, KEY)
    step(state, window(), KEY, np.uint32(0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_an_outcome_outlives_the_state_that_came_with_it(step):
    state, found = step(update.init(AGENT, KEY), window(np.nan), KEY, np.uint32(0))
    step(state, window(), KEY, np.uint32(1))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert (int(found.skipped), int(found.streak)) == (1, 1)
    assert np.isnan(found.metrics["digest"])


def test_nothing_is_compiled_twice(step):
    state = update.init(AGENT, KEY)
    for index in range(3):  # nor for windows of a table that was restored
        state, _ = step(state, replace(window(), incarnation=index), KEY, np.uint32(index))
    assert step._cache_size() == 1


def remembered(first: float = 1.0) -> Window:
    flags = np.zeros((4, 4), bool)
    where = np.broadcast_to(np.stack([np.zeros(4), np.zeros(4), first + np.arange(4)], -1), (4, 4, 3))
    latents = {"made": np.zeros((4, 1), jnp.bfloat16), "place": np.full((4, 1), first, np.float32)}
    return Window(
        env_id=np.zeros(4, np.int32), first_row=np.arange(4), obs={"where": where.astype(np.float32)},
        reward=np.zeros((4, 4), np.float32), is_first=flags | (np.arange(4) == 0), is_last=flags, is_terminal=flags,
        action=np.zeros((4, 4, ACTION_SIZE), np.float32), latents=latents,
    )  # fmt: skip


def test_latents_come_back_for_the_rows_behind_the_context():
    agent = Remembering(AGENT.env, AGENT.plan)
    _, found = update.make_update(agent)(update.init(agent, KEY), remembered(), KEY, np.uint32(0))
    metrics, latents = found.metrics, found.write_back
    assert (float(metrics["torn"]), float(metrics["misplaced"])) == (0, 0)
    assert latents["made"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(latents["made"], np.float32), np.ones((4, 3)))
    np.testing.assert_array_equal(latents["place"], np.tile([2, 3, 4], (4, 1)))


def test_a_report_is_the_agents_own_and_changes_nothing():
    agent = Remembering(AGENT.env, AGENT.plan)
    state = update.init(agent, KEY)
    before = values(state)
    look = update.make_report(agent)
    found = look(state, remembered(), KEY)
    expected = agent.report(state.train, remembered(), agent.draw_report_noise(KEY))
    assert list(found.losses) == list(expected.losses)
    assert {k: float(v) for k, v in found.losses.items()} == {k: float(v) for k, v in expected.losses.items()}
    np.testing.assert_allclose(found.open_loop["where"].prediction, expected.open_loop["where"].prediction)
    assert float(look(state, remembered(), jax.random.key(6)).losses["noise"]) != float(found.losses["noise"])
    assert values(state) == before
