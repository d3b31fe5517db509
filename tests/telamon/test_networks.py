"""Layers and initialisers of both agents: pinned numbers and false friends (docs/numerics.md, B4, B5, B7, B10)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.networks import (
    Linear,
    NormedLinear,
    NormedMLP,
    dropout,
    ema,
    fan_in,
    grouped_softmax,
    mish,
    norm_layer,
    normal,
    rms_norm,
    truncated_normal_fan_in,
)

KEY = jax.random.key(0)
DREAMER = dict(norm="rms", norm_eps=1e-4, act=nn.silu, kernel_init=truncated_normal_fan_in())
TDMPC2 = dict(norm="layer", norm_eps=1e-5, act=mish, kernel_init=normal(0.02))


def size(tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def normed(kind: str, eps: float, x, dtype=jnp.float32) -> jax.Array:
    """A fresh norm (scale 1, shift 0) applied to x."""
    module = norm_layer(kind, eps, dtype)
    return module.apply(module.init(KEY, x), x)


# B4: norms


def test_norms_pinned():
    x = jnp.array([1.0, 2, 3, 4])
    np.testing.assert_allclose(normed("rms", 1e-4, x), [0.36514595, 0.7302919, 1.0954379, 1.4605838], rtol=1e-6)
    expected = [-1.3416355, -0.44721183, 0.44721183, 1.3416355]
    np.testing.assert_allclose(normed("layer", 1e-5, x), expected, rtol=1e-6)


def test_flax_default_epsilon_would_show():
    """Its 1e-6 gives -1.3416403 where 1e-5 gives -1.3416355."""
    default = nn.LayerNorm()
    x = jnp.array([1.0, 2, 3, 4])
    assert float(default.apply(default.init(KEY, x), x)[0]) == pytest.approx(-1.3416403, rel=2e-7)
    assert float(normed("layer", 1e-5, x)[0]) == pytest.approx(-1.3416355, rel=2e-7)


def test_variance_is_the_mean_of_squared_deviations():
    """flax's default E[x^2] - E[x]^2 cancels far from 0: an error of 2e-2 at mean 1000, where ours is 4e-5."""
    x = np.float32(1000) + np.asarray(jax.random.normal(KEY, (64, 512)))
    exact = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    fast = nn.LayerNorm(epsilon=1e-5)
    error = lambda y: np.abs(np.asarray(y, np.float64) - exact).max()
    assert error(normed("layer", 1e-5, x)) < 3e-4
    assert error(fast.apply(fast.init(KEY, x), x)) > 3e-3


def test_rms_norm_has_a_scale_and_no_shift_and_does_not_centre():
    x = jnp.array([5.0, 6, 7, 8])
    rms, layer = norm_layer("rms", 1e-4, jnp.float32), norm_layer("layer", 1e-5, jnp.float32)
    assert set(rms.init(KEY, x)["params"]) == {"scale"}
    assert set(layer.init(KEY, x)["params"]) == {"scale", "bias"}
    assert (normed("rms", 1e-4, x) > 0).all()


@pytest.mark.parametrize(("kind", "eps"), [("rms", 1e-4), ("layer", 1e-5)])
def test_bf16_in_bf16_out_with_float32_statistics(kind, eps):
    """256 has no room for ones in bfloat16: statistics in it would be several percent off."""
    x = (100 + jax.random.normal(KEY, (8, 4096))).astype(jnp.bfloat16)
    ours = normed(kind, eps, x, jnp.bfloat16)
    assert ours.dtype == jnp.bfloat16
    exact = normed(kind, eps, x.astype(jnp.float32)).astype(jnp.bfloat16)
    difference = np.abs(np.asarray(ours, np.float32) - np.asarray(exact, np.float32))
    assert difference.max() <= 0.02  # one rounding of values up to 4
    assert np.abs(np.asarray(ours, np.float32).mean() - (1.0 if kind == "rms" else 0.0)) < 1e-2


