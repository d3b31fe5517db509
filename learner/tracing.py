"""A trace of some updates, with all that happens between them: `--profile N` (docs/profiling.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

log = logging.getLogger(__name__)

FOLDER = "profile"
"""Where in a run directory traces are."""
WARM_UPDATES, WARM_TICKS = 10, 2
"""That pass before a trace begins: updates of this process, and ticks since the first of them. So it shows no
compilation, nor a part of the updates that a random phase owes, which follow each other without a tick."""


class Trace:
    """Begins and ends by itself, called before each update.

    updates: to be traced; 0: none. folder: where JAX writes it. say: is told in a sentence where it lies, or that there
    is none.
    """

    def __init__(self, updates: int, folder: Path, say: Callable[[str], None]) -> None:
        self._left, self._folder, self._say = updates, folder, say
        self._made = 0
        """Updates of this process."""
        self._first_tick = 0
        """Ticks at the first of them."""
        self._running = False

    def before_update(self, ticks: int) -> None:
        """ticks: that have been made, in this process or before; rows do as well."""
        if self._made == 0:
            self._first_tick = ticks
        if self._running and self._left == 0:
            self.end()
        warm = self._made >= WARM_UPDATES and ticks - self._first_tick >= WARM_TICKS
        if self._left > 0 and warm and not self._running:
            self._begin()
        self._made += 1
        self._left -= self._running

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of a Python function would be in it, and be slowed down by that
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._running = True

    def end(self) -> None:
        """Ends a trace that is going on, with fewer updates than were asked for where the run ends before, and tells of
        one that was asked for and never began."""
        if not self._running:
            if self._left > 0:
                reason = f"the run ended before it was warm, after {self._made} updates of this process"
                log.warning("event=profile_not_made reason=%r", reason)
                self._say(f"no profile: {reason} (see docs/profiling.md)")
            return
        self._running = False
        jax.profiler.stop_trace()
        log.info("event=profile folder=%s last_update=%d", self._folder, self._made)
        self._say(f"profile in {self._folder}, up to update {self._made} of this process (see docs/profiling.md)")


@contextmanager
def tracing(updates: int, folder: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[Trace]:
    """A trace that has ended when the block has."""
    trace = Trace(updates, folder, say)
    try:
        yield trace
    finally:
        trace.end()
