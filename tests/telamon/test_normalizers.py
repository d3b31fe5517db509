"""DreamerV3's return scale and TD-MPC2's Q scale: pinned numbers, and how they differ (docs/numerics.md, B3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.normalizers import ReturnNormalizer, RunningScale, percentiles

DREAMER, TDMPC2 = ReturnNormalizer(), RunningScale()


def scales(normalizer, batches) -> list[float]:
    """The scale after each batch."""
    state, out = normalizer.init(), []
    update = jax.jit(normalizer.update)
    for batch in batches:
        state = update(state, jnp.asarray(batch, jnp.float32))
        out.append(float(normalizer.scale(state) if normalizer is DREAMER else state))
    return out


def test_percentiles_interpolate_linearly():
    """Of 256 elements: positions 12.75 and 242.25."""
    low, high = percentiles(jnp.arange(256.0), 5, 95)
    np.testing.assert_allclose([low, high], [12.75, 242.25], rtol=1e-6)
    np.testing.assert_allclose(high - low, 229.5, rtol=1e-6)


RAMPS = [np.arange(256) * s for s in (0.001, 0.01, 1, 10)]


def test_ramps_pinned():
    np.testing.assert_allclose(scales(DREAMER, RAMPS), [1.0, 1.0, 2.3199697, 25.246771], rtol=1e-6)
    np.testing.assert_allclose(scales(TDMPC2, RAMPS), [1.0, 1.01295, 3.2978203, 26.214842], rtol=1e-6)


def test_dreamer_percentile_averages_pinned():
    state = DREAMER.init()
    for batch in RAMPS:
        state = DREAMER.update(state, jnp.asarray(batch, jnp.float32))
    np.testing.assert_allclose(state, [1.4025983, 26.649368], rtol=1e-6)


def test_two_averages_equal_one_of_the_range():
    state, r = DREAMER.init(), 0.0
    for batch in RAMPS:
        state = DREAMER.update(state, jnp.asarray(batch, jnp.float32))
        r = 0.99 * r + 0.01 * (np.percentile(batch, 95) - np.percentile(batch, 5))
    np.testing.assert_allclose(DREAMER.scale(state), max(1, r), rtol=1e-6)


def test_a_constant_range_pinned():
    batches = [np.linspace(0, 50 / 0.9, 101)] * 100  # 5th to 95th percentile: 50
    assert scales(DREAMER, batches)[-1] == pytest.approx(31.698427, rel=1e-5)
    assert scales(TDMPC2, batches)[-1] == pytest.approx(32.064415, rel=1e-5)


def test_clamping_before_or_after_the_average_shows_where_ranges_alternate():
    """Ranges 0 and 3: DreamerV3 averages to 1.5 and then clamps; TD-MPC2 clamps 0 to 1 and averages to 2."""
    batches = [np.zeros(101), np.linspace(0, 3 / 0.9, 101)] * 1000
    assert scales(DREAMER, batches)[-1] == pytest.approx(1.50753, rel=1e-5)
    assert scales(TDMPC2, batches)[-1] == pytest.approx(2.00502, rel=1e-5)


def test_small_returns_are_never_magnified():
    tiny = [np.linspace(0, 1e-3, 101)] * 50
    assert scales(DREAMER, tiny) == [1.0] * 50
    assert scales(TDMPC2, tiny) == [1.0] * 50


def test_no_gradient_flows_through_a_scale():
    x = jnp.arange(64.0)
    through_dreamer = jax.grad(lambda x: DREAMER.scale(DREAMER.update(DREAMER.init(), 100 * x)))(x)
    through_tdmpc2 = jax.grad(lambda x: TDMPC2.update(TDMPC2.init(), 100 * x))(x)
    assert not np.asarray(through_dreamer).any()
    assert not np.asarray(through_tdmpc2).any()


def test_statistics_are_float32():
    x = jnp.linspace(0, 1000, 256).astype(jnp.bfloat16)
    assert TDMPC2.update(TDMPC2.init(), x).dtype == jnp.float32
    assert {leaf.dtype for leaf in DREAMER.update(DREAMER.init(), x)} == {jnp.dtype("float32")}
