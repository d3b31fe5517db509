"""What an operator sees of the learner, read when somebody looks. docs/metrics.md lists every name.

Counters count what this process has done: they begin at 0 with it, which is how `rate` knows that it is another one. A
run that goes on from its checkpoint goes back a little, which it would take for a beginning at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from learner import limiter
from learner.limiter import Side
from learner.loop import Doing, Loop, LoopStatus, Stage
from learner.mesh import Held
from telamon.data import LimiterConfig
from telamon.telemetry import pages

if TYPE_CHECKING:  # which needs Ray, that a learner without a cluster does not
    from learner.publish import Published

Values = Mapping[str, float] | Mapping[Doing, float]
"""By the value of a label."""


class LimiterMetrics(Collector):
    """The rate limiter: which side waits and for how long, the ratio, the band, the shards' credit.

    status: how the limiter stands; None while there is none. config: its own. registry: where these metrics are
    registered.
    """

    def __init__(
        self, status: Callable[[], limiter.Status | None], config: LimiterConfig, registry: CollectorRegistry
    ) -> None:
        self._status, self._config = status, config
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "telamon_learner_asked_replayed_rows_per_inserted_row", "The train ratio that is asked for.",
            value=self._config.ratio,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "telamon_learner_limiter_band_rows",
            "Rows that the learner may be ahead of the train ratio, or behind.",
            value=self._config.band,
        )
        status = self._status()
        if status is None:
            return
        yield _by(
            CounterMetricFamily, "limiter_wait_seconds",
            "Time in which the learner waited for rows, or a shard's writers for credit.", "side",
            {"learner": status.waits.learner, "writers": status.waits.writers},
        )  # fmt: skip
        yield _by(
            GaugeMetricFamily, "limiter_waiting", "1 for the side that waits now, or for none.", "side",
            {side: side == status.waits.side for side in get_args(Side)},
        )  # fmt: skip
        yield _by(
            GaugeMetricFamily, "replayed_rows_per_inserted_row",
            "The train ratio that was kept, over the whole run and over the last minute; NaN before any rows.", "over",
            {"run": status.run_ratio, "minute": status.recent_ratio},
        )  # fmt: skip
        yield GaugeMetricFamily(
            "telamon_learner_limiter_lead_rows",
            "Inserted rows that the learner is ahead of the train ratio; negative: behind.", value=status.lead,
        )  # fmt: skip
        yield _by(
            GaugeMetricFamily, "limiter_credit_rows", "Rows that a shard may still take.", "shard", status.headroom
        )
        yield CounterMetricFamily(
            "telamon_learner_limiter_rebases", "Shards that came back after they had dropped out.",
            value=status.rebases,
        )  # fmt: skip


class LearnerMetrics(Collector):
    """A learner's loop, its devices and what stands beside it.

    loop: how it stands. device_bytes: what the devices hold, as `mesh.device_bytes`. published: how snapshots reach the
    actors; None where there are none. All three are asked at each look. registry: where these metrics are registered.
    leads: whether this process speaks for the whole learner; else it tells of itself alone, or sums over a run would
    count updates once for each process.
    """

    def __init__(
        self,
        loop: Callable[[], LoopStatus],
        device_bytes: Callable[[], Mapping[str, Mapping[Held, int]]],
        published: Callable[[], Published] | None,
        registry: CollectorRegistry,
        leads: bool = True,
    ) -> None:
        self._loop, self._device_bytes, self._published, self._leads = loop, device_bytes, published, leads
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        loop = self._loop()
        yield from _own(loop)
        yield self._devices()
        if self._leads:
            yield from _of_the_learner(loop)
        if self._published is not None:
            yield from self._snapshots(loop, self._published())

    def _devices(self) -> Metric:
        family = GaugeMetricFamily(
            "telamon_learner_device_bytes",
            "Of this process's devices. live: of its arrays; in_use, limit: of all, where the device tells.",
            labels=["device", "kind"],
        )  # fmt: skip
        for device, kinds in self._device_bytes().items():
            for kind, size in kinds.items():
                family.add_metric([device, kind], size)
        return family

    def _snapshots(self, loop: LoopStatus, published: Published) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "telamon_learner_snapshot_version", "Number of the newest snapshot.", value=loop.version
        )
        yield GaugeMetricFamily(
            "telamon_learner_snapshot_bytes", "Size of the newest snapshot.", value=published.snapshot_bytes
        )
        yield CounterMetricFamily(
            "telamon_learner_pushes", "Snapshots that workers have answered for.", value=published.pushes
        )
        yield CounterMetricFamily(
            "telamon_learner_skipped_pushes", "Snapshots that a busy worker was not sent.", value=published.skipped
        )
        yield CounterMetricFamily(
            "telamon_learner_failed_pushes", "Snapshots that did not reach their worker.", value=published.failed
        )
        yield SummaryMetricFamily(
            "telamon_learner_push_seconds", "From the taking of a snapshot to a worker's answer that it has it.",
            published.pushes, published.push_seconds,
        )  # fmt: skip


def _own(loop: LoopStatus) -> Iterator[Metric]:
    """What a process tells of itself."""
    for name, (text, count) in _OWN_COUNTERS.items():
        yield CounterMetricFamily(f"telamon_learner_{name}", text, value=count(loop))
    for name, (text, label, counts) in _OWN_COUNTERS_BY.items():
        yield _by(CounterMetricFamily, name, text, label, counts(loop))


def _of_the_learner(loop: LoopStatus) -> Iterator[Metric]:
    """What all processes of a learner do together, and one of them tells."""
    for name, (text, count) in _COUNTERS.items():
        yield CounterMetricFamily(f"telamon_learner_{name}", text, value=count(loop))
    for name, (text, level) in _GAUGES.items():
        yield GaugeMetricFamily(f"telamon_learner_{name}", text, value=level(loop))
    for name, (text, number, seconds) in _SECONDS.items():
        yield SummaryMetricFamily(f"telamon_learner_{name}_seconds", text, number(loop), seconds(loop))
    for name, (text, label, levels) in _GAUGES_BY.items():
        yield _by(GaugeMetricFamily, name, text, label, levels(loop))


def _by(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, label: str,
    values: Values,
) -> Metric:  # fmt: skip
    family = kind(f"telamon_learner_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _beside(loop: LoopStatus) -> Values:
    return {} if loop.beside is None else {**asdict(loop.beside), "checkpoint": loop.saved.seconds}


def _rows(loop: LoopStatus) -> Values:
    return {"written": loop.written.written, "stale": loop.written.stale, "dropped": loop.written.dropped}


_COUNTERS: Mapping[str, tuple[str, Callable[[LoopStatus], float]]] = {
    "updates": ("Updates made by this process, those skipped included.", lambda loop: loop.updates),
    "skipped_updates": ("Updates made by this process that were not finite, and changed nothing.",
                        lambda loop: loop.skipped),
    "trained_rows": ("Rows that its updates were made on; a row counts each time.", lambda loop: loop.trained_rows),
}  # fmt: skip
_OWN_COUNTERS: Mapping[str, tuple[str, Callable[[LoopStatus], float]]] = {
    "compilations": ("Programs that XLA has compiled in this process, or read from its cache.",
                     lambda loop: loop.compiled.programs),
    "compilation_seconds": ("Time that compiling took, or reading from its cache.", lambda loop: loop.compiled.seconds),
    "recompilations": ("Programs that were compiled while training, under a name that had been compiled before.",
                       lambda loop: loop.compiled.again),
}  # fmt: skip
_GAUGES: Mapping[str, tuple[str, Callable[[LoopStatus], float]]] = {
    "run_updates": ("Updates of the run; after a restart those of the checkpoint it goes on from.",
                    lambda loop: loop.counters.updates),
    "checkpoint_age_seconds": ("Since the newest checkpoint of this process became whole; before it, since the start.",
                               lambda loop: loop.checkpoint_age),
    "batch_wait_ratio": ("Share of the time waiting for batches, of the time in which there were rows.",
                         lambda loop: loop.batch_wait_ratio),
    "devices": ("Devices that the update is made on, of all processes of the learner; 0 before they are known.",
                lambda loop: loop.devices),
}  # fmt: skip
_SECONDS: Mapping[str, tuple[str, Callable[[LoopStatus], int], Callable[[LoopStatus], float]]] = {
    "update": ("Turns of the loop with an update: the device's work, as the loop waits for the update before.",
               lambda loop: loop.updates, lambda loop: loop.update_seconds),
    "checkpoint": ("From the wish for a checkpoint until it is whole.",
                   lambda loop: loop.saved.checkpoints, lambda loop: loop.saved.seconds),
}  # fmt: skip
_OWN_COUNTERS_BY: Mapping[str, tuple[str, str, Callable[[LoopStatus], Values]]] = {
    "seconds": ("The loop's time by what it did, or waited for: all of it. other: the start and its compiling, "
                "choosing, waiting for the other processes of a learner.", "doing", lambda loop: loop.seconds),
    "beside_seconds": ("What threads beside the loop have spent. copy: handing batches to the devices; checkpoint: "
                       "from the wish until it is whole.", "doing", _beside),
    "write_back_rows": ("Rows of write-backs by outcome. stale: overwritten since; dropped: their shard was away.",
                        "to", _rows),
}  # fmt: skip
_GAUGES_BY: Mapping[str, tuple[str, str, Callable[[LoopStatus], Values]]] = {
    "metric": ("What the newest update told, losses and norms; NaN where it was not finite.", "name",
               lambda loop: loop.metrics),
    "stage": ("1 for what the learner does now.", "stage",
              lambda loop: {stage: stage == loop.stage for stage in get_args(Stage)}),
}  # fmt: skip


@contextmanager
def serving(
    loop: Loop, published: Callable[[], Published], config: LimiterConfig, host: str, port: int, leads: bool = True
) -> Iterator[str]:
    """Shows a learner's metrics at the URL that the block is given; port 0: a free one. leads: as in LearnerMetrics.

    Raises OSError naming the owner of a port that is taken.
    """
    registry = pages.new_registry()
    LearnerMetrics(loop.status, loop.device_bytes, published if leads else None, registry, leads)
    if leads:
        LimiterMetrics(loop.limiter_status, config, registry)
    with pages.serving(registry, host, port, "LearnerSetup.metrics_port") as url:
        yield url
