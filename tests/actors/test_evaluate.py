from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actors.collector import jit_act
from actors.evaluate import Stopped, evaluate
from telamon.data import Schedule
from telamon.envs.counting import Fault, make
from tests.probe import ACTION_SIZE, Probe, State

PARAMS = State(jnp.int32(100), jnp.float32(0.5))
KEY = jax.random.key(3)


def setup(num_envs=3, mode="eval", **env):
    batch = make("continuous", num_envs, 0, **{"lengths": (3, 7, 5), "action_size": ACTION_SIZE, **env})
    agent = Probe(batch.spec, Schedule("transitions", 0))
    return agent, jit_act(agent, num_envs, mode), PARAMS, batch, KEY


def by_hand(length: int) -> float:
    """Return of an episode: every step pays updates + 2 t (its place) + 3 t (its carry) in units of 1 / 1024."""
    return sum(100 + 5 * t for t in range(length)) / 1024


def test_the_first_episode_of_every_environment_counts_and_no_more():
    found = evaluate(*setup())
    assert found.length.tolist() == [3, 7, 5]
    np.testing.assert_allclose(found.total_reward, [by_hand(n) for n in (3, 7, 5)], rtol=1e-6)


def test_a_dict_action_reaches_the_environment_part_by_part():
    class Twofold(Probe):
        def act(self, *args):
            push, carry, _ = super().act(*args)
            return {"push": push, "button": jnp.ones(push.shape, jnp.int32)}, carry, {}

    env = make("dict", 1, 0, lengths=(4,), action_size=ACTION_SIZE)
    agent = Twofold(env.spec, Schedule("transitions", 0))
    found = evaluate(agent, jit_act(agent, 1, "eval"), PARAMS, env, KEY)
    # buttons come first (1 + 2 + 3 + 4), then the pushes, weighted by 5 (updates), 6 (place) and 7 (carry)
    by_hand = sum(10 + (5 * 100 + 6 * t + 7 * t) / 1024 for t in range(4))
    assert found.total_reward[0] == pytest.approx(by_hand, rel=1e-6)


def test_draws_are_those_of_key_and_tick():
    agent, act, params, env, key = setup(mode="train", lengths=(4,))  # Probe draws noise in train mode only
    found = evaluate(agent, act, params, env, key)
    for e in range(3):
        noise = [agent.draw_act_noise(jax.random.fold_in(key, tick), 3)[e] + 0.01 * 0.5 for tick in range(4)]
        assert found.total_reward[e] == pytest.approx(by_hand(4) + 4 * float(sum(noise)), rel=1e-5)


def test_pictures_are_of_the_first_environments_episode():
    agent, act, params, env, key = setup(lengths=(5, 9, 9))
    seen = []
    evaluate(agent, act, params, env, key, on_tick=lambda env: seen.append(env._row.obs["where"][0].tolist()))
    assert seen == [[0, 0, t] for t in range(6)]


def test_a_rebuilt_environment_counts_from_its_new_beginning():
    faults = [Fault("raise", env=1, episode=0, t=4)]
    found = evaluate(*setup(lengths=(7,), on_error="rebuild", faults=faults))
    assert found.length.tolist() == [7, 7, 7]
    assert found.total_reward[0] == found.total_reward[2] == pytest.approx(by_hand(7))
    # a rebuilt one numbers its episodes from 1000 on, which shows in its places
    assert found.total_reward[1] == pytest.approx(by_hand(7) + 7 * 2 * 1000 * 16 / 1024)


def test_stops_when_asked():
    asked = iter([False, False, True])
    agent, act, params, env, key = setup()
    with pytest.raises(Stopped):
        evaluate(agent, act, params, env, key, stopped=lambda: next(asked))
    assert env._row.obs["where"][:, 2].tolist() == [2, 2, 2]
