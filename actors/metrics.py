"""What an operator sees of the actors: of a rollout worker, and of the evaluator. Read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector as Readable
from prometheus_client.registry import CollectorRegistry

from actors.collector import LENGTHS, RETURNS, Collector, Doing
from actors.rollout import DELAYS, Unroll
from telamon.telemetry import pages
from telamon.telemetry.histogram import Counted, Histogram


@dataclass(frozen=True)
class Figures:
    """What a rollout worker has done since it was started, and how it stands."""

    ticks: int = 0
    rows: int = 0
    """Appended, those included that the replay has not taken yet."""
    resets: int = 0
    """Of the rows, those that begin an episode."""
    transitions: int = 0
    action_repeat: int = 1
    """Environment steps of a transition."""
    episodes: int = 0
    environments: int = 0
    refused_rows: int = 0
    """Of environments that broke, and have begun new episodes."""
    lost_rows: int = 0
    """Dropped because the table that they continued was lost."""
    version: int | None = None
    """Of the snapshot that it acts with; None before the first."""
    newest: int | None = None
    """Of the newest snapshot that it was offered."""
    doing: Doing = "idle"
    seconds: Mapping[Doing, float] = field(default_factory=dict)
    """Spent on each thing, up to the moment."""
    returns: Counted = Histogram(RETURNS).counted
    """Of the episodes that have ended."""
    lengths: Counted = Histogram(LENGTHS).counted
    """Agent steps, likewise."""
    delays: Counted = Histogram(DELAYS).counted
    """Seconds from the offer of a snapshot to its use."""

    @property
    def env_steps(self) -> int:
        return self.transitions * self.action_repeat

    @property
    def lag(self) -> int:
        """Versions between the snapshot that it acts with and the newest one that it was offered."""
        return 0 if self.version is None or self.newest is None else self.newest - self.version

    def since(self, base: Figures) -> Figures:
        """What was done after `base`. Counters begin at 0 with their process, that of a resumed run too: it may go back
        a little, which `rate` would take for a beginning at 0."""
        return replace(self, **{name: getattr(self, name) - getattr(base, name) for name in _COUNTED})


_COUNTED = ("ticks", "rows", "resets", "transitions", "episodes", "refused_rows", "lost_rows")


def figures_of(source: Collector | Unroll) -> Figures:
    """Those of what acts; what stands around it knows the rest: snapshots, and what became of the rows."""
    counters, watch = source.counters, source.stopwatch
    return Figures(
        ticks=source.tick_count,
        rows=counters.rows,
        transitions=counters.transitions,
        action_repeat=source.env.spec.action_repeat,
        episodes=counters.episodes,
        environments=source.env.num_envs,
        refused_rows=source.env.refused_rows,
        doing=watch.doing,
        seconds=watch.seconds,
        returns=source.books.returns.counted,
        lengths=source.books.lengths.counted,
    )


_COUNTERS: dict[str, tuple[str, Callable[[Figures], float]]] = {
    "ticks": ("Steps of the batch of environments.", lambda f: f.ticks),
    "rows": ("Rows appended, those included that the replay has not taken yet.", lambda f: f.rows),
    "transitions": ("Transitions of environments: rows that begin no episode.", lambda f: f.transitions),
    "env_steps": ("Environment steps: transitions times the action repeat.", lambda f: f.env_steps),
    "episodes": ("Episodes that have ended.", lambda f: f.episodes),
    "refused_rows": (
        "Rows of environments that broke, not finite for example; each cost its episode.", lambda f: f.refused_rows
    ),
    "lost_rows": ("Rows dropped because the table that they continued was lost.", lambda f: f.lost_rows),
}  # fmt: skip
_GAUGES: dict[str, tuple[str, Callable[[Figures], float]]] = {
    "environments": ("Environments in the batch.", lambda f: f.environments),
    "snapshot_version": ("Version of the snapshot that it acts with; -1 before the first.",
                         lambda f: -1 if f.version is None else f.version),
    "snapshot_lag_versions": ("Versions by which the snapshot that it acts with is older than the newest one offered.",
                              lambda f: f.lag),
}  # fmt: skip
_HISTOGRAMS: dict[str, tuple[str, Callable[[Figures], Counted]]] = {
    "episode_return": (
        "Returns of the episodes that have ended. They may be negative, so the sum is in telamon_actor_returned_total.",
        lambda f: f.returns,
    ),
    "episode_length_steps": ("Lengths of the episodes that have ended, in agent steps.", lambda f: f.lengths),
    "snapshot_delay_seconds": ("From the offer of a snapshot to its use.", lambda f: f.delays),
}


class ActorMetrics(Readable):
    """Metrics of a rollout worker in `registry`; figures: asked at each look."""

    def __init__(self, figures: Callable[[], Figures], registry: CollectorRegistry) -> None:
        self._figures = figures
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        for name, (text, count) in _COUNTERS.items():
            yield CounterMetricFamily(f"telamon_actor_{name}", text, value=count(figures))
        for name, (text, level) in _GAUGES.items():
            yield GaugeMetricFamily(f"telamon_actor_{name}", text, value=level(figures))
        for name, (text, counted) in _HISTOGRAMS.items():
            yield pages.histogram(f"telamon_actor_{name}", text, counted(figures))
        yield pages.signs(
            "telamon_actor_returned",
            "Sum of the returns of ended episodes, of positive and of negative ones, both without their sign.",
            figures.returns,
        )
        spent = CounterMetricFamily(
            "telamon_actor_seconds", "Time by what it was spent on, waiting for the replay included.", labels=["doing"]
        )
        for doing in get_args(Doing):
            spent.add_metric([doing], figures.seconds.get(doing, 0.0))
        yield spent


@dataclass(frozen=True)
class EvalFigures:
    """What an evaluator has done since it was started."""

    evaluations: int = 0
    seconds: float = 0.0
    """That they took."""
    version: int | None = None
    """Of the snapshot that it evaluates or did last; None before the first."""
    mean_return: float | None = None
    """Of the last evaluation's episodes; None before the first."""


class EvaluatorMetrics(Readable):
    """Metrics of an evaluator in `registry`; figures: asked at each look."""

    def __init__(self, figures: Callable[[], EvalFigures], registry: CollectorRegistry) -> None:
        self._figures = figures
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        yield CounterMetricFamily(
            "telamon_evaluator_evaluations", "Evaluations that were finished.", value=figures.evaluations
        )
        yield SummaryMetricFamily(
            "telamon_evaluator_evaluation_seconds",
            "Time that finished evaluations took.",
            figures.evaluations,
            figures.seconds,
        )
        yield GaugeMetricFamily(
            "telamon_evaluator_snapshot_version",
            "Version that it evaluates, or evaluated last; -1 before the first.",
            value=-1 if figures.version is None else figures.version,
        )
        last = GaugeMetricFamily(
            "telamon_evaluator_return", "Mean return of the last evaluation; nothing before the first.", labels=[]
        )
        if figures.mean_return is not None:
            last.add_metric([], figures.mean_return)
        yield last


@contextmanager
def serving(register: Callable[[CollectorRegistry], object], host: str) -> Iterator[str]:
    """Shows what `register` puts into a registry at the URL that the block is given, on a free port of `host`."""
    registry = pages.new_registry()
    register(registry)
    with pages.serving(registry, host, 0, "the page") as url:
        yield url
