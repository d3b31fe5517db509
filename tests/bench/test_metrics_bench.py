from __future__ import annotations

import json

import pytest

from bench.metrics import SCRAPE_SECONDS, case, counted, lines, parser
from telamon.telemetry.stopwatch import Stopwatch


def test_calls_are_counted_while_the_block_runs():
    watch = Stopwatch(("a", "b"), "a")
    with counted(Stopwatch, "now") as calls:
        watch.now("b")
        watch.now("a")
    watch.now("b")
    assert calls == {"now": 2}
    assert watch.doing == "b"


def test_a_share_is_calls_times_cost_over_the_whole():
    line = case("tick", 2e-3, {"a": 4, "b": 0.5}, {"a": 1e-6, "b": 2e-6, "c": 1.0})
    assert line == {"case": "tick", "cpu_ms": 2.0, "metrics_us": 5.0, "share": 0.0025, "calls": {"a": 4, "b": 0.5}}


@pytest.mark.slow
def test_being_seen_costs_less_than_a_hundredth():
    options = parser().parse_args(["--ticks", "20", "--updates", "10", "--calls", "1000", "--scrapes", "3"])
    found = [json.loads(json.dumps(line)) for line in lines(options)]
    assert [(line["case"], line.get("page")) for line in found] == [
        ("calls", None), ("tick", None), ("update", None),
        *(("scrape", page) for page in ("actor", "evaluator", "learner", "replay", "driver")),
    ]  # fmt: skip
    tick, update = found[1:3]
    assert tick["calls"]["stopwatch"] == 4
    assert update["calls"]["stopwatch"] > 2
    # CPU times, whose ratio a busy machine leaves alone; a tenth of the bound is usual
    assert 0 < tick["share"] < 0.01
    assert 0 < update["share"] < 0.01
    for line in found[3:]:
        assert line["bytes"] > 100
        assert 0 < line["cpu_ms"] / 1e3 / SCRAPE_SECONDS < 0.01
