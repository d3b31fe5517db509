"""The command itself: one run that is stopped, goes on and learns."""

from __future__ import annotations

import signal

import pytest

from learner import checkpoint
from telamon.telemetry.writer import read_metrics, series
from tests.e2e.processes import TINY_ARGS, Process, said

pytestmark = pytest.mark.e2e


def test_a_run_is_stopped_resumed_and_learns(tmp_path):
    # An action (1, 1) pays 1 + 2 in each of 7 steps: 21 is the best return, and random actions get 0 +- 3.4.
    run_dir = tmp_path / "run"
    command = [
        "train", "tdmpc2", "counting:continuous", *TINY_ARGS, "--agent.iterations", "3", "--run-dir", str(run_dir),
        "--steps", "600", "--log-every", "20", "--eval.every", "200", "--eval.episodes", "2",
        "--checkpoint.every", "100",
    ]  # fmt: skip
    with Process(command, tmp_path / "cache") as first:
        assert first.wait_for(lambda: said(run_dir, "loss/"))
        first.send(signal.SIGINT)
        code, out, err = first.finish()
    assert (code, err) == (130, "")
    assert "memory when full: replay 0.00 GiB" in out
    assert "repeat the command with --resume to continue" in out
    assert len(checkpoint.names(run_dir / "checkpoints")) in (1, 2)

    code, out, err = Process([*command, "--resume"], tmp_path / "cache").finish()
    assert (code, err) == (0, "")
    assert "resumed from checkpoint" in out
    assert {p.name for p in run_dir.iterdir()} >= {"config.yaml", "metrics.jsonl", "log.txt", "checkpoints", "replay"}
    steps, returns = series(read_metrics(run_dir), "eval/return")
    assert steps.tolist() == [0, 200, 400, 600]
    assert returns[0] < 9
    assert returns[-1] > 15, returns
    losses, _ = series(read_metrics(run_dir), "loss/total_loss")
    assert losses.tolist() == [31, *range(40, 601, 20)]

    code, _, err = Process(command, tmp_path / "cache").finish()
    assert code == 1
    assert err == f"telamon: {run_dir} already holds a run; add --resume to continue it, or --run-dir for another\n"
