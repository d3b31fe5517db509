"""A TD-MPC2 agent small enough for a test, with parameters that leave nothing at zero.

What is compiled here is compiled without optimisation, and once per agent and process: compiling is nearly all that
these tests take.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.tdmpc2 import planner
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
    enc_dim=16, mlp_dim=16, latent_dim=16, num_q=3, num_bins=11, batch_size=4, horizon=2, num_samples=16,
    num_pi_trajs=4, num_elites=4, iterations=2,
)  # fmt: skip

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
update = jit(TDMPC2.update_with_intermediates, static_argnums=0)
act = jit(TDMPC2.act, static_argnums=0, static_argnames="mode")
act_noise = jit(TDMPC2.draw_act_noise, static_argnums=(0, 2))
update_noise = jit(TDMPC2.draw_update_noise, static_argnums=0)
plan_noise = jit(planner.draw_plan_noise, static_argnums=(1, 2, 3))
plan = jit(planner.plan, static_argnums=(0, 2), static_argnames="eval_mode")


def config(**changes: Any) -> TDMPC2Config:
    return TDMPC2Config(**{**SIZES, **changes})


def agent(env: EnvSpec = ENV, **changes: Any) -> TDMPC2:
    return TDMPC2(config(**changes), env)


def params(of: TDMPC2, seed: int = 0) -> Any:
    """Random numbers everywhere: no zero heads, no unit gains, no two equal members."""
    rng = np.random.default_rng(seed)
    spread = lambda shape: rng.normal(0, 1 / np.sqrt(shape[-2]) if len(shape) > 1 else 0.3, shape)
    shapes = jax.eval_shape(of.init, jax.random.key(0)).params
    return jax.tree.map(lambda leaf: jnp.asarray(spread(leaf.shape), jnp.float32), shapes)


def state(of: TDMPC2, seed: int = 0) -> TrainState:
    """A state before its first update, with a target that differs from the online members."""
    return of.start(params(of, seed), params(of, seed + 1)["q"])


def batch(of: TDMPC2, seed: int = 0) -> Batch:
    """Random transitions; half of the last ones are terminal where the agent is episodic."""
    c, rng = of.config, np.random.default_rng(seed)
    terminated = np.zeros((c.horizon, c.batch_size))
    terminated[-1, ::2] = c.episodic
    arrays = Batch(
        obs=rng.normal(size=(c.horizon + 1, c.batch_size, of.networks.obs_dim)),
        action=rng.uniform(-1, 1, (c.horizon, c.batch_size, of.action_dim)),
        reward=rng.normal(size=(c.horizon, c.batch_size)),
        terminated=terminated,
    )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)
