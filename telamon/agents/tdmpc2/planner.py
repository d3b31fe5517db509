"""MPPI in latent space (paper, section 3.2 and algorithm 1), written for one environment; `agent.act` batches it.

A plan is H actions. Each iteration draws Gaussian candidates around `mean`, adds the policy's own trajectories, values
all of them with the model, and refits mean and std to the elites. Shapes: N candidates of which P from the policy, K
elites, H horizon, A action, L latent.

Cost of one iteration in multiply-adds: N (H (dynamics + reward) + policy + 2 Q members), weights each; 98 % of a
decision.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.agents.tdmpc2.config import RECIPES, TDMPC2Config
from telamon.agents.tdmpc2.networks import Networks, Params
from telamon.agents.tdmpc2.policy import sample


class PlanNoise(NamedTuple):
    """Every random draw of one decision; I iterations."""

    pi_traj_eps: jax.Array
    """[H, P, A] N(0, 1): the policy's trajectories."""
    candidates: jax.Array
    """[I, H, N - P, A] N(0, 1)."""
    terminal_eps: jax.Array
    """[I, N, A] N(0, 1): the policy action at the end of each plan."""
    pairs: jax.Array
    """int32 [I, 2]: the Q members averaged in each iteration."""
    elite: jax.Array
    """Recipe `paper`: one uniform []; `latest`: Exp(1) [K]."""
    final: jax.Array
    """[A] N(0, 1): exploration."""
    dropout: jax.Array
    """Key of the Q dropout (recipe `paper`)."""


class Iteration(NamedTuple):
    """What one MPPI iteration found."""

    actions: jax.Array
    """[H, N, A], the policy's trajectories first."""
    value: jax.Array
    """[N] in reward units."""
    elites: jax.Array
    """int32 [K] into N, by falling value."""
    score: jax.Array
    """[K], sums to 1."""
    mean: jax.Array
    """[H, A]."""
    std: jax.Array
    """[H, A]."""


class Plan(NamedTuple):
    """A decision and what it leaves behind."""

    action: jax.Array
    """[A] in [-1, 1]."""
    mean: jax.Array
    """[H, A]: warm start of the next decision. The weighted mean, not the executed action."""
    elite: jax.Array
    """int32 []: the executed elite of the last iteration."""
    last: Iteration


def policy_trajectories(nets: Networks, params: Params, z: jax.Array, eps: jax.Array) -> jax.Array:
    """Actions [H, P, A] of P policy rollouts through the model from one latent z [1, L]."""
    horizon, count, _ = eps.shape
    z, actions = jnp.broadcast_to(z, (count, z.shape[-1])), []
    for t in range(horizon):
        actions.append(sample(*nets.policy(params, z), eps[t]).action)
        z = nets.dynamics(params, z, actions[-1]) if t < horizon - 1 else z
    return jnp.stack(actions)


