"""The page for Prometheus of a run of one process, read while it goes on."""

from __future__ import annotations

import io
import json
import logging
import math
import socket
import sys
from contextlib import contextmanager
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from deploy import local, running
from deploy.config import EvalConfig
from deploy.discovery import TARGETS_FILE
from deploy.local import Extras
from tests.harness import TINY, after, probing
from tests.probe import Remembering
from tests.waiting import until

CONSOLE = Console(file=io.StringIO())


def read(url: str) -> str:
    with urlopen(url, timeout=60) as answer:
        return answer.read().decode()


class Samples(dict):
    """(name, labels) -> value."""

    def __init__(self, text: str):
        self.families = list(text_string_to_metric_families(text))
        for family in self.families:
            for sample in family.samples:
                self[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def of(self, name: str, /, **labels: str) -> float:
        return self[f"telamon_{name}", tuple(sorted(labels.items()))]


@contextmanager
def shown(harness, run_dir, resume=False, turns=80, before=lambda: None):
    """(run, page read at that turn, `before` which something happens) of a run with a page, which ends there."""
    looked = []

    def look(run):
        before()
        until(lambda: running.read(run_dir).state == "running")  # as the page has it, too
        assert f"metrics {page.url}" in running.read(run_dir).notes
        looked.append((read(page.url), (run_dir / TARGETS_FILE).read_text()))
        return True

    with harness.open(run_dir) as run, local.open_page(run_dir, 0) as page:
        ask = after(turns, look)
        local.execute(run, resume, CONSOLE, lambda: ask(run), page=page)
        text, targets = looked[0]
        assert json.loads(targets) == [
            {
                "targets": [page.url.split("/")[2]],
                "labels": {"run": str(run_dir), "role": "train", "part": "train", "instance": "train"},
            }
        ]
        assert "metrics" not in str(running.read(run_dir).notes)
        assert json.loads(read(page.url.replace("/metrics", "/targets"))) == []  # it has ended
        yield run, Samples(text)


def test_one_page_tells_of_actor_learner_replay_and_run(monkeypatch, tmp_path):
    harness = probing(monkeypatch, eval=EvalConfig(every=1000, episodes=2))
    with shown(harness, tmp_path / "run") as (run, page):
        c = run.counters
        assert page.of("actor_rows_total") == page.of("replay_appended_rows_total", table="run") == c.rows
        assert page.of("actor_env_steps_total") == page.of("driver_env_steps_total") == run.env_steps
        assert page.of("actor_snapshot_version") == page.of("learner_updates_total") == c.updates > 5
        assert page.of("actor_snapshot_lag_versions") == 0
        assert page.of("learner_trained_rows_total") == c.updates * run.agent.batch_size * run.agent.window_spec.length
        assert page.of("driver_asked_env_steps") == 60
        assert page.of("driver_state", state="running") == 1
        assert page.of("driver_parts", kind="train", state="wanted") == 1
        assert page.of("driver_targets", kind="train") == 1
        assert page.of("driver_evaluated_env_steps") == 0
        assert page.of("learner_checkpoint_seconds_count") == run.saved.checkpoints - 1 > 0  # the last one came later
        assert page.of("learner_stage", stage="training") == 1
        assert page.of("learner_seconds_total", doing="compute") > 0
        assert page.of("actor_seconds_total", doing="acting") > 0
        asked = page.of("learner_asked_replayed_rows_per_inserted_row")
        assert asked == run.agent.batch_size * run.agent.window_spec.length
        kept = page.of("learner_replayed_rows_per_inserted_row", over="run")
        assert kept == pytest.approx(asked * c.updates / c.rows)
        assert abs(page.of("learner_limiter_lead_rows")) <= page.of("learner_limiter_band_rows")
        assert page.of("learner_limiter_wait_seconds_total", side="learner") > 0
        assert page.of("learner_limiter_wait_seconds_total", side="writers") > 0
        assert page["process_resident_memory_bytes", ()] > 2**20
        returns = [sample for name, sample in page.items() if name == ("telamon_driver_return", (("of", "train"),))]
        assert len(returns) == 1
        known = json.dumps(sorted({family.name for family in page.families}))
        for group in ("telamon_actor_", "telamon_learner_", "telamon_replay_", "telamon_driver_", "process_"):
            assert group in known


def test_counters_of_a_resumed_run_begin_at_0_and_those_of_the_run_never_fall(monkeypatch, tmp_path):
    harness = probing(monkeypatch, random=5, kind=Remembering)
    with shown(harness, tmp_path / "run", turns=90) as (_, before):
        pass
    status = running.read(tmp_path / "run")
    running.write(
        running.RunStatus(**{**vars(status), "numbers": {**status.numbers, "env_steps": 1e6}}), tmp_path / "run"
    )
    with shown(harness, tmp_path / "run", resume=True, turns=0) as (run, page):
        assert page.of("actor_rows_total") == page.of("learner_updates_total") == 0
        assert page.of("replay_appended_rows_total", table="run") == page.of("learner_trained_rows_total") == 0
        assert page.of("learner_run_updates") == run.counters.updates >= before.of("learner_run_updates") > 0
        assert page.of("driver_rows_total") == run.counters.rows
        assert page.of("driver_env_steps_total") == 1e6
        assert math.isfinite(page.of("learner_metric", name=next(iter(run.metrics))))


def test_the_targets_of_a_run_that_fails_stay(monkeypatch, tmp_path):
    def fail(run):
        raise OSError("no space left")

    with probing(monkeypatch).open(tmp_path / "run") as run, local.open_page(tmp_path / "run", 0) as page:
        with pytest.raises(OSError, match="no space"):
            local.execute(run, False, CONSOLE, lambda: fail(run), page=page)
        assert json.loads(page.targets.text()) != []


def test_warnings_are_counted_while_it_is_shown(monkeypatch, tmp_path):
    def warn():
        logging.getLogger("deploy").warning("event=something")
        logging.getLogger("deploy").error("event=worse")

    handlers = list(logging.getLogger().handlers)
    with shown(probing(monkeypatch), tmp_path / "run", turns=4, before=warn) as (_, page):
        assert page.of("driver_log_lines_total", level="WARNING") == 1
        assert page.of("driver_log_lines_total", level="ERROR") == 1
    assert logging.getLogger().handlers == handlers


def test_a_taken_port_is_refused_before_anything_is_written(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=rf"{port} is in use by process .*; stop it, or give --metrics-port"):
            local.train(config(), tmp_path / "run", False, CONSOLE, Extras(metrics_port=port))
    assert not (tmp_path / "run").exists()


def test_without_its_libraries_it_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deploy.page", None)
    with pytest.raises(
        ValueError, match=r"metrics_port needs the extra `service` \(pip install 'telamon\[service\]'\)"
    ):
        local.train(config(), tmp_path / "run", False, CONSOLE, Extras(metrics_port=0))
    assert not (tmp_path / "run").exists()


def config():
    return local.RunConfig("tdmpc2", "counting:continuous", eval=EvalConfig(every=0), agent=TINY)


@pytest.mark.parametrize(
    ("changed", "said"), [({"profile": -1}, "profile=-1"), ({"metrics_port": 65536}, "0 to 65535")]
)
def test_what_is_shown_besides_has_bounds(changed, said):
    with pytest.raises(ValueError, match=said):
        Extras(**changed)
