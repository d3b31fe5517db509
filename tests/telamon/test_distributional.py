"""symlog, symexp, both two-hot codings: pinned numbers, and what must not be simplified (docs/numerics.md, B1, B2)."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from telamon.distributional import TwoHot, dreamer_two_hot, symexp, symlog, tdmpc2_two_hot

DREAMER, TDMPC2 = dreamer_two_hot(), tdmpc2_two_hot()
BOTH = pytest.mark.parametrize("two_hot", [DREAMER, TDMPC2], ids=["dreamerv3", "tdmpc2"])
finite = st.floats(-1e6, 1e6, width=32)


def weights(two_hot: TwoHot, y: float) -> dict[int, float]:
    """The non-zero weights of one target by bin."""
    w = np.asarray(two_hot.encode(jnp.float32(y)))
    return {int(k): float(w[k]) for k in np.nonzero(w)[0]}


# B1


def test_symlog_pinned():
    x = jnp.array([-1000, -1, -0.5, 0, 0.5, 1, 1000], jnp.float32)
    expected = [-6.908755, -0.6931472, -0.4054651, 0, 0.4054651, 0.6931472, 6.908755]
    np.testing.assert_allclose(symlog(x), expected, rtol=1e-6)
    np.testing.assert_allclose(symexp(symlog(x)), x, rtol=1e-6)


@given(finite)
def test_symexp_inverts_symlog_and_both_are_odd(x):
    x = np.float32(x)
    # relative error of symexp is that of its argument, times its size
    np.testing.assert_allclose(symexp(symlog(x)), x, rtol=5e-6, atol=1e-37)
    assert symlog(-x) == -symlog(x)
    assert symexp(-symlog(x)) == -symexp(symlog(x))


def test_slope_is_one_beside_zero_and_zero_at_zero():
    """Both references write sign(x) f(|x|), whose derivative at exactly 0 is 0."""
    for function in (symlog, symexp):
        slope = jax.vmap(jax.grad(function))(jnp.array([-1e-6, 0, 1e-6]))
        np.testing.assert_allclose(slope, [1, 0, 1], rtol=1e-5)


def test_symlog_keeps_its_dtype():
    x = jnp.array([-3, 0, 300], jnp.bfloat16)
    assert symlog(x).dtype == symexp(symlog(x)).dtype == jnp.bfloat16


# B2: bins


def test_dreamer_bins():
    bins = np.array(DREAMER.bins)
    assert (len(bins), bins[127]) == (255, 0.0)
    np.testing.assert_allclose(bins[[128, 130, 254]], [0.17055759, 0.60390407, 4.8516518e8], rtol=1e-6)
    assert (bins == -bins[::-1]).all()
    whole = np.asarray(symexp(jnp.linspace(-20, 20, 255)))
    assert (np.abs(bins - whole) / np.maximum(1, np.abs(bins))).max() <= 2e-6


def test_tdmpc2_bins():
    bins = np.array(TDMPC2.bins)
    np.testing.assert_allclose(bins, np.linspace(-10, 10, 101), atol=1e-6)
    assert bins[50] == 0.0
    assert (bins == -bins[::-1]).all()


@pytest.mark.parametrize(
    ("num_bins", "vmin", "vmax"), [(20, -3.0, 5.0), (21, -3.0, 5.0), (2, -1.0, 1.0), (16, -4.0, 4.0)]
)
def test_tdmpc2_bins_need_not_be_odd_nor_around_zero(num_bins, vmin, vmax):
    two_hot = tdmpc2_two_hot(num_bins, vmin, vmax)
    np.testing.assert_allclose(two_hot.bins, np.linspace(vmin, vmax, num_bins), atol=1e-6)
    logits = jax.random.normal(jax.random.key(0), (7, num_bins))
    expected = symexp((jax.nn.softmax(logits) * jnp.asarray([two_hot.bins])).sum(-1))
    np.testing.assert_allclose(two_hot.decode(logits), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TwoHot((0.0,), "identity"), "two-hot needs 2 bins or more, got 1; raise num_bins"),
        (lambda: TwoHot((-1.0, 0.0, 2.0), "identity"), r"must be mirrored around their middle 0\.5"),
        (lambda: tdmpc2_two_hot(vmin=2, vmax=-2), "vmin=2 below vmax=-2"),
        (lambda: tdmpc2_two_hot(num_bins=1), "num_bins=1 of 2 or more"),
    ],
)
def test_impossible_bins_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# B2: encoding


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        # 5e-6 from the numbers of the block specification, whose bins came from another version's expm1
        (1.0, {131: 0.61732686, 132: 0.38267314}),
        (-3.7, {117: 0.8155647, 118: 0.18443531}),
        (0.0, {127: 1}),
        (1e10, {254: 1}),
        (-1e10, {0: 1}),
        (DREAMER.bins[130], {130: 1}),
    ],
)
def test_dreamer_encoding_pinned(y, expected):
    assert weights(DREAMER, y) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (1.0, {53: 0.5342636, 54: 0.4657364}),
        (-3.7, {42: 0.73781204, 43: 0.26218796}),
        (0.0, {50: 1}),
        (1e10, {100: 1}),
        (-1e10, {0: 1}),
        (22025.0, {99: 1.0681152e-4, 100: 0.9998932}),  # so only when rounded in the order written
    ],
)
def test_tdmpc2_encoding_pinned(y, expected):
    assert weights(TDMPC2, y) == pytest.approx(expected, rel=1e-5)


def test_interpolation_is_in_raw_space_for_dreamer_and_in_symlog_space_for_tdmpc2():
    """On one pair of bins the two spaces give 0.3827 and 0.4015 of the weight of 1.0 to the upper bin."""
    low, high = DREAMER.bins[131], DREAMER.bins[132]
    raw = (1 - low) / (high - low)
    log = (np.log1p(1) - np.log1p(low)) / (np.log1p(high) - np.log1p(low))
    assert (raw, log) == (pytest.approx(0.3827, abs=1e-4), pytest.approx(0.4015, abs=1e-4))
    assert weights(DREAMER, 1.0)[132] == pytest.approx(raw, abs=1e-5)
    low, high = np.expm1(TDMPC2.bins[53]), np.expm1(TDMPC2.bins[54])
    raw = (1 - low) / (high - low)
    assert abs(weights(TDMPC2, 1.0)[54] - raw) > 0.01


def test_search_and_division_find_the_same_weights():
    y = np.random.default_rng(0).uniform(-3e4, 3e4, 10_000).astype(np.float32)
    searched = TwoHot(TDMPC2.bins, "symlog")
    # float32 rounding of symlog(y) near +-10, divided by the bin width of 0.2
    np.testing.assert_allclose(searched.encode(y), TDMPC2.encode(y), atol=2e-5)


@BOTH
@given(y=finite)
def test_weights_sum_to_one_on_two_neighbours(two_hot, y):
    w = np.asarray(two_hot.encode(jnp.float32(y)))
    np.testing.assert_allclose(w.sum(), 1, rtol=1e-6)
    assert (w >= 0).all()
    assert all(b - a == 1 for a, b in pairwise(np.nonzero(w)[0]))
    assert np.count_nonzero(w) <= 2


# B2: decoding


@BOTH
def test_uniform_logits_decode_to_exactly_zero(two_hot):
    """A plain sum over DreamerV3's bins gives 2.0 here, a sum of (p_i b_i + p_j b_j) gives 0.17 under jit."""
    compiled = jax.jit(two_hot.decode)
    for shape in ((), (3,), (64, 5)):
        for level in (0.0, 3.7, -11.3):
            assert not np.asarray(compiled(jnp.full((*shape, len(two_hot.bins)), level))).any()
    assert not np.asarray(two_hot.decode(jnp.zeros((3, len(two_hot.bins))))).any()


