"""How tests wait: no longer than needed, and as long as a machine may take that has other things to do."""

from __future__ import annotations

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
