"""The recurrent state-space model: block-diagonal GRU, prior and posterior (arXiv:2301.04104, eq. 3).

Differs from a standard GRU: the reset gate scales the whole candidate, the update gate weights the *candidate* and
starts at sigmoid(-1), and one norm runs over the whole state, not over each block.

Axes: N rows, B batch, T time, D deter, S latents, C classes, A encoded action, E tokens, d hidden. The state is kept by
blocks, [g, N, D / g], inside the scans: block products then run over contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.dreamerv3.distributions import one_hot_sample, sg
from telamon.agents.dreamerv3.networks import EPS, BlockLinear, Params, normed, scaled
from telamon.networks import Linear, matmul, per_device, rms_norm


class State(NamedTuple):
    """What the model carries from row to row."""

    deter: jax.Array
    """[N, D] in the compute dtype."""
    stoch: jax.Array
    """[N, S, C] one-hot, in the compute dtype."""


class Observed(NamedTuple):
    """A filtered sequence."""

    deter: jax.Array
    """[B, T, D]."""
    stoch: jax.Array
    """[B, T, S, C]."""
    logits: jax.Array
    """[B, T, S, C] of the posterior, raw, float32."""


@dataclass(frozen=True)
class RSSM:
    """Pure functions of parameters `p` (the module `dyn`)."""

    config: DreamerV3Config
    action_width: int
    token_width: int

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.dtype)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters. The recurrent kernels' scale is that of their full input width, all blocks together."""
        c = self.config
        g, latents = c.blocks, c.stoch * c.classes
        keys = iter(jax.random.split(key, 10))
        layer = lambda width: normed(c.hidden).init(next(keys), jnp.zeros(width))["params"]
        linear = lambda width: Linear(latents, scaled()).init(next(keys), jnp.zeros(width))["params"]
        block = lambda width, units: BlockLinear(units, g).init(next(keys), jnp.zeros(width))["params"]
        return {
            "in_deter": layer(c.deter),
            "in_stoch": layer(latents),
            "in_action": layer(self.action_width),
            "hidden": {
                "linear": block(g * (c.deter // g + 3 * c.hidden), c.deter),
                "norm": {"scale": jnp.ones(c.deter)},
            },
            "gates": block(c.deter, 3 * c.deter),
            "prior": {"layer0": layer(c.deter), "layer1": layer(c.hidden), "logits": linear(c.hidden)},
            "posterior": {"layer0": layer(c.deter + self.token_width), "logits": linear(c.hidden)},
        }

    def initial(self, n: int) -> State:
        """Zeros; nothing is learned."""
        c = self.config
        return State(jnp.zeros((n, c.deter), self.dtype), jnp.zeros((n, c.stoch, c.classes), self.dtype))

    # one step

    def embed_action(self, p: Params, action: jax.Array) -> jax.Array:
        """Encoded actions [..., A] -> [..., d]. Entries beyond [-1, 1] are scaled onto it, without gradient."""
        action = action / sg(jnp.maximum(1.0, jnp.abs(action)))
        return jnp.asarray(normed(self.config.hidden, dtype=self.dtype).apply({"params": p["in_action"]}, action))

    def core(self, p: Params, blocks: jax.Array, stoch: jax.Array, action: jax.Array) -> jax.Array:
        """The next deter: blocks [g, N, D / g], stoch [N, S * C], embedded action [N, d] -> [g, N, D / g]."""
        g, _, width = blocks.shape
        x0 = self._layer(p["in_deter"], flat(blocks))
        x1 = self._layer(p["in_stoch"], stoch)
        shared = jnp.concatenate([x0, x1, action], -1)

        # Each block sees its own slice of deter and all of `shared`: the latter is one dense product.
        kernel = p["hidden"]["linear"]["kernel"].astype(self.dtype)
        x = jnp.einsum("gni,gio->gno", blocks, kernel[:, :width])
        x = x + by_block(matmul(shared, dense(kernel[:, width:])), g)
        x = x + by_block(p["hidden"]["linear"]["bias"].astype(self.dtype)[None], g)
        x = nn.silu(self._block_norm(p["hidden"]["norm"]["scale"], x))

        kernel = p["gates"]["kernel"].astype(self.dtype).reshape(g, width, 3, width)
        bias = p["gates"]["bias"].astype(self.dtype).reshape(g, 1, 3, width)
        gate = lambda i: jnp.einsum("gni,gio->gno", x, kernel[:, :, i]) + bias[:, :, i]
        reset, candidate, update = gate(0), gate(1), gate(2)
        update = nn.sigmoid(update - 1)
        return update * jnp.tanh(nn.sigmoid(reset) * candidate) + (1 - update) * blocks

    def prior(self, p: Params, deter: jax.Array) -> jax.Array:
        """Raw logits [..., S, C], float32, from deter [..., D] alone."""
        p = p["prior"]
        return self._logits(p["logits"], self._layer(p["layer1"], self._layer(p["layer0"], deter)))

    def token_part(self, p: Params, tokens: jax.Array) -> jax.Array:
        """The posterior's first product as far as it needs no state: tokens [..., E] -> [..., d]."""
        linear = p["posterior"]["layer0"]["linear"]
        bias = linear["bias"].astype(self.dtype)
        y = matmul(tokens.astype(self.dtype), linear["kernel"][self.config.deter :].astype(self.dtype))
        return y + jnp.expand_dims(bias, tuple(range(y.ndim - 1)))

    def posterior(self, p: Params, deter: jax.Array, token_part: jax.Array) -> jax.Array:
        """Raw logits [..., S, C], float32, from deter [..., D] and the tokens' part [..., d]."""
        p = p["posterior"]
        kernel = p["layer0"]["linear"]["kernel"][: self.config.deter].astype(self.dtype)
        x = matmul(deter, kernel) + token_part
        return self._logits(p["logits"], nn.silu(rms_norm(x, p["layer0"]["norm"]["scale"], EPS)))

    def sample(self, logits: jax.Array, gumbel: jax.Array) -> jax.Array:
        """A one-hot draw [..., S, C] in the compute dtype, with straight-through gradients."""
        return one_hot_sample(logits, gumbel, self.config.unimix).astype(self.dtype)

    # sequences

    def observe(
        self,
        p: Params,
        carry: State,
        tokens: jax.Array,
        prev_action: jax.Array,
        is_first: jax.Array,
        gumbel: jax.Array,
    ) -> Observed:
        """Filters tokens [B, T, E] after encoded actions [B, T, A]; state and action are zeroed where is_first [B, T].

        Only the recurrence stays in the scan: the products of actions and tokens with their weights are made before.
        gumbel: [B, T, S, C].
        """
        return per_device(self._observe, p, carry, tokens, prev_action, is_first, gumbel)

    def _observe(
        self,
        p: Params,
        carry: State,
        tokens: jax.Array,
        prev_action: jax.Array,
        is_first: jax.Array,
        gumbel: jax.Array,
    ) -> Observed:
        keep = 1 - is_first.astype(self.dtype)
        action = self.embed_action(p, prev_action * keep[..., None])
        xs = (action, self.token_part(p, tokens), keep, gumbel)

        def step(carry: tuple[jax.Array, jax.Array], x: Any) -> Any:
            (blocks, stoch), (action, token, keep, gumbel) = carry, x
            blocks = self.core(p, blocks * keep[None, :, None], stoch * keep[:, None], action)
            deter = flat(blocks)
            logits = self.posterior(p, deter, token)
            stoch = self.sample(logits, gumbel)
            stoch = stoch.reshape(stoch.shape[0], -1)
            return (blocks, stoch), (deter, stoch, logits)

        start = (by_block(carry.deter, self.config.blocks), carry.stoch.reshape(carry.stoch.shape[0], -1))
        _, (deter, stoch, logits) = jax.lax.scan(step, start, jax.tree.map(lambda x: x.swapaxes(0, 1), xs))
        deter, stoch, logits = (x.swapaxes(0, 1) for x in (deter, stoch, logits))
        return Observed(deter, stoch.reshape(logits.shape), logits)

    def observe_step(
        self,
        p: Params,
        carry: State,
        tokens: jax.Array,
        prev_action: jax.Array,
        is_first: jax.Array,
        gumbel: jax.Array,
    ) -> Observed:
        """One step of `observe` without a time axis."""
        one = lambda x: x[:, None]
        found = self.observe(p, carry, one(tokens), one(prev_action), one(is_first), one(gumbel))
        return Observed(*(x[:, 0] for x in found))

    def imagine_step(self, p: Params, state: State, action: jax.Array, gumbel: jax.Array) -> tuple[State, jax.Array]:
        """(next state, raw prior logits [N, S, C]) after an encoded action [N, A]."""
        blocks = by_block(state.deter, self.config.blocks)
        stoch = state.stoch.reshape(state.stoch.shape[0], -1)
        deter = flat(self.core(p, blocks, stoch, self.embed_action(p, action)))
        logits = self.prior(p, deter)
        return State(deter, self.sample(logits, gumbel)), logits

    def _layer(self, p: Params, x: jax.Array) -> jax.Array:
        return jnp.asarray(normed(self.config.hidden, dtype=self.dtype).apply({"params": p}, x))

    def _logits(self, p: Params, x: jax.Array) -> jax.Array:
        c = self.config
        y = jnp.asarray(Linear(c.stoch * c.classes, scaled(), self.dtype).apply({"params": p}, x), jnp.float32)
        return y.reshape(*y.shape[:-1], c.stoch, c.classes)

    def _block_norm(self, scale: jax.Array, x: jax.Array) -> jax.Array:
        """RMSNorm over the whole state of x [g, N, D / g]."""
        y = x.astype(jnp.float32)
        root = jax.lax.rsqrt((y * y).mean((0, 2), keepdims=True) + EPS)
        return (y * (root * scale.reshape(x.shape[0], 1, -1))).astype(x.dtype)


def by_block(x: jax.Array, blocks: int) -> jax.Array:
    """[N, D] -> [g, N, D / g]."""
    return x.reshape(x.shape[0], blocks, -1).swapaxes(0, 1)


def flat(x: jax.Array) -> jax.Array:
    """[g, N, D / g] -> [N, D]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def dense(kernel: jax.Array) -> jax.Array:
    """[g, i, o], a kernel whose blocks share their input -> [i, g * o]."""
    return kernel.swapaxes(0, 1).reshape(kernel.shape[1], -1)
