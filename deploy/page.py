"""The page for Prometheus of a run of one process: of its actor, learner, replay and the run as a whole, at once.

Threads beside the loop read it, and never make it wait.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from actors.metrics import ActorMetrics, Figures, figures_of
from deploy import discovery, local, running
from deploy.discovery import Target, Targets
from deploy.metrics import DriverMetrics, RunFigures
from deploy.standing import PART, Standing
from learner import limiter
from learner.batches import Written
from learner.compilations import Compilations
from learner.limiter import Side
from learner.loop import LoopStatus, Stage
from learner.mesh import device_bytes
from learner.metrics import LearnerMetrics, LimiterMetrics
from replay_server.metrics import DiskMetrics, StoreMetrics
from replay_server.store import Store
from telamon.data import Counters, LimiterConfig
from telamon.telemetry import pages

if TYPE_CHECKING:
    from deploy.local import Run

HOST = "127.0.0.1"
TABLE = "run"
KNOB = "--metrics-port"
WORKING: Mapping[local.Doing, Side] = {
    "rows": "learner", "batch": "writers", "compute": "writers", "write_back": "writers",
}  # fmt: skip
"""What the one loop does -> the side that waits for that: its other one."""


class Page:
    """Shows the process alone, until there is a run. `opened` makes it.

    before: numbers of the run when another process last told of it.
    """

    def __init__(self, run_dir: Path, before: Mapping[str, float]) -> None:
        self.registry = pages.new_registry()
        self.targets = Targets(run_dir)
        self.url = ""
        self._before = before

    @contextmanager
    def showing(self, run: Run, standing: Standing) -> Iterator[None]:
        """Shows a run from here on, and while the block runs tells Prometheus where. Nothing of it is counted before:
        a run that goes on from a checkpoint goes back a little, which would look like a beginning at 0."""
        warnings, compilations = _Warnings(), Compilations()
        begun = figures_of(run.collector)
        loop = _Loop(run, standing, compilations)
        ActorMetrics(lambda: _acting(run, begun), self.registry)
        LearnerMetrics(loop.status, device_bytes, None, self.registry)
        if run.schedule.ratio != 0:
            config = limits(run)
            LimiterMetrics(lambda: limited(run, config, standing), config, self.registry)
        if isinstance(run.replay, Store):
            StoreMetrics(TABLE, run.replay, self.registry)
            DiskMetrics(run.run_dir, self.registry)
        DriverMetrics(lambda: self._figures(run, standing, warnings.lines), self.targets.counts, self.registry)
        self.targets.update([Target("train", PART, self.url)])
        standing.notes.append(note := f"metrics {self.url}")
        logging.getLogger().addHandler(warnings)
        try:
            with compilations.counted(warm=lambda: run.counters.updates > loop.begun.updates):
                yield
            self.targets.update(())  # of a run that fails they stay: whoever watches is to see that it is gone
        finally:
            logging.getLogger().removeHandler(warnings)
            standing.notes.remove(note)

    def _figures(self, run: Run, standing: Standing, lines: Mapping[str, int]) -> RunFigures:
        """Of the run, which another process may have brought further than the checkpoint that this one began at."""
        c = run.config
        most = lambda name, now: max(int(self._before.get(name, 0)), now)
        return RunFigures(
            algorithm=c.algorithm, task=c.task, seed=c.seed, version=version("telamon"), run_dir=run.run_dir,
            asked_env_steps=c.steps, state=standing.state, env_steps=most("env_steps", run.env_steps),
            rows=most("rows", run.counters.rows), episodes=most("episodes", run.counters.episodes),
            returns={key.partition("/")[0]: value for key, value in standing.returns.items()},
            evaluated=run.progress.evaluated, wanted={PART: 1}, running={PART: int(standing.state == "running")},
            turn_age=run.stopwatch.age, log_lines=lines,
        )  # fmt: skip


@contextmanager
def opened(run_dir: Path, port: int) -> Iterator[Page]:
    """A page on this machine while the block runs. run_dir: absolute.

    Raises OSError naming the owner of a port that is taken.
    """
    try:
        before = running.read(run_dir).numbers
    except (FileNotFoundError, ValueError):  # a run that begins, or one that is older than such files
        before = {}
    page = Page(run_dir, before)
    with pages.serving(page.registry, HOST, port, KNOB, {discovery.PATH: page.targets.text}) as page.url:
        yield page


class _Warnings(logging.Handler):
    """Counts lines by level."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.levelname] += 1