def plan_value(
    nets: Networks,
    params: Params,
    gamma: float,
    z: jax.Array,
    actions: jax.Array,
    terminal_eps: jax.Array,
    pair: jax.Array,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Discounted model return of each plan plus the bootstrapped value of where it ends: [N].

    z is [1, L], shared by all N plans: its share of the first products is computed once. With a termination head,
    the reward on entering a state predicted to be terminal still counts; nothing after it does.
    """
    episodic = nets.config.episodic
    weight = 1.0
    total, alive = jnp.zeros(actions.shape[1]), jnp.ones(actions.shape[1])
    for t in range(actions.shape[0]):
        reward = nets.two_hot.decode(nets.reward(params, z, actions[t]))
        z = nets.dynamics(params, z, actions[t])
        total = total + weight * alive * reward
        weight = weight * gamma
        if episodic:
            alive = alive * (jax.nn.sigmoid(nets.termination(params, z)) <= 0.5)
    last = sample(*nets.policy(params, z), terminal_eps).action
    q = nets.q_pair(params["q"], pair, z, last, dropout_key).mean(0)
    return jnp.nan_to_num(total + weight * alive * q)


def iterate(
    nets: Networks,
    params: Params,
    gamma: float,
    z: jax.Array,
    pi_actions: jax.Array,
    mean: jax.Array,
    std: jax.Array,
    candidates: jax.Array,
    terminal_eps: jax.Array,
    pair: jax.Array,
    dropout_key: jax.Array | None,
) -> Iteration:
    """One MPPI iteration: draw candidates around `mean`, value all plans, refit to the best."""
    drawn = jnp.clip(mean[:, None] + std[:, None] * candidates, -1, 1)
    actions = jnp.concatenate([pi_actions, drawn], 1)
    value = plan_value(nets, params, gamma, z, actions, terminal_eps, pair, dropout_key)
    return refit(nets.config, actions, value)


def refit(config: TDMPC2Config, actions: jax.Array, value: jax.Array) -> Iteration:
    """Elites of the plans `actions` [H, N, A] by `value` [N], and the mean and std of their weighted actions.

    The std is around the new mean, and clipped.
    """
    top, elites = jax.lax.top_k(value, config.num_elites)
    score = jnp.exp(config.temperature * (top - top[0]))
    score = score / score.sum()
    elite_actions, weight = actions[:, elites], score[None, :, None]
    mean = (weight * elite_actions).sum(1) / (score.sum() + 1e-9)
    variance = (weight * (elite_actions - mean[:, None]) ** 2).sum(1) / (score.sum() + 1e-9)
    std = jnp.clip(jnp.sqrt(variance), config.min_std, config.max_std)
    return Iteration(actions, value, elites, score, mean, std)


def draw_elite(score: jax.Array, draw: jax.Array) -> jax.Array:
    """Index of an elite, int32 []. `draw` [] uniform: inverse CDF; `draw` [K] Exp(1): Gumbel-max."""
    if draw.ndim == 0:
        cdf = jnp.cumsum(score)
        return jnp.argmax(cdf / cdf[-1] > draw).astype(jnp.int32)
    return jnp.argmax(jnp.log(score) - jnp.log(draw)).astype(jnp.int32)


def warm_start(prev_mean: jax.Array, t0: jax.Array) -> jax.Array:
    """The previous plan shifted by one step, its last row 0; all 0 at the first observation of an episode."""
    shifted = jnp.concatenate([prev_mean[1:], jnp.zeros_like(prev_mean[:1])])
    return jnp.where(t0, 0.0, shifted)


def plan(
    nets: Networks,
    params: Params,
    gamma: float,
    z: jax.Array,
    prev_mean: jax.Array,
    t0: jax.Array,
    noise: PlanNoise,
    eval_mode: bool,
) -> Plan:
    """One decision from a latent z [L]. `eval_mode` removes only the exploration noise at the end."""
    c = nets.config
    z = z[None]
    pi_actions = policy_trajectories(nets, params, z, noise.pi_traj_eps)
    dropped = RECIPES[c.recipe].q_dropout_always and c.dropout > 0

    def body(
        carry: tuple[jax.Array, jax.Array], draws: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], Iteration]:
        candidates, terminal_eps, pair, i = draws
        key = jax.random.fold_in(noise.dropout, i) if dropped else None
        found = iterate(nets, params, gamma, z, pi_actions, *carry, candidates, terminal_eps, pair, key)
        return (found.mean, found.std), found

    start = warm_start(prev_mean, t0), jnp.full_like(prev_mean, c.max_std)
    iterations = noise.pairs.shape[0]
    draws = (noise.candidates, noise.terminal_eps, noise.pairs, jnp.arange(iterations))
    _, found = jax.lax.scan(body, start, draws)
    last = jax.tree.map(lambda x: x[-1], found)
    elite = draw_elite(last.score, noise.elite)
    action = last.actions[0, last.elites[elite]]
    if not eval_mode:
        action = action + last.std[0] * noise.final
    return Plan(jnp.clip(action, -1, 1), last.mean, elite, last)


def draw_pairs(key: jax.Array, num_q: int, count: int) -> jax.Array:
    """`count` unordered pairs of distinct Q members, int32 [count, 2], each uniform."""
    permute = lambda k: jax.random.permutation(k, num_q)[:2]
    return jax.vmap(permute)(jax.random.split(key, count)).astype(jnp.int32)


def draw_plan_noise(key: jax.Array, config: TDMPC2Config, action_dim: int, iterations: int) -> PlanNoise:
    """The draws of one decision."""
    traj, cand, term, pair, elite, final, drop = jax.random.split(key, 7)
    n, p, h = config.num_samples, config.num_pi_trajs, config.horizon
    inverse_cdf = RECIPES[config.recipe].elite_draw == "inverse_cdf"
    return PlanNoise(
        pi_traj_eps=jax.random.normal(traj, (h, p, action_dim)),
        candidates=jax.random.normal(cand, (iterations, h, n - p, action_dim)),
        terminal_eps=jax.random.normal(term, (iterations, n, action_dim)),
        pairs=draw_pairs(pair, config.num_q, iterations),
        elite=jax.random.uniform(elite) if inverse_cdf else jax.random.exponential(elite, (config.num_elites,)),
        final=jax.random.normal(final, (action_dim,)),
        dropout=drop,
    )
