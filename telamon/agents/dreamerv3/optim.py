"""DreamerV3's one optimiser for all modules: LaProp behind a clip of each tensor's gradient (paper, "Optimizer").

Differs from Adam: the gradient is divided by its root mean square first and averaged afterwards. Differs from optax's
adaptive_grad_clip: norms are those of whole tensors, not of units.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from telamon.agents.dreamerv3.config import DreamerV3Config

LEAST_NORM = 1e-3
"""Norm that a tensor is taken to have at least."""


def adaptive_clip(clip: float) -> optax.GradientTransformationExtraArgs:
    """g / max(1, |g| / (clip max(1e-3, |p|))), L2 norms of whole tensors."""

    def update(grads: Any, state: optax.EmptyState, params: Any = None, **extra: Any) -> tuple[Any, optax.EmptyState]:
        def one(g: jax.Array, p: jax.Array) -> jax.Array:
            bound = clip * jnp.maximum(LEAST_NORM, norm(p))
            return g / jnp.maximum(1.0, norm(g) / bound)

        return jax.tree.map(one, grads, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def make(config: DreamerV3Config) -> optax.GradientTransformationExtraArgs:
    """Clip, root mean square, momentum, weight decay on kernels, rate: lr k / warmup for update k of the warm-up."""
    c = config
    rate = optax.constant_schedule(c.lr)
    if c.warmup > 0:
        rate = optax.join_schedules([optax.linear_schedule(0.0, c.lr, c.warmup), rate], [c.warmup])
    is_kernel = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", tree)
    decay = [optax.add_decayed_weights(c.weight_decay, is_kernel)] if c.weight_decay > 0 else []
    return optax.chain(
        adaptive_clip(c.agc),
        optax.scale_by_rms(decay=c.beta2, eps=c.eps, eps_in_sqrt=False, bias_correction=True),
        optax.ema(decay=c.beta1, debias=True),
        *decay,
        optax.scale_by_learning_rate(rate),
    )


def norm(x: jax.Array) -> jax.Array:
    """L2 norm of all elements, []."""
    return jnp.sqrt(jnp.sum(jnp.square(x)))


def global_norm(tree: Any) -> jax.Array:
    """L2 norm of all elements of all leaves, []."""
    return jnp.asarray(optax.tree.norm(tree))
