"""Learning curves of runs as a picture, over the published curve where one is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.config import RunConfig, differing_keys, load
from deploy.curves import Curve, align, published
from telamon.telemetry.writer import read_metrics, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHER = {"eval/return": "train/return", "train/return": "eval/return"}
"""What is drawn faintly behind each metric."""
NAMES = {"eval/return": "evaluation", "train/return": "training episodes"}
AXES_INCHES = (8.0, 5.5)


@dataclass(frozen=True)
class Run:
    """What a plot needs of a run directory."""

    path: Path
    config: RunConfig
    rows: list[dict[str, float]]

    def has(self, metric: str) -> bool:
        return any(metric in row for row in self.rows)


def plot_runs(run_dirs: Sequence[Path], out: Path, reference: str | None = None) -> None:
    """Writes a picture of the runs' returns against environment steps to `out` (*.png).

    One pair of axes per task. Runs that differ only in their seed become one curve: mean, and a band from the
    lowest to the highest. `reference` (see deploy.curves) draws the published curve underneath; the metric that it was
    measured with is then the one in front. Raises ImportError naming the extra to install, FileNotFoundError or
    ValueError in one sentence for a directory without a run or metrics, and for what the reference does not have.
    """
    runs = [read_run(path) for path in run_dirs]
    figure = draw(runs, reference)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def read_run(run_dir: Path) -> Run:
    """Reads config.yaml and metrics.jsonl of a run. Raises as `plot_runs` does."""
    run = Run(run_dir, load(run_dir), read_metrics(run_dir))
    if not any(run.has(metric) for metric in NAMES):
        raise ValueError(f"{run_dir} has logged no return yet ({' or '.join(NAMES)}); plot it after its first episode")
    return run


def draw(runs: Sequence[Run], reference: str | None) -> Figure:
    """The figure of `plot_runs`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("a plot needs matplotlib; install it with: pip install 'telamon[plot]'") from e
    if not runs:
        raise ValueError("there is no run to plot; name at least one run directory")
    tasks = list(dict.fromkeys(run.config.task for run in runs))
    columns = math.ceil(math.sqrt(len(tasks)))
    lines = math.ceil(len(tasks) / columns)
    # A figure of its own draws with Agg when saved and leaves pyplot's global state alone.
    figure = Figure(figsize=(AXES_INCHES[0] * columns, AXES_INCHES[1] * lines), layout="constrained")
    for number, task in enumerate(tasks, start=1):
        curve = published(reference, task) if reference is not None else None
        _draw_task(
            figure.add_subplot(lines, columns, number), task, [run for run in runs if run.config.task == task], curve
        )
    return figure


def _draw_task(axes: Axes, task: str, runs: Sequence[Run], curve: Curve | None) -> None:
    from matplotlib.ticker import EngFormatter

    if curve is not None:
        metric = curve.metric
        for run in runs:
            if not run.has(metric):
                raise ValueError(
                    f"{run.path} holds no {metric}, which the curve of {curve.label} measures; "
                    "plot it without a reference, or later"
                )
    else:
        metric = next(m for m in NAMES if any(run.has(m) for run in runs))
    right = max(int(row["step"]) for run in runs for row in run.rows if metric in row or OTHER[metric] in row)
    right = max(right, 1)  # an axis needs an extent when the untrained agent's evaluation is all there is
    if curve is not None:
        right = _draw_published(axes, curve, right)
    groups = [[runs[number] for number in group] for group in experiments([run.config for run in runs])]
    for number, group in enumerate(groups):
        names = "" if len(groups) == 1 else f" ({', '.join(run.path.name for run in group)})"
        who = group[0].config.algorithm + names
        _draw_experiment(axes, group, metric, f"C{number}", who)
    axes.set_xlim(0, right)
    axes.set_title(f"{' and '.join(dict.fromkeys(run.config.algorithm for run in runs))} on {task}")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return per episode")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), fontsize="small", frameon=False)  # covers no curve


def experiments(configs: Sequence[RunConfig]) -> list[list[int]]:
    """Numbers of runs, grouped into seeds of one experiment, in the order given: nothing else that counts differs."""
    groups: list[list[int]] = []
    for number, config in enumerate(configs):
        for group in groups:
            of_group = configs[group[0]]
            if not differing_keys(replace(config, seed=of_group.seed), of_group):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def _draw_published(axes: Axes, curve: Curve, right: int) -> int:
    """Draws the part of the curve that our data reaches, up to its next point; returns where the axis should end."""
    from matplotlib.ticker import EngFormatter

    beyond = np.flatnonzero(curve.steps >= right)
    end = int(beyond[0]) + 1 if beyond.size else len(curve.steps)
    steps, values = curve.steps[:end], curve.values[:, :end]
    gap = EngFormatter(sep="")(float(np.median(np.diff(curve.steps))))
    label = f"{curve.label}: {NAMES[curve.metric]}{_spread(len(values))}, a point every {gap}"
    # Only its points are published: the dashes say that the way between them is not known.
    _draw_mean(axes, steps, values, label, color="0.45", marker="s", linewidth=1, linestyle="--", zorder=1)
    return max(right, int(steps[-1]))


def _draw_experiment(axes: Axes, group: Sequence[Run], metric: str, color: str, who: str) -> None:
    curves = [series(run.rows, metric) for run in group if run.has(metric)]
    if curves:
        steps, values = align(curves)
        label = f"{who}: {NAMES[metric]}{_spread(len(curves))}"
        _draw_mean(axes, steps, values, label, color=color, marker="o" if len(steps) < 40 else "", zorder=3)
    faint = OTHER[metric]
    for number, run in enumerate(run for run in group if run.has(faint)):
        label = f"{who}: {NAMES[faint]}" if number == 0 else ""
        axes.plot(*series(run.rows, faint), color=color, alpha=0.35, linewidth=0.8, zorder=2, label=label)


def _draw_mean(axes: Axes, steps: np.ndarray, values: np.ndarray, label: str, **style: Any) -> None:
    """Mean over seeds, values [S, N], and for several seeds the band from lowest to highest."""
    axes.plot(steps, np.nanmean(values, axis=0), label=label, **{"linewidth": 1.8, "markersize": 4, **style})
    if len(values) > 1:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0, zorder=style["zorder"])


def _spread(seeds: int) -> str:
    return f", mean and range of {seeds} seeds" if seeds > 1 else ", one seed"
