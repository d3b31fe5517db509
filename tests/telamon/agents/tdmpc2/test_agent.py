"""The agent as the rest of the system meets it: batches, schedule, updates, compilation."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.update import init, make_update
from telamon.agents.tdmpc2 import losses
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.data import ActionSpec, Window
from tests.telamon.agents.tdmpc2 import tiny


def window(agent: TDMPC2, seed: int = 0) -> Window:
    """Rows that know their place: row t of window b holds (10 b + t) / 100, negated in its action."""
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
    flat = tiny.agent().flatten_obs({"alpha": np.array([9.0]), "zeta": np.array([[1.0, 2.0, 3.0]])})
    np.testing.assert_array_equal(flat, [[1, 2, 3, 9]])
    assert flat.dtype == jnp.float32


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


def test_a_burst_resumes_where_it_stopped():
    """What is left is due minus done: arithmetic, no state."""
    schedule = tiny.agent(episode_length=500).schedule(1)
    assert schedule.start == 2500
    assert schedule.due(2501) - 1234 == 1266


def test_many_environments_wait_for_their_first_round_of_episodes():
    schedule = tiny.agent().schedule(32)  # a round is 1600 transitions
    assert [schedule.due(n) for n in (1600, 1632, 1664)] == [0, 1600, 1632]
    sixteen = tiny.agent(episode_length=500).schedule(16)
    assert [sixteen.due(n) for n in (8000, 8016, 8032)] == [0, 8000, 8016]


def test_a_given_seed_is_kept_but_for_the_first_round_of_episodes():
    assert tiny.agent(seed_steps=123).schedule(1).start == 123
    assert tiny.agent(seed_steps=0).schedule(4).start == 4 * 50  # nothing can be sampled before


def test_capacity_is_in_whole_episodes():
    assert tiny.agent(buffer_size=120).capacity(1) == 3 * 51
    assert tiny.agent(episode_length=500).capacity(1) == 2000 * 501
    assert tiny.agent(episode_length=500).capacity(16) == 125 * 501


# state


def test_a_fresh_state():
    agent = tiny.agent()
    state = tiny.jit(agent.init)(jax.random.key(0))
    params, nets = state.params, agent.networks
    jax.tree.map(np.testing.assert_array_equal, params["q"], state.target_q)
    assert state.scale == 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        zero_head = "kernel" in name and "layer2" in name and ("reward" in name or "['q']" in name)
        if "bias" in name or zero_head:
            assert not np.asarray(leaf).any(), name
        elif "scale" in name:
            assert (leaf == 1).all(), name
        else:
            assert float(leaf.std()) == pytest.approx(0.02, rel=0.5), name
    members = np.asarray(params["q"]["layer0"]["linear"]["kernel"])
    assert len({m.tobytes() for m in members}) == 3
    z, a = jax.random.uniform(jax.random.key(1), (5, 16)), jnp.ones((5, 2))
    for logits in (tiny.jit(nets.reward)(params, z, a), tiny.jit(nets.q)(params["q"], z, a)):
        assert not np.asarray(nets.two_hot.decode(logits)).any()


# Q ensemble


def test_members_calls_and_rows_have_dropout_masks_of_their_own():
    agent = tiny.agent(dropout=0.5)
    q = tiny.jit(agent.networks.q)
    same = jax.tree.map(lambda x: jnp.stack([x[0]] * 3), tiny.params(agent)["q"])  # only masks can differ
    z, a = jnp.ones((6, 16)), jnp.ones((6, 2))
    logits = np.asarray(q(same, z, a, jax.random.key(0)))
    assert not np.array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], np.asarray(q(same, z, a, jax.random.key(1)))[0])
    assert not np.array_equal(logits[0][0], logits[0][1])
    plain = np.asarray(q(same, z, a))
    np.testing.assert_array_equal(plain[0], plain[1])
    np.testing.assert_array_equal(plain[0][0], plain[0][1])


def test_the_smaller_of_two_decoded_values_is_not_the_value_of_their_mean():
    agent = tiny.agent()
    q, nets = tiny.params(agent)["q"], agent.networks
    z, a = jax.random.uniform(jax.random.key(0), (4, 16)), jnp.ones((4, 2))
    pair = tiny.jit(nets.q_pair)
    decoded = nets.two_hot.decode(tiny.jit(nets.q)(q, z, a))
    np.testing.assert_allclose(pair(q, jnp.array([2, 0]), z, a), decoded[jnp.array([2, 0])], rtol=1e-5, atol=1e-6)
    of_mean = nets.two_hot.decode(tiny.jit(nets.q)(q, z, a)[:2].mean(0))
    assert (np.abs(decoded[:2].min(0) - of_mean) > 1e-3).all()
    assert (np.abs(decoded[:2].mean(0) - of_mean) > 1e-4).any()


# updates

LIVELY = {recipe: tiny.agent(recipe=recipe, dropout=0.5) for recipe in ("paper", "latest")}
EPISODIC = tiny.agent(episodic=True)


def found_by(agent: TDMPC2, noise_key: int = 0, dropout: int = 0, **batch: jax.Array):
    """(state, metrics, intermediates) of one update."""
    noise = tiny.update_noise(agent, jax.random.key(noise_key))._replace(dropout=jax.random.key(dropout))
    return tiny.update(agent, tiny.state(agent), tiny.batch(agent)._replace(**batch), noise)


@pytest.mark.parametrize(("recipe", "in_target"), [("paper", True), ("latest", False)])
def test_dropout_acts_in_the_targets_of_recipe_paper_only_and_always_in_the_losses(recipe, in_target):
    _, _, one = found_by(LIVELY[recipe])
    _, _, two = found_by(LIVELY[recipe], dropout=1)
    assert np.array_equal(one.target.value, two.target.value) is not in_target
    assert not np.array_equal(one.model.q_logits, two.model.q_logits)

    agent, noise = LIVELY[recipe], tiny.update_noise(LIVELY[recipe], jax.random.key(0))
    q = tiny.jit(lambda key: policy_loss(agent, tiny.params(agent), one.model.zs, noise, key)[1].q)
    assert not np.array_equal(q(jax.random.key(0)), q(jax.random.key(1)))
    np.testing.assert_array_equal(one.model.reward_logits, two.model.reward_logits)
    np.testing.assert_array_equal(one.target.next_z, two.target.next_z)


def policy_loss(agent: TDMPC2, params, zs, noise, dropout_key):
    return losses.policy_loss(
        params["pi"], agent.networks, params["q"], zs, jnp.ones(()), noise.pi_eps, noise.pi_pair, dropout_key
    )


def test_each_loss_moves_its_own_parameters_alone():
    agent = LIVELY["latest"]
    params, noise = tiny.params(agent), tiny.update_noise(agent, jax.random.key(0))
    _, _, found = found_by(agent)
    assert set(found.grads) == {"encoder", "dynamics", "reward", "q"}
    assert all(np.asarray(g).any() for g in jax.tree.leaves(found.grads))
    loss = lambda params, zs: policy_loss(agent, params, zs, noise, noise.dropout)[0]
    to_params, to_zs = tiny.jit(jax.grad(loss, argnums=(0, 1)))(params, found.model.zs)
    moved = {name for name, tree in to_params.items() if any(np.asarray(g).any() for g in jax.tree.leaves(tree))}
    assert moved == {"pi"}
    assert not np.asarray(to_zs).any()


def test_a_terminal_transition_is_worth_its_reward():
    _, metrics, found = found_by(EPISODIC)
    batch = tiny.batch(EPISODIC)
    ended = batch.terminated == 1
    np.testing.assert_array_equal(found.target.value[ended], batch.reward[ended])
    assert (np.abs(found.target.value - batch.reward)[~ended] > 1e-4).all()
    assert metrics["termination_rate"] == 0.5


def test_termination_loss_is_the_mean_binary_cross_entropy_of_hard_labels():
    """log 2 at logit 0, whatever the label."""
    state = tiny.state(EPISODIC)
    head = state.params["termination"]
    head = head | {"layer2": jax.tree.map(jnp.zeros_like, head["layer2"])}
    silent = state._replace(params=state.params | {"termination": head})
    noise = tiny.update_noise(EPISODIC, jax.random.key(0))
    _, metrics, found = tiny.update(EPISODIC, silent, tiny.batch(EPISODIC), noise)
    np.testing.assert_allclose(metrics["termination_loss"], 0.6931472, rtol=1e-6)
    assert found.model.termination_logits.shape == (2, 4)


def test_termination_statistics():
    found = losses.termination_statistics(jnp.array([1.0, 1, -1, -1, 0]), jnp.array([1.0, 0, 1, 0, 0]))
    assert found["termination_rate"] == pytest.approx(0.4)
    np.testing.assert_allclose(found["termination_f1"], 0.5, rtol=1e-6)
    none = losses.termination_statistics(jnp.array([-1.0, -1]), jnp.zeros(2))
    assert none["termination_f1"] == 0  # guarded, not a division by zero


def test_episodic_mode_learns_terminations_values_and_rewards_and_acts():
    state, batch = tiny.jit(EPISODIC.init)(jax.random.key(0)), tiny.batch(EPISODIC, seed=3)
    history = []
    for i in range(300):
        state, metrics, _ = tiny.update(EPISODIC, state, batch, tiny.update_noise(EPISODIC, jax.random.key(i)))
        history.append(metrics)
    for name in ("termination_loss", "reward_loss", "total_loss"):
        assert history[-1][name] < 0.9 * history[0][name], name
    obs = {"zeta": jnp.ones((1, 3)), "alpha": jnp.ones(1)}
    noise = tiny.act_noise(EPISODIC, jax.random.key(0), 1)
    action, carry, _ = tiny.act(
        EPISODIC, state.params, EPISODIC.initial_carry(1), obs, jnp.array([True]), noise, mode="train"
    )
    assert action.shape == (1, 2)
    assert np.isfinite(carry).all()
    assert (np.abs(action) <= 1).all()


def test_without_episodic_mode_there_is_no_termination_head():
    assert "termination" not in jax.eval_shape(tiny.agent().init, jax.random.key(0)).params
    assert not tiny.agent().learns_terminations
    assert EPISODIC.learns_terminations


def test_bf16_networks_keep_float32_parameters_distributions_and_losses():
    agent = tiny.agent(dtype="bfloat16", recipe="latest")
    state, metrics, found = found_by(agent)
    assert {x.dtype for x in jax.tree.leaves((state, metrics, found))} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert all(np.isfinite(m) for m in metrics.values())
    _, exact, _ = found_by(tiny.agent(dtype="float32", recipe="latest"))
    assert metrics["total_loss"] != exact["total_loss"]
    np.testing.assert_allclose(metrics["total_loss"], exact["total_loss"], rtol=0.02)


def test_a_report_gives_the_losses_of_an_update():
    agent = tiny.agent(recipe="latest")
    rows, noise = window(agent), tiny.update_noise(agent, jax.random.key(0))
    state = tiny.state(agent)
    reported = tiny.jit(agent.report)(state, rows, noise)
    _, metrics, _ = tiny.update(agent, state, agent.batch(rows), noise)
    assert set(reported.losses) == {"consistency_loss", "reward_loss", "value_loss", "total_loss"}
    assert not reported.open_loop
    for name, value in reported.losses.items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-6)


def test_draws_of_an_update_are_independent():
    agent = tiny.agent(batch_size=512)
    noise = tiny.update_noise(agent, jax.random.key(0))
    assert noise.td_eps.shape == (2, 512, 2)
    assert noise.pi_eps.shape == (3, 512, 2)
    np.testing.assert_allclose([noise.td_eps.std(), noise.pi_eps.std()], 1, atol=0.05)
    assert abs(np.corrcoef(noise.td_eps.ravel(), noise.pi_eps[:2].ravel())[0, 1]) < 0.1
    pairs = [tiny.update_noise(agent, jax.random.key(i)) for i in range(12)]
    assert any(set(map(int, n.td_pair)) != set(map(int, n.pi_pair)) for n in pairs)


# acting


def test_without_a_planner_training_samples_and_evaluation_takes_the_mean():
    agent = tiny.agent(mpc=False)
    params, carry = tiny.params(agent), agent.initial_carry(2) + 0.5
    obs = {"zeta": jnp.ones((2, 3)), "alpha": jnp.ones(2)}
    first = jnp.zeros(2, bool)
    noises = [tiny.act_noise(agent, jax.random.key(i), 2) for i in range(2)]
    act = lambda mode, noise: tiny.act(agent, params, carry, obs, first, noise, mode=mode)
    assert not np.array_equal(act("train", noises[0])[0], act("train", noises[1])[0])
    np.testing.assert_array_equal(act("eval", noises[0])[0], act("eval", noises[1])[0])
    mean, _ = agent.networks.policy(params, agent.networks.encode(params, agent.flatten_obs(obs)))
    np.testing.assert_allclose(act("eval", noises[0])[0], jnp.tanh(mean), rtol=1e-5)
    np.testing.assert_array_equal(act("train", noises[0])[1], carry)


def test_actions_have_the_environments_shape():
    agent = tiny.agent(env=replace(tiny.ENV, action=ActionSpec((2, 3))), mpc=False)
    noise = tiny.act_noise(agent, jax.random.key(0), 4)
    obs = {"zeta": jnp.ones((4, 3)), "alpha": jnp.ones(4)}
    shapes = jax.eval_shape(
        lambda params: agent.act(params, agent.initial_carry(4), obs, jnp.zeros(4, bool), noise, "train"),
        jax.eval_shape(agent.init, jax.random.key(0)).params,
    )
    assert shapes[0].shape == (4, 2, 3)


# compilation


def test_nothing_is_compiled_again_after_the_first_update_plan_and_action():
    agent = tiny.agent(horizon=1, num_q=2, iterations=1)
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
        state, _ = update(state, window(agent, seed=i), key, np.uint32(i))
        obs = {"zeta": np.full((2, 3), i, np.float32), "alpha": np.full(2, i, np.float32)}
        _, carry, _ = act(agent.acting_params(state.train), carry, obs, np.array([i == 0, True]), key, np.uint32(i))
    assert (update._cache_size(), act._cache_size()) == (1, 1)
