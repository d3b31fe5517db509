"""`telamon doctor`: what this machine has, and what a run would miss."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from telamon.envs.registry import BACKENDS, list_envs

Verdict = Literal["ok", "note", "missing"]
GIB = 2**30


class Check(NamedTuple):
    """One finding. `note`: training works without it; `missing`: it does not."""

    name: str
    verdict: Verdict
    text: str


def examine(run_root: Path) -> list[Check]:
    """Every check, in the order in which they matter. Takes some seconds: it compiles, steps and renders."""
    return [
        _python(), _libraries(), _devices(), _speed(), _memory(), _disk(run_root),
        _environments(), _rendering(), _video(),
    ]  # fmt: skip


def _python() -> Check:
    here = sys.version_info[:2]
    supported = here in ((3, 11), (3, 12))
    text = f"Python {platform.python_version()}"
    return Check("python", "ok" if supported else "note", text if supported else f"{text}: tested with 3.11 and 3.12")


def _libraries() -> Check:
    found, absent = [], []
    for name in ("telamon", "jax", "flax", "optax", "orbax-checkpoint", "numpy", "tyro", "rich", "tensorboardX"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(name)
    if absent:
        return Check("libraries", "missing", f"{', '.join(absent)}: pip install telamon brings them")
    return Check("libraries", "ok", ", ".join(found))


def _devices() -> Check:
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind}, backend {jax.default_backend()}"
    if jax.default_backend() != "cpu":
        return Check("devices", "ok", text)
    if shutil.which("nvidia-smi"):
        return Check("devices", "note", f"{text}, though there is an NVIDIA GPU: pip install 'telamon[cuda]' uses it")
    return Check("devices", "ok", f"{text}, {os.cpu_count()} cores")


def _speed() -> Check:
    """The matrix product that a decision and an update mostly consist of."""
    n = 1024
    product = jax.jit(lambda a: a @ a)
    a = jnp.ones((n, n))
    product(a).block_until_ready()
    seconds = min(_seconds(lambda: product(a).block_until_ready()) for _ in range(10))
    return Check("speed", "ok", f"{2 * n**3 / seconds / 1e9:.0f} GFLOP/s in a float32 product of {n} x {n} matrices")


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _memory() -> Check:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return Check("memory", "ok" if size >= 4 else "note", f"{size:.1f} GiB; replay may take 80 % of it (memory_limit)")


def _disk(run_root: Path) -> Check:
    free = shutil.disk_usage(run_root).free / GIB
    if not os.access(run_root, os.W_OK):
        return Check("disk", "missing", f"{run_root} cannot be written to; choose another place with --run-dir")
    return Check("disk", "ok" if free >= 2 else "note", f"{free:.1f} GiB free where runs/ would be ({run_root})")


def _environments() -> Check:
    rows = list_envs()
    text = "; ".join(f"{r.prefix} ({len(r.ids)})" if r.missing is None else f"no {r.prefix}: {r.missing}" for r in rows)
    usable = [r for r in rows if r.missing is None and BACKENDS[r.prefix].extra is not None]
    return Check("environments", "ok" if usable else "missing", text)


def _rendering() -> Check:
    """In a process of its own: MuJoCo's choice of a renderer lasts, and a broken driver can take its process along."""
    if find_spec("dm_control") is None:
        return Check("rendering", "note", "not tried: dm_control is not installed")
    gl = os.environ.get("MUJOCO_GL", "egl" if sys.platform == "linux" and not os.environ.get("DISPLAY") else "")
    code = "from dm_control import suite; print(suite.load('cartpole', 'swingup').physics.render(48, 64).shape)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **({"MUJOCO_GL": gl} if gl else {})},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    how = f"MUJOCO_GL={gl or 'unset'}"
    if done.returncode == 0:
        return Check("rendering", "ok", f"MuJoCo draws with {how}")
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Check("rendering", "note", f"no videos with {how}: {reason} (Debian: apt install libegl1 libgl1-mesa-dri)")


def _video() -> Check:
    if find_spec("imageio_ffmpeg") is None:
        return Check("video", "note", "telamon eval --video needs pip install 'telamon[video]'")
    return Check("video", "ok", f"imageio-ffmpeg {version('imageio-ffmpeg')}")
