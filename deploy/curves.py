"""Published learning curves, shipped as package data in deploy/curves/ (sources and licences: NOTICE).

Steps are environment steps: agent steps times the action repeat, as everywhere in this project.
"""

from __future__ import annotations

import difflib
import gzip
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

Seed = tuple[Iterable[float], Iterable[float]]
"""One seed's steps and values."""


@dataclass(frozen=True)
class Reference:
    """A published set of curves and what of ours measures the same."""

    file: str
    seeds: Callable[[Any], dict[str, list[Seed]]]
    """From the file's JSON document to each task's seeds."""
    metric: str
    """The metric of ours that measures what was published."""
    label: str


@dataclass(frozen=True)
class Curve:
    """One task's published curve."""

    steps: np.ndarray
    """int64 [N], environment steps."""
    values: np.ndarray
    """float64 [S, N], one row per seed; NaN outside a seed's own range."""
    metric: str
    label: str


REFERENCES = {
    # Tasks scored by their success rate are left out: what we plot are returns.
    "tdmpc2": Reference(
        "tdmpc2.json.gz",
        lambda document: {
            task: [(seed["step"], seed["value"]) for seed in entry["seeds"].values()]
            for task, entry in document["state"].items()
            if entry["metric"] == "reward"
        },
        "eval/return",
        "published TD-MPC2, 5M parameters",
    ),
    "tdmpc2-size1": Reference(
        "official_tdmpc2_size1_cartpole_swingup.json",
        lambda document: {"cartpole-swingup": [(document["env_steps"], document["train_return"])]},
        "train/return",
        "official TD-MPC2 code, 1M parameters",
    ),
    "dreamerv3": Reference(
        "dreamerv3.json.gz",
        lambda document: {
            _task(name.removeprefix("dmc_")): [(seed["step"], seed["value"]) for seed in seeds.values()]
            for name, seeds in document["domains"]["dmc_proprio"].items()
        },
        "train/return",
        "published DreamerV3, proprioceptive",
    ),
}
"""By the name that `--reference` takes."""


def published(reference: str, env: str) -> Curve:
    """The published curve of a reference on an environment, `dmc:cartpole-swingup` or `envpool:CartpoleSwingup-v1`.

    Raises ValueError for an unknown reference or an environment that it has no curve for.
    """
    if reference not in REFERENCES:
        raise ValueError(f"there is no reference {reference!r}; known references are {', '.join(REFERENCES)}")
    entry = REFERENCES[reference]
    data = (resources.files("deploy") / "curves" / entry.file).read_bytes()
    tasks = entry.seeds(json.loads(gzip.decompress(data) if entry.file.endswith(".gz") else data))
    task = task_name(env)
    if task not in tasks:
        near = ", ".join(f"dmc:{name}" for name in difflib.get_close_matches(task or "", tasks))
        has = f"it has {near}" if near else f"its {len(tasks)} tasks are of the DeepMind Control suite"
        raise ValueError(f"reference {reference!r} has no curve for {env}; {has}")
    steps, values = align(tasks[task])
    return Curve(steps, values, entry.metric, entry.label)


def task_name(env: str) -> str | None:
    """The published name of a DeepMind Control task, `cartpole-swingup`; None for any other environment."""
    backend, _, name = env.partition(":")
    if backend == "envpool":
        return _task(re.sub(r"-v\d+$", "", re.sub(r"(?<=.)(?=[A-Z])", "-", name)).lower())
    return _task(name) if backend == "dmc" else None


def align(seeds: Iterable[Seed]) -> tuple[np.ndarray, np.ndarray]:
    """Puts curves on one axis: steps int64 [N], all of theirs, and values float64 [S, N].

    Between its own points a curve is interpolated linearly, outside them it is NaN; points of one step are averaged.
    """
    curves = []
    for steps, values in seeds:
        unique, where = np.unique(np.asarray(steps, dtype=np.int64), return_inverse=True)
        sums = np.bincount(where, weights=np.asarray(values, dtype=np.float64), minlength=len(unique))
        curves.append((unique, sums / np.bincount(where, minlength=len(unique))))
    grid = np.unique(np.concatenate([steps for steps, _ in curves]))
    return grid, np.stack([np.interp(grid, *curve, left=np.nan, right=np.nan) for curve in curves])


def _task(name: str) -> str:
    name = name.replace("_", "-")
    return name.replace("ball-in-cup-", "cup-").replace("point-mass-", "pointmass-")
