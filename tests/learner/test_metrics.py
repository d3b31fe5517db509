"""The names, labels and values of a learner's page."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from learner import limiter
from learner.background import Beside
from learner.batches import Written
from learner.checkpoint import Saved
from learner.compilations import Compiled
from learner.loop import LoopStatus
from learner.metrics import LearnerMetrics, LimiterMetrics, serving
from learner.publish import Published
from telamon.data import Counters, LimiterConfig

LIMITER = LimiterConfig(ratio=8.0, rows_per_update=16, tick_rows=1, capacity=1000, band=100)
LIMITED = limiter.Status(limiter.Waits(1.5, 2.5, "writers"), -3.0, {"shard-0": 7}, 7.5, 8.5, 2)
PUBLISHED = Published(11, 1 << 20, 30, 4, 1, (0.01, 0.02), {"actor-0": 1}, 0.75)
SECONDS = dict(zip(
    ("rows", "batch", "compute", "write_back", "publish", "checkpoint", "report", "other"), range(1, 9), strict=True
))  # fmt: skip
LOOP = LoopStatus(
    stage="training", counters=Counters(1000, 990, 10, 500, 20), version=12, saved=Saved(3, 6.0, 100.0),
    checkpoint_age=42.0, metrics={"loss": 0.25, "grad_norm": math.nan, "worst_loss": math.inf}, seconds=SECONDS,
    beside=Beside(0.1, 0.2, 0.3, 0.4), batch_wait_ratio=0.125, updates=100, skipped=5, trained_rows=1600,
    update_seconds=10.0, written=Written(60, 3, 2, 5), compiled=Compiled(9, 4.5, 1), devices=2,
)  # fmt: skip
HELD = {"cuda:0": {"live": 100, "in_use": 200, "limit": 1000}, "cuda:1": {"live": 50}}
NAMES = {
    "updates_total": 100, "skipped_updates_total": 5, "trained_rows_total": 1600, "compilations_total": 9,
    "compilation_seconds_total": 4.5, "recompilations_total": 1, "run_updates": 500, "checkpoint_age_seconds": 42,
    "batch_wait_ratio": 0.125, "devices": 2, "update_seconds_count": 100, "update_seconds_sum": 10,
    "checkpoint_seconds_count": 3, "checkpoint_seconds_sum": 6, "snapshot_version": 12, "snapshot_bytes": 1 << 20,
    "pushes_total": 30, "skipped_pushes_total": 4, "failed_pushes_total": 1, "push_seconds_count": 30,
    "push_seconds_sum": 0.75, "asked_replayed_rows_per_inserted_row": 8, "limiter_band_rows": 100,
    "limiter_lead_rows": -3, "limiter_rebases_total": 2,
}  # fmt: skip
"""Those without labels."""
LABELLED: dict[str, tuple[str, dict[str, float]]] = {
    "seconds_total": ("doing", SECONDS),
    "beside_seconds_total": (
        "doing", {"sample": 0.1, "copy": 0.2, "write_back": 0.3, "publish": 0.4, "checkpoint": 6.0}
    ),
    "metric": ("name", {"loss": 0.25, "grad_norm": math.nan, "worst_loss": math.inf}),
    "stage": ("stage", {"starting": 0, "restoring": 0, "compiling": 0, "waiting for rows": 0, "training": 1,
                        "saving": 0, "finished": 0}),
    "write_back_rows_total": ("to", {"written": 60, "stale": 3, "dropped": 2}),
    "limiter_wait_seconds_total": ("side", {"learner": 1.5, "writers": 2.5}),
    "limiter_waiting": ("side", {"learner": 0, "writers": 1, "none": 0}),
    "limiter_credit_rows": ("shard", {"shard-0": 7}),
    "replayed_rows_per_inserted_row": ("over", {"run": 7.5, "minute": 8.5}),
}  # fmt: skip


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def expected() -> Iterator[tuple[tuple[str, tuple[tuple[str, str], ...]], float]]:
    for name, value in NAMES.items():
        yield (f"telamon_learner_{name}", ()), value
    for name, (label, values) in LABELLED.items():
        for key, value in values.items():
            yield (f"telamon_learner_{name}", ((label, key),)), value
    for device, kinds in HELD.items():
        for kind, size in kinds.items():
            yield ("telamon_learner_device_bytes", (("device", device), ("kind", kind))), size


def test_the_page_of_a_learner_that_works(registry):
    LearnerMetrics(lambda: LOOP, lambda: HELD, lambda: PUBLISHED, registry)
    LimiterMetrics(lambda: LIMITED, LIMITER, registry)
    found, wanted = samples(registry), dict(expected())
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, nan_ok=True), key


def test_families_have_a_help_and_their_values_are_asked_at_each_look(registry):
    statuses = [LOOP, replace(LOOP, updates=101)]
    LearnerMetrics(lambda: statuses[0], lambda: {}, lambda: PUBLISHED, registry)
    LimiterMetrics(lambda: LIMITED, LIMITER, registry)
    assert all(family.documentation.endswith(".") for family in registry.collect())
    assert registry.get_sample_value("telamon_learner_updates_total") == 100
    statuses.pop(0)
    assert registry.get_sample_value("telamon_learner_updates_total") == 101


def test_a_learner_alone_has_no_snapshots_and_no_threads(registry):
    LearnerMetrics(lambda: LoopStatus("training"), lambda: {}, None, registry)
    names = {name.removeprefix("telamon_learner_") for name, _ in samples(registry)}
    assert not [name for name in names if "push" in name or "snapshot" in name or "beside" in name]
    assert {"updates_total", "run_updates", "stage", "update_seconds_sum"} <= names


def test_a_process_that_follows_tells_of_itself_alone():
    """Else a sum over a run would count what all its processes do together once for each of them."""
    with serving(loop_of(LOOP), lambda: PUBLISHED, LIMITER, "127.0.0.1", 0, leads=False) as url:
        text = urlopen(url).read().decode()
    families = {family.name for family in text_string_to_metric_families(text) if family.name.startswith("telamon")}
    assert families == {
        f"telamon_learner_{name}"
        for name in ("compilations", "compilation_seconds", "recompilations", "seconds", "beside_seconds",
                     "write_back_rows", "device_bytes")
    }  # fmt: skip


def test_before_there_are_shards_only_what_is_asked_for_is_known(registry):
    LimiterMetrics(lambda: None, LIMITER, registry)
    assert samples(registry) == {
        ("telamon_learner_asked_replayed_rows_per_inserted_row", ()): 8.0,
        ("telamon_learner_limiter_band_rows", ()): 100.0,
    }


def loop_of(status: LoopStatus) -> Any:
    return SimpleNamespace(status=lambda: status, limiter_status=lambda: LIMITED, device_bytes=lambda: HELD)


def test_what_prometheus_reads():
    with serving(loop_of(LOOP), lambda: PUBLISHED, LIMITER, "127.0.0.1", 0) as url:
        text = urlopen(url).read().decode()
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert 'telamon_learner_metric{name="grad_norm"} NaN\n' in text  # shown as it is, not left out
    assert 'telamon_learner_metric{name="worst_loss"} +Inf\n' in text
    assert found.keys() >= dict(expected()).keys()
    assert found["process_resident_memory_bytes", ()] > 1 << 20


def test_a_port_that_is_taken_names_its_owner():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} is in use by process .*LearnerSetup\.metrics_port"),
            serving(loop_of(LOOP), lambda: PUBLISHED, LIMITER, "127.0.0.1", port),
        ):
            pass
