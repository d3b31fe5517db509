"""How tests wait: no longer than needed, and as long as a machine may take that has other things to do."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

SECONDS = 60.0
"""Time-out of whatever should happen, and bound of what must not wait for a longer one. Only a time-out that is meant
to pass is shorter."""


def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Waits until `condition()` holds. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


def next_line(process: subprocess.Popen[str], seconds: float = SECONDS) -> str:
    """The next line of a process's standard output; nothing where that has ended.

    Kills the process and raises AssertionError where none comes for `seconds`.
    """
    output, found = process.stdout, []
    assert output is not None
    reader = threading.Thread(target=lambda: found.append(output.readline()), daemon=True)
    reader.start()
    reader.join(seconds)
    if not found:
        process.kill()
        raise AssertionError(f"process {process.pid} said nothing within {seconds:g} s")
    return found[0]
