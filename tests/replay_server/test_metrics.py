"""What a replay server counts, read as Prometheus reads it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from replay_server import metrics
from replay_server.config import ServerConfig
from replay_server.store import Store
from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec, to_columns
from telamon.replay import ReplayStats, TableSpec
from telamon.telemetry import pages

SPEC = TableSpec(
    RowSpec((("vector", ArraySpec((4,))),), ArraySpec((2,))), WindowSpec(length=4), capacity=100, max_envs=2
)
STATS = ReplayStats(
    rows=500, rows_held=200, bytes_held=200 * SPEC.row.nbytes, episodes=3, items=7, online_queue=2,
    sampled_windows=11, written_back=5, stale=1,
)  # fmt: skip


@dataclass
class FakeTable:
    spec: TableSpec = SPEC
    credit: int = -1
    num_envs: int = 2
    counts: ReplayStats = STATS

    def stats(self):
        return self.counts


class Page:
    """Metrics of some tables, and a look at them."""

    def __init__(self, clock=None, **tables):
        self.registry = CollectorRegistry()
        self.metrics = metrics.Metrics(self.registry, tables.items, **({} if clock is None else {"clock": clock}))

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"telamon_replay_{name}", labels)


def test_tables_are_read_when_somebody_looks():
    table = FakeTable(counts=replace(STATS, rows=0, written_back=0, stale=0))
    page = Page(main=table)
    table.counts = STATS
    expected = {
        "held_rows": 200, "held_bytes": 200 * SPEC.row.nbytes, "full_bytes": SPEC.nbytes, "environments": 2,
        "items": 7, "online_queue_windows": 2, "credit_rows": -1, "appended_rows_total": 500,
        "appended_bytes_total": 500 * SPEC.row.nbytes, "written_back_rows_total": 5, "stale_rows_total": 1,
    }  # fmt: skip
    assert {name: page.value(name, table="main") for name in expected} == expected
    table.counts = replace(STATS, rows=501)
    assert page.value("appended_rows_total", table="main") == 501


def test_what_a_restore_takes_back_is_not_taken_from_counters():
    table = FakeTable()
    page = Page(main=table)
    shown = []
    for rows in (500, 510, 300, 310, 320):
        table.counts = replace(STATS, rows=rows)
        shown.append(page.value("appended_rows_total", table="main"))
    assert shown == [0, 10, 10, 20, 30]
    assert page.value("held_rows", table="main") == 200
    page = Page(main=table)  # of a server that was started again, which finds 320 rows
    assert page.value("appended_rows_total", table="main") == 0
    table.counts = replace(STATS, rows=321)
    assert page.value("appended_rows_total", table="main") == 1


def test_tables_may_come_later():
    tables = {}
    page = CollectorRegistry()
    metrics.Metrics(page, tables.items)
    assert page.get_sample_value("telamon_replay_held_rows", {"table": "late"}) is None
    tables["late"] = FakeTable()
    assert page.get_sample_value("telamon_replay_held_rows", {"table": "late"}) == 200


def test_calls_by_code():
    page = Page()
    with page.metrics.call("Append", "peer", lambda: "OK"):
        assert page.value("open_calls", method="Append") == 1
    with pytest.raises(RuntimeError), page.metrics.call("Append", "peer", lambda: "INTERNAL"):
        raise RuntimeError
    assert page.value("open_calls", method="Append") == 0
    assert page.value("calls_total", method="Append", code="OK") == 1
    assert page.value("calls_total", method="Append", code="INTERNAL") == 1


def test_connections_with_calls():
    page = Page()
    assert page.value("connections") == 0
    with page.metrics.call("Append", "a", lambda: "OK"), page.metrics.call("Sample", "a", lambda: "OK"):
        assert page.value("connections") == 1
        with page.metrics.call("Append", "b", lambda: "OK"):
            assert page.value("connections") == 2
        with page.metrics.call("Stats", "a", lambda: "OK"):
            pass
        assert page.value("connections") == 1
    assert page.value("connections") == 0


def test_requests_are_timed():
    times = iter([10.0, 10.5, 20.0, 20.002])
    page = Page(clock=lambda: next(times))
    with page.metrics.request("Sample"):
        assert page.value("busy_requests", method="Sample") == 1
    with pytest.raises(ValueError), page.metrics.request("Sample"):
        raise ValueError
    assert page.value("busy_requests", method="Sample") == 0
    assert page.value("request_seconds_count", method="Sample") == 2
    assert page.value("request_seconds_sum", method="Sample") == pytest.approx(0.502)
    assert page.value("request_seconds_bucket", method="Sample", le="0.003") == 1
    assert page.value("request_seconds_bucket", method="Sample", le="1.0") == 2


def test_ages_of_sampled_rows_batch_by_batch():
    page = Page()
    first, second = np.array([1, 2, 5, 64, 65]), np.array([4**12, 4**12 + 1])
    page.metrics.sampled("main", "train", 700, first)
    page.metrics.sampled("main", "report", 300, second)
    ages = np.concatenate([first, second])
    for bound in (4**k for k in range(13)):
        found = page.value("sampled_age_rows_bucket", table="main", le=str(float(bound)))
        assert found == (ages <= bound).sum(), bound
    assert page.value("sampled_age_rows_bucket", table="main", le="+Inf") == ages.size
    assert page.value("sampled_age_rows_count", table="main") == ages.size
    assert page.value("sampled_age_rows_sum", table="main") == ages.sum()
    assert page.value("sampled_windows_total", table="main", purpose="train") == 5
    assert page.value("sampled_windows_total", table="main", purpose="report") == 2
    assert page.value("sampled_bytes_total", table="main") == 1000


def test_what_only_counts():
    page = Page()
    page.metrics.waited_for_credit("main", 0.25)
    page.metrics.refused("main", "OUT_OF_RANGE", 16)
    page.metrics.unauthenticated()
    assert page.value("credit_wait_seconds_total", table="main") == 0.25
    assert page.value("refused_rows_total", table="main", reason="OUT_OF_RANGE") == 16
    assert page.value("unauthenticated_calls_total") == 1


TABLE = {
    "held_rows", "held_bytes", "full_bytes", "environments", "items", "online_queue_windows", "credit_rows",
    "appended_rows_total", "appended_bytes_total", "written_back_rows_total", "stale_rows_total",
}  # fmt: skip
DISK = {("disk_size_bytes", ()), ("disk_free_bytes", ())}


def everything(registry):
    """(name, labels) of every sample."""
    return {
        (s.name.removeprefix("telamon_replay_"), tuple(label for label in s.labels if label != "le"))
        for family in registry.collect()
        for s in family.samples
    }


def used_page(tmp_path):
    """A page on which everything has happened."""
    registry = pages.new_registry()
    metrics.DiskMetrics(tmp_path, registry)
    counts = metrics.Metrics(registry, lambda: [("main", FakeTable())])
    with counts.call("Append", "a", lambda: "OK"), counts.request("Append"):
        counts.waited_for_credit("main", 1.0)
        counts.refused("main", "OUT_OF_RANGE", 1)
        counts.sampled("main", "train", 10, np.array([1]))
    return registry


def test_the_whole_page_of_a_server(tmp_path):
    expected = {(name, ("table",)) for name in TABLE} | DISK
    expected |= {(name, ("table",)) for name in ("sampled_bytes_total", "credit_wait_seconds_total")}
    expected |= {("sampled_windows_total", ("table", "purpose")), ("refused_rows_total", ("table", "reason"))}
    expected |= {("calls_total", ("method", "code")), ("open_calls", ("method",)), ("busy_requests", ("method",))}
    expected |= {("connections", ()), ("unauthenticated_calls_total", ())}
    for name, label in (("sampled_age_rows", "table"), ("request_seconds", "method")):
        expected |= {(f"{name}_{part}", (label,)) for part in ("bucket", "sum", "count")}
    found = {sample for sample in everything(used_page(tmp_path)) if not sample[0].startswith("process_")}
    assert found == expected


def test_a_store_of_ones_own_is_shown_as_a_table():
    store = Store(SPEC.row, SPEC.window, 2, 100, np.random.default_rng(0))
    registry = CollectorRegistry()
    metrics.StoreMetrics("run", store, registry)
    value = lambda name, **labels: registry.get_sample_value(f"telamon_replay_{name}", {"table": "run", **labels})
    assert everything(registry) == {(name, ("table",)) for name in (*TABLE, "sampled_bytes_total")} | {
        ("sampled_windows_total", ("table", "purpose"))
    }
    assert (value("appended_rows_total"), value("full_bytes"), value("environments")) == (0, SPEC.nbytes, 2)
    for t in range(8):
        flags = np.full(2, t == 0), np.full(2, t == 7), np.zeros(2, bool)
        action = np.zeros((2, 2), np.float32)
        vector = {"vector": np.zeros((2, 4), np.float32)}
        store.append(Rows(np.arange(2, dtype=np.int32), vector, np.zeros(2, np.float32), *flags, action, {}))
    window = store.sample(3)
    store.sample(5, purpose="report")
    assert (value("appended_rows_total"), value("held_rows"), value("credit_rows")) == (16, 16, -1)
    assert value("sampled_windows_total", purpose="train") == 3
    resumed = CollectorRegistry()
    metrics.StoreMetrics("run", store, resumed)
    again = lambda name, **labels: resumed.get_sample_value(f"telamon_replay_{name}", {"table": "run", **labels})
    assert (again("appended_rows_total"), again("appended_bytes_total"), again("held_rows")) == (0, 0, 16)
    assert (again("sampled_windows_total", purpose="train"), again("sampled_bytes_total")) == (0, 0)
    sizes = sum(column.nbytes for name, column in to_columns(window).items() if name in store.served)
    assert value("sampled_bytes_total") == sizes > 0


def test_the_disk_of_the_rows(tmp_path):
    registry = CollectorRegistry()
    metrics.DiskMetrics(tmp_path, registry)
    size, free = (registry.get_sample_value(f"telamon_replay_disk_{which}_bytes") for which in ("size", "free"))
    assert size == shutil.disk_usage(tmp_path).total
    assert 0 < free <= size


def test_the_operators_page_lists_every_option():
    text = (Path(__file__).parents[2] / "docs/replay.md").read_text()
    options = {f"--{field.name.replace('_', '-')}" for field in fields(ServerConfig)}
    assert options <= set(re.findall(r"--[a-z-]+", text.partition("## Who may call")[0]))
