"""What an operator sees of the learner, read when somebody looks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from learner.limiter import Limiter


class LimiterMetrics(Collector):
    """The rate limiter: which side waits and for how long, the ratio, the band, the shards' credit.

    registry: where these metrics are registered; each limiter needs its own.
    """

    def __init__(self, limiter: Limiter, band: int, registry: CollectorRegistry) -> None:
        self._limiter, self._band = limiter, band
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        status = self._limiter.status()
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