def test_flax_rms_norm_left_to_itself_would_widen_bf16():
    default = nn.RMSNorm()
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert default.apply(default.init(KEY, x), x).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm_as_a_function_of_its_scale_is_the_layer(dtype):
    x = (3 * jax.random.normal(KEY, (2, 5, 64))).astype(dtype)
    scale = jax.random.normal(jax.random.key(1), (64,))
    layer = norm_layer("rms", 1e-4, dtype).apply({"params": {"scale": scale}}, x)
    ours = rms_norm(x, scale, 1e-4)
    assert ours.dtype == dtype
    rtol = 1e-6 if dtype == jnp.float32 else 0.01
    np.testing.assert_allclose(ours.astype(jnp.float32), layer.astype(jnp.float32), rtol=rtol)
    np.testing.assert_allclose(
        rms_norm(jnp.array([1.0, 2, 3, 4]), jnp.ones(4), 1e-4), [0.36514595, 0.7302919, 1.0954379, 1.4605838], rtol=1e-6
    )


# B4: activations


def test_activations_pinned():
    np.testing.assert_allclose(nn.silu(jnp.array([1.0, -1])), [0.7310586, -0.2689414], rtol=1e-6)
    np.testing.assert_allclose(mish(jnp.array([1.0, -1])), [0.8650984, -0.3034015], rtol=1e-6)


def test_mish_as_a_rational_function_is_mish_everywhere():
    x = np.concatenate([np.linspace(-40, 40, 4001), [-1e4, -88, 0, 88, 1e4]]).astype(np.float32)
    wide = x.astype(np.float64)
    exact = wide * np.tanh(np.logaddexp(0, wide))
    np.testing.assert_allclose(mish(x), exact, rtol=1e-6, atol=1e-12)
    slope = jax.vmap(jax.grad(mish))(x)
    step = 1e-6
    forward, back = (w * np.tanh(np.logaddexp(0, w)) for w in (wide + step, wide - step))
    np.testing.assert_allclose(slope, (forward - back) / (2 * step), atol=3e-7)


def test_mish_and_its_slope_hold_in_bf16():
    x = jnp.linspace(-12, 25, 1481).astype(jnp.bfloat16)
    assert mish(x).dtype == jnp.bfloat16
    as_float = lambda y: np.asarray(y, np.float32)
    np.testing.assert_allclose(as_float(mish(x)), mish(x.astype(jnp.float32)), rtol=0.03)
    slope = jax.vmap(jax.grad(mish))
    np.testing.assert_allclose(as_float(slope(x)), slope(x.astype(jnp.float32)), atol=0.01)


# B4: layers


def test_parameters_of_a_normed_layer():
    """in x out weights, a bias, and a scale (RMSNorm) or a scale and a shift (LayerNorm)."""
    count = lambda **kind: size(NormedLinear(7, **kind).init(KEY, jnp.zeros(5))["params"])
    assert count(**DREAMER) == 5 * 7 + 2 * 7
    assert count(**TDMPC2) == 5 * 7 + 3 * 7


@pytest.mark.parametrize(
    ("out", "out_act", "expected"),
    [
        (None, None, {"layer0", "layer1"}),
        (3, None, {"layer0", "layer1", "layer2"}),
        (4, nn.silu, {"layer0", "layer1", "layer2"}),
    ],
)
def test_output_layers(out, out_act, expected):
    """None, a plain Linear, or one more normed layer with its own activation."""
    module = NormedMLP((8, 6), out, out_act, **TDMPC2)
    params = module.init(KEY, jnp.zeros(5))["params"]
    assert set(params) == expected
    last = params[max(expected)]
    assert ("norm" in last) == (out is None or out_act is not None)
    assert module.apply({"params": params}, jnp.zeros((3, 5))).shape == (3, out or 6)


def test_defaults_are_dreamers():
    module = NormedMLP((8,))
    assert (module.norm, module.norm_eps, module.act, module.dropout) == ("rms", 1e-4, nn.silu, 0.0)


def test_leading_axes_are_batch_axes():
    module = NormedMLP((8,), 3, **DREAMER)
    x = jax.random.normal(KEY, (4, 5, 6))
    params = module.init(KEY, x)
    flat = module.apply(params, x.reshape(20, 6)).reshape(4, 5, 3)
    np.testing.assert_allclose(module.apply(params, x), flat, rtol=1e-6, atol=1e-6)


