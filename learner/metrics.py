"""What an operator sees of the learner, read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from learner import limiter

if TYPE_CHECKING:  # which need Ray, that whoever looks at a limiter alone does not
    from learner.loop import LoopStatus
    from learner.publish import Published


class LimiterMetrics(Collector):
    """The rate limiter: which side waits and for how long, the ratio, the band, the shards' credit.

    status: how the limiter stands; None while there is none. registry: where these metrics are registered.
    """

    def __init__(self, status: Callable[[], limiter.Status | None], band: int, registry: CollectorRegistry) -> None:
        self._status, self._band = status, band
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # or registering would ask for the status already

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        if status is None:
            return
        waits = CounterMetricFamily(
            "telamon_learner_limiter_wait_seconds",
            "Time in which the learner waited for rows, or a shard's writers for credit.", labels=["side"],
        )  # fmt: skip
        waits.add_metric(["learner"], status.waits.learner)
        waits.add_metric(["writers"], status.waits.writers)
        yield waits
        waiting = GaugeMetricFamily("telamon_learner_limiter_waiting", "Which side waits now: 1.", labels=["side"])
        for side in ("learner", "writers", "none"):
            waiting.add_metric([side], status.waits.side == side)
        yield waiting
        replayed = GaugeMetricFamily(
            "telamon_learner_replayed_rows_per_inserted_row", "The train ratio that was kept.", labels=["over"]
        )
        replayed.add_metric(["run"], status.run_ratio)
        replayed.add_metric(["minute"], status.recent_ratio)
        yield replayed
        yield GaugeMetricFamily(
            "telamon_learner_limiter_lead_rows",
            "Inserted rows that the learner is ahead of the train ratio; negative: behind.", value=status.lead,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "telamon_learner_limiter_band_rows", "Bound of the lead, either side.", value=self._band
        )
        room = GaugeMetricFamily(
            "telamon_learner_limiter_credit_rows", "Rows that a shard may still take.", labels=["shard"]
        )
        for name, rows in status.headroom.items():
            room.add_metric([name], rows)
        yield room
        yield CounterMetricFamily(
            "telamon_learner_limiter_rebases", "Shards that came back after they had dropped out.",
            value=status.rebases,
        )  # fmt: skip


class LearnerMetrics(Collector):
    """The loop and what stands beside it.

    loop, published: how they stand. registry: where these metrics are registered.
    """

    def __init__(
        self, loop: Callable[[], LoopStatus], published: Callable[[], Published], registry: CollectorRegistry
    ) -> None:
        self._loop, self._published = loop, published
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # or registering would ask for the status already

    def collect(self) -> Iterable[Metric]:
        loop, published = self._loop(), self._published()
        for name, (text, count) in _COUNTERS.items():
            yield CounterMetricFamily(f"telamon_learner_{name}", text, value=count(loop, published))
        for name, (text, level) in _GAUGES.items():
            yield GaugeMetricFamily(f"telamon_learner_{name}", text, value=level(loop, published))
        for name, (text, number, seconds) in _SECONDS.items():
            yield SummaryMetricFamily(
                f"telamon_learner_{name}_seconds", text, number(loop, published), seconds(loop, published)
            )
        waited = CounterMetricFamily(
            "telamon_learner_wait_seconds",
            "Time without a batch: for rows, or for the making of a batch while there were rows.", labels=["for"],
        )  # fmt: skip
        waited.add_metric(["rows"], loop.waited.rows)
        waited.add_metric(["batch"], loop.waited.batch)
        yield waited
        rows = CounterMetricFamily("telamon_learner_write_back_rows", "Rows of write-backs, by outcome.", labels=["to"])
        rows.add_metric(["written"], loop.written.written)
        rows.add_metric(["stale"], loop.written.stale)
        rows.add_metric(["dropped"], loop.written.dropped)
        yield rows
        latest = GaugeMetricFamily("telamon_learner_metric", "What the newest update told.", labels=["name"])
        for name, value in loop.metrics.items():
            latest.add_metric([name], value)
        yield latest


_COUNTERS: dict[str, tuple[str, Callable[[LoopStatus, Published], float]]] = {
    "updates": ("Updates of the run, those skipped included.", lambda loop, _: loop.counters.updates),
    "skipped_updates": ("Updates of the run that were not finite.", lambda loop, _: loop.counters.skipped),
    "write_back_wait_seconds": ("Time for which updates waited for latents to be sent.",
                                lambda loop, _: loop.write_back_wait_seconds),
    "pushes": ("Snapshots that workers have answered for.", lambda _, published: published.pushes),
    "skipped_pushes": ("Snapshots that a busy worker was not sent.", lambda _, published: published.skipped),
    "failed_pushes": ("Snapshots that did not reach their worker.", lambda _, published: published.failed),
}  # fmt: skip
_GAUGES: dict[str, tuple[str, Callable[[LoopStatus, Published], float]]] = {
    "snapshot_version": ("Of the newest snapshot.", lambda loop, _: loop.version),
    "snapshot_bytes": ("Of the newest snapshot.", lambda _, published: published.snapshot_bytes),
    "batch_wait_ratio": ("Share of the time waiting for batches while there were rows.",
                         lambda loop, _: loop.batch_wait_ratio),
}  # fmt: skip
_SECONDS: dict[str, tuple[str, Callable[[LoopStatus, Published], int], Callable[[LoopStatus, Published], float]]] = {
    "update": ("Turns with an update: the device's work.",
               lambda loop, _: loop.updates, lambda loop, _: loop.update_seconds),
    "checkpoint": ("For which a checkpoint held the updates up.",
                   lambda loop, _: loop.checkpoints, lambda loop, _: loop.checkpoint_seconds),
    "publish": ("From the devices into the object store.",
                lambda _, published: published.snapshots, lambda _, published: published.put_seconds),
}  # fmt: skip


@contextmanager
def serving(
    loop: Callable[[], LoopStatus],
    limited: Callable[[], limiter.Status | None],
    published: Callable[[], Published],
    band: int,
    host: str,
    port: int,
) -> Iterator[str]:
    """Shows a learner's metrics at the URL that the block is given; port 0: a free one.

    Raises OSError at once when the port is taken.
    """
    registry = CollectorRegistry()
    LearnerMetrics(loop, published, registry)
    LimiterMetrics(limited, band, registry)
    server, thread = start_http_server(port, host, registry)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
