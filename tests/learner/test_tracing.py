"""Traces of some updates: when they begin and end, and that they hold what the documents say."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter

import jax
import pytest

from deploy import local
from learner import tracing
from learner.tracing import FOLDER, WARM_TICKS, WARM_UPDATES, Trace
from tests.harness import after, probing, stop


@pytest.fixture
def calls(monkeypatch):
    """What the profiler was told."""
    told = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, profiler_options: told.append("begin"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: told.append("end"))
    return told


def made(trace: Trace, calls, updates: int, ticks_per_update: int) -> list[tuple[str, int]]:
    """What was told, at which update of this process."""
    found = []
    for update in range(updates):
        trace.before_update(1000 + update * ticks_per_update)
        found += [(told, update) for told in calls]
        calls.clear()
    return found


def test_a_trace_holds_so_many_updates_once_the_loop_is_warm(calls, tmp_path):
    said = []
    assert made(Trace(5, tmp_path, said.append), calls, 100, 1) == [("begin", WARM_UPDATES), ("end", WARM_UPDATES + 5)]
    (sentence,) = said
    assert str(tmp_path) in sentence


def test_a_burst_is_not_what_one_wants_to_see(calls, tmp_path):
    trace = Trace(5, tmp_path, lambda text: None)
    assert made(trace, calls, 50, 0) == []
    for tick in range(WARM_TICKS):
        trace.before_update(1000 + tick)
        assert calls == []
    trace.before_update(1000 + WARM_TICKS)
    assert calls == ["begin"]


def test_a_run_that_ends_before_ends_its_trace(calls, tmp_path, caplog):
    caplog.set_level(logging.INFO, "learner")
    with tracing.tracing(100, tmp_path, lambda text: None) as trace:
        assert made(trace, calls, 15, 1) == [("begin", WARM_UPDATES)]
    assert calls == ["end"]
    assert f"event=profile folder={tmp_path} last_update=15" in caplog.text
    assert "profile_not_made" not in caplog.text
    calls.clear()
    with tracing.tracing(0, tmp_path, lambda text: None) as trace:
        assert made(trace, calls, 50, 1) == []
    assert calls == []
    assert "profile_not_made" not in caplog.text


def test_a_run_that_ends_before_it_is_warm_says_that_there_is_no_trace(calls, tmp_path, caplog):
    said = []
    with tracing.tracing(100, tmp_path, said.append) as trace:
        assert made(trace, calls, 3, 1) == []
    assert calls == []
    reason = "the run ended before it was warm, after 3 updates of this process"
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", f"event=profile_not_made reason={reason!r}")
    assert said == [f"no profile: {reason} (see docs/profiling.md)"]


def test_what_a_trace_of_a_run_holds(monkeypatch, tmp_path):
    (tmp_path / "console").touch()
    with (tmp_path / "console").open("w") as out, probing(monkeypatch, steps=200).open(tmp_path / "run") as run:
        ask = after(150, stop)
        console = local.Console(file=out)
        local.execute(run, False, console, lambda: ask(run), profile=4)
    assert f"profile in {tmp_path / 'run' / FOLDER}" in (tmp_path / "console").read_text()
    (events,) = (tmp_path / "run" / FOLDER).rglob("*.trace.json.gz")
    (planes,) = (tmp_path / "run" / FOLDER).rglob("*.xplane.pb")
    assert planes.stat().st_size > 0
    with gzip.open(events) as file:
        found = json.load(file)["traceEvents"]
    names = Counter(event.get("name") for event in found)
    assert names["update"] == names["batch"] == names["tick"] == 4
    assert names["PjitFunction(update)"] >= 4
    assert names["PjitFunction(act)"] >= 4
    numbers = [int(event["args"]["step_num"]) for event in found if event.get("name") == "update"]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert numbers[0] > WARM_UPDATES  # it has had a burst
