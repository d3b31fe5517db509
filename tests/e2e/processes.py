"""Real `telamon` processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from deploy.config import flatten
from tests.harness import TINY

ROOT = Path(__file__).parents[2]
CODE = """
import json, signal, sys, time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from telamon.envs import counting

def hang(seconds):
    stop = signal.getsignal(signal.SIGINT)

    def asked(*how):
        stop(*how)
        said.write_text("asked")

    signal.signal(signal.SIGINT, asked)
    said.write_text("hangs")
    time.sleep(seconds)

options = json.loads(sys.argv.pop(1))
if "says" in options:
    said = Path(options.pop("says"))
    counting.time = SimpleNamespace(sleep=hang)
options["faults"] = [counting.Fault(**fault) for fault in options.get("faults", [])]
counting.make = partial(counting.make, **options)
from deploy.cli import main
main()
"""
"""The command, with counting environments of the options that come first.

One that hangs writes so into the file `says`, and that it was interrupted.
"""

TINY_ARGS = [
    part
    for key, value in flatten(asdict(TINY)).items()
    if value is not None and not isinstance(value, bool)
    for part in (f"--agent.{key.replace('_', '-')}", str(value))
]
"""TINY as the command line says it."""


class Process:
    """One `telamon` process; `cache` holds what it and its like have compiled."""

    def __init__(self, args: Sequence[str], cache: Path, counting: Mapping[str, Any] | None = None) -> None:
        # a run takes seconds, so what it compiles need not be fast code
        flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_COMPILATION_CACHE_DIR": str(cache)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CODE, json.dumps(counting or {}), *args],
            cwd=ROOT,
            env={**os.environ, **flags, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing outlives a test."""
        self._process.kill()
        self._process.communicate()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_for(self, reached: Callable[[], bool], seconds: float = 300) -> bool:
        """Waits until `reached()`; False where the process ended before."""
        deadline = time.monotonic() + seconds
        while not reached():
            if self._process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"not reached within {seconds} s"
            time.sleep(0.002)
        return True

    def finish(self, seconds: float = 300) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) once it has ended; killed where it does not end in time."""
        with self:
            out, err = self._process.communicate(timeout=seconds)
        return self._process.returncode, out, err


def said(run_dir: Path, text: str) -> bool:
    """Whether metrics.jsonl holds `text` already."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and text in path.read_text()
