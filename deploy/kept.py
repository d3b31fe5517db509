"""A part of a run that is started again when it dies, until it has died too often. In the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.exceptions

from actors.pool import PartFailed, RestartPolicy, Restarts, one_line, pause_after

STATUS_SECONDS = 1.0
"""Between two questions how a part stands."""
STATUS_PATIENCE = 120.0
"""A part that does not answer for so long is taken for dead and replaced."""
PLACEMENT_SECONDS = 600.0
"""In which a cluster must find room for a part: a node may have to be started for it."""


class Kept:
    """An actor that is started again when it dies, and asked how it stands about once a second.

    start: makes the actor of the n-th attempt, from 0; None while there is no room for it.
    job: its method that is called once after each start, and whose result is kept.
    policy: how long to wait before a start, and when to give up.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[int], Any],
        job: str | None,
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.handle: Any = None
        """None while it is down."""
        self.status: Any = None
        """What it said last; None since it was started."""
        self.result: Any = None
        """Of its job; None while that goes on."""
        self.starts = self.deaths = 0
        self._start, self._job, self._restarts, self._clock = start, job, Restarts(policy), clock
        self._working: Any = None
        self._asked: Any = None
        self._asked_at = self._start_at = -math.inf

    def poll(self) -> Sequence[str]:
        """Does what is due, without waiting. Returns its new log lines.

        Raises PartFailed once it has died too often, and where its job raised something: no restart would help.
        """
        now = self._clock()
        if self.handle is None:
            if now >= self._start_at:
                self._begin(now)
            return ()
        if self._working is not None and is_ready(self._working):
            try:
                self._working, self.result = None, ray.get(self._working)
            except ray.exceptions.RayTaskError as error:
                raise PartFailed(f"{self.name}: {error.cause}") from error.cause
            except ray.exceptions.RayError as error:
                self.died(one_line(error))
                return ()
        return self._look(now)

    def died(self, reason: str) -> None:
        """Books a death; the next start is due after a pause. Raises PartFailed where it was one too many."""
        now = self._clock()
        self.deaths += 1
        self.kill()
        self._start_at = now + pause_after(self._restarts, self.name, reason, now)

    def kill(self) -> None:
        """Ends the process at once, if there is one."""
        if self.handle is not None:
            ray.kill(self.handle)
        self.handle = self.status = self._working = self._asked = None

    def _begin(self, now: float) -> None:
        self.handle = self._start(self.starts)
        if self.handle is None:
            return
        self.starts += 1
        if self._job is not None:
            self._working = getattr(self.handle, self._job).remote()
        self._asked, self._asked_at = self.handle.status.remote(), now

    def _look(self, now: float) -> Sequence[str]:
        if self._asked is None:
            if now - self._asked_at >= STATUS_SECONDS:
                self._asked, self._asked_at = self.handle.status.remote(), now
            return ()
        if not is_ready(self._asked):
            if now - self._asked_at > (PLACEMENT_SECONDS if self.status is None else STATUS_PATIENCE):
                self.died(f"it has not answered for {now - self._asked_at:.0f} s")
            return ()
        try:
            self.status = ray.get(self._asked)
        except ray.exceptions.RayError as error:
            self.died(one_line(error))
            return ()
        self._asked = None
        return self.status.log


def is_ready(ref: Any) -> bool:
    """Whether the result is there, now."""
    return bool(ray.wait([ref], timeout=0)[0])