def test_split_products_equal_one_product_of_the_concatenation():
    z, a = jax.random.normal(KEY, (1, 8)), jax.random.normal(jax.random.key(1), (5, 3))
    module = Linear(4, normal(1.0))
    params = module.init(KEY, z, a)
    params["params"]["bias"] = jnp.arange(4.0)
    whole = jnp.concatenate([jnp.broadcast_to(z, (5, 8)), a], -1) @ params["params"]["kernel"] + jnp.arange(4.0)[None]
    assert params["params"]["kernel"].shape == (11, 4)
    np.testing.assert_allclose(module.apply(params, z, a), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        Linear(3, normal(1.0), jnp.bfloat16),
        NormedMLP((8,), **TDMPC2, dtype=jnp.bfloat16),
        NormedMLP((8,), 3, **DREAMER, dtype=jnp.bfloat16),
    ],
)
def test_compute_dtype_is_bf16_and_parameters_stay_float32(module):
    x = jnp.zeros((2, 5))
    params = module.init(KEY, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert module.apply(params, x).dtype == jnp.bfloat16


# B4: dropout


def test_dropout_comes_before_the_norm():
    """After the norm, a fifth of each row would be 0 and its variance not 1."""
    module = NormedLinear(4096, lambda x: x, "layer", 1e-5, normal(1.0), dropout=0.2)
    x = jax.random.normal(KEY, (8, 16))
    params = module.init(KEY, x)
    y = np.asarray(module.apply(params, x, dropout_key=jax.random.key(1)))
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-3)
    np.testing.assert_allclose(y.var(-1), 1, atol=1e-3)
    # what was dropped is 0 before the norm: one common value per row after it
    values, counts = np.unique(y[0], return_counts=True)
    assert counts.max() == pytest.approx(0.2 * 4096, rel=0.2)
    assert values[counts.argmax()] != 0


def test_without_a_key_nothing_is_dropped():
    x = jax.random.normal(KEY, (8, 16))
    with_dropout, without = (NormedMLP((32,), 3, **TDMPC2, dropout=p) for p in (0.5, 0.0))
    params = without.init(KEY, x)
    np.testing.assert_array_equal(with_dropout.apply(params, x), without.apply(params, x))
    assert (with_dropout.apply(params, x, dropout_key=KEY) != without.apply(params, x)).any()


def test_dropout_acts_in_the_first_layer_only():
    """With the first layer's weights 0 there is nothing left that a mask could change."""
    module = NormedMLP((32, 32), 32, mish, **TDMPC2, dropout=0.5)
    x = jax.random.normal(KEY, (8, 16))
    params = module.init(KEY, x)
    silent = jax.tree.map(lambda x: x, params)
    silent["params"]["layer0"]["linear"] = jax.tree.map(jnp.zeros_like, params["params"]["layer0"]["linear"])
    silent["params"]["layer0"]["norm"]["bias"] = jnp.linspace(-1, 1, 32)  # what the second layer sees
    keys = jax.random.key(1), jax.random.key(2)
    same = [module.apply(silent, x, dropout_key=key) for key in keys]
    other = [module.apply(params, x, dropout_key=key) for key in keys]
    np.testing.assert_array_equal(*same)
    assert (np.asarray(other[0]) != np.asarray(other[1])).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout_rate_and_scale(dtype):
    """16 bits per element: 0.01 is rounded to 655 / 65536, and survivors are divided by what is left."""
    x = jnp.ones((1001, 997), dtype)
    y = dropout(x, 0.01, KEY)
    assert y.dtype == dtype
    kept = np.asarray(y, np.float32)
    assert set(np.unique(kept)) == {0.0, float(jnp.asarray(1, dtype) / jnp.asarray(1 - 655 / 65536, dtype))}
    share = 655 / 65536
    assert (kept == 0).mean() == pytest.approx(share, abs=5 * np.sqrt(share / kept.size))
    both_halves = (kept.ravel()[0::2] == 0).mean(), (kept.ravel()[1::2] == 0).mean()
    assert both_halves == pytest.approx((share, share), rel=0.06)  # neither half of a word is special


