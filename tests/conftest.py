"""Strict settings for every test, put into the environment so that child processes inherit them."""

from __future__ import annotations

import os

import hypothesis
import pytest

# Derives from the profile that hypothesis chose: a fixed seed under CI, fresh examples elsewhere.
# No deadline: a first example may compile.
hypothesis.settings.register_profile("telamon", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("telamon")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module, and so before JAX, is imported."""
    # One compilation cache per worker: JAX writes entries in place, so two writers could tear them.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir(f"jax-{worker}"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    # [B] + [T, B] is a bug more often than a wish: broadcasting has to be written out.
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    # float32 products in float32 on every backend, or tolerances would mean different things.
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
