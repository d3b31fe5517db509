"""Encoder, decoder and heads: layouts, initial weights, refusals (docs/numerics.md, B5, B6)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.agents.dreamerv3.distributions import BoundedNormal, Categorical
from telamon.agents.dreamerv3.networks import (
    BlockLinear,
    Conv,
    NormedConv,
    action_width,
    check_sides,
    concat,
    doubled,
    encode_action,
)
from telamon.data import ActionSpec, ArraySpec
from telamon.distributional import symlog
from tests.telamon.agents.dreamerv3 import tiny

KEY = jax.random.key(0)
LATEST, PAPER = tiny.agent(tiny.MIXED, recipe="latest"), tiny.agent(tiny.MIXED)

# vectors


def test_quantities_are_symlogged_categories_are_not_and_keys_are_sorted():
    spaces = (("z", ArraySpec((2,))), ("a", ArraySpec((), "int32", 3)), ("m", ArraySpec((2,), "bool", 2)))
    values = {"z": np.array([[5.0, -1]]), "a": np.array([2]), "m": np.array([[True, False]])}
    expected = [0, 0, 1, 0, 1, 1, 0, np.log(6), -np.log(2)]
    np.testing.assert_allclose(concat(spaces, values, squash=True, lead=1), [expected], rtol=1e-6)
    assert concat(spaces, values, squash=True, lead=1).dtype == jnp.float32
    np.testing.assert_allclose(concat(spaces, values, squash=False, lead=1)[0, -2:], [5, -1])


def test_one_missing_element_blanks_its_key_for_its_sample_alone():
    spaces = (("f", ArraySpec((2,))), ("i", ArraySpec((2,), "int32", 2)), ("u", ArraySpec((), "uint8", 256)))
    values = {
        "f": np.array([[-np.inf, 1], [2, 3], [4, 5]], np.float32),
        "i": np.array([[0, 1], [0, -1], [1, 0]], np.int32),
        "u": np.array([255, 0, 1], np.uint8),
    }
    out = np.asarray(concat(spaces, values, squash=False, lead=1))
    np.testing.assert_array_equal(out[:, :2], [[0, 0], [2, 3], [4, 5]])
    np.testing.assert_array_equal(out[:, 2:6], [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]])
    np.testing.assert_array_equal(out[:, 6:].argmax(-1), [255, 0, 1])  # unsigned: never missing


def test_actions_are_one_hot_per_element_and_keys_are_sorted():
    actions = (("z", ActionSpec((2,))), ("a", ActionSpec((2,), (2, 3))), ("m", ActionSpec((), (4,))))
    values = {"z": jnp.array([[7.0, -0.5]]), "a": jnp.array([[1, 2]]), "m": jnp.array([3])}
    np.testing.assert_array_equal(encode_action(actions, values, lead=1), [[0, 1, 0, 0, 1, 0, 0, 0, 1, 7, -0.5]])
    assert action_width(actions) == 11


def test_categories_out_of_range_are_all_zeros():
    actions = (("a", ActionSpec((), (3,))),)
    np.testing.assert_array_equal(encode_action(actions, {"a": jnp.array([-1, 3])}, lead=1), np.zeros((2, 3)))


# B6


def test_a_block_linear_layer_is_a_dense_one_with_a_block_diagonal_kernel():
    x = jax.random.normal(KEY, (3, 7, 6))
    layer = BlockLinear(9, 3)
    params = layer.init(KEY, x)["params"]
    assert {name: leaf.shape for name, leaf in params.items()} == {"kernel": (3, 2, 3), "bias": (9,)}
    params = {"kernel": params["kernel"], "bias": jnp.arange(9.0)}
    dense = np.zeros((6, 9))
    for k, block in enumerate(np.asarray(params["kernel"])):
        dense[2 * k : 2 * k + 2, 3 * k : 3 * k + 3] = block
    np.testing.assert_allclose(layer.apply({"params": params}, x), x @ dense + np.arange(9)[None, None], rtol=1e-5)


def test_blocks_do_not_see_each_other():
    layer = BlockLinear(6, 3)
    params = layer.init(KEY, jnp.zeros(6))
    jacobian = np.asarray(jax.jacobian(lambda x: layer.apply(params, x))(jnp.ones(6))).reshape(3, 2, 3, 2)
    for out in range(3):
        for into in range(3):
            assert jacobian[out, :, into].any() == (out == into)


def test_a_block_kernel_starts_at_the_scale_of_the_full_width():
    kernel = BlockLinear(8 * 256, 8).init(KEY, jnp.zeros(8 * 1024))["params"]["kernel"]
    assert kernel.shape == (8, 1024, 256)
    assert float(kernel.std()) == pytest.approx(0.011048, rel=0.01)  # per block it would be 0.03125


# convolutions


def convolution(x, kernel, bias, stride: int, upsample: bool) -> np.ndarray:
    """SAME, without a flip, in loops. Upsampled: a zero after every pixel but the last, padded by 3 and 2."""
    if upsample:
        spread = np.zeros((2 * x.shape[0] - 1, 2 * x.shape[1] - 1, x.shape[2]))
        spread[::2, ::2] = x
        x, pad = spread, [(3, 2), (3, 2)]
    else:
        total = [max((-(-n // stride) - 1) * stride + 5 - n, 0) for n in x.shape[:2]]
        pad = [(t // 2, t - t // 2) for t in total]
    x = np.pad(x, [*pad, (0, 0)])
    rows, columns = ((n - 5) // stride + 1 for n in x.shape[:2])
    out = np.zeros((rows, columns, kernel.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            patch = x[i * stride : i * stride + 5, j * stride : j * stride + 5]
            out[i, j] = np.einsum("hwi,hwio->o", patch, kernel) + bias
    return out


@pytest.mark.parametrize(("stride", "upsample", "shape"), [(1, False, (6, 8)), (2, False, (3, 4)), (1, True, (12, 16))])
def test_a_convolution_keeps_halves_or_doubles(stride, upsample, shape):
    layer = Conv(3, 5, stride, upsample)
    x = jax.random.normal(KEY, (1, 6, 8, 2))
    params = {"kernel": jax.random.normal(KEY, (5, 5, 2, 3)), "bias": jnp.arange(3.0)}
    y = layer.apply({"params": params}, x)[0]
    assert y.shape == (*shape, 3)
    expected = convolution(np.asarray(x[0], np.float64), *map(np.asarray, params.values()), stride, upsample)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_pooling_comes_before_the_norm_over_channels():
    x = jax.random.normal(KEY, (2, 4, 6, 3))
    pooled, plain = NormedConv(5, 3, pool=True), Conv(5, 3)
    params = tiny.jit(pooled.init)(KEY, x)["params"]
    y = np.asarray(tiny.jit(plain.apply)({"params": params["conv"]}, x)).reshape(2, 2, 2, 3, 2, 5).max((2, 4))
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(tiny.jit(pooled.apply)({"params": params}, x), nn.silu(y), rtol=1e-4, atol=1e-5)


def test_doubling_repeats_every_pixel():
    x = jnp.arange(4.0).reshape(1, 2, 2, 1)
    expected = [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    np.testing.assert_array_equal(doubled(x)[0, :, :, 0], expected)


# image sides


@pytest.mark.parametrize("shape", [(48, 48, 3), (64, 96, 1), (256, 48, 4)])
def test_sides_that_can_be_halved(shape):
    check_sides("image", shape, 4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((65, 64, 3), "65x64 pixels.* multiples of 16 from 48 to 256 .*halves them 4 times.* nearest valid .*64 or 80"),
        ((64, 84, 3), "64x84 pixels.* side to 84 is 80 or 96$"),
        ((32, 64, 3), "32x64 pixels.* side to 32 is 48$"),
        ((300, 64, 3), "300x64 pixels.* side to 300 is 256$"),
    ],
)
def test_sides_that_cannot_are_refused_with_the_nearest_that_can(shape, message):
    with pytest.raises(ValueError, match=f"image 'view' is {message}"):
        check_sides("view", shape, 4)


# encoder


def test_tokens_have_any_leading_axes():
    nets, params = LATEST.networks, tiny.params(LATEST)
    obs = tiny.observations(tiny.MIXED, (2, 3))
    tokens = tiny.jit(lambda obs: nets.encode(params, obs, lead=2))(obs)
    assert tokens.shape == (2, 3, nets.token_width)
    flat = {key: x.reshape(6, *x.shape[2:]) for key, x in obs.items()}
    flat = tiny.jit(lambda obs: nets.encode(params, obs, lead=1))(flat)
    np.testing.assert_allclose(tokens.reshape(6, -1), flat, rtol=1e-5, atol=1e-6)


def test_every_observation_reaches_the_tokens():
    nets, params = LATEST.networks, tiny.params(LATEST)
    encode = tiny.jit(lambda obs: nets.encode(params, obs, lead=1))
    obs = tiny.observations(tiny.MIXED, (1,))
    tokens = encode(obs)
    for key, array in tiny.MIXED.obs:
        other = ((obs[key] + 1) % (array.classes or 251)).astype(array.dtype)
        assert (encode(obs | {key: other}) != tokens).any(), key


def test_images_are_stacked_in_sorted_order_and_centred():
    """A first stage that averages each channel shows what it is given."""
    agent = tiny.agent(tiny.MIXED, mults=(1,), depth=4, recipe="paper", kernel=1)
    params = tiny.params(agent)["enc"]
    same = {"kernel": jnp.eye(4)[None, None], "bias": jnp.zeros(4)}
    params = params | {"conv0": {"conv": same, "norm": {"scale": jnp.ones(4)}}}
    obs = tiny.observations(tiny.MIXED, (1,))
    obs["left view"], obs["view/right"] = np.full((1, 12, 16, 1), 255, np.uint8), np.zeros((1, 12, 16, 3), np.uint8)
    tokens = tiny.jit(lambda obs: agent.networks.encode({"enc": params}, obs, lead=1))(obs)
    tokens = tokens[0, agent.config.units :].reshape(12, 16, 4)
    x = np.array([0.5, -0.5, -0.5, -0.5])
    np.testing.assert_allclose(tokens[3, 5], nn.silu(x / np.sqrt(0.25 + 1e-4)), rtol=1e-5)


# decoder


def feature(agent, *lead: int, seed: int = 0):
    c, rng = agent.config, np.random.default_rng(seed)
    deter = jnp.asarray(rng.normal(size=(*lead, c.deter)), c.dtype)
    stoch = jax.nn.one_hot(rng.integers(0, c.classes, (*lead, c.stoch)), c.classes, dtype=c.dtype)
    return deter, stoch.reshape(*lead, -1)


@pytest.mark.parametrize("agent", [LATEST, PAPER], ids=["latest", "paper"])
def test_what_was_decoded_has_the_shapes_of_the_observations(agent):
    nets, params = agent.networks, tiny.params(agent)
    decoded = tiny.jit(nets.decode)(params, feature(agent, 2, 3))
    assert {key: x.shape for key, x in decoded.items()} == {
        "sense/arm.x": (2, 3, 3), "level": (2, 3), "grid": (2, 3, 2, 2), "kind of thing": (2, 3, 4),
        "doors": (2, 3, 2, 2), "view/right": (2, 3, 12, 16, 3), "left view": (2, 3, 12, 16, 1),
    }  # fmt: skip
    for key in ("view/right", "left view"):
        assert ((decoded[key] > 0) & (decoded[key] < 1)).all()
    shown = nets.prediction(decoded)
    np.testing.assert_allclose(symlog(shown["grid"]), decoded["grid"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(shown["doors"], decoded["doors"].argmax(-1))
    np.testing.assert_array_equal(shown["left view"], np.round(np.asarray(decoded["left view"]) * 255))
    assert shown["left view"].dtype == jnp.uint8


def test_each_observation_has_a_loss_of_its_own_summed_over_its_elements():
    nets, obs = LATEST.networks, tiny.observations(tiny.MIXED, (2, 3))
    decoded = tiny.jit(nets.decode)(tiny.params(LATEST), feature(LATEST, 2, 3))
    losses = tiny.jit(nets.reconstruction)(decoded, obs)
    decoded = {key: np.asarray(x) for key, x in decoded.items()}
    assert set(losses) == {key for key, _ in tiny.MIXED.obs}
    log = lambda x: np.sign(x) * np.log1p(np.abs(x))
    np.testing.assert_allclose(losses["grid"], ((decoded["grid"] - log(obs["grid"])) ** 2).sum((2, 3)), rtol=1e-5)
    np.testing.assert_allclose(losses["level"], (decoded["level"] - log(obs["level"])) ** 2, rtol=1e-5)
    image = ((decoded["view/right"] - obs["view/right"] / 255) ** 2).sum((2, 3, 4))
    np.testing.assert_allclose(losses["view/right"], image, rtol=1e-5)
    p = np.exp(decoded["doors"]) / np.exp(decoded["doors"]).sum(-1, keepdims=True)
    picked = np.take_along_axis(p, obs["doors"].astype(int)[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses["doors"], -np.log(picked).sum(-1), rtol=1e-5)


def test_only_recipe_paper_forgives_tiny_squared_errors():
    decoded = {key: jnp.zeros((1, *array.shape)) for key, array in tiny.ENV.obs}
    obs = {"zeta": np.full((1, 3), 5e-5, np.float32), "alpha": np.full(1, 5e-5, np.float32)}
    paper, latest = (tiny.agent(recipe=recipe).networks.reconstruction(decoded, obs) for recipe in ("paper", "latest"))
    assert (paper["zeta"], paper["alpha"]) == (0, 0)
    np.testing.assert_allclose(latest["zeta"], 7.5e-9, rtol=1e-3)


# heads


def test_initial_weights_of_the_last_layers():
    for recipe, scale in (("paper", 0.1), ("latest", 1.0)):
        agent = tiny.agent(units=64, recipe=recipe)
        params = tiny.fresh(agent).params
        spread = lambda *path, params=params: float(at(params, path).std())
        assert spread("dec", "out_zeta", "kernel") == pytest.approx(scale / 8, rel=0.3)
        assert spread("pol", "mean_action", "kernel") == pytest.approx(0.01 / 8, rel=0.3)
        assert spread("pol", "std_action", "kernel") == pytest.approx(0.01 / 8, rel=0.3)
        assert spread("con", "layer1", "kernel") == pytest.approx(1 / 8, rel=0.3)
        assert spread("val", "layer0", "linear", "kernel") == pytest.approx(1 / np.sqrt(24), rel=0.1)
        for name, leaf in tiny.leaves(params).items():
            last = name in ("['rew']['layer1']['kernel']", "['val']['layer1']['kernel']")
            assert (leaf == 1).all() if "scale" in name else not leaf.any() == ("bias" in name or last), name


def at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


def test_fresh_rewards_and_values_are_exactly_0():
    agent = tiny.agent(units=64)
    nets, params, x = agent.networks, tiny.fresh(agent).params, feature(agent, 5)
    both = tiny.jit(lambda params: (nets.reward(params, x), nets.value(params["val"], x)))(params)
    for logits in both:
        assert logits.shape == (5, 11)
        assert not np.asarray(nets.two_hot.decode(logits)).any()


@pytest.mark.parametrize(("recipe", "floor"), [("paper", 0.01), ("latest", 0.0)])
def test_policies_have_a_distribution_per_key_and_only_recipe_papers_are_mixed(recipe, floor):
    agent = tiny.agent(tiny.MIXED, recipe=recipe)
    params = jax.tree.map(lambda x: 100 * x, tiny.params(agent)["pol"])
    policy = tiny.jit(agent.networks.policy)({"pol": params}, feature(agent, 7))
    assert isinstance(policy["steer"], BoundedNormal)
    assert policy["steer"].mean.shape == (7, 2)
    for key, classes in (("keys/both hands", (3, 5)), ("gear", (4,))):
        assert isinstance(policy[key], Categorical)
        assert tuple(x.shape for x in policy[key].logits) == tuple((7, n) for n in classes)
        for logits in policy[key].logits:
            least = float(jax.nn.softmax(logits, -1).min())
            assert least == pytest.approx(floor / logits.shape[-1], rel=1e-3, abs=1e-6)


# names


def test_any_name_of_an_observation_or_action_will_do():
    """Slashes, dots and blanks too, and names that layers have."""
    obs = tuple((key, ArraySpec((2,))) for key in ("a/b", "a", "a.b c", "mlp", "", "params"))
    env = tiny.EnvSpec("names", obs, tuple((key, ActionSpec((1,))) for key in ("x/y", "x", "mlp", "")), None)
    agent = tiny.agent(env)
    nets, params = agent.networks, tiny.params(agent)
    assert set(jax.eval_shape(nets.decode, params, feature(agent, 1))) == {key for key, _ in obs}
    assert set(jax.eval_shape(nets.policy, params, feature(agent, 1))) == {"x/y", "x", "mlp", ""}
