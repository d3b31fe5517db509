"""Published learning curves, shipped as package data in deploy/curves/ (sources and licences: NOTICE).

Steps are environment steps: agent steps times the action repeat, as everywhere in this project.
"""

from __future__ import annotations

import difflib
import gzip
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
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
    task: Callable[[str], str | None]
    """The published name of an environment of ours; None for one that it cannot have."""
    bin: int = 1
    """Published points are averaged over this many environment steps, to where the bin ends."""


@dataclass(frozen=True)
class Curve:
    """One task's published curve."""

    steps: np.ndarray
    """int64 [N], environment steps."""
    values: np.ndarray
    """float64 [S, N], one row per seed; NaN outside a seed's own range."""
    metric: str
    label: str


def task_name(env: str, backends: Collection[str]) -> str | None:
    """The published name of a DeepMind Control task of one of `backends`, `cartpole-swingup`; None for any other."""
    backend, _, name = env.partition(":")
    if backend not in backends:
        return None
    if backend == "envpool":
        name = re.sub(r"-v\d+$", "", re.sub(r"(?<=.)(?=[A-Z])", "-", name)).lower()
    return _task(name)


def game_name(env: str) -> str | None:
    """The published name of an Atari game, `ms_pacman`, by `atari:ms_pacman` or `envpool:MsPacman-v5`; None else."""
    backend, _, name = env.partition(":")
    if backend == "envpool":
        return re.sub(r"-v\d+$", "", re.sub(r"(?<=.)(?=[A-Z])", "_", name)).lower()
    return name if backend == "atari" else None


def _dreamerv3(domain: str, task: Callable[[str], str]) -> Callable[[Any], dict[str, list[Seed]]]:
    return lambda document: {
        task(name.partition("_")[2]): [(seed["step"], seed["value"]) for seed in seeds.values()]
        for name, seeds in document["domains"][domain].items()
    }


def _task(name: str) -> str:
    name = name.replace("_", "-")
    return name.replace("ball-in-cup-", "cup-").replace("point-mass-", "pointmass-")


_vectors = partial(task_name, backends=("dmc", "envpool"))
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
        _vectors,
    ),
    "tdmpc2-size1": Reference(
        "official_tdmpc2_size1_cartpole_swingup.json",
        lambda document: {"cartpole-swingup": [(document["env_steps"], document["train_return"])]},
        "train/return",
        "official TD-MPC2 code, 1M parameters",
        _vectors,
    ),
    "dreamerv3": Reference(
        "dreamerv3.json.gz",
        _dreamerv3("dmc_proprio", _task),
        "train/return",
        "published DreamerV3, proprioceptive",
        _vectors,
    ),
    "dreamerv3-vision": Reference(
        "dreamerv3.json.gz",
        _dreamerv3("dmc_vision", _task),
        "train/return",
        "published DreamerV3, pixels",
        partial(task_name, backends=("dmcpixels",)),
        bin=10_000,
    ),
    "dreamerv3-atari100k": Reference(
        "dreamerv3.json.gz",
        _dreamerv3("atari100k", str),
        "train/return",
        "published DreamerV3, Atari 100k",
        game_name,
        bin=10_000,
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
    task = entry.task(env)
    if task not in tasks:
        near = ", ".join(difflib.get_close_matches(task or "", tasks))
        has = f"it has {near}" if near else f"its {len(tasks)} tasks are {', '.join(list(tasks)[:3])} and so on"
        raise ValueError(f"reference {reference!r} has no curve for {env}; {has}")
    steps, values = align(binned(*seed, entry.bin) for seed in tasks[task])
    return Curve(steps, values, entry.metric, entry.label)


def binned(steps: Iterable[float], values: Iterable[float], width: int) -> Seed:
    """One seed with its steps moved up to multiples of `width`; `align` averages the points of one step."""
    return -(-np.asarray(steps, dtype=np.int64) // width) * width, values


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
