"""MPPI (numerics, B13): by hand on toy models, then with networks; and how decisions are batched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.agents.tdmpc2 import planner
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.data import ActionSpec
from tests.telamon.agents.tdmpc2 import tiny

GAMMA = 0.5


@dataclass(frozen=True)
class Toy:
    """Stands for the networks: the latent counts steps, rewards and values are functions of the test."""

    config: TDMPC2Config
    reward_of: Callable[[jax.Array, jax.Array], jax.Array] = lambda z, a: 0.0 * a[..., 0]
    value_of: float = 0.0
    terminal_at: int = 1000

    two_hot = SimpleNamespace(decode=lambda logits: logits)

    def dynamics(self, params, z, a):
        return jnp.broadcast_to(z, (len(a), 1)) + 1

    def reward(self, params, z, a):
        return self.reward_of(z, a)

    def termination(self, params, z):
        return jnp.where(z[:, 0] >= self.terminal_at, 5.0, -5.0)

    def policy(self, params, z):
        return jnp.zeros((len(z), 2)), jnp.full((len(z), 2), -20.0)

    def q_pair(self, members, pair, z, a, dropout_key=None):
        return jnp.stack([jnp.full(len(z), self.value_of), jnp.full(len(z), self.value_of + 2)])


def value(toy: Toy, actions: jax.Array) -> np.ndarray:
    n = actions.shape[1]
    arguments = jnp.zeros((1, 1)), actions, jnp.zeros((n, 2)), jnp.array([0, 1]), None
    return np.asarray(planner.plan_value(toy, {"q": None}, GAMMA, *arguments))  # type: ignore[arg-type]  # a stand-in


# one iteration, by hand


def test_refit_pinned():
    """Elites of values 1, 2, 4: the temperature multiplies, the deviation is the biased one around the new mean."""
    actions = jnp.array([[[0.0], [0.5], [1.0], [-9]], [[-1.0], [0.0], [0.2], [-9]]])
    found = planner.refit(tiny.config(num_elites=3), actions, jnp.array([1.0, 2.0, 4.0, -5.0]))
    np.testing.assert_array_equal(found.elites, [2, 1, 0])
    np.testing.assert_allclose(found.score, [0.6285317, 0.2312239, 0.14024438], rtol=1e-6)
    np.testing.assert_allclose(found.mean[:, 0], [0.74414366, -0.01453803], rtol=1e-6)
    np.testing.assert_allclose(found.std[:, 0], [0.3641262, 0.4064164], rtol=1e-6)


def test_the_deviation_keeps_its_bounds():
    refit = lambda actions, **bounds: planner.refit(tiny.config(num_elites=2, **bounds), actions, jnp.zeros(2)).std
    np.testing.assert_allclose(refit(jnp.zeros((2, 2, 1))), 0.05)
    np.testing.assert_allclose(refit(jnp.array([[[-1.0], [1.0]]]), max_std=0.5), 0.5)


def test_a_value_is_the_discounted_return_and_the_mean_of_the_pair_where_the_plan_ends():
    """Rewards 10 z + a_0 at z = 0, 1 and a pair of 4 and 6: (a) + 0.5 (10 + a) + 0.25 * 5."""
    toy = Toy(tiny.config(), lambda z, a: 10 * z[:, 0] + a[:, 0], value_of=4.0)
    actions = jnp.array([[[1.0, 0], [2, 0]], [[3, 0], [-4, 0]]])
    np.testing.assert_allclose(value(toy, actions), [1 + 0.5 * 13 + 1.25, 2 + 0.5 * 6 + 1.25])


@pytest.mark.parametrize(("terminal_at", "expected"), [(1, 1.0), (2, 1 + 0.5 * 13), (3, 1 + 0.5 * 13 + 1.25)])
def test_the_reward_on_entering_a_predicted_termination_counts_and_nothing_after_it(terminal_at, expected):
    toy = Toy(tiny.config(episodic=True), lambda z, a: 10 * z[:, 0] + a[:, 0], value_of=4.0, terminal_at=terminal_at)
    assert value(toy, jnp.array([[[1.0, 0]], [[3, 0]]])) == expected
    blind = replace(toy, config=tiny.config(episodic=False))
    assert value(blind, jnp.array([[[1.0, 0]], [[3, 0]]])) == 1 + 0.5 * 13 + 1.25


def test_a_value_that_is_no_number_counts_as_zero_and_an_infinite_one_as_the_largest():
    toy = Toy(tiny.config(), lambda z, a: jnp.log(a[:, 0]))
    actions = jnp.array([[[-1.0, 0], [jnp.inf, 0], [1, 0]]])
    np.testing.assert_array_equal(value(toy, actions), [0, np.finfo(np.float32).max, 0.5])


def test_candidates_are_clipped_before_they_are_valued_and_follow_the_policys():
    toy = Toy(tiny.config(num_samples=4, num_pi_trajs=1, num_elites=2), lambda z, a: a.sum(-1))
    noise = jnp.array([[[1.0, -1], [9, 9], [-9, -9]]])
    mean, std = jnp.array([[0.5, 0]]), jnp.array([[0.25, 0.5]])
    proposed = jnp.full((1, 1, 2), 0.125)
    found = planner.iterate(
        toy, {"q": None}, GAMMA, jnp.zeros((1, 1)), proposed, mean, std, noise, jnp.zeros((4, 2)), jnp.array([0, 1]),
        None,
    )  # type: ignore[arg-type]  # fmt: skip  # a stand-in
    np.testing.assert_array_equal(found.actions, [[[0.125, 0.125], [0.75, -0.5], [1, 1], [-1, -1]]])
    np.testing.assert_array_equal(found.value, [0.25 + 0.5, 0.25 + 0.5, 2 + 0.5, -2 + 0.5])


def test_the_mean_converges_to_the_best_action():
    best = jnp.array([0.6, -0.3])
    settings = tiny.config(num_samples=512, num_elites=64, num_pi_trajs=0, iterations=12, temperature=100)
    toy = Toy(settings, lambda z, a: -((a - best[None]) ** 2).sum(-1))
    noise = tiny.plan_noise(jax.random.key(0), settings, 2, 12)
    found = tiny.plan(toy, {"q": None}, 0.99, jnp.zeros(1), jnp.zeros((2, 2)), True, noise, eval_mode=True)
    np.testing.assert_allclose(found.mean, [best, best], atol=0.02)
    np.testing.assert_allclose(found.action, best, atol=0.15)


# warm start and the executed elite


def test_warm_start_shifts_the_mean_and_ends_in_zero():
    prev = jnp.array([[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(planner.warm_start(prev, jnp.array(False)), [[2.0], [3.0], [0.0]])
    np.testing.assert_array_equal(planner.warm_start(prev, jnp.array(True)), np.zeros((3, 1)))


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 1), (0.19, 1), (0.21, 2), (0.69, 2), (0.71, 3), (0.999, 3)])
def test_an_elite_is_drawn_by_the_inverse_cdf_of_a_uniform(draw, expected):
    assert planner.draw_elite(jnp.array([0.0, 0.2, 0.5, 0.3]), jnp.float32(draw)) == expected


def test_an_elite_is_drawn_by_the_largest_score_over_an_exponential():
    score = jnp.array([0.2, 0.5, 0.3])
    assert planner.draw_elite(score, jnp.array([0.1, 1.0, 1.0])) == 0
    assert planner.draw_elite(score, jnp.array([1.0, 1.0, 1.0])) == 1
    draws = jax.random.exponential(jax.random.key(0), (4000, 3))
    picks = jax.vmap(planner.draw_elite, in_axes=(None, 0))(score, draws)
    np.testing.assert_allclose(np.bincount(picks) / 4000, score, atol=0.03)


# whole decisions


def draws(agent: TDMPC2, seed: int = 0) -> planner.PlanNoise:
    return tiny.plan_noise(jax.random.key(seed), agent.config, agent.action_dim, agent.iterations)


def decide(agent: TDMPC2, noise: planner.PlanNoise, eval_mode: bool = False, t0: bool = False, **params: Any) -> Any:
    """A plan from a fixed latent and a previous mean of 0.3."""
    z = jnp.full(agent.config.latent_dim, 1 / agent.config.simnorm_dim)
    prev = jnp.full((agent.config.horizon, agent.action_dim), 0.3)
    own = tiny.params(agent) | params
    return tiny.plan(agent.networks, own, agent.gamma, z, prev, t0, noise, eval_mode=eval_mode)


def test_evaluation_removes_the_final_noise_alone():
    agent = tiny.agent(recipe="latest")
    noise = draws(agent)
    trained, evaluated = (
        decide(agent, noise),
        decide(agent, noise._replace(final=noise.final * jnp.nan), eval_mode=True),
    )
    np.testing.assert_array_equal(trained.mean, evaluated.mean)
    assert trained.elite == evaluated.elite
    elite = evaluated.last.actions[0, evaluated.last.elites[evaluated.elite]]
    np.testing.assert_array_equal(evaluated.action, elite)
    expected = np.clip(elite + trained.last.std[0] * noise.final, -1, 1)
    np.testing.assert_allclose(trained.action, expected, rtol=1e-6)

    for index in (0, 2):  # still stochastic: the elite is drawn
        drawn = noise._replace(elite=jnp.ones(4).at[index].set(1e-30))
        assert decide(agent, drawn, eval_mode=True).elite == index


def test_the_mean_is_handed_on_and_not_the_executed_action():
    agent = tiny.agent()
    for eval_mode in (False, True):
        found = decide(agent, draws(agent), eval_mode)
        np.testing.assert_array_equal(found.mean, found.last.mean)
        assert not np.array_equal(found.mean[0], found.action)


def test_policy_columns_stay_the_same_over_the_iterations():
    agent = tiny.agent()
    noise, params = draws(agent), tiny.params(agent)
    z = jnp.full((1, 16), 1 / 8)
    proposed = tiny.jit(planner.policy_trajectories, static_argnums=0)(agent.networks, params, z, noise.pi_traj_eps)
    last = decide(agent, noise).last.actions[:, : agent.config.num_pi_trajs]
    np.testing.assert_allclose(last, proposed, rtol=1e-5, atol=1e-6)


def test_a_decision_starts_at_the_shifted_mean_with_the_largest_deviation():
    """With one iteration and noise of 1, candidates lie max_std from that mean whatever the last plan found."""
    agent = tiny.agent(iterations=1, num_pi_trajs=0, max_std=0.25)
    noise = draws(agent)._replace(candidates=jnp.ones((1, 2, 16, 2)))
    for t0, first in ((False, 0.3), (True, 0.0)):
        actions = decide(agent, noise, t0=t0).last.actions
        np.testing.assert_allclose(actions[0], first + 0.25, rtol=1e-6)
        np.testing.assert_allclose(actions[1], 0.25, rtol=1e-6)


def test_only_the_two_drawn_members_are_evaluated():
    """The others may hold NaN, and more of them cost no more matrix products."""
    agent = tiny.agent()  # three members
    noise = draws(agent)._replace(pairs=jnp.array([[0, 2], [2, 0]]))
    poisoned = jax.tree.map(lambda x: x.at[1].set(jnp.nan), tiny.params(agent)["q"])
    np.testing.assert_array_equal(decide(agent, noise, q=poisoned).last.value, decide(agent, noise).last.value)
    products = []
    for count in (2, 3, 8):
        many = tiny.agent(num_q=count)
        params = jax.eval_shape(many.init, jax.random.key(0)).params
        shapes = jnp.zeros(16), jnp.zeros((2, 2)), jnp.array(True), draws(many)
        lowered = tiny.plan.lower(many.networks, params, 0.9, *shapes, eval_mode=True)
        products.append(lowered.as_text().count("dot_general"))
    assert products[0] == products[1] == products[2] > 0


def test_dropout_acts_in_the_planner_of_recipe_paper_only():
    for recipe, differs in (("paper", True), ("latest", False)):
        agent = tiny.agent(recipe=recipe, dropout=0.5)
        noise = draws(agent)
        one, two = decide(agent, noise), decide(agent, noise._replace(dropout=jax.random.key(99)))
        assert np.array_equal(one.last.value, two.last.value) is not differs


def test_every_iteration_has_dropout_masks_of_its_own(monkeypatch):
    seen = []
    toy = Toy(tiny.config(num_pi_trajs=0, dropout=0.5))
    monkeypatch.setattr(
        Toy, "q_pair", lambda self, members, pair, z, a, key: (seen.append(key), jnp.zeros((2, len(z))))[1]
    )
    noise = tiny.plan_noise(jax.random.key(0), toy.config, 2, 2)
    with jax.disable_jit():
        planner.plan(toy, {"q": None}, 0.9, jnp.zeros(1), jnp.zeros((2, 2)), True, noise, True)  # type: ignore[arg-type]  # a stand-in
    assert len({jax.random.key_data(key).tobytes() for key in seen}) == 2


def test_two_more_iterations_from_twenty_action_dimensions_on():
    wide = lambda n: tiny.agent(env=replace(tiny.ENV, action=ActionSpec((n,)))).iterations
    assert (wide(19), wide(20)) == (2, 4)


@pytest.mark.parametrize("batching", ["vmap", "map"])
def test_a_batch_of_environments_decides_as_each_alone(batching):
    agent = tiny.agent(env_batching=batching)
    params, nets = tiny.params(agent), agent.networks
    noise = tiny.act_noise(agent, jax.random.key(0), 3)
    obs = {"zeta": jax.random.normal(jax.random.key(1), (3, 3)), "alpha": jnp.arange(3.0)}
    first = jnp.array([True, False, False])
    carry = jnp.asarray(np.random.default_rng(0).uniform(-0.5, 0.5, agent.initial_carry(3).shape), jnp.float32)
    action, mean, latents = tiny.act(agent, params, carry, obs, first, noise, mode="train")
    assert latents == {}
    z = tiny.jit(nets.encode)(params, agent.flatten_obs(obs))
    for i in range(3):
        one = noise.plan._replace(pairs=jnp.zeros(3))
        one = jax.tree.map(lambda x, i=i: x[i], one)._replace(pairs=noise.plan.pairs)
        alone = tiny.plan(nets, params, agent.gamma, z[i], carry[i], first[i], one, eval_mode=False)
        np.testing.assert_allclose(action[i], alone.action, atol=1e-5)
        np.testing.assert_allclose(mean[i], alone.mean, atol=1e-5)


# draws


def test_pairs_are_two_distinct_members_each_as_often():
    pairs = np.asarray(planner.draw_pairs(jax.random.key(0), 5, 4000))
    assert (pairs[:, 0] != pairs[:, 1]).all()
    counts = np.bincount(np.sort(pairs, 1) @ [5, 1], minlength=25)
    counts = counts[counts > 0]
    assert len(counts) == 10  # every unordered pair
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-square with 9 degrees of freedom, p = 0.001
    assert {tuple(sorted(p)) for p in np.asarray(planner.draw_pairs(jax.random.key(1), 2, 50)).tolist()} == {(0, 1)}


def test_environments_share_their_pairs_and_nothing_else():
    agent = tiny.agent()
    noise = tiny.act_noise(agent, jax.random.key(0), 3)
    assert noise.plan.pairs.shape == (2, 2)
    drawn = noise.plan._replace(pairs=noise.policy_eps, dropout=jax.random.key_data(noise.plan.dropout))
    for leaf in drawn:
        assert len({np.asarray(x).tobytes() for x in leaf}) == 3
