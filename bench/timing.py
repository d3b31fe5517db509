"""How the benchmarks measure: interleaved with a calibration, in wall and CPU time, as JSON lines.

`cal` is one jitted float32 product of 1024 x 1024 matrices, timed between the repetitions of the case in the same run:
a speed in cal compares across machines and noisy hours. On a busy machine judge by CPU time.
"""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

SIZE = 1024
WARM_UP = 3


@dataclass(frozen=True)
class Times:
    """Milliseconds per call."""

    wall: list[float]
    cpu: list[float]


def interleaved(case: Callable[[], Any], repetitions: int) -> tuple[Times, Times]:
    """(case, calibration), one after the other `repetitions` times, warm-up dropped. `case` returns device arrays."""
    product = jax.jit(lambda a: a @ a)
    a = jnp.ones((SIZE, SIZE), jnp.float32)
    calls = (case, lambda: product(a))
    times = Times([], []), Times([], [])
    for i in range(WARM_UP + repetitions):
        for call, found in zip(calls, times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            if i >= WARM_UP:
                found.wall.append(1e3 * (time.perf_counter() - wall))
                found.cpu.append(1e3 * (time.process_time() - cpu))
    return times


def report(name: str, case: Times, calibration: Times, flops: int, **config: Any) -> dict[str, Any]:
    """One line of results. `share` is the case's rate of products over the calibration's, by CPU time."""
    wall, cpu = statistics.median(case.wall), statistics.median(case.cpu)
    cal_wall, cal_cpu = statistics.median(calibration.wall), statistics.median(calibration.cpu)
    return {
        "case": name,
        **config,
        "wall_ms": round(wall, 2),
        "wall_ms_min": round(min(case.wall), 2),
        "cpu_ms": round(cpu, 2),
        "cal_ms": round(cal_wall, 2),
        "cal_cpu_ms": round(cal_cpu, 2),
        "cal": round(wall / cal_wall, 2),
        "cpu_cal": round(cpu / cal_cpu, 2),
        "gflop": round(flops / 1e9, 2),
        "share": round(flops / cpu / (2 * SIZE**3 / cal_cpu), 3),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": version("jax"),
        "commit": commit(),
    }


def commit() -> str:
    """Of the checkout, with a + where files differ from it."""
    git = lambda *args: subprocess.run(
        ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "-uno") else "")
