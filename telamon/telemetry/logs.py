"""Logging set-up: every event of ours in the run directory's log.txt, warnings on stderr too.

Messages are events, `LOG.info("event=checkpoint step=%d path=%s", step, path)`; numbers that form a curve are metrics
and belong to the metrics writer.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

LOG_FILE = "log.txt"
PACKAGES = ("telamon", "replay_server", "actors", "learner", "deploy")
"""Loggers that get the run's level. Libraries are heard from WARNING on."""
BUFFER_LINES = 1000
"""Newest lines that a part of a cluster keeps until they are fetched."""
PART_LOG_BYTES = 8 * 2**20
"""Of a part's log file; one older file of that size stays beside it."""


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that moment: the live view replaces it to keep its panel whole."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # the base class holds an attribute of that name
        return sys.stderr


def setup_logging(run_dir: Path, level: int = logging.INFO) -> None:
    """Sends events from `level` on to `run_dir`/log.txt, appending (times in UTC), and warnings to stderr.

    A second call moves the log to its own `run_dir`; handlers of others are left alone.
    """
    _install(
        {
            "telamon-file": logging.FileHandler(run_dir / LOG_FILE, encoding="utf-8"),
            "telamon-stderr": _StderrHandler(),
        },
        level,
    )


class LogBuffer(logging.Handler):
    """Keeps the newest lines until somebody fetches them: the log of a part that writes no files of its own."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=lines)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) == self._lines.maxlen:
            self._dropped += 1
        self._lines.append(self.format(record))

    def drain(self) -> list[str]:
        """The lines since the last call, oldest first; where some had no room, the first line says how many."""
        self.acquire()
        try:
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped = 0
        finally:
            self.release()
        return [f"event=lines_dropped count={dropped}", *lines] if dropped else lines


def setup_buffer(lines: int = BUFFER_LINES, level: int = logging.INFO) -> LogBuffer:
    """Sends events from `level` on to a buffer, in place of an earlier one."""
    buffer = LogBuffer(lines)
    _install({"telamon-buffer": buffer}, level)
    return buffer


class PartLogs:
    """The log files of a cluster's parts, `directory`/NAME.log, bounded; the directory comes with the first line."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, RotatingFileHandler] = {}

    def write(self, name: str, lines: Iterable[str]) -> None:
        """Appends finished lines to the file of part `name`."""
        if name not in self._files:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{name}.log"
            self._files[name] = RotatingFileHandler(path, maxBytes=PART_LOG_BYTES, backupCount=1, encoding="utf-8")
        for line in lines:
            self._files[name].emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _install(handlers: dict[str, logging.Handler], level: int) -> None:
    """Gives the root logger `handlers`, in place of those of the same names."""
    formatter = logging.Formatter(
        "time=%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.name in handlers]:
        root.removeHandler(old)
        old.close()
    for name, handler in handlers.items():
        handler.set_name(name)
        handler.setFormatter(formatter)
        root.addHandler(handler)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
