"""TD-MPC2's two optimisers: Adam behind one global clip norm each, in torch's form."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from telamon.agents.tdmpc2.config import RECIPES, TDMPC2Config
from telamon.agents.tdmpc2.networks import Params

WORLD_EPS, POLICY_EPS = 1e-8, 1e-5


class OptimState(NamedTuple):
    """State of both optimisers."""

    world: optax.ScaleByAdamState
    policy: optax.ScaleByAdamState
    stale_square: jax.Array
    """Recipe `paper`: squared norm of the last clipped policy gradient, which the next world-model norm includes."""


def init(world: Params, pi: Params) -> OptimState:
    """Zero moments."""
    return OptimState(_adam(WORLD_EPS).init(world), _adam(POLICY_EPS).init(pi), jnp.zeros(()))


def _adam(eps: float) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=0.9, b2=0.999, eps=eps)


def square_norm(grads: Params) -> jax.Array:
    """Sum of the squares of all entries, []."""
    return jnp.asarray(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))


def clip_coefficient(norm: jax.Array, bound: float) -> jax.Array:
    """min(1, bound / (norm + 1e-6)), torch's form."""
    return jnp.minimum(1.0, bound / (norm + 1e-6))


def world_step(
    config: TDMPC2Config, grads: Params, state: OptimState, world: Params
) -> tuple[Params, OptimState, jax.Array]:
    """One Adam step of the world model; returns its pre-clip norm too.

    One norm over all modules, before the encoder's smaller rate. In recipe `paper` the policy's gradient of the last
    update, still lying in its tensors, counts in that norm (it is not applied): it only shortens the step.
    """
    stale = state.stale_square if RECIPES[config.recipe].stale_policy_norm else 0.0
    norm = jnp.sqrt(square_norm(grads) + stale)
    coef = clip_coefficient(norm, config.grad_clip_norm)
    direction, adam = _adam(WORLD_EPS).update(jax.tree.map(lambda g: g * coef, grads), state.world)
    rate = {name: config.lr * (config.enc_lr_scale if name == "encoder" else 1.0) for name in world}
    stepped = {
        name: jax.tree.map(lambda p, d, lr=rate[name]: p - lr * d, world[name], direction[name]) for name in world
    }
    return stepped, state._replace(world=adam), norm


def policy_step(
    config: TDMPC2Config, grads: Params, state: OptimState, pi: Params
) -> tuple[Params, OptimState, jax.Array]:
    """One Adam step of the policy, with a clip norm of its own; returns its pre-clip norm too."""
    square = square_norm(grads)
    norm = jnp.sqrt(square)
    coef = clip_coefficient(norm, config.grad_clip_norm)
    direction, adam = _adam(POLICY_EPS).update(jax.tree.map(lambda g: g * coef, grads), state.policy)
    stepped = jax.tree.map(lambda p, d: p - config.lr * d, pi, direction)
    return stepped, state._replace(policy=adam, stale_square=square * coef**2), norm