def _acting(run: Run, begun: Figures) -> Figures:
    """Of the actor, which always acts with the newest parameters: they are as many versions as updates."""
    updates = run.counters.updates
    return replace(figures_of(run.collector).since(begun), version=updates, newest=updates)


class _Loop:
    """The one loop, as a learner's."""

    def __init__(self, run: Run, standing: Standing, compilations: Compilations) -> None:
        self._run, self._standing, self._compilations = run, standing, compilations
        self._started = time.monotonic()
        self.begun = replace(run.counters)
        stats = run.replay.stats()
        self._written, self._stale = stats.written_back, stats.stale

    def status(self) -> LoopStatus:
        run, begun = self._run, self.begun
        counters, stats, spent = replace(run.counters), run.replay.stats(), run.stopwatch.seconds
        updates, whole = counters.updates - begun.updates, run.saved.newest
        return LoopStatus(
            stage=self._stage(counters),
            counters=counters,
            saved=run.saved,
            checkpoint_age=time.monotonic() - (self._started if whole is None else whole),
            # of an update that has ended: the loop waits for each
            metrics={name: float(value) for name, value in run.metrics.items()},
            seconds={
                "rows": spent["rows"], "batch": spent["batch"], "compute": spent["compute"],
                "write_back": spent["write_back"], "checkpoint": spent["checkpoint"], "report": spent["report"],
                "other": spent["evaluation"] + spent["other"],
            },
            updates=updates,
            skipped=counters.skipped - begun.skipped,
            trained_rows=updates * trained_rows(run),
            update_seconds=spent["compute"],
            written=Written(stats.written_back - self._written, stats.stale - self._stale),
            compiled=self._compilations.figures,
            devices=1,
        )  # fmt: skip

    def _stage(self, counters: Counters) -> Stage:
        if self._standing.state == "stopping" or self._run.stopwatch.doing == "checkpoint":
            return "saving"
        if counters.updates:
            return "training"
        return "compiling" if self._run.stopwatch.doing == "compute" else "waiting for rows"


def trained_rows(run: Run) -> int:
    """Rows that one update trains on."""
    return run.agent.batch_size * (run.agent.window_spec.length - run.agent.window_spec.context)


def limits(run: Run) -> LimiterConfig:
    """What a limiter would ask of a run whose loop does exactly what is due: its ratio, and the narrowest band."""
    num_envs = run.config.env.num
    rows = num_envs * local.capacity(run.config, run.agent, num_envs)
    wide = LimiterConfig.following(run.schedule, trained_rows(run), num_envs, rows, 2**62)
    return replace(wide, band=wide.smallest_band)


def limited(run: Run, config: LimiterConfig, standing: Standing) -> limiter.Status:
    """How the two sides stand, of which each waits while the loop does the other's work."""
    spent, doing, minute = run.stopwatch.seconds, run.stopwatch.doing, standing.minute
    waited = {
        side: sum(spent[thing] for thing, waits in WORKING.items() if waits == side) for side in ("learner", "writers")
    }
    recent = float("nan")
    if minute.get("rows"):
        recent = minute.get("updates", 0.0) * config.rows_per_update / minute["rows"]
    return limiter.Status(
        waits=limiter.Waits(waited["learner"], waited["writers"], WORKING.get(doing, "none")),
        lead=-run.updates_owed * config.update_rows,
        headroom={},
        run_ratio=limiter.ratio(config, run.counters.rows, run.counters.updates),
        recent_ratio=recent,
        rebases=0,
    )
