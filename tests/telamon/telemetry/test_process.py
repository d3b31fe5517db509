"""What is told of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import psutil
import pytest

from telamon.telemetry.process import resident_bytes


def test_memory_that_is_in_use():
    before = resident_bytes()
    held = np.ones(2**23)  # 64 MiB
    assert resident_bytes() - before > held.nbytes // 2
    # what another reader tells a moment later
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert resident_bytes(os.getpid()) == pytest.approx(resident_bytes(), rel=0.1)


def test_a_process_that_has_ended_has_none():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(OSError):
        resident_bytes(process.pid)
