"""Strict settings for every test, put into the environment so that child processes inherit them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
    # Ray reads this when it is imported. Unset it would depend on a file in the home directory.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # by default Ray's processes give way to all others: tests would starve
    # [B] + [T, B] is a bug more often than a wish: broadcasting has to be written out.
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    # float32 products in float32 on every backend, or tolerances would mean different things.
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this process, of eight CPUs as it believes. Tests that use it are marked slow and ray.

    Its processes find the checkout, and have no compilation cache: two that write an entry could tear it.
    """
    import ray  # not for those who test without it

    variables = {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    for attempt in range(5):  # its own processes have 30 seconds to start, which a busy machine may exceed
        try:
            ray.init(
                address="local", num_cpus=8, include_dashboard=False, object_store_memory=200_000_000,
                _node_ip_address="127.0.0.1", log_to_driver=False, logging_level="error",
                runtime_env={"env_vars": variables},
            )  # fmt: skip
            break
        except Exception:  # Ray raises nothing more specific
            ray.shutdown()
            if attempt == 4:
                raise
    try:
        yield
    finally:
        ray.shutdown()
