"""Layers and initialisers that both agents share.

Compute dtype: inputs and weights are cast to `dtype`, a norm's statistics are float32, its output is `dtype` again.
Parameters are always float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")
Activation = Callable[[jax.Array], jax.Array]
Initializer = Callable[..., jax.Array]


def mish(x: jax.Array) -> jax.Array:
    """x tanh(softplus(x)), as x n / (n + 2) with n = e^x (e^x + 2): one exp and one division.

    For positive x as x (1 - 2 / (n + 2)), whose derivative does not cancel: 15 % of it would be lost in bfloat16.
    """
    e = jnp.exp(jnp.minimum(x, 20.0))  # beyond 20 the factor is 1 to float32 precision, and e^2x would overflow
    n = e * (e + 2)
    r = 1 / (n + 2)
    return x * jnp.where(x > 0, 1 - 2 * r, n * r)


def grouped_softmax(x: jax.Array, group: int) -> jax.Array:
    """Softmax within consecutive groups of the last axis: [..., D] -> [..., D]."""
    return jax.nn.softmax(x.reshape(*x.shape[:-1], x.shape[-1] // group, group), -1).reshape(x.shape)


def fan_in(shape: tuple[int, ...]) -> int:
    """Inputs of one output unit: the width of a matrix, all blocks of a block matrix, the receptive field of a conv."""
    return shape[0] if len(shape) < 3 else shape[-2] * int(np.prod(shape[:-2]))


def truncated_normal_fan_in(scale: float = 1.0) -> Initializer:
    """DreamerV3: scale * 1.1368 / sqrt(fan_in) * TruncNormal(-2, 2).

    1.1368 is the reference's literal for 1 / std(TruncNormal(-2, 2)); flax's own constant differs by 4.2e-5.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        draw = jax.random.truncated_normal(key, -2, 2, shape, dtype)
        return draw * 1.1368 * np.sqrt(1 / fan_in(shape), dtype=np.float32) * scale

    return init


def normal(std: float = 0.02) -> Initializer:
    """TD-MPC2: N(0, std^2), untruncated. torch's `trunc_normal_` has absolute bounds of +-2, here 100 sigma."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return std * jax.random.normal(key, shape, dtype)

    return init


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Inverted dropout from 16 random bits per element; `rate` is rounded to a multiple of 2^-16 (0.01 -> 0.009995).

    A full-width mask takes a good part of a plan; two masks are cut from each 32-bit word because threefry computes
    whole words anyway.
    """
    drop = round(rate * 2**16)
    words = jax.random.bits(key, (-(-x.size // 2),), jnp.uint32)
    bits = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[: x.size].reshape(x.shape)
    return jnp.where(bits >= drop, x / jnp.asarray(1 - drop / 2**16, x.dtype), 0)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., D] @ [D, U], all rows of x at once: on CPU, dw takes twice as long where it sums over several axes.

    Over a mesh the axes stay apart: of [H, N] merged into one no device can hold a part of N, so each would get all.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return jnp.tensordot(x, w, 1)
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def per_device(f: Callable[..., Tree], weights: Any, *rows: Any) -> Tree:
    """f(weights, *rows), where axis 0 of all arrays in `rows` and of the result counts independent rows.

    Over a mesh each device runs it on its part of the rows, with weights that count as its own. So gradients are summed
    over the devices once, behind f, and not in every step of a scan that f makes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return f(weights, *rows)
    whole, cut = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(mesh.axis_names)

    def part(weights: Any, *rows: Any) -> Tree:
        return f(jax.lax.pcast(weights, mesh.axis_names, to="varying"), *rows)

    return jax.shard_map(part, in_specs=(whole, *(cut for _ in rows)), out_specs=cut)(weights, *rows)


class Linear(nn.Module):
    """y = [x_0, x_1, ...] W + b. Inputs are concatenated along the last axis without being copied together.

    Each input meets its own rows of W, and leading axes broadcast, so an input shared by many rows is multiplied once.
    """

    units: int
    kernel_init: Initializer
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        widths = [x.shape[-1] for x in inputs]
        kernel = self.param("kernel", self.kernel_init, (sum(widths), self.units))
        bias = self.param("bias", nn.initializers.zeros, (self.units,))
        rows = jnp.split(kernel.astype(self.dtype), np.cumsum(widths)[:-1])
        products = [matmul(x.astype(self.dtype), w) for x, w in zip(inputs, rows, strict=True)]
        product = sum(products[1:], products[0])
        return product + jnp.expand_dims(bias.astype(self.dtype), tuple(range(product.ndim - 1)))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, statistics in float32, in the dtype of `x`: nn.RMSNorm as a
    function of its scale [D]."""
    y = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * (root * jnp.expand_dims(scale, tuple(range(x.ndim - 1))))).astype(x.dtype)


def norm_layer(kind: Literal["rms", "layer"], eps: float, dtype: jnp.dtype) -> nn.Module:
    """RMSNorm has a scale and no shift; LayerNorm subtracts the mean before it squares (the fast form cancels)."""
    if kind == "rms":
        return nn.RMSNorm(epsilon=eps, dtype=dtype, name="norm")
    return nn.LayerNorm(epsilon=eps, use_fast_variance=False, dtype=dtype, name="norm")


class NormedLinear(nn.Module):
    """act(Norm(Dropout(Linear(x)))): dropout comes *before* the norm."""

    units: int
    act: Activation
    norm: Literal["rms", "layer"]
    norm_eps: float
    kernel_init: Initializer
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, *inputs: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        x = Linear(self.units, self.kernel_init, self.dtype, name="linear")(*inputs)
        if dropout_key is not None and self.dropout > 0:
            x = dropout(x, self.dropout, dropout_key)
        return self.act(norm_layer(self.norm, self.norm_eps, self.dtype)(x))


class NormedMLP(nn.Module):
    """Hidden NormedLinear layers, then nothing, a plain Linear, or a NormedLinear with its own activation.

    [..., D_0], [..., D_1], ... -> [..., hidden[-1] or out], in `dtype`. Defaults are DreamerV3's.
    """

    hidden: tuple[int, ...]
    out: int | None = None
    out_act: Activation | None = None
    """Given: the output layer is normed and ends in this; None: it is a plain Linear."""
    act: Activation = nn.silu
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-4
    kernel_init: Initializer = truncated_normal_fan_in()
    out_kernel_init: Initializer = truncated_normal_fan_in()
    dropout: float = 0.0
    """In the first hidden layer only, and only where a key is given."""
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, *inputs: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        normed = lambda i, units, act, rate, init: NormedLinear(
            units, act, self.norm, self.norm_eps, init, rate, self.dtype, name=f"layer{i}"
        )
        x = inputs
        for i, units in enumerate(self.hidden):
            rate = self.dropout if i == 0 else 0.0
            x = (normed(i, units, self.act, rate, self.kernel_init)(*x, dropout_key=dropout_key),)
        last = len(self.hidden)
        if self.out is None:
            return x[0]
        if self.out_act is not None:
            return normed(last, self.out, self.out_act, 0.0, self.out_kernel_init)(*x)
        return Linear(self.out, self.out_kernel_init, self.dtype, name=f"layer{last}")(*x)


def ema(target: Tree, online: Tree, rate: float) -> Tree:
    """target + rate (online - target), leaf by leaf, norms and biases included."""
    return jax.tree.map(lambda t, o: t + rate * (o - t), target, online)


def param_count(params: Any) -> int:
    """Number of scalars in a tree."""
    return sum(x.size for x in jax.tree.leaves(params))
