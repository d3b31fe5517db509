"""DreamerV3's networks beside the RSSM: encoder, decoder and heads (arXiv:2301.04104, table 3 and appendix).

Every hidden layer is Linear, RMSNorm, SiLU. Parameters are one dict per module: `enc`, `dyn` (rssm.py), `dec`, `rew`,
`con`, `pol`, `val`. A feature is the pair (deter [..., D], stoch [..., S * C]).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.dreamerv3.config import RECIPES, DreamerV3Config
from telamon.agents.dreamerv3.distributions import (
    Categorical,
    Distribution,
    bounded_normal,
    categorical_error,
    squared_error,
    symlog_error,
    unimix,
)
from telamon.data import ActionSpec, ArraySpec
from telamon.distributional import TwoHot, dreamer_two_hot, symexp, symlog
from telamon.networks import Linear, NormedLinear, NormedMLP, norm_layer, truncated_normal_fan_in

Params = dict[str, Any]
Feature = tuple[jax.Array, jax.Array]

EPS = 1e-4
"""Of every RMSNorm."""
MIN_SIDE, MAX_SIDE = 3, 16
"""Pixels per side of an image after its last stage."""

scaled = truncated_normal_fan_in
normed = partial(NormedLinear, act=nn.silu, norm="rms", norm_eps=EPS, kernel_init=scaled())


def initializer(scale: float) -> Any:
    """Exactly zero where the scale is."""
    return nn.initializers.zeros if scale == 0 else scaled(scale)


# vectors


def concat(
    spaces: tuple[tuple[str, ArraySpec], ...], values: Mapping[str, jax.Array], squash: bool, lead: int
) -> jax.Array:
    """Named arrays [*lead axes, *shape] as one vector [..., n], float32: quantities (symlog where `squash`), categories
    one-hot; keys sorted.

    Where every element of a key is "missing" in one of its elements (-inf, or -1 for signed integers), all of that key
    is 0 for that sample.
    """
    parts = []
    for key, space in sorted(spaces):
        x = jnp.asarray(values[key])
        there = jnp.ones(x.shape[:lead], bool)
        if jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.signedinteger):
            marker = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else -1
            there = (x != marker).all(tuple(range(lead, x.ndim)))
        mask = lambda y, there=there: jnp.where(jnp.expand_dims(there, tuple(range(lead, y.ndim))), y, 0)
        x = mask(x)
        if space.classes is None:
            x = x.astype(jnp.float32)
            x = symlog(x) if squash else x
        else:
            x = jax.nn.one_hot(x.astype(jnp.int32), space.classes, dtype=jnp.float32)
        parts.append(mask(x).reshape(*x.shape[:lead], -1))
    return jnp.concatenate(parts, -1)


def encode_action(actions: tuple[tuple[str, ActionSpec], ...], values: Mapping[str, jax.Array], lead: int) -> jax.Array:
    """A dict of actions as one vector [..., A], float32: integers one-hot per element, keys sorted."""
    parts = []
    for key, spec in sorted(actions):
        x = values[key].reshape(*values[key].shape[:lead], -1)
        if spec.classes is None:
            parts.append(x.astype(jnp.float32))
        else:
            parts += [jax.nn.one_hot(x[..., i], n, dtype=jnp.float32) for i, n in enumerate(spec.classes)]
    return jnp.concatenate(parts, -1)


def action_width(actions: tuple[tuple[str, ActionSpec], ...]) -> int:
    """Size of an encoded action."""
    return sum(head_width(spec) for _, spec in actions)


def head_width(spec: ActionSpec) -> int:
    """Random numbers that one draw of this action takes: one per element, or one per class."""
    return spec.array.size if spec.classes is None else sum(spec.classes)


class BlockLinear(nn.Module):
    """y_k = x_k W_k for `blocks` contiguous slices, plus one bias: [..., I] -> [..., units].

    The kernel is (blocks, I / blocks, units / blocks); its initial scale is that of the *full* width I.
    """

    units: int
    blocks: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        g, width = self.blocks, x.shape[-1]
        kernel = self.param("kernel", scaled(), (g, width // g, self.units // g))
        bias = self.param("bias", nn.initializers.zeros, (self.units,))
        rows = x.astype(self.dtype).reshape(-1, g, width // g)
        y = jnp.einsum("ngi,gio->ngo", rows, kernel.astype(self.dtype)).reshape(*x.shape[:-1], self.units)
        return y + jnp.expand_dims(bias.astype(self.dtype), tuple(range(y.ndim - 1)))


# images


class Conv(nn.Module):
    """A square convolution of [N, height, width, C], SAME; `upsample` inserts a zero after every pixel first."""

    channels: int
    kernel: int
    stride: int = 1
    upsample: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        k = self.kernel
        kernel = self.param("kernel", scaled(), (k, k, x.shape[-1], self.channels)).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.channels,))
        # The transpose of a stride-2 convolution without flipping its kernel, as the reference's library has it.
        pad = [((k + 1) // 2, k // 2)] * 2 if self.upsample else "SAME"
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype), kernel, (self.stride, self.stride), pad,
            lhs_dilation=(2, 2) if self.upsample else (1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return y + jnp.expand_dims(bias.astype(self.dtype), (0, 1, 2))


class NormedConv(nn.Module):
    """Conv, RMSNorm over channels, SiLU; with `pool`, the greatest of each 2 x 2 pixels between them."""

    channels: int
    kernel: int
    stride: int = 1
    upsample: bool = False
    pool: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Conv(self.channels, self.kernel, self.stride, self.upsample, self.dtype, name="conv")(x)
        if self.pool:
            n, h, w, c = x.shape
            x = x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))
        return nn.silu(norm_layer("rms", EPS, self.dtype)(x))


def check_sides(key: str, shape: tuple[int, ...], halvings: int) -> None:
    """Raises ValueError with the nearest valid sizes where an image cannot be halved so often."""
    step, low, high = 2**halvings, MIN_SIDE * 2**halvings, MAX_SIDE * 2**halvings
    for side in shape[:2]:
        if side % step or not low <= side <= high:
            below, above = (min(max(f(side / step) * step, low), high) for f in (math.floor, math.ceil))
            near = f"{below}" if below == above else f"{below} or {above}"
            raise ValueError(
                f"image {key!r} is {shape[0]}x{shape[1]} pixels, but its sides must be multiples of {step} from {low} "
                f"to {high} (agent.mults halves them {halvings} times); the nearest valid side to {side} is {near}"
            )


class Encoder(nn.Module):
    """Observations {key: [N, *shape]} -> tokens [N, E]: vectors through an MLP, images through convolutions."""

    config: DreamerV3Config
    vectors: tuple[tuple[str, ArraySpec], ...]
    images: tuple[tuple[str, ArraySpec], ...]

    @nn.compact
    def __call__(self, obs: Mapping[str, jax.Array]) -> jax.Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        tokens = []
        if self.vectors:
            x = concat(self.vectors, obs, squash=True, lead=1)
            tokens.append(NormedMLP((c.units,) * c.layers, dtype=dtype, name="mlp")(x))
        if self.images:
            x = jnp.concatenate([obs[key] for key, _ in sorted(self.images)], -1).astype(dtype) / 255 - 0.5
            for i, mult in enumerate(c.image_mults):
                full = c.image_strided and i == 0
                x = NormedConv(
                    c.depth * mult, c.kernel, stride=2 if c.image_strided and not full else 1,
                    pool=not c.image_strided, dtype=dtype, name=f"conv{i}",
                )(x)  # fmt: skip
            tokens.append(x.reshape(x.shape[0], -1))
        return jnp.concatenate(tokens, -1)


class Decoder(nn.Module):
    """Feature [N, ...] -> {key: [N, ...]}, float32: symlog quantities, logits of categories, images in [0, 1]."""

    config: DreamerV3Config
    vectors: tuple[tuple[str, ArraySpec], ...]
    images: tuple[tuple[str, ArraySpec], ...]

    @nn.compact
    def __call__(self, feature: Feature) -> dict[str, jax.Array]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        deter, stoch = feature
        out: dict[str, jax.Array] = {}
        if self.vectors:
            x = NormedMLP((c.units,) * c.layers, dtype=dtype, name="mlp")(stoch, deter)
            init = initializer(RECIPES[c.recipe].decoder_scale)
            for key, space in self.vectors:
                width = space.size * (space.classes or 1)
                y = Linear(width, init, dtype, name=f"out_{key}")(x).astype(jnp.float32)
                classes = () if space.classes is None else (space.classes,)
                out[key] = y.reshape(y.shape[0], *space.shape, *classes)
        if self.images:
            channels = [space.shape[-1] for _, space in self.images]
            x = self._image(deter, stoch, sum(channels))
            parts = jnp.split(x, np.cumsum(channels)[:-1], -1)
            out |= {key: part for (key, _), part in zip(self.images, parts, strict=True)}
        return out

    def _image(self, deter: jax.Array, stoch: jax.Array, channels: int) -> jax.Array:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        depths = [c.depth * m for m in c.image_mults]
        halvings = len(depths) - c.image_strided
        height, width = (side // 2**halvings for side in self.images[0][1].shape[:2])
        pixels, g = height * width * depths[-1], c.bspace

        x = BlockLinear(pixels, g, dtype, name="space")(deter)
        x = x.reshape(-1, g, height, width, depths[-1] // g).transpose(0, 2, 3, 1, 4)
        y = normed(2 * c.units, dtype=dtype, name="stoch0")(stoch)
        y = Linear(pixels, scaled(), dtype, name="stoch1")(y)
        shape = (-1, height, width, depths[-1])
        x = nn.silu(norm_layer("rms", EPS, dtype)(x.reshape(shape) + y.reshape(shape)))

        for i in reversed(range(len(depths) - 1)):
            x = x if c.image_strided else doubled(x)
            x = NormedConv(depths[i], c.kernel, upsample=c.image_strided, dtype=dtype, name=f"conv{i}")(x)
        x = x if c.image_strided else doubled(x)
        return nn.sigmoid(Conv(channels, c.kernel, dtype=dtype, name="image")(x).astype(jnp.float32))


def doubled(x: jax.Array) -> jax.Array:
    """Every pixel of [N, height, width, C] four times."""
    return x.repeat(2, -2).repeat(2, -3)


class Policy(nn.Module):
    """Feature [..., F] -> raw parameters {key: (logits,) or (mean, std)}, float32."""

    config: DreamerV3Config
    actions: tuple[tuple[str, ActionSpec], ...]

    @nn.compact
    def __call__(self, feature: Feature) -> dict[str, tuple[jax.Array, ...]]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        x = NormedMLP((c.units,) * c.layers, dtype=dtype, name="mlp")(*feature)
        out = {}
        for key, spec in self.actions:
            names = ("mean", "std") if spec.classes is None else ("logits",)
            linear = lambda name, key=key, spec=spec: Linear(
                head_width(spec), scaled(0.01), dtype, name=f"{name}_{key}"
            )
            out[key] = tuple(linear(name)(x).astype(jnp.float32) for name in names)
        return out


@dataclass(frozen=True)
class Networks:
    """The modules for one environment; every method is pure. Leading axes of arguments are free."""

    config: DreamerV3Config
    vectors: tuple[tuple[str, ArraySpec], ...]
    images: tuple[tuple[str, ArraySpec], ...]
    actions: tuple[tuple[str, ActionSpec], ...]

    @cached_property
    def two_hot(self) -> TwoHot:
        return dreamer_two_hot(self.config.num_bins)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        head = partial(NormedMLP, dtype=dtype)
        zero = nn.initializers.zeros
        return {
            "enc": Encoder(c, self.vectors, self.images),
            "dec": Decoder(c, self.vectors, self.images),
            "rew": head((c.units,) * c.head_layers, c.num_bins, out_kernel_init=zero),
            "con": head((c.units,) * c.head_layers, 1),
            "pol": Policy(c, self.actions),
            "val": head((c.units,) * c.layers, c.num_bins, out_kernel_init=zero),
        }

    @cached_property
    def token_width(self) -> int:
        obs = {k: jnp.zeros((1, *a.shape), a.dtype) for k, a in (*self.vectors, *self.images)}
        shape = jax.eval_shape(lambda k: self.modules["enc"].init_with_output(k, obs)[0], jax.random.key(0))
        return shape.shape[-1]

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of all modules but `dyn`. Reward and value decode to exactly 0: their last layers are 0."""
        c = self.config
        obs = {k: jnp.zeros((1, *a.shape), a.dtype) for k, a in (*self.vectors, *self.images)}
        feature = (jnp.zeros((1, c.deter)), jnp.zeros((1, c.stoch * c.classes)))
        keys = jax.random.split(key, len(self.modules))
        # heads are MLPs of two inputs; encoder, decoder and policy take one argument
        args = {name: feature if name in ("rew", "con", "val") else (feature,) for name in self.modules} | {
            "enc": (obs,)
        }
        return {
            name: module.init(k, *args[name])["params"]
            for (name, module), k in zip(self.modules.items(), keys, strict=True)
        }

    def encode(self, params: Params, obs: Mapping[str, jax.Array], lead: int) -> jax.Array:
        """Observations with `lead` leading axes -> tokens [..., E]."""
        flat = {k: merged(jnp.asarray(obs[k]), lead) for k, _ in (*self.vectors, *self.images)}
        tokens = self.modules["enc"].apply({"params": params["enc"]}, flat)
        first = obs[(*self.vectors, *self.images)[0][0]]
        return jnp.asarray(tokens).reshape(*first.shape[:lead], -1)

    def decode(self, params: Params, feature: Feature) -> dict[str, jax.Array]:
        """{key: [..., ...]}, float32: symlog quantities, logits of categories, images in [0, 1]."""
        lead = feature[0].shape[:-1]
        flat = (merged(feature[0], len(lead)), merged(feature[1], len(lead)))
        out: Any = self.modules["dec"].apply({"params": params["dec"]}, flat)
        return {key: x.reshape(*lead, *x.shape[1:]) for key, x in out.items()}

    def reconstruction(self, decoded: Mapping[str, jax.Array], obs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The loss [...] of each key of what was decoded; images against obs / 255."""
        floor = RECIPES[self.config.recipe].squared_error_floor
        losses = {}
        for key, space in self.vectors:
            rank = len(space.shape)
            if space.classes is None:
                losses[key] = symlog_error(decoded[key], obs[key], rank, floor)
            else:
                losses[key] = categorical_error(decoded[key], obs[key], rank)
        for key, _ in self.images:
            losses[key] = squared_error(decoded[key], obs[key].astype(jnp.float32) / 255, 3)
        return losses

    def prediction(self, decoded: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What was decoded, in the environment's own units: float32, the likeliest category, uint8 images."""
        out = {}
        for key, space in self.vectors:
            x = decoded[key]
            out[key] = symexp(x) if space.classes is None else jnp.argmax(x, -1)
        for key, _ in self.images:
            out[key] = jnp.round(decoded[key] * 255).astype(jnp.uint8)
        return out

    def reward(self, params: Params, feature: Feature) -> jax.Array:
        """Two-hot logits [..., K] of the reward on entering the state."""
        return self._head(params, "rew", feature)

    def continuation(self, params: Params, feature: Feature) -> jax.Array:
        """Logit [...] of the discounted continuation."""
        return self._head(params, "con", feature)[..., 0]

    def value(self, critic: Params, feature: Feature) -> jax.Array:
        """Two-hot logits [..., K] of the return, by the critic or the slow critic."""
        return self._head({"val": critic}, "val", feature)

    def policy(self, params: Params, feature: Feature) -> dict[str, Distribution]:
        """A distribution per action key."""
        raw: Any = self.modules["pol"].apply({"params": params["pol"]}, feature)
        return {key: self._distribution(spec, raw[key]) for key, spec in self.actions}

    def _distribution(self, spec: ActionSpec, raw: tuple[jax.Array, ...]) -> Distribution:
        c = self.config
        if spec.classes is None:
            return bounded_normal(raw[0], raw[1], c.min_std, c.max_std, spec.shape)
        share = RECIPES[c.recipe].policy_unimix
        logits = jnp.split(raw[0], np.cumsum(spec.classes)[:-1], -1)
        return Categorical(tuple(unimix(x, share) if share > 0 else x for x in logits), spec.shape)

    def _head(self, params: Params, name: str, feature: Feature) -> jax.Array:
        return jnp.asarray(self.modules[name].apply({"params": params[name]}, *feature), jnp.float32)


def merged(x: jax.Array, lead: int) -> jax.Array:
    """`lead` leading axes as one."""
    return x.reshape(-1, *x.shape[lead:])
