"""The command with DreamerV3: one run that is stopped, goes on, reports, is evaluated and plotted."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from telamon.telemetry.writer import read_metrics, series
from tests.e2e.processes import Process, said

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_dreamerv3_from_start_to_picture(tmp_path):
    run_dir, cache = tmp_path / "run", tmp_path / "cache"
    command = [
        "train", "dreamerv3", "gym:CartPole-v1", "--preset", "debug", "--run-dir", str(run_dir), "--steps", "1200",
        "--log-every", "50", "--eval.every", "400", "--eval.episodes", "3", "--report.every", "300",
        "--report.keep", "2", "--checkpoint.every", "200",
    ]  # fmt: skip
    with Process(command, cache) as first:
        assert first.wait_for(lambda: said(run_dir, "report/"), seconds=600)
        first.send(signal.SIGINT)
        code, out, err = first.finish()
    assert (code, err) == (130, "")
    assert "dreamerv3 on gym:CartPole-v1: memory when full: replay" in out

    code, out, err = Process([*command, "--resume"], cache).finish(600)
    assert code == 0
    assert "resumed from checkpoint" in out
    (warning,) = err.splitlines()
    assert "event=episodes_abandoned env=gym:CartPole-v1" in warning  # Gymnasium's environments cannot be saved

    found = read_metrics(run_dir)
    for metric in ("loss/total_loss", "report/dyn_loss", "report/rec/obs_loss", "eval/return", "train/return"):
        steps, values = series(found, metric)
        assert steps[-1] >= 1190
        assert np.isfinite(values).all()
    # a row in a window of 12 trained ones at a time, 4 windows per update, 8 times each: an update every 6 rows
    last = found[-1]
    rows, updates = int(last["counters/rows"]), int(last["counters/updates"])
    assert 0.95 * rows / 6 - 20 < updates <= rows / 6
    assert last["counters/skipped_updates"] == 0
    pictures = sorted(p.name for p in (run_dir / "report").iterdir())
    assert len(pictures) == 2
    assert all(name.startswith("openloop-obs-") for name in pictures)

    code, out, err = Process(["eval", str(run_dir), "--episodes", "2"], cache).finish()
    assert (code, err) == (0, "")
    assert "mean return" in out

    picture = tmp_path / "curve.png"
    code, out, err = Process(["plot", str(run_dir), "--out", str(picture)], cache).finish()
    assert (code, err) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
