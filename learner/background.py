"""Threads beside a loop: what ends one early is raised in the loop, and what one is to do waits in a bounded queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.1
"""How often what waits looks whether it is to end."""


@dataclass
class Beside:
    """Seconds that the threads beside a loop have spent on what has ended. Each is added to by one thread alone."""

    sample: float = 0.0
    """Asking for windows, waiting for shards included."""
    copy: float = 0.0
    """Handing windows to the devices; what a device then copies by itself is not waited for."""
    write_back: float = 0.0
    """Fetching latents from the devices and sending them."""
    publish: float = 0.0
    """Fetching snapshots from the devices and handing them on."""


class Background:
    """A thread that runs `work(stop)`, which returns soon after `stop` is set.

    What it raises before that is kept for `check`; what it raises after was in the way of its end.
    """

    def __init__(self, work: Callable[[threading.Event], None], name: str) -> None:
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"telamon-{name}", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[threading.Event], None]) -> None:
        try:
            work(self._stop)
        except Exception as error:  # noqa: BLE001  # not lost: `check` raises it in the loop
            if not self._stop.is_set():
                self._error = error

    def check(self) -> None:
        """Raises what ended the thread early."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Asks for the end."""
        self._stop.set()

    def end(self) -> None:
        """Asks for the end, and waits for it."""
        self.stop()
        self._thread.join()


class Outbox(Generic[T]):
    """Hands items to `handle` one after the other, in a thread; at most `depth` wait for it.

    clock: seconds, monotonic.
    """

    def __init__(
        self, handle: Callable[[T], None], depth: int, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._handle, self._depth, self._clock = handle, depth, clock
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._busy = False
        self._thread = Background(self._work, name)

    def put(self, item: T) -> None:
        """Waits while there is no room. Raises what `handle` has raised."""
        with self._changed:
            while len(self._items) >= self._depth:
                self.check()
                self._changed.wait(POLL_SECONDS)
            self._items.append(item)
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what `handle` has raised, after which nothing is handed on any more."""
        self._thread.check()

    @property
    def idle(self) -> bool:
        """Whether all that was put has been handled."""
        with self._changed:
            return not self._items and not self._busy

    def drain(self, timeout: float) -> bool:
        """Waits until it is idle; whether it is. Raises as `check`."""
        deadline = self._clock() + timeout
        with self._changed:
            while self._items or self._busy:
                self.check()
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(min(left, POLL_SECONDS))
            return True

    def stop(self) -> None:
        """Drops what waits; `handle` may still be busy with one item."""
        self._thread.stop()
        with self._changed:
            self._items.clear()
            self._changed.notify_all()

    def end(self) -> None:
        """As `stop`, and waits until `handle` has returned."""
        self.stop()
        self._thread.end()

    def _work(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with self._changed:
                if not self._items:
                    self._changed.wait(POLL_SECONDS)
                    continue
                item = self._items.popleft()
                self._busy = True
                self._changed.notify_all()
            try:
                self._handle(item)
            finally:
                del item  # its arrays are not held while nothing is to do
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
