"""Runs on Ray by real processes; `bench/chaos_launch.py` does the killing for longer, and of whole nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import chaos_launch
from bench.chaos_launch import Run, check_tables, kill, kill_driver, pid_of, report, tiny, works
from deploy.loading import load_agent
from telamon.telemetry.writer import read_metrics, series
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.ray]

ENDLESS = 10**9


def environment(tmp_path: Path) -> dict[str, str]:
    """Of a command whose compiled programs need not be fast. It compiles where no other test does."""
    return {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "PYTHONUNBUFFERED": "1",
    }


def options(steps: int, *more: str) -> list[str]:
    return ["tdmpc2", "counting:continuous", *tiny(), "--agent.buffer-size", "200000", "--steps", str(steps),
            "--eval.episodes", "2", "--restarts", "1000", *more]  # fmt: skip


def telamon(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def gone(pids: list[int | None]) -> None:
    until(lambda: not any(pid is not None and chaos_launch.alive(pid) for pid in pids))


def test_a_run_goes_on_whatever_dies_and_changes_its_size(tmp_path):
    args = options(ENDLESS, "--actors", "2", "--replay-shards", "2", "--eval.every", "500", "--checkpoint.every", "500")
    run = Run(tmp_path / "run", args, environment(tmp_path))
    run.start()
    try:
        run.until(works)
        for part in ("actor-0", "shard-0", "learner"):
            story = kill(run, part)
            assert story["version_after"] >= story["version_before"], part
            assert story["rows_after"] > story["rows_before"], part

        assert telamon("scale", str(run.run_dir), "--actors", "3").returncode == 0
        run.until(lambda s: pid_of(s, "actor-2") is not None and s.numbers["actors_running"] == 3)
        refused = telamon("scale", str(run.run_dir), "--actors", "9")
        assert refused.returncode == 1
        assert "actors=9 must be 2 (one for each replay shard) to 4 (max_actors" in refused.stderr
        assert telamon("scale", str(run.run_dir), "--actors", "2").returncode == 0
        shown = run.until(lambda s: "actor-2" not in [part.name for part in s.parts])

        seen = telamon("status", str(run.run_dir))
        assert seen.returncode == 0
        assert all(part.name in seen.stdout for part in shown.parts)

        story = kill_driver(run)
        assert story["version_after"] > story["version_before"]
        last = run.until(works)
        pids = [pid_of(last, part.name) for part in last.parts]
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    finally:
        run.process.kill()
    gone(pids)
    found = report(run, counting=True)
    assert found["faults"] == []
    assert found["state"] == "stopped"
    assert found["rows"] == found["rows_counted"]
    assert found["rings"] == 3
    assert found["abandoned"] > 0
    assert found["steps_monotone"]
    assert telamon("status", str(run.run_dir)).returncode == 1
    assert "Traceback" not in run.run_dir.with_suffix(".out").read_text()


def test_a_run_ends_by_itself_with_all_that_a_local_one_leaves(tmp_path):
    """And with the number of updates that its rows are worth."""
    run = Run(tmp_path / "run", options(1500, "--eval.every", "400", "--log-every", "100"), environment(tmp_path))
    run.start()
    assert run.end() == 0
    status = run.status()
    assert status.state == "finished"
    assert status.numbers["train_ratio"] == pytest.approx(status.numbers["asked_ratio"], rel=0.02)
    found = check_tables(run.run_dir, counting=True)
    assert (found.faults, found.abandoned) == ([], 0)
    rows = read_metrics(run.run_dir)
    for key in ("train/return", "eval/return", "loss/total_loss", "cluster/snapshot_lag_versions"):
        assert series(rows, key)[0].size, key
    trained = load_agent(run.run_dir)
    assert trained.counters["updates"] == status.numbers["updates"]
    assert trained.counters["rows"] == found.rows
    assert {p.name for p in (run.run_dir / "logs").iterdir()} >= {
        "learner.log", "actor-0.log", "actor-1.log", "shard-0.log", "evaluator.log", "ray"
    }  # fmt: skip
    assert (run.run_dir / "token").stat().st_mode & 0o777 == 0o600
    again = telamon("launch", *options(1500), "--run-dir", str(run.run_dir))
    assert again.returncode == 1
    assert "already holds a run" in again.stderr


def test_what_cannot_be_ends_with_one_sentence(tmp_path):
    refused = telamon(
        "launch", *options(1500, "--agent.batch-size", "9", "--learners", "2"), "--run-dir", str(tmp_path / "a")
    )
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == ("telamon: agent.batch_size=9 cannot be split evenly over learners=2")
    assert not (tmp_path / "a").exists()
