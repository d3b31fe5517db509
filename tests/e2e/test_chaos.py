"""The replay under fire, by real processes; `bench/chaos.py` says what is checked, and does it for longer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from bench import chaos

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_nothing_acknowledged_is_lost_however_often_the_server_is_killed():
    # not pytest's own folder: a socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="telamon-chaos-") as directory:
        report = chaos.run(Path(directory), kills=20, seconds=900, seed=11)
    print(report)
    assert report.kills >= 20  # otherwise the machine was too slow to show anything
    assert report.writer_kills > 0
    assert report.ticks_taken_back > 0  # some kills came in the middle of a tick
    assert report.rows > 3 * chaos.SPEC.capacity * chaos.SPEC.max_envs  # the rings went round
    assert report.stale > 0
    assert report.written_back > 0
