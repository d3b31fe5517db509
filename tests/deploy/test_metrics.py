"""The page of a run as a whole."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from deploy import metrics
from deploy.discovery import Target, Targets
from deploy.metrics import DriverMetrics, RunFigures

PAGES = {"learner": 1, "actor": 2}


@pytest.fixture
def figures(tmp_path) -> RunFigures:
    return RunFigures(
        "tdmpc2", "dmc:cartpole-swingup", 3, "0.1.0", tmp_path, 5000, state="running", env_steps=1200, rows=640,
        episodes=7, returns={"train": 12.5}, evaluated=1000, wanted={"actor": 2, "learner": 1},
        running={"actor": 1, "learner": 1}, restarts={"actor": 4}, turn_age=2.5, log_lines={"WARNING": 2},
    )  # fmt: skip


def sample(figures: RunFigures, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    DriverMetrics(lambda: figures, lambda: PAGES, registry)
    return registry.get_sample_value(f"telamon_driver_{name}", labels)


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("run_info", {"algorithm": "tdmpc2", "task": "dmc:cartpole-swingup", "seed": "3", "version": "0.1.0"}, 1),
        ("env_steps_total", {}, 1200),
        ("rows_total", {}, 640),
        ("episodes_total", {}, 7),
        ("turn_age_seconds", {}, 2.5),
        ("asked_env_steps", {}, 5000),
        ("evaluated_env_steps", {}, 1000),
        ("state", {"state": "running"}, 1),
        ("state", {"state": "failed"}, 0),
        ("return", {"of": "train"}, 12.5),
        ("return", {"of": "eval"}, None),
        ("targets", {"kind": "actor"}, 2),
        ("parts", {"kind": "actor", "state": "wanted"}, 2),
        ("parts", {"kind": "actor", "state": "running"}, 1),
        ("restarts_total", {"kind": "actor"}, 4),
        ("restarts_total", {"kind": "learner"}, 0),
        ("log_lines_total", {"level": "WARNING"}, 2),
        ("log_lines_total", {"level": "ERROR"}, 0),
    ],
)
def test_samples(figures, name, labels, value):
    assert sample(figures, name, **labels) == value


def test_disk_of_the_run_directory(figures):
    size, free = sample(figures, "disk_size_bytes"), sample(figures, "disk_free_bytes")
    assert 0 < free < size


def test_before_the_first_evaluation(figures):
    assert sample(replace(figures, evaluated=None), "evaluated_env_steps") == -1


def test_the_page_and_the_targets_beside_it(figures, tmp_path):
    targets = Targets(tmp_path)
    targets.update([Target("learner", "learner", "http://127.0.0.1:9/metrics")])
    with metrics.serving(lambda: figures, targets, "127.0.0.1", 0) as url:
        page = urllib.request.urlopen(url).read().decode()
        found = json.load(urllib.request.urlopen(url.removesuffix("metrics") + "targets"))
    assert "telamon_driver_env_steps_total 1200.0" in page
    assert 'telamon_driver_targets{kind="learner"} 1.0' in page
    assert found == json.loads(targets.text())
