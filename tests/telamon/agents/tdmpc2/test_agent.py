"""The agent as the rest of the system meets it: batches, schedule, updates, compilation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.update import init, make_update
from telamon.agents.tdmpc2 import losses
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.data import Window
from tests.telamon.agents.tdmpc2 import tiny


def window(agent: TDMPC2, seed: int = 0) -> Window:
    """Rows that know their place: row t of window b holds 10 b + t, negated in its action."""
    b, t = agent.batch_size, agent.window_spec.length
    where = (10 * np.arange(b)[:, None] + np.arange(t) + 100 * seed).astype(np.float32) / 100
    flags = np.zeros((b, t), bool)
    return Window(
        env_id=np.zeros(b, np.int32), first_row=np.zeros(b, np.int64),
        obs={"alpha": where, "zeta": np.stack([where, where + 0.001, where + 0.002], -1)},
        reward=where, is_first=flags, is_last=flags, is_terminal=where == where.max(),
        action=np.stack([-where, -where], -1).clip(-1, 1),
    )  # fmt: skip


# observations and batches


def test_observations_keep_the_environments_order_and_scalars_count_one():
    agent = tiny.agent()
    flat = agent.flatten_obs({"alpha": jnp.array([9.0]), "zeta": jnp.array([[1.0, 2.0, 3.0]])})
    np.testing.assert_array_equal(flat, [[1, 2, 3, 9]])


def test_a_batch_pairs_each_action_with_the_reward_and_end_that_followed():
    agent = tiny.agent()
    rows = window(agent)
    batch = agent.batch(rows)
    np.testing.assert_array_equal(batch.obs[..., 3], rows.obs["alpha"].T)
    np.testing.assert_array_equal(batch.action[..., 0], rows.action[:, :-1, 0].T)
    np.testing.assert_array_equal(batch.reward, rows.reward[:, 1:].T)
    np.testing.assert_array_equal(batch.terminated, rows.is_terminal[:, 1:].T)
    assert batch.terminated.sum() == 1


# schedule


def test_one_environment_acts_at_random_for_one_transition_more_than_the_seed_then_owes_a_burst():
    schedule = tiny.agent().schedule(1)  # episodes of 50: the seed is 1000
    assert [schedule.due(n) for n in (0, 999, 1000, 1001, 1002, 5000)] == [0, 0, 0, 1000, 1001, 4999]


def test_many_environments_wait_for_their_first_round_of_episodes():
    schedule = tiny.agent().schedule(32)  # a round is 1600 transitions
    assert [schedule.due(n) for n in (1600, 1632, 1664)] == [0, 1600, 1632]


def test_the_seed_is_five_episodes_where_those_are_longer_than_1000():
    assert tiny.agent(episode_length=500).schedule(1).start == 2500
    assert tiny.agent(seed_steps=0).schedule(1).start >= 50  # nothing can be sampled before


def test_capacity_is_in_whole_episodes():
    assert tiny.agent(buffer_size=120).capacity(1) == 3 * 51


# state


def test_a_fresh_state():
    agent = tiny.agent()
    state = agent.init(jax.random.key(0))
    q = state.params["q"]
    jax.tree.map(np.testing.assert_array_equal, q, state.target_q)
    for module in ("reward", "q"):
        assert not np.asarray(state.params[module]["layer2"]["kernel"]).any()
    for module in ("pi", "encoder", "dynamics"):
        last = sorted(state.params[module])[-1]
        kernel = state.params[module][last].get("kernel", state.params[module][last].get("linear", {}).get("kernel"))
        assert 0.01 < np.std(kernel) < 0.03
    members = np.asarray(q["layer0"]["linear"]["kernel"])
    assert len({m.tobytes() for m in members}) == 3
    z, a = jnp.ones((5, 16)), jnp.ones((5, 2))
    nets = agent.networks
    assert not np.asarray(nets.two_hot.decode(jax.jit(nets.reward)(state.params, z, a))).any()
    assert not np.asarray(nets.two_hot.decode(jax.jit(nets.q)(q, z, a))).any()
    assert state.scale == 1


# Q ensemble


def test_members_and_calls_have_dropout_masks_of_their_own():
    agent = tiny.agent(dropout=0.5)
    nets = agent.networks
    one = tiny.state(agent).params["q"]
    same = jax.tree.map(lambda x: jnp.stack([x[0]] * 3), one)  # identical members: only masks can differ
    z, a = jnp.ones((6, 16)), jnp.ones((6, 2))
    logits = np.asarray(nets.q(same, z, a, jax.random.key(0)))
    assert not np.array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], np.asarray(nets.q(same, z, a, jax.random.key(1)))[0])
    assert not np.array_equal(logits[0][0], logits[0][1])  # nor do rows share one
    plain = np.asarray(nets.q(same, z, a))
    np.testing.assert_array_equal(plain[0], plain[1])


def test_the_smaller_of_two_decoded_values_is_not_the_value_of_their_mean():
    agent = tiny.agent()
    q, nets = tiny.state(agent).params["q"], agent.networks
    z, a = jnp.ones((4, 16)), jnp.ones((4, 2))
    low = nets.q_pair(q, jnp.array([0, 1]), z, a).min(0)
    mean = nets.two_hot.decode(nets.q(q, z, a)[:2].mean(0))
    assert (np.abs(low - mean) > 1e-3).all()
    for other in (nets.q_pair(q, jnp.array([1, 0]), z, a).min(0),):
        np.testing.assert_array_equal(low, other)


# losses


def test_dropout_acts_in_the_target_of_recipe_paper_only_and_always_in_the_losses():
    for recipe, in_target in (("paper", True), ("latest", False)):
        agent = tiny.agent(recipe=recipe, dropout=0.5)
        state, batch, noise = tiny.state(agent), tiny.batch(agent), agent.draw_update_noise(jax.random.key(0))
        find = jax.jit(agent.losses)
        target, (_, model), _ = find(state, batch, noise)
        target2, (_, model2), _ = find(state, batch, noise._replace(dropout=jax.random.key(7)))
        assert np.array_equal(target.value, target2.value) is not in_target
        assert not np.array_equal(model.q_logits, model2.q_logits)


def test_a_terminal_transition_is_worth_its_reward():
    agent = tiny.agent(episodic=True)
    state, batch, noise = tiny.state(agent), tiny.batch(agent), agent.draw_update_noise(jax.random.key(0))
    ended = batch._replace(terminated=jnp.ones_like(batch.terminated))
    target, *_ = jax.jit(agent.losses)(state, ended, noise)
    np.testing.assert_array_equal(target.value, batch.reward)


def test_world_losses_do_not_move_the_policy_nor_policy_losses_the_world():
    agent = tiny.agent()
    state, batch, noise = tiny.state(agent), tiny.batch(agent), agent.draw_update_noise(jax.random.key(0))
    target, _, grads = jax.jit(agent.losses)(state, batch, noise)
    assert "pi" not in grads
    loss = lambda q: losses.policy_loss(
        state.params["pi"],
        agent.networks,
        q,
        target.next_z,
        state.scale,
        noise.pi_eps[:3],
        noise.pi_pair,
        noise.dropout,
    )[0]
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(jax.grad(loss)(state.params["q"])))


def test_termination_loss_and_statistics():
    zero = jnp.zeros(4)
    np.testing.assert_allclose(
        losses.optax.sigmoid_binary_cross_entropy(zero, jnp.array([0.0, 1, 0, 1])), np.log(2), rtol=1e-6
    )
    found = losses.termination_statistics(jnp.array([1.0, 1, -1, -1]), jnp.array([1.0, 0, 1, 0]))
    assert found["termination_rate"] == 0.5
    np.testing.assert_allclose(found["termination_f1"], 0.5, rtol=1e-6)
    none = losses.termination_statistics(jnp.array([-1.0, -1]), jnp.zeros(2))
    assert none["termination_f1"] == 0  # guarded, not a division by zero


def test_episodic_learning_and_acting_run_and_learn_terminations():
    agent = tiny.agent(episodic=True)
    update = jax.jit(agent.update_from_batch)
    state, batch = agent.init(jax.random.key(0)), tiny.batch(agent, seed=3)
    first = None
    for i in range(200):
        state, metrics = update(state, batch, agent.draw_update_noise(jax.random.key(i)))
        first = first or metrics
    assert metrics["termination_loss"] < 0.7 * first["termination_loss"]


@pytest.mark.parametrize("recipe", ["paper", "latest"])
def test_bf16_networks_keep_float32_parameters_and_losses(recipe):
    agent = tiny.agent(dtype="bfloat16", recipe=recipe)
    state, metrics = jax.jit(agent.update_from_batch)(
        tiny.state(agent), tiny.batch(agent), agent.draw_update_noise(jax.random.key(0))
    )
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert all(m.dtype == jnp.float32 and np.isfinite(m) for m in metrics.values())


def test_a_report_changes_nothing():
    agent = tiny.agent()
    rows, noise = window(agent), agent.draw_update_noise(jax.random.key(0))
    state = tiny.state(agent)
    found = jax.jit(agent.report)(state, rows, noise)
    _, metrics, _ = jax.jit(agent.update)(state, rows, noise)
    for name, value in found.items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-6)


# acting


def test_without_a_planner_training_samples_and_evaluation_takes_the_mean():
    agent = tiny.agent(mpc=False)
    params, carry = tiny.state(agent).params, agent.initial_carry(2) + 0.5
    obs = {"zeta": jnp.ones((2, 3)), "alpha": jnp.ones(2)}
    first = jnp.zeros(2, bool)
    noises = [agent.draw_act_noise(jax.random.key(i), 2) for i in range(2)]
    sampled = [agent.act(params, carry, obs, first, n, "train")[0] for n in noises]
    means = [agent.act(params, carry, obs, first, n, "eval")[0] for n in noises]
    assert not np.array_equal(*sampled)
    np.testing.assert_array_equal(*means)
    mean, _ = agent.networks.policy(params, agent.networks.encode(params, agent.flatten_obs(obs)))
    np.testing.assert_allclose(means[0], jnp.tanh(mean), rtol=1e-6)
    np.testing.assert_array_equal(agent.act(params, carry, obs, first, noises[0], "train")[1], carry)


# compilation


def test_nothing_is_compiled_again_after_the_first_update_plan_and_action():
    agent = tiny.agent()
    update = make_update(agent)
    state = init(agent, jax.random.key(0))
    key = jax.random.key(1)
    act = jax.jit(
        lambda params, carry, obs, first, key, tick: agent.act(
            params, carry, obs, first, agent.draw_act_noise(jax.random.fold_in(key, tick), 2), "train"
        )
    )
    carry = agent.initial_carry(2)
    for i in range(5):
        state, _, _ = update(state, window(agent, seed=i), key, np.uint32(i))
        obs = {"zeta": np.full((2, 3), i, np.float32), "alpha": np.full(2, i, np.float32)}
        _, carry, _ = act(agent.acting_params(state.train), carry, obs, np.array([i == 0, True]), key, np.uint32(i))
        if i == 1:
            sizes = update._cache_size(), act._cache_size()
    assert (update._cache_size(), act._cache_size()) == sizes == (1, 1)
