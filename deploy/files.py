"""Files of a run directory that others may look at at any moment."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".lock"


def replace_text(path: Path, text: str) -> None:
    """Writes a file, complete or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """While the block runs no other command trains in the run directory, which is made if missing.

    Raises ValueError where one does.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with this process, however it ends
        except BlockingIOError as error:
            raise ValueError(
                f"another `telamon launch` or `telamon train` is at work in {run_dir}; end it first"
            ) from error
        yield
    finally:
        os.close(handle)
