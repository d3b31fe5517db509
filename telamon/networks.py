"""Layers and initialisers that both agents share.

Compute dtype: inputs and weights are cast to `dtype`, a norm's statistics are float32, its output is `dtype` again.
Parameters are always float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

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

    A full-width mask costs 15 to 30 % of a plan; two masks are cut from each 32-bit word because threefry computes
    whole words anyway.
    """
    drop = round(rate * 2**16)
    words = jax.random.bits(key, (-(-x.size // 2),), jnp.uint32)
    bits = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[: x.size].reshape(x.shape)
    return jnp.where(bits >= drop, x / jnp.asarray(1 - drop / 2**16, x.dtype), 0)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., D] @ [D, U], all rows of x at once: on CPU, dw takes twice as long where it sums over several axes."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def normed(act: Activation, eps: float, x: jax.Array, scale: jax.Array, shift: jax.Array | None) -> jax.Array:
    """act(norm(x)) of rows x [N, D], in their dtype: LayerNorm, or RMSNorm (no shift, no centring) if `shift` is None.

    The mean is subtracted before the square is taken: E[x^2] - E[x]^2 cancels. `act` maps rows to rows.
    The gradient is written out because it keeps x alone and sums by products of matrix and vector: 9 % of an update.
    """
    return _normed_forward(act, eps, x, scale, shift)[0]


def _normed_forward(act: Activation, eps: float, x: jax.Array, scale: jax.Array, shift: jax.Array | None):
    wide = x.astype(jnp.float32)
    mean = jnp.zeros((len(x), 1)) if shift is None else wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + eps)
    y = (wide - mean) * (inverse * scale[None])
    y = y if shift is None else y + shift[None]
    return act(y.astype(x.dtype)), (x, mean, inverse, scale, shift)


def _normed_backward(act: Activation, eps: float, residuals: tuple, g: jax.Array):
    """With n = (x - mean) / std and d = act'(y) g: dx = (s d - E[s d] - n E[s d n]) / std, ds = sum d n, db = sum d."""
    x, mean, inverse, scale, shift = residuals
    n = (x.astype(jnp.float32) - mean) * inverse
    y = n * scale[None] if shift is None else n * scale[None] + shift[None]
    d = jax.vjp(act, y.astype(x.dtype))[1](g)[0].astype(jnp.float32)
    product = partial(jnp.matmul, precision="highest")
    row_mean = lambda m: product(m, scale / scale.size)[:, None]  # of s m
    column_sum = lambda m: product(jnp.ones(len(m)), m)
    dx = d * scale[None] - n * row_mean(d * n)
    dx = dx if shift is None else dx - row_mean(d)
    return (inverse * dx).astype(x.dtype), column_sum(d * n), None if shift is None else column_sum(d)


normed.defvjp(_normed_forward, _normed_backward)


class Norm(nn.Module):
    """act(norm(x)) over the last axis of x [..., D], in its dtype; statistics are float32."""

    kind: Literal["rms", "layer"]
    """RMSNorm has a scale and no shift, and does not centre."""
    eps: float
    act: Activation = lambda x: x

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (width,))
        shift = self.param("bias", nn.initializers.zeros, (width,)) if self.kind == "layer" else None
        return normed(self.act, self.eps, x.reshape(-1, width), scale, shift).reshape(x.shape)


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
        return Norm(self.norm, self.norm_eps, self.act, name="norm")(x)


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
