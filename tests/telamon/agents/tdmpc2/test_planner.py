"""MPPI (numerics, B13), its random pair of Q members (B9), and how decisions are batched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.agents.tdmpc2 import planner
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.data import ActionSpec
from tests.telamon.agents.tdmpc2 import tiny

GAMMA = 0.9


class GivenValues:
    """Stands for the networks where a test decides what a plan is worth: value(actions [H, N, A]) -> [N]."""

    def __init__(self, config: Any) -> None:
        self.config = config


def iterate(
    monkeypatch: pytest.MonkeyPatch,
    value: Any,
    candidates: jax.Array,
    pi: jax.Array | None = None,
    mean=None,
    std=None,
    **config: Any,
) -> planner.Iteration:
    """One iteration over given candidates under a given value."""
    horizon, n, a = candidates.shape
    pi = jnp.zeros((horizon, 0, a)) if pi is None else pi
    settings = tiny.config(num_samples=n + pi.shape[1], num_pi_trajs=pi.shape[1], **config)
    monkeypatch.setattr(planner, "plan_value", lambda nets, params, gamma, z, actions, *rest: value(actions))
    mean = jnp.zeros((horizon, a)) if mean is None else mean
    std = jnp.ones((horizon, a)) if std is None else std
    return planner.iterate(
        GivenValues(settings), {}, GAMMA, jnp.zeros((1, 16)), pi, mean, std, candidates,
        jnp.zeros((n + pi.shape[1], a)), jnp.array([0, 1]), None,
    )  # type: ignore[arg-type]  # fmt: skip  # only the config of the networks is used


def test_refit_pinned(monkeypatch):
    """Three elites of values 1, 2, 4: the temperature multiplies, the deviation is around the new mean."""
    actions = jnp.array([[[0.0], [0.5], [1.0]], [[-1.0], [0.0], [0.2]]])
    found = iterate(monkeypatch, lambda _: jnp.array([1.0, 2.0, 4.0]), actions, num_elites=3)
    np.testing.assert_allclose(found.score[::-1], [0.14024438, 0.2312239, 0.6285317], rtol=1e-6)
    np.testing.assert_allclose(found.mean[:, 0], [0.74414366, -0.01453803], rtol=1e-6)
    np.testing.assert_allclose(found.std[:, 0], [0.3641262, 0.4064164], rtol=1e-6)


def test_elites_are_the_best_of_this_iteration_by_falling_value(monkeypatch):
    values = jnp.array([0.0, 3.0, -1.0, 5.0, 2.0])
    found = iterate(monkeypatch, lambda _: values, jnp.zeros((2, 5, 1)), num_elites=3)
    np.testing.assert_array_equal(found.elites, [3, 1, 4])
    np.testing.assert_allclose(found.score.sum(), 1, rtol=1e-6)


def test_candidates_are_clipped_before_they_are_valued(monkeypatch):
    seen = []
    value = lambda actions: (seen.append(actions), actions.sum((0, 2)))[1]
    iterate(
        monkeypatch, value, 3 * jnp.ones((2, 6, 2)), mean=0.5 * jnp.ones((2, 2)), std=2 * jnp.ones((2, 2)), num_elites=2
    )
    np.testing.assert_array_equal(seen[0], np.ones((2, 6, 2)))


def test_deviation_keeps_its_bounds(monkeypatch):
    same = iterate(monkeypatch, lambda a: a.sum((0, 2)), jnp.zeros((2, 6, 1)), num_elites=4)
    np.testing.assert_allclose(same.std, 0.05)
    wide = iterate(monkeypatch, lambda a: jnp.zeros(2), jnp.array([[[-1.0], [1.0]]]), num_elites=2, max_std=0.5)
    np.testing.assert_allclose(wide.std, 0.5)


def test_the_mean_converges_to_the_best_action(monkeypatch):
    best = jnp.array([[0.6, -0.3], [0.1, 0.9], [-0.8, 0.0]])
    value = lambda actions: -100 * ((actions - best[:, None]) ** 2).sum((0, 2))
    mean, std = jnp.zeros((3, 2)), 2 * jnp.ones((3, 2))
    for i in range(12):
        noise = jax.random.normal(jax.random.key(i), (3, 512, 2))
        found = iterate(monkeypatch, value, noise, mean=mean, std=std, num_elites=64)
        mean, std = found.mean, found.std
    np.testing.assert_allclose(mean, best, atol=0.05)


def test_warm_start_shifts_the_mean_and_ends_in_zero():
    prev = jnp.array([[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(planner.warm_start(prev, jnp.array(False)), [[2.0], [3.0], [0.0]])
    np.testing.assert_array_equal(planner.warm_start(prev, jnp.array(True)), np.zeros((3, 1)))


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 0), (0.19, 0), (0.21, 1), (0.69, 1), (0.71, 2), (0.999, 2)])
def test_an_elite_is_drawn_by_the_inverse_cdf_of_a_uniform(draw, expected):
    assert planner.draw_elite(jnp.array([0.2, 0.5, 0.3]), jnp.float32(draw)) == expected


def test_an_elite_is_drawn_by_the_largest_score_over_an_exponential():
    assert planner.draw_elite(jnp.array([0.2, 0.5, 0.3]), jnp.array([0.1, 1.0, 1.0])) == 0
    assert planner.draw_elite(jnp.array([0.2, 0.5, 0.3]), jnp.array([1.0, 1.0, 1.0])) == 1


def decide(
    agent: TDMPC2, noise: planner.PlanNoise, t0: bool = False, eval_mode: bool = False, **params: Any
) -> planner.Plan:
    """A plan from a fixed latent and previous mean."""
    state = tiny.state(agent)
    z = agent.networks.encode(state.params, jnp.ones(agent.networks.obs_dim))
    prev = 0.3 * jnp.ones((agent.config.horizon, agent.action_dim))
    return planner.plan(
        agent.networks, {**state.params, **params}, agent.gamma, z, prev, jnp.array(t0), noise, eval_mode=eval_mode
    )


def draws(agent: TDMPC2, seed: int = 0) -> planner.PlanNoise:
    return planner.draw_plan_noise(jax.random.key(seed), agent.config, agent.action_dim, agent.iterations)


def test_evaluation_removes_the_final_noise_alone():
    agent = tiny.agent(recipe="latest")
    noise = draws(agent)
    trained, evaluated = decide(agent, noise), decide(agent, noise, eval_mode=True)
    np.testing.assert_array_equal(trained.mean, evaluated.mean)
    assert trained.elite == evaluated.elite
    elite = evaluated.last.actions[0, evaluated.last.elites[evaluated.elite]]
    np.testing.assert_array_equal(evaluated.action, elite)
    np.testing.assert_allclose(trained.action, jnp.clip(elite + trained.last.std[0] * noise.final, -1, 1), rtol=1e-6)
    other = decide(agent, draws(agent, seed=1), eval_mode=True)
    assert not np.array_equal(other.action, evaluated.action)  # still stochastic


def test_the_mean_is_handed_on_and_not_the_executed_action():
    agent = tiny.agent()
    found = decide(agent, draws(agent))
    np.testing.assert_array_equal(found.mean, found.last.mean)
    assert not np.array_equal(found.mean[0], found.action)


def test_policy_columns_stay_the_same_over_the_iterations():
    agent = tiny.agent()
    noise, state = draws(agent), tiny.state(agent)
    z = agent.networks.encode(state.params, jnp.ones((1, agent.networks.obs_dim)))
    proposed = planner.policy_trajectories(agent.networks, state.params, z, noise.pi_traj_eps)
    last = decide(agent, noise).last.actions[:, : agent.config.num_pi_trajs]
    np.testing.assert_allclose(last, proposed, rtol=1e-5, atol=1e-6)


def test_deviation_starts_anew_in_every_decision():
    """With one iteration and noise of 1, candidates lie max_std from the mean whatever the last plan was."""
    agent = tiny.agent(iterations=1, num_pi_trajs=0, max_std=0.25)
    noise = draws(agent)._replace(candidates=jnp.ones((1, 3, 16, 2)))
    actions = decide(agent, noise).last.actions
    np.testing.assert_allclose(actions[0], 0.3 + 0.25, rtol=1e-6)
    np.testing.assert_allclose(actions[-1], 0.0 + 0.25, rtol=1e-6)


def test_only_the_drawn_members_are_evaluated():
    agent = tiny.agent()  # three members
    noise = draws(agent)._replace(pairs=jnp.array([[0, 2], [2, 0]]))
    poisoned = jax.tree.map(lambda x: x.at[1].set(jnp.nan), tiny.state(agent).params["q"])
    found = decide(agent, noise, q=poisoned)
    np.testing.assert_array_equal(found.last.value, decide(agent, noise).last.value)
    assert np.isfinite(found.action).all()


def test_a_value_that_is_no_number_counts_as_zero():
    agent = tiny.agent()
    poisoned = jax.tree.map(lambda x: x * jnp.nan, tiny.state(agent).params["q"])
    found = decide(agent, draws(agent), q=poisoned)
    np.testing.assert_array_equal(found.last.value, np.zeros(16))
    assert np.isfinite(found.action).all()


def test_dropout_acts_in_the_planner_of_recipe_paper_only():
    for recipe, differs in (("paper", True), ("latest", False)):
        agent = tiny.agent(recipe=recipe, dropout=0.5)
        noise = draws(agent)
        one, two = decide(agent, noise), decide(agent, noise._replace(dropout=jax.random.key(99)))
        assert np.array_equal(one.last.value, two.last.value) is not differs


def test_rewards_after_a_predicted_termination_do_not_count():
    agent = tiny.agent(episodic=True)
    state = tiny.state(agent)
    always = jax.tree.map(jnp.zeros_like, state.params["termination"])
    always["layer2"]["bias"] = jnp.array([9.0])
    params = {**state.params, "termination": always}
    z = agent.networks.encode(params, jnp.ones((1, agent.networks.obs_dim)))
    actions = jax.random.uniform(jax.random.key(0), (3, 5, 2), minval=-1)
    value = planner.plan_value(agent.networks, params, GAMMA, z, actions, jnp.zeros((5, 2)), jnp.array([0, 1]), None)
    first = agent.networks.two_hot.decode(agent.networks.reward(params, z, actions[0]))
    np.testing.assert_allclose(value, first, rtol=1e-5)


def test_pairs_are_two_distinct_members_each_as_often():
    pairs = np.asarray(planner.draw_pairs(jax.random.key(0), 5, 4000))
    assert (pairs[:, 0] != pairs[:, 1]).all()
    counts = np.bincount(np.sort(pairs, 1) @ [5, 1], minlength=25)
    counts = counts[counts > 0]
    assert len(counts) == 10  # every unordered pair
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-square with 9 degrees of freedom, p = 0.001
    assert {tuple(sorted(p)) for p in np.asarray(planner.draw_pairs(jax.random.key(1), 2, 50)).tolist()} == {(0, 1)}


def test_two_more_iterations_from_twenty_action_dimensions_on():
    wide = lambda n: tiny.agent(env=replace(tiny.ENV, action=ActionSpec((n,)))).iterations
    assert (wide(19), wide(20)) == (2, 4)


@pytest.mark.parametrize("batching", ["vmap", "map"])
def test_a_batch_of_environments_decides_as_each_alone(batching):
    agent = tiny.agent(env_batching=batching)
    params = tiny.state(agent).params
    noise = agent.draw_act_noise(jax.random.key(0), 3)
    obs = {"zeta": jax.random.normal(jax.random.key(1), (3, 3)), "alpha": jnp.arange(3.0)}
    first, carry = jnp.array([True, False, False]), 0.1 * jnp.ones(agent.initial_carry(3).shape)
    action, mean, latents = agent.act(params, carry, obs, first, noise, "train")
    assert latents == {}
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], noise.plan._replace(pairs=jnp.zeros(3)))._replace(
            pairs=noise.plan.pairs
        )
        z = agent.networks.encode(params, agent.flatten_obs({k: v[i] for k, v in obs.items()}))
        alone = planner.plan(agent.networks, params, agent.gamma, z, carry[i], first[i], one, eval_mode=False)
        np.testing.assert_allclose(action[i], alone.action, atol=1e-5)
        np.testing.assert_allclose(mean[i], alone.mean, atol=1e-5)
