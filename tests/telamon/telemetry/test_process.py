"""What is told of a process."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import psutil
import pytest

from telamon.telemetry.process import resident_bytes


def test_memory_that_is_in_use():
    size = 2**26
    before = resident_bytes()
    with mmap.mmap(-1, size) as held:  # no allocator's memory, which may have it already
        held.write(b"x" * size)
        assert resident_bytes() - before > size // 2
    # what another reader tells a moment later
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert resident_bytes(os.getpid()) == pytest.approx(resident_bytes(), rel=0.1)


def test_a_process_that_has_ended_has_none():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(OSError):
        resident_bytes(process.pid)
