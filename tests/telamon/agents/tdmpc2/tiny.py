"""A TD-MPC2 agent small enough for a test, with parameters that leave nothing at zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from telamon.agents.tdmpc2.agent import TDMPC2, TrainState
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.agents.tdmpc2.losses import Batch
from telamon.data import ActionSpec, ArraySpec, EnvSpec

ENV = EnvSpec(
    id="tiny",
    obs=(("zeta", ArraySpec((3,))), ("alpha", ArraySpec(()))),  # not in alphabetical order, and with a scalar
    action=ActionSpec((2,)),
    episode_length=50,
)

SIZES: dict[str, Any] = dict(
    enc_dim=16, mlp_dim=16, latent_dim=16, num_q=3, num_bins=11, batch_size=4, num_samples=16, num_pi_trajs=4,
    num_elites=4, iterations=2,
)  # fmt: skip


def config(**changes: Any) -> TDMPC2Config:
    return TDMPC2Config(**{**SIZES, **changes})


def agent(env: EnvSpec = ENV, **changes: Any) -> TDMPC2:
    return TDMPC2(config(**changes), env)


def scrambled(tree: Any, seed: int = 0) -> Any:
    """Every leaf moved by N(0, 0.3): no zero heads, no unit gains, no two equal members."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten([x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


def state(of: TDMPC2, seed: int = 0) -> TrainState:
    """A state with scrambled parameters and a target that differs from them."""
    params = scrambled(jax.jit(of.init)(jax.random.key(seed)).params, seed)
    return of.start(params, scrambled(params["q"], seed + 1))


def batch(of: TDMPC2, seed: int = 0) -> Batch:
    """Random transitions; a third of the last ones are terminal where the agent is episodic."""
    c = of.config
    obs, action, reward, terminal = jax.random.split(jax.random.key(seed), 4)
    ends = jax.random.uniform(terminal, (c.batch_size,)) < (1 / 3 if c.episodic else 0)
    return Batch(
        obs=jax.random.normal(obs, (c.horizon + 1, c.batch_size, of.networks.obs_dim)),
        action=jax.random.uniform(action, (c.horizon, c.batch_size, of.action_dim), minval=-1),
        reward=jax.random.normal(reward, (c.horizon, c.batch_size)),
        terminated=jnp.zeros((c.horizon, c.batch_size)).at[-1].set(ends),
    )
