"""The one metrics writer: metrics.jsonl and TensorBoard events on one x-axis, environment steps.

metrics.jsonl is the record: one JSON object per line, `{"step": 2000, "train/return": 41.5, ...}`. TensorBoard is a
copy of it. A value that is not finite is `null` in the file (JSON has no NaN) and reads back as NaN.

Keys are `GROUP/NAME`. Those under `time/` are facts of the wall clock (rates, durations); every other key of a resumed
run must equal its uninterrupted twin's bit for bit, which the file can show: floats are written with all their digits.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

LOG = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
WALL_CLOCK = "time/"
"""Prefix of the only keys that may differ between a run and its resumed twin."""
FLUSH_SECONDS = 5.0
"""Longest time for which TensorBoard events stay in memory while metrics arrive."""


class MetricsWriter:
    """Appends to `run_dir`/metrics.jsonl and to TensorBoard events beside it.

    run_dir: an existing directory.
    resume_length: bytes of metrics.jsonl to keep, a `length` taken earlier; what a run wrote after that point is cut
        off the file and hidden from TensorBoard. None starts a new file.
    clock: seconds since the epoch, for TensorBoard's own time axis.

    Raises FileExistsError where a new run would write over an old one's metrics, ValueError where the file cannot be
    cut back to `resume_length`.
    """

    def __init__(self, run_dir: Path, resume_length: int | None = None, clock: Callable[[], float] = time.time) -> None:
        path = run_dir / METRICS_FILE
        self._file = _create(path) if resume_length is None else _cut_back(path, resume_length)
        self._clock = clock
        # The library names the file by the second: a number keeps a quick resume from writing over its predecessor,
        # and TensorBoard reads a directory's files in the order of their names.
        number = len(list(run_dir.glob("events.out.tfevents.*")))
        self._events = EventsWriter(str(run_dir / "events"), f".{number:04d}")
        self._flushed = clock()
        self._step = 0
        if resume_length is not None:
            self._continue_events(read_metrics(run_dir))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one line at `step` environment steps. Raises ValueError where `step` goes back or a key is "step"."""
        if step < self._step:
            raise ValueError(f"metrics at step {step} would follow those at step {self._step}; steps must not go back")
        if "step" in metrics:
            raise ValueError('a metric is named "step", which names the x-axis; name it GROUP/NAME')
        values = {key: float(value) for key, value in metrics.items()}
        line = {"step": int(step), **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._write_event(step, values)
        self._step = step
        if self._clock() - self._flushed >= FLUSH_SECONDS:
            self._flush_events()

    def write_image(self, step: int, key: str, png: bytes, size: tuple[int, int]) -> None:
        """Adds a PNG or APNG of `size` (height, width) pixels at `step` environment steps, to TensorBoard alone."""
        height, width = size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)  # 3: RGB
        summary = Summary(value=[Summary.Value(tag=key, image=image)])
        self._events.write_event(Event(wall_time=self._clock(), step=step, summary=summary))

    @property
    def length(self) -> int:
        """Bytes of metrics.jsonl, all of them on disk, TensorBoard's copy too: what a checkpoint stores for resume."""
        os.fsync(self._file.fileno())
        self._flush_events()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_event(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._events.write_event(Event(wall_time=self._clock(), step=step, summary=summary))

    def _flush_events(self) -> None:
        self._events.flush()
        self._flushed = self._clock()

    def _continue_events(self, kept: list[dict[str, float]]) -> None:
        """Hides what earlier files hold at and after the last kept step, and writes that step's kept lines again.

        A start event hides whole steps, while the cut may lie between two lines of one step.
        """
        self._step = int(kept[-1]["step"]) if kept else 0
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(wall_time=self._clock(), step=self._step, session_log=start))
        for line in kept:
            if line["step"] == self._step:
                self._write_event(self._step, {k: v for k, v in line.items() if k != "step"})


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of `run_dir`/metrics.jsonl in order, each with its integer "step"; `null` becomes NaN.

    A last line without its newline was cut by a crash, or is being written: it is skipped with a warning. Raises
    FileNotFoundError where there is no file, ValueError naming any other line that cannot be read.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} holds no {METRICS_FILE}: it is not a run directory or nothing was logged")
    *lines, tail = path.read_bytes().split(b"\n")
    if tail:
        LOG.warning("event=half_written_line_skipped path=%s bytes=%d", path, len(tail))
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def series(rows: Iterable[Mapping[str, float]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """One metric of `read_metrics`: environment steps int64 [N] and values float64 [N] of the lines that hold `key`."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return (
        np.array([step for step, _ in points], dtype=np.int64),
        np.array([value for _, value in points], dtype=np.float64),
    )


def _parse(line: bytes, where: str) -> dict[str, float]:
    try:
        return {k: math.nan if v is None else v for k, v in json.loads(line).items()}
    except (ValueError, AttributeError) as e:
        raise ValueError(f"{where} is not a JSON object ({e}); the file was damaged after it was written") from e


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except FileExistsError as e:
        raise FileExistsError(f"{path} holds the metrics of an earlier run; resume it or use another directory") from e


def _cut_back(path: Path, length: int) -> BinaryIO:
    """Opens `path` for appending after its first `length` bytes, which must end with a whole line.

    A run may have died before it wrote the file that its resumption cuts back to nothing.
    """
    file = path.open("r+b" if length else "wb")
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - 1))
        if not 0 <= length <= size or (length > 0 and file.read(1) != b"\n"):
            raise ValueError(
                f"{path} has {size} bytes and cannot be cut back to {length}, the end of a line when the checkpoint "
                "was written; it was changed since"
            )
        file.truncate(length)
        file.seek(length)
    except (OSError, ValueError):
        file.close()
        raise
    return file
