"""Two processes of a learner, with two devices each: the same orders, the same state, one of them published."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial

import jax
import pytest

from learner import checkpoint, update
from tests.learner.parts import AGENT
from tests.learner.processes import DUE
from tests.waiting import SECONDS

pytestmark = pytest.mark.slow


def test_two_processes_carry_out_the_same_orders(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    start = lambda rank: subprocess.Popen(
        [sys.executable, "-m", "tests.learner.processes", str(rank), "2", coordinator, str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    processes = [start(rank) for rank in range(2)]
    try:
        ended = [process.communicate(timeout=10 * SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ended
    leading, other = (json.loads(out.splitlines()[-1]) for out, _ in ended)
    for found in (leading, other):
        assert (found["reason"], found["updates"], found["devices"]) == ("finished", DUE, 4)
        assert found["drawn"] == [2]  # half a batch each
        assert (found["torn"], found["misplaced"]) == (0, 0)
    assert leading["digest"] == other["digest"]
    assert leading["version"] == other["version"]
    assert leading["published"] == list(range(1, leading["version"] + 1))
    assert other["published"] == []
    name = leading["checkpoint"]
    assert name == other["checkpoint"] == f"{100:012d}-{DUE:012d}"
    like = jax.eval_shape(partial(update.fresh, AGENT), jax.random.key(0))
    assert int(checkpoint.load(tmp_path / "checkpoints", name, like).state.train.updates) == DUE
