"""Logging set-up: every event of ours in the run directory's log.txt, warnings on stderr too.

Messages are events, `LOG.info("event=checkpoint step=%d path=%s", step, path)`; numbers that form a curve are metrics
and belong to the metrics writer.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TextIO

LOG_FILE = "log.txt"
PACKAGES = ("telamon", "replay_server", "actors", "learner", "deploy")
"""Loggers that get the run's level. Libraries are heard from WARNING on."""


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
    formatter = logging.Formatter(
        "time=%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    root = logging.getLogger()
    handlers: dict[str, logging.Handler] = {
        "telamon-file": logging.FileHandler(run_dir / LOG_FILE, encoding="utf-8"),
        "telamon-stderr": _StderrHandler(),
    }
    for old in [h for h in root.handlers if h.name in handlers]:
        root.removeHandler(old)
        old.close()
    for name, handler in handlers.items():
        handler.set_name(name)
        handler.setFormatter(formatter)
        root.addHandler(handler)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