def test_a_plain_sum_over_dreamer_bins_is_not_zero():
    """What the test above protects from: float32 rounding of terms as large as 2e6."""
    terms = np.float32(1 / 255) * np.array(DREAMER.bins, np.float32)
    assert abs(np.add.accumulate(terms)[-1]) > 0.1


def test_decoding_pinned():
    np.testing.assert_allclose(DREAMER.decode(jnp.linspace(-1, 1, 255)), 2.4558884e7, rtol=1e-5)
    np.testing.assert_allclose(TDMPC2.decode(jnp.linspace(-1, 1, 101)), 23.267637, rtol=2e-6)


def test_tdmpc2_maps_back_after_the_expectation():
    """symexp(E[b]) = 23.3; E[symexp(b)] would be 2132.8."""
    logits = jnp.linspace(-1, 1, 101)
    other = (jax.nn.softmax(logits) * symexp(jnp.asarray(TDMPC2.bins))).sum()
    assert other == pytest.approx(2132.78, rel=1e-4)
    assert TDMPC2.decode(logits) == pytest.approx(23.2676, rel=1e-4)


@BOTH
@pytest.mark.parametrize("y", [1.0, -3.7, 123.4])
def test_decoding_inverts_encoding(two_hot, y):
    np.testing.assert_allclose(two_hot.decode(jnp.log(two_hot.encode(jnp.float32(y)))), y, rtol=1e-6)


# B2: cross-entropy


@BOTH
@pytest.mark.parametrize("y", [0.0, 1.0, -3.7, 1e10])
def test_cross_entropy_of_uniform_logits_is_log_k(two_hot, y):
    k = len(two_hot.bins)
    assert {255: 5.5412636, 101: 4.6151205}[k] == pytest.approx(np.log(k))
    np.testing.assert_allclose(two_hot.cross_entropy(jnp.zeros(k), jnp.float32(y)), np.log(k), rtol=1e-6)


def test_cross_entropy_pinned():
    ce = lambda two_hot: two_hot.cross_entropy(jnp.linspace(-1, 1, len(two_hot.bins)), jnp.float32(1.0))
    np.testing.assert_allclose([ce(DREAMER), ce(TDMPC2)], [5.669425, 4.710373], rtol=1e-6)


@BOTH
def test_gradient_is_softmax_minus_target_and_none_reaches_the_target(two_hot):
    logits, y = jax.random.normal(jax.random.key(0), (len(two_hot.bins),)), jnp.float32(2.5)
    to_logits, to_y = jax.grad(two_hot.cross_entropy, argnums=(0, 1))(logits, y)
    np.testing.assert_allclose(to_logits, jax.nn.softmax(logits) - two_hot.encode(y), atol=1e-6)
    np.testing.assert_allclose(to_logits.sum(), 0, atol=1e-6)
    assert to_y == 0


@BOTH
def test_all_of_it_is_float32_whatever_the_networks_compute_in(two_hot):
    logits = jnp.linspace(-1, 1, len(two_hot.bins)).astype(jnp.bfloat16)
    y = jnp.asarray(1.0, jnp.bfloat16)
    assert (
        two_hot.encode(y).dtype == two_hot.decode(logits).dtype == two_hot.cross_entropy(logits, y).dtype == jnp.float32
    )
    exact = two_hot.decode(logits.astype(jnp.float32))
    np.testing.assert_array_equal(two_hot.decode(logits), exact)