def test_dropout_masks_differ_between_rows_and_keys():
    x = jnp.ones((64, 512))
    masks = [np.asarray(dropout(x, 0.1, key) == 0) for key in (KEY, jax.random.key(1))]
    assert len({row.tobytes() for row in masks[0]}) == 64
    assert (masks[0] != masks[1]).any()
    overlap = (masks[0] & masks[1]).mean()
    assert overlap == pytest.approx(0.01, rel=0.2)  # independent


# B5


def test_fan_in():
    assert fan_in((256, 512)) == 256
    assert fan_in((8, 1024, 256)) == 8192  # a block matrix sees the full width
    assert fan_in((3, 3, 16, 32)) == 144


def test_truncated_normal_is_the_references_to_the_bit():
    """With the literal 1.1368: flax's 1.1368472 would differ by 4e-5."""
    ours = truncated_normal_fan_in()(KEY, (256, 512))
    expected = jax.random.truncated_normal(KEY, -2, 2, (256, 512)) * 1.1368 * np.sqrt(1 / 256, dtype=np.float32)
    np.testing.assert_array_equal(ours, expected)
    assert float(ours.std()) == pytest.approx(0.0625, rel=0.01)
    flax = nn.initializers.lecun_normal()(KEY, (256, 512))
    difference = np.abs(np.asarray(ours) - np.asarray(flax)).max()
    assert 3e-6 < difference < 1e-5


def test_truncated_normal_of_a_block_matrix():
    ours = truncated_normal_fan_in()(KEY, (8, 1024, 256))
    assert float(ours.std()) == pytest.approx(0.011048, rel=0.01)
    assert not np.asarray(truncated_normal_fan_in(0.0)(KEY, (4, 4))).any()


def test_tdmpc2_initialiser_is_not_truncated():
    """jax's truncated_normal(0.02) has std 0.0176 and nothing beyond 0.04."""
    ours = np.asarray(normal(0.02)(KEY, (512, 512)))
    assert ours.std() == pytest.approx(0.02, rel=0.01)
    assert (np.abs(ours) > 0.04).mean() == pytest.approx(0.0455, rel=0.05)
    truncated = np.asarray(jax.nn.initializers.truncated_normal(0.02)(KEY, (512, 512)))
    assert truncated.std() == pytest.approx(0.0176, rel=0.01)
    assert np.abs(truncated).max() <= 0.04


# B7


def test_simnorm_pinned():
    half = [0.04445499, 0.05708134, 0.07329389, 0.09411121, 0.12084118, 0.15516315, 0.19923344, 0.2558208]
    np.testing.assert_allclose(grouped_softmax(jnp.arange(16) / 4, 8), half * 2, rtol=1e-6)


def test_simnorm_groups_are_simplices_that_ignore_a_shift():
    x = jax.random.normal(KEY, (5, 3, 24))
    y = grouped_softmax(x, 8)
    np.testing.assert_allclose(y.reshape(5, 3, 3, 8).sum(-1), 1, rtol=1e-6)
    shift = jnp.repeat(jnp.array([1.0, -20, 300]), 8)[None, None]
    np.testing.assert_allclose(grouped_softmax(x + shift, 8), y, rtol=1e-4, atol=1e-5)


def test_simnorm_of_no_rows():
    assert grouped_softmax(jnp.zeros((0, 16)), 8).shape == (0, 16)


# B10


@pytest.mark.parametrize(("rate", "expected"), [(0.02, 0.02), (0.01, 0.01)])
def test_ema_moves_every_leaf_by_its_rate(rate, expected):
    online = NormedMLP((4,), 2, **TDMPC2).init(KEY, jnp.zeros(3))
    online = jax.tree.map(jnp.ones_like, online)
    target = jax.tree.map(jnp.zeros_like, online)
    moved = ema(target, online, rate)
    assert jax.tree.structure(moved) == jax.tree.structure(online)
    for leaf in jax.tree.leaves(moved):  # norm scales and shifts included
        np.testing.assert_allclose(leaf, expected, rtol=1e-6)
