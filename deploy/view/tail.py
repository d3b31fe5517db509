"""What a growing metrics.jsonl holds, a piece at a time: a reader says how far it has come and gets what is new.

A resumed run cuts its file back and goes on from there. A reader of what was cut off is told to begin again.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from telamon.telemetry.writer import METRICS_FILE

POINTS = 2000
"""Most points of one metric that a piece holds. More would cost the browser time and show nothing that a screen has
room for."""
SEAL_BYTES = 2**16
"""So many bytes before a place tell whether the file is still the one that was read. Two runs of one seed can agree on
them, but for the wall clock, only where they agree on all."""
BIGGEST = sys.float_info.max
"""Finite value."""

Series = tuple[list[int], list[float | None]]
"""Environment steps and values; None for one that was not finite."""


@dataclass(frozen=True)
class Place:
    """How far a reader has come."""

    offset: int = 0
    """Bytes, the end of a line."""
    seal: str = ""
    """Digest of the bytes before it."""


@dataclass(frozen=True)
class Piece:
    """What is new since a place."""

    place: Place
    """Where the next piece begins."""
    whole: bool
    """It begins at the beginning: what the reader has is of another file, or was cut off."""
    series: dict[str, Series] = field(default_factory=dict)
    thinned: dict[str, int] = field(default_factory=dict)
    """Metrics of which some points were left out -> how many there were."""


def read(run_dir: Path, since: Place, points: int = POINTS) -> Piece:
    """The whole lines of `run_dir`/metrics.jsonl after `since`, at most `points` of each metric.

    A half line at the end is not there yet, and a missing file is an empty one. Raises ValueError for a damaged line.
    """
    path = run_dir / METRICS_FILE
    try:
        with path.open("rb") as file:
            start = max(0, since.offset - SEAL_BYTES)
            file.seek(start)
            data = file.read()  # once: what is compared and what is sent are of one moment
            whole = since.offset == 0 or _seal(data[: since.offset - start]) != since.seal
            if whole and start > 0:
                file.seek(0)
                start, data = 0, file.read()
    except FileNotFoundError:
        return Piece(Place(), whole=True)
    begin = 0 if whole else since.offset - start
    end = data.rfind(b"\n") + 1
    series = _series(data[begin:end], path, start + begin)
    kept = {key: thin(values, points) for key, (_, values) in series.items()}
    return Piece(
        place=Place(start + end, _seal(data[:end][-SEAL_BYTES:])),
        whole=whole,
        series={key: ([x[i] for i in kept[key]], [y[i] for i in kept[key]]) for key, (x, y) in series.items()},
        thinned={key: len(x) for key, (x, _) in series.items() if len(x) > len(kept[key])},
    )


def thin(values: Sequence[float | None], points: int) -> list[int]:
    """Indices, in order, of at most `points` values: the lowest and the highest of stretches of equal length.

    All of them where they are that few.
    """
    count = len(values)
    if count <= points:
        return list(range(count))
    width = math.ceil(count / (points // 2))
    padded = np.full(-(-count // width) * width, np.nan)
    padded[:count] = [math.nan if value is None else value for value in values]
    stretches = padded.reshape(-1, width)
    missing = np.isnan(stretches)
    low = np.where(missing, np.inf, stretches).argmin(axis=1)
    high = np.where(missing, -np.inf, stretches).argmax(axis=1)
    first = np.arange(len(stretches)) * width
    return np.unique(np.concatenate([first + low, first + high])).tolist()


def _series(data: bytes, path: Path, offset: int) -> dict[str, Series]:
    """Lines, each with its newline, as series. offset: of the first, in the file."""
    series: dict[str, Series] = {}
    for line in data.splitlines(keepends=True):
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
            for key, value in values.items():
                steps, points = series.setdefault(key, ([], []))
                steps.append(step)
                points.append(value if value is not None and -BIGGEST <= value <= BIGGEST else None)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} was damaged after it was written: the line at byte {offset} holds no metrics ({error!r})"
            ) from error
        offset += len(line)
    return series


def _seal(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
