"""TD-MPC2's networks: every one an MLP of Linear, LayerNorm, Mish; latents end in SimNorm (paper, section 3.1).

Parameters are one dict per module (`encoder`, `dynamics`, `reward`, `q`, `pi`, and `termination` when episodic), the
Q members stacked on a leading axis. Latents z are [..., L], actions a [..., A]; leading axes of z and a broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.distributional import TwoHot, tdmpc2_two_hot
from telamon.networks import NormedMLP, grouped_softmax, mish, normal

Params = dict[str, Any]


@dataclass(frozen=True)
class Networks:
    """The modules for one observation width and one action width; every method is pure."""

    config: TDMPC2Config
    obs_dim: int
    action_dim: int

    @cached_property
    def two_hot(self) -> TwoHot:
        return tdmpc2_two_hot(self.config.num_bins, self.config.vmin, self.config.vmax)

    @cached_property
    def modules(self) -> dict[str, NormedMLP]:
        c = self.config
        simnorm = partial(grouped_softmax, group=c.simnorm_dim)
        mlp = partial(
            NormedMLP, act=mish, norm="layer", norm_eps=1e-5,
            kernel_init=normal(0.02), out_kernel_init=normal(0.02), dtype=jnp.dtype(c.dtype),
        )  # fmt: skip
        zero, hidden = nn.initializers.zeros, (c.mlp_dim, c.mlp_dim)
        modules = {
            "encoder": mlp((c.enc_dim,) * max(c.num_enc_layers - 1, 1), c.latent_dim, simnorm),
            "dynamics": mlp(hidden, c.latent_dim, simnorm),
            "reward": mlp(hidden, c.num_bins, out_kernel_init=zero),
            "q": mlp(hidden, c.num_bins, out_kernel_init=zero, dropout=c.dropout),
            "pi": mlp(hidden, 2 * self.action_dim),
        }
        return modules | ({"termination": mlp(hidden, 1)} if c.episodic else {})

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters. Reward and Q decode to exactly 0 for every input: their last layers are zero."""
        z, a = jnp.zeros(self.config.latent_dim), jnp.zeros(self.action_dim)
        inputs = {"encoder": (jnp.zeros(self.obs_dim),), "pi": (z,), "termination": (z,)}
        keys = jax.random.split(key, len(self.modules))
        params = {}
        for (name, module), k in zip(self.modules.items(), keys, strict=True):
            init = lambda k, module=module, name=name: module.init(k, *inputs.get(name, (z, a)))["params"]
            params[name] = jax.vmap(init)(jax.random.split(k, self.config.num_q)) if name == "q" else init(k)
        return params

    def _apply(self, params: Params, name: str, *inputs: jax.Array) -> jax.Array:
        return jnp.asarray(self.modules[name].apply({"params": params[name]}, *inputs), jnp.float32)

    def encode(self, params: Params, obs: jax.Array) -> jax.Array:
        """Observations [..., S] -> latents [..., L]."""
        return self._apply(params, "encoder", obs)

    def dynamics(self, params: Params, z: jax.Array, a: jax.Array) -> jax.Array:
        """The next latent [..., L]; deterministic, no residual."""
        return self._apply(params, "dynamics", z, a)

    def reward(self, params: Params, z: jax.Array, a: jax.Array) -> jax.Array:
        """Two-hot logits [..., K] of the reward on leaving z with a."""
        return self._apply(params, "reward", z, a)

    def termination(self, params: Params, z: jax.Array) -> jax.Array:
        """Logit [...] that z is terminal."""
        return self._apply(params, "termination", z)[..., 0]

    def policy(self, params: Params, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and log standard deviation [..., A] of the Gaussian before its tanh."""
        mean, raw = jnp.split(self._apply(params, "pi", z), 2, -1)
        return mean, bounded_log_std(raw, self.config.log_std_min, self.config.log_std_max)

    def q(self, members: Params, z: jax.Array, a: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Two-hot logits [M, ..., K] of M stacked members; with a key, each member has its own dropout mask."""
        logits = []
        for m in range(jax.tree.leaves(members)[0].shape[0]):
            member = {"params": jax.tree.map(lambda x, m=m: x[m], members)}
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, m)
            logits.append(jnp.asarray(self.modules["q"].apply(member, z, a, dropout_key=key), jnp.float32))
        return jnp.stack(logits)

    def q_pair(
        self, members: Params, pair: jax.Array, z: jax.Array, a: jax.Array, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Decoded scalars [2, ...] of the two members `pair` [2]; only these two are evaluated."""
        return self.two_hot.decode(self.q(jax.tree.map(lambda x: x[pair], members), z, a, dropout_key))


def bounded_log_std(raw: jax.Array, low: float, high: float) -> jax.Array:
    """low + (high - low) (tanh(raw) + 1) / 2: the log standard deviation stays in (low, high)."""
    return low + 0.5 * (high - low) * (jnp.tanh(raw) + 1)
