"""What others see of a run of one process."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from deploy import running, standing
from deploy.config import EvalConfig
from deploy.standing import Standing, goes_to
from telamon.envs.base import EnvError
from telamon.telemetry.live import LiveView
from telamon.telemetry.writer import read_metrics, series
from tests.harness import after, once, probing, stop


def test_a_finished_run_has_said_how_it_stood(monkeypatch, tmp_path):
    run = probing(monkeypatch, eval=EvalConfig(every=60, episodes=2)).run(tmp_path / "run")
    found = running.read(tmp_path / "run")
    assert (found.state, found.command, found.alive) == ("finished", "train", False)
    assert found.summary == "60 of 60 env steps, 59 updates"
    assert found.numbers["rows"] == run.counters.rows
    assert found.numbers["asked_env_steps"] == 60
    _, returns = series(read_metrics(run.run_dir), "eval/return")
    assert found.numbers["eval/return"] == returns[-1]
    (part,) = found.parts
    assert part.name == "train"
    assert part.where.endswith(f"pid {os.getpid()}")
    assert part.now == "done"
    assert part.memory is not None
    assert part.memory > 2**20


def test_a_run_that_was_stopped_or_has_failed_says_so(monkeypatch, tmp_path):
    harness = probing(monkeypatch)
    harness.run(tmp_path / "run", stopped=after(30, stop))
    assert running.read(tmp_path / "run").state == "stopped"
    harness.run(tmp_path / "run", resume=True)
    assert running.read(tmp_path / "run").state == "finished"
    with pytest.raises(EnvError):
        probing(monkeypatch, env={"terminate_every": 2}).run(tmp_path / "failing")
    assert running.read(tmp_path / "failing").state == "failed"


def test_a_run_is_seen_while_it_goes_on(monkeypatch, tmp_path):
    seen = []

    def look(run):
        live = LiveView("a run", 60, Console(file=io.StringIO()))
        live.update(status="training", metrics={"train/return": 4.0, "eval/return": 7.0, "loss/total_loss": 1.0})
        now = [0.0]
        made = Standing(run, live.progress, lambda: now[0])
        seen.append(made.status("running"))
        run.counters.updates += 20
        now[0] = 5.0
        seen.append(made.status("running"))
        run.counters.updates -= 20
        return True

    probing(monkeypatch).run(tmp_path / "run", stopped=once(lambda run: run.counters.updates > 3, look))
    first, second = seen
    assert first.rates == {}
    assert second.rates == {"env_steps": 0.0, "updates": 4.0, "rows": 0.0}
    assert second.numbers["train/return"] == 4.0
    assert second.numbers["eval/return"] == 7.0
    assert "loss/total_loss" not in second.numbers
    assert second.parts[0].now == "training"


def test_what_takes_the_time_is_said_in_words():
    assert goes_to({}) == goes_to({"updates": 0.04}) == ""
    shares = {"acting": 0.2, "updates": 0.701, "reports": 0.04, "batches": 0.05}
    assert goes_to(shares).endswith("its time: 70% updates, 20% acting, 5% batches")


def test_the_seconds_of_a_loop_are_shared_out(monkeypatch, tmp_path):
    run = probing(monkeypatch, eval=EvalConfig(every=30, episodes=2)).run(tmp_path / "run")
    spent = standing.spent(run)
    assert set(spent) >= {"updates", "acting", "environments", "evaluations", "checkpoints"}
    done = {name for name, seconds in spent.items() if seconds > 0}
    assert done >= {"updates", "batches", "acting", "environments", "replay", "evaluations", "checkpoints"}
    assert run.stopwatch.doing == "other"
    lines = [line for line in read_metrics(run.run_dir) if "time/learner_compute_ratio" in line]
    assert lines
    for line in lines:
        for who in ("actors", "learner"):
            shares = [value for key, value in line.items() if key.startswith(f"time/{who}_")]
            assert sum(shares) == pytest.approx(1)


def test_a_loop_that_was_interrupted_in_an_evaluation_does_something_else(monkeypatch, tmp_path):
    harness = probing(monkeypatch, eval=EvalConfig(every=1000, episodes=2))
    seen = []

    def stopped(run):
        seen.append(run.stopwatch.doing)
        return "evaluation" in seen

    run = harness.run(tmp_path / "run", stopped=stopped)
    assert seen == ["other", "evaluation", "other"]
    assert run.counters.rows == 0
