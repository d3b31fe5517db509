"""How often XLA compiles in this process, as JAX tells it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
"""Of one program, compiled or read from a cache of compilations."""


class Compiled(NamedTuple):
    """What was compiled."""

    programs: int = 0
    seconds: float = 0.0
    again: int = 0
    """Of the programs, those that came when nothing should be compiled any more, under a name that was compiled before:
    the first report, say, is none of them."""


class Compilations:
    """Counts the compilations of all threads. `figures`: up to now."""

    def __init__(self) -> None:
        self.figures = Compiled()
        self._names: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def counted(self, warm: Callable[[], bool]) -> Iterator[None]:
        """Counts those of the block. warm: whether nothing should be compiled any more; asked at each one."""

        def listen(event: str, duration_secs: float, **about: Any) -> None:
            if event != EVENT:
                return
            name = str(about.get("fun_name"))
            with self._lock:
                programs, before, again = self.figures
                known = name in self._names
                self._names.add(name)
                self.figures = Compiled(programs + 1, before + duration_secs, again + (known and warm()))

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
