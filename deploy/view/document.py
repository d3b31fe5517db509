"""What the page is told, as one JSON document: all of it at first, then what is new."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from deploy.config import RunConfig
from deploy.curves import REFERENCES, Curve, published
from deploy.plot import experiments
from deploy.view import rundir, tail
from deploy.view.rundir import Picture
from deploy.view.tail import Place

NO_REFERENCE = "none"
Source = Callable[[int, Picture], str | None]
"""Of a run's number and its picture: the URL that the page finds it at; None where it has none."""


def readable(runs: Mapping[str, Path]) -> list[RunConfig]:
    """The configs of the runs that have one. Raises what is wrong with the first, in one sentence, where none has.

    Their metrics are left alone: they may be long, and are read where they are wanted.
    """
    found: list[RunConfig] = []
    problems: list[OSError | ValueError] = []
    for path in runs.values():
        try:
            found.append(rundir.config(path))
        except (OSError, ValueError) as problem:  # the page says so where there are others
            problems.append(problem)
    if not found:
        raise problems[0]
    return found


def references(configs: Sequence[RunConfig], asked: str | None) -> dict[str, Curve]:
    """Task -> the published curve to draw with it.

    asked: None takes the first that there is for a run's algorithm on its task, "none" takes none. Raises ValueError
    for a name that is unknown, or has no curve for any of the tasks.
    """
    if asked == NO_REFERENCE:
        return {}
    if asked is not None:
        found = {c.task: curve for c in configs if (curve := _published(asked, c.task)) is not None}
        return found or {configs[0].task: published(asked, configs[0].task)}  # which says what is wrong
    found = {}
    for config in configs:
        curves = (_published(name, config.task) for name in REFERENCES if name.split("-")[0] == config.algorithm)
        first = next((curve for curve in curves if curve is not None), None)
        if first is not None:
            found.setdefault(config.task, first)
    return found


def _published(name: str, task: str) -> Curve | None:
    try:
        return published(name, task)
    except ValueError:
        if name not in REFERENCES:
            raise
        return None


def first(runs: Mapping[str, Path], curves: Mapping[str, Curve], source: Source) -> dict[str, Any]:
    """Everything about `runs` (by name): what `news` tells, and what does not change while they run."""
    return {
        "points": tail.POINTS,
        "references": {task: _curve(curve) for task, curve in curves.items()},
        **news(runs, [Place()] * len(runs), source),
    }


def news(runs: Mapping[str, Path], since: Sequence[Place], source: Source) -> dict[str, Any]:
    """How runs stand, and what their metrics hold since a place of each. A run that cannot be read says why."""
    told = [_run(number, name, path, since[number], source) for number, (name, path) in enumerate(runs.items())]
    readable = [number for number, run in enumerate(told) if "config" in run]
    configs = [told[number].pop("config") for number in readable]
    for group, members in enumerate(experiments(configs)):
        for member in members:
            told[readable[member]]["group"] = group
    return {"seconds": time.time(), "runs": told, "settings": _settings([run.pop("settings", {}) for run in told])}


def encode(document: Mapping[str, Any]) -> str:
    """JSON that may also stand inside of a <script>."""
    return json.dumps(document, allow_nan=False, separators=(",", ":"), default=str).replace("<", "\\u003c")


def _run(number: int, name: str, path: Path, since: Place, source: Source) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "path": str(path)}
    try:
        config = rundir.config(path)
        told |= {"config": config, "settings": rundir.settings(path)}
        told |= {key: getattr(config, key) for key in ("algorithm", "task", "seed", "steps")}
        told["standing"] = rundir.standing(path)
        told["warnings"] = [asdict(warned) for warned in rundir.warnings(path)]
        told["pictures"] = [
            {"title": p.title, "step": p.step, "name": p.name, "film": p.path.suffix == ".mp4",
             "source": source(number, p)}
            for p in rundir.pictures(path)
        ]  # fmt: skip
        told["metrics"] = asdict(tail.read(path, since))
    except (OSError, ValueError) as error:  # the page shows the others all the same
        told["problem"] = str(error)
    return told


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line per setting, with its value in each run (None where it has none) and whether they differ."""
    keys = dict.fromkeys(key for run in runs for key in run)
    lines = [(key, [_text(run[key]) if key in run else None for run in runs]) for key in keys]
    return [{"key": key, "values": values, "differs": len(set(values)) > 1} for key, values in lines]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _curve(curve: Curve) -> dict[str, Any]:
    rows = [[value if math.isfinite(value) else None for value in row] for row in np.round(curve.values, 3).tolist()]
    return {"label": curve.label, "metric": curve.metric, "steps": curve.steps.tolist(), "values": rows}
