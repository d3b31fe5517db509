"""What an operator sees of a run as a whole: how far it is, what it earns, which of its parts are there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from deploy import discovery
from deploy.running import STATES
from telamon.telemetry import pages


@dataclass(frozen=True)
class RunFigures:
    """How a run stands."""

    algorithm: str
    task: str
    seed: int
    version: str
    """Of Telamon."""
    run_dir: Path
    asked_env_steps: int
    state: str = "starting"
    env_steps: int = 0
    rows: int = 0
    episodes: int = 0
    returns: Mapping[str, float] = field(default_factory=dict)
    """Of the newest training episode (`train`) and the newest evaluation (`eval`), as far as there were any."""
    evaluated: int | None = None
    """Environment steps of the last evaluation."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Role -> parts that the run shall have."""
    running: Mapping[str, int] = field(default_factory=dict)
    """Role -> parts that do their work."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Role -> deaths of parts, of earlier drivers of the run too."""
    turn_age: float = 0.0
    """Seconds since the loop that leads the run last came round."""
    log_lines: Mapping[str, int] = field(default_factory=dict)
    """Level -> lines that parts have said."""


_COUNTERS: Mapping[str, tuple[str, Callable[[RunFigures], float]]] = {
    "env_steps": ("Environment steps of the run, those of earlier drivers included.", lambda f: f.env_steps),
    "rows": ("Rows of the run, likewise.", lambda f: f.rows),
    "episodes": ("Training episodes of the run that have ended, likewise.", lambda f: f.episodes),
}
_GAUGES: Mapping[str, tuple[str, Callable[[RunFigures], float]]] = {
    "asked_env_steps": ("Environment steps after which the run ends.", lambda f: f.asked_env_steps),
    "evaluated_env_steps": (
        "Environment steps at the last evaluation; -1 before the first.",
        lambda f: -1 if f.evaluated is None else f.evaluated,
    ),
    "turn_age_seconds": (
        "Since the loop that leads the run last came round: what it does takes so long, or it hangs.",
        lambda f: f.turn_age,
    ),
    "disk_size_bytes": ("Of the file system of the run directory.", lambda f: shutil.disk_usage(f.run_dir).total),
    "disk_free_bytes": ("Free there.", lambda f: shutil.disk_usage(f.run_dir).free),
}


class DriverMetrics(Collector):
    """Metrics of a run in `registry`. figures: how it stands; pages: role -> pages of its parts; asked at each look."""

    def __init__(
        self, figures: Callable[[], RunFigures], pages: Callable[[], Mapping[str, int]], registry: CollectorRegistry
    ) -> None:
        self._figures, self._pages = figures, pages
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        f = self._figures()
        info = GaugeMetricFamily(
            "telamon_driver_run_info", "Always 1; its labels say what is run.",
            labels=["algorithm", "task", "seed", "version"],
        )  # fmt: skip
        info.add_metric([f.algorithm, f.task, str(f.seed), f.version], 1)
        yield info
        for name, (text, value) in _COUNTERS.items():
            yield CounterMetricFamily(f"telamon_driver_{name}", text, value=value(f))
        for name, (text, value) in _GAUGES.items():
            yield GaugeMetricFamily(f"telamon_driver_{name}", text, value=value(f))
        yield _by("state", "1 for what the run does now.", "state", {s: s == f.state for s in STATES})
        yield _by("return", "Of the newest training episode, of the newest evaluation.", "of", f.returns)
        yield _by("targets", "Pages for Prometheus.", "kind", self._pages())
        parts = GaugeMetricFamily(
            "telamon_driver_parts", "Parts that the run shall have, and those that do their work.",
            labels=["kind", "state"],
        )  # fmt: skip
        for state, counts in (("wanted", f.wanted), ("running", f.running)):
            for kind, count in counts.items():
                parts.add_metric([kind, state], count)
        yield parts
        deaths = CounterMetricFamily(
            "telamon_driver_restarts", "Deaths of parts, after which they are started again.", labels=["kind"]
        )
        for kind in f.wanted:
            deaths.add_metric([kind], f.restarts.get(kind, 0))
        yield deaths
        said = CounterMetricFamily("telamon_driver_log_lines", "Lines that parts have logged.", labels=["level"])
        for level in ("WARNING", "ERROR"):
            said.add_metric([level], f.log_lines.get(level, 0))
        yield said


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"telamon_driver_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


@contextmanager
def serving(figures: Callable[[], RunFigures], targets: discovery.Targets, host: str, port: int) -> Iterator[str]:
    """Shows the metrics of a run at the URL that the block is given, and its targets beside them (`/targets`).

    Raises OSError naming the owner of a port that is taken.
    """
    registry = pages.new_registry()
    DriverMetrics(figures, targets.counts, registry)
    documents = {discovery.PATH: targets.text}
    with pages.serving(registry, host, port, "--metrics-port", documents) as url:
        yield url
