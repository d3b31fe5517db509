"""What an operator sees of a rollout worker, read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from actors.collector import Doing
from telamon.telemetry import pages


@dataclass(frozen=True)
class Figures:
    """What a rollout worker has done since it was started, and how it stands."""

    ticks: int = 0
    rows: int = 0
    """Appended, those included that the replay has not taken yet."""
    resets: int = 0
    """Of the rows, those that begin an episode."""
    transitions: int = 0
    episodes: int = 0
    lost_rows: int = 0
    """Dropped because the table that they continued was lost."""
    version: int | None = None
    """Of the snapshot that it acts with; None before the first."""
    newest: int | None = None
    """Of the newest snapshot that it was offered."""
    doing: Doing = "idle"
    seconds: Mapping[Doing, float] | None = None
    """Spent on each thing."""

    @property
    def lag(self) -> int:
        """Versions between the snapshot that it acts with and the newest one that it was offered."""
        return 0 if self.version is None or self.newest is None else self.newest - self.version


_COUNTERS: dict[str, tuple[str, Callable[[Figures], float]]] = {
    "ticks": ("Steps of the batch of environments.", lambda f: f.ticks),
    "rows": ("Rows appended.", lambda f: f.rows),
    "transitions": ("Transitions of environments.", lambda f: f.transitions),
    "episodes": ("Episodes that have ended.", lambda f: f.episodes),
    "lost_rows": ("Rows dropped because the table that they continued was lost.", lambda f: f.lost_rows),
}
_GAUGES: dict[str, tuple[str, Callable[[Figures], float]]] = {
    "snapshot_version": ("Version that it acts with; -1 before the first.",
                         lambda f: -1 if f.version is None else f.version),
    "snapshot_lag_versions": ("Versions by which that is older than the newest one offered.", lambda f: f.lag),
}  # fmt: skip


class WorkerMetrics(Collector):
    """Metrics of the rollout worker `name` in `registry`; figures: asked at each look."""

    def __init__(self, name: str, figures: Callable[[], Figures], registry: CollectorRegistry) -> None:
        self._name, self._figures = name, figures
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # or registering would ask for the figures already

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        for kind, entries in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for entry, (text, value) in entries.items():
                family = kind(f"telamon_actor_{entry}", text, labels=["worker"])
                family.add_metric([self._name], value(figures))
                yield family
        spent = CounterMetricFamily(
            "telamon_actor_seconds", "Time by what it was spent on, waiting for the replay included.",
            labels=["worker", "doing"],
        )  # fmt: skip
        for doing, seconds in (figures.seconds or {}).items():
            spent.add_metric([self._name, doing], seconds)
        yield spent


@contextmanager
def serving(name: str, figures: Callable[[], Figures], host: str) -> Iterator[str]:
    """Shows the metrics of worker `name` at the URL that the block is given, on a free port of `host`."""
    registry = pages.new_registry()
    WorkerMetrics(name, figures, registry)
    with pages.serving(registry, host, 0, "--cluster.metrics-host") as url:
        yield url
