"""TD-MPC2's losses, in the order in which one update meets them. Each returns its intermediates.

Differs from the paper (and follows the code behind its curves): the TD target bootstraps the *encoded* next
observation, latent losses are means over dimensions, every sum over the horizon is divided by its length.

Time-major: H horizon, B batch, S observation, A action, L latent, K bins, M members of the Q ensemble.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from telamon.agents.tdmpc2.config import RECIPES
from telamon.agents.tdmpc2.networks import Networks, Params
from telamon.agents.tdmpc2.policy import Sample, entropy_bonus, sample, squashed_entropy
from telamon.normalizers import RunningScale


class Batch(NamedTuple):
    """H transitions in a row, B times over: (obs[t], action[t]) -> (reward[t], terminated[t], obs[t + 1])."""

    obs: jax.Array
    """[H + 1, B, S]."""
    action: jax.Array
    """[H, B, A]."""
    reward: jax.Array
    """[H, B]."""
    terminated: jax.Array
    """[H, B], 0 or 1."""


class Target(NamedTuple):
    """What the predictions of one update are compared with."""

    next_z: jax.Array
    """[H, B, L]: encoded next observations."""
    value: jax.Array
    """[H, B] in reward units."""


class WorldModel(NamedTuple):
    """Intermediates of the world-model loss."""

    zs: jax.Array
    """[H + 1, B, L]: the encoded first observation, then predictions."""
    reward_logits: jax.Array
    """[H, B, K]."""
    q_logits: jax.Array
    """[M, H, B, K]."""
    termination_logits: jax.Array | None
    """[H, B]."""
    losses: dict[str, jax.Array]
    """Terms before their coefficients."""


class Policy(NamedTuple):
    """Intermediates of the policy loss."""

    sample: Sample
    q: jax.Array
    """[H + 1, B]: the pair's mean value, divided by the scale."""
    bonus: jax.Array
    """[H + 1, B]: the entropy quantity."""
    entropy: jax.Array
    """[H + 1, B]: entropy of the squashed sample, for logs."""
    scale: jax.Array
    """[]: the running scale after this batch."""


def td_target(
    nets: Networks,
    params: Params,
    target_q: Params,
    gamma: float,
    batch: Batch,
    eps: jax.Array,
    pair: jax.Array,
    dropout_key: jax.Array | None,
) -> Target:
    """r + gamma (1 - terminated) min over a pair of target members, at a policy sample; no gradient.

    `params` are those before this update; eps is [H, B, A].
    """
    next_z = nets.encode(params, batch.obs[1:])
    action = sample(*nets.policy(params, next_z), eps).action
    q = nets.q_pair(target_q, pair, next_z, action, dropout_key).min(0)
    return jax.lax.stop_gradient(Target(next_z, batch.reward + gamma * (1 - batch.terminated) * q))


def world_model_loss(
    world: Params, nets: Networks, batch: Batch, target: Target, dropout_key: jax.Array
) -> tuple[jax.Array, WorldModel]:
    """20 consistency + 0.1 reward + 0.1 value (+ termination), through a rollout of H predicted latents."""
    c = nets.config
    horizon = batch.action.shape[0]
    rho = c.rho ** jnp.arange(horizon)

    rollout = [nets.encode(world, batch.obs[0])]
    for t in range(horizon):
        rollout.append(nets.dynamics(world, rollout[-1], batch.action[t]))
    zs = jnp.stack(rollout)

    consistency = ((zs[1:] - target.next_z) ** 2).mean((1, 2))
    reward_logits = nets.reward(world, zs[:-1], batch.action)
    reward = nets.two_hot.cross_entropy(reward_logits, batch.reward).mean(1)
    q_logits = nets.q(world["q"], zs[:-1], batch.action, dropout_key)
    value = nets.two_hot.cross_entropy(q_logits, jnp.broadcast_to(target.value, q_logits.shape[:-1])).mean((0, 2))
    losses = {
        "consistency_loss": (rho * consistency).sum() / horizon,
        "reward_loss": (rho * reward).sum() / horizon,
        "value_loss": (rho * value).sum() / horizon,
    }
    total = (
        c.consistency_coef * losses["consistency_loss"]
        + c.reward_coef * losses["reward_loss"]
        + c.value_coef * losses["value_loss"]
    )
    termination_logits = None
    if c.episodic:
        termination_logits = nets.termination(world, zs[1:])
        bce = optax.sigmoid_binary_cross_entropy(termination_logits, batch.terminated)
        losses["termination_loss"] = bce.mean()
        total = total + c.termination_coef * losses["termination_loss"]
    losses["total_loss"] = total
    return total, WorldModel(zs, reward_logits, q_logits, termination_logits, losses)


def policy_loss(
    pi: Params,
    nets: Networks,
    q_members: Params,
    zs: jax.Array,
    scale: jax.Array,
    eps: jax.Array,
    pair: jax.Array,
    dropout_key: jax.Array,
) -> tuple[jax.Array, Policy]:
    """-(Q / S + 1e-4 entropy), over all H + 1 latents.

    The latents are those of *before* the world model's step, the Q members those of *after* it, and the scale S is
    updated from t = 0 before it divides.
    """
    c = nets.config
    recipe = RECIPES[c.recipe]
    zs = jax.lax.stop_gradient(zs)
    drawn = sample(*nets.policy({"pi": pi}, zs), eps)
    q = nets.q_pair(jax.lax.stop_gradient(q_members), pair, zs, drawn.action, dropout_key).mean(0)
    scale = RunningScale(c.tau).update(scale, q[0])
    q = q / scale
    bonus = entropy_bonus(drawn, eps, recipe.squashed_entropy)
    rho = c.rho ** jnp.arange(zs.shape[0])
    loss = (rho * -(c.entropy_coef * bonus + q).mean(1)).mean()
    return loss, Policy(drawn, q, bonus, squashed_entropy(drawn, eps), scale)


def termination_statistics(logits: jax.Array, terminated: jax.Array) -> dict[str, jax.Array]:
    """Share of terminal targets, and F1 of the predictions at a threshold of 0.5, of [N] logits against [N] labels."""
    predicted = jax.nn.sigmoid(logits) > 0.5
    actual = terminated > 0.5
    hits = (predicted & actual).sum()
    precision = hits / (predicted.sum() + 1e-9)
    recall = hits / (actual.sum() + 1e-9)
    f1 = 2 * precision * recall / (precision + recall + 1e-9)
    return {"termination_rate": terminated.mean(), "termination_f1": f1}
