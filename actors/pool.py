"""Keeps a number of rollout workers going: calls them, hears of their deaths, starts them again. In the driver.

Follows RLlib's FaultTolerantActorManager in what it keeps of an actor: its calls in flight by their kind, a few at a
time, whether it is well, and a look at it now and then. Differs: a dead actor is made anew by `start`, with random
streams of its own, after a pause that grows and as often as a budget allows; one that hangs is killed; the number of
workers changes while they run; an error that a worker raises itself is no death, and is raised here.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.rollout import Piece
from actors.worker import Closed, WorkerStatus

log = logging.getLogger(__name__)

MOST_TICKS = 10_000
"""Ticks of one call at most."""


@dataclass(frozen=True)
class RestartPolicy:
    """When something that has died is started again, and when it is given up."""

    first: float = 1.0
    """Seconds before the first restart."""
    factor: float = 2.0
    """By which the pause grows with every death."""
    longest: float = 30.0
    """Seconds of the longest pause."""
    budget: int = 10
    """Deaths within `window` after each of which it is started again; one more is too many."""
    window: float = 600.0
    """Seconds after which a death is forgotten."""


class Restarts:
    """The deaths of one part of a run."""

    def __init__(self, policy: RestartPolicy = RestartPolicy()) -> None:
        self.policy = policy
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Seconds to wait before the next start after a death at `now`; None: it was one too many."""
        p = self.policy
        self._deaths.append(now)
        while self._deaths[0] <= now - p.window:
            self._deaths.popleft()
        if len(self._deaths) > p.budget:
            return None
        # the exponent is bounded too: a float has no power of some thousands
        return min(p.longest, p.first * p.factor ** min(len(self._deaths) - 1, 64))


class PartFailed(RuntimeError):
    """A part of the run gave up; the message says which and why."""


def pause_after(restarts: Restarts, name: str, reason: str, now: float) -> float:
    """Books a death of part `name`; seconds until it is to be started again. Raises PartFailed once it was too many."""
    pause = restarts.died(now)
    if pause is None:
        p = restarts.policy
        raise PartFailed(
            f"{name} died {p.budget + 1} times within {p.window:g} s, the last time because: {reason}; "
            "the bound is restarts"
        )
    log.warning("event=part_died part=%s reason=%r restart_in=%.1f", name, reason, pause)
    return pause


class Calls(Protocol):
    """What the pool needs of Ray."""

    def ready(self, refs: Sequence[Any]) -> Sequence[Any]:
        """Those whose result is there, now."""
        ...

    def get(self, ref: Any) -> Any:
        """The result. Raises RayTaskError for what the worker raised, another RayError where it is gone."""
        ...

    def kill(self, handle: Any) -> None: ...


class RayCalls:
    """Ray itself."""

    def ready(self, refs: Sequence[Any]) -> Sequence[Any]:
        return ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else []

    def get(self, ref: Any) -> Any:
        return ray.get(ref)

    def kill(self, handle: Any) -> None:
        ray.kill(handle)


@dataclass(frozen=True)
class Event:
    """Something that a poll found, about one worker."""

    name: str


@dataclass(frozen=True)
class Started(Event):
    """It has built everything and acts."""

    attempt: int
    seconds: float
    """Since it was asked for."""


@dataclass(frozen=True)
class Arrived(Event):
    """A piece is done."""

    piece: Piece


@dataclass(frozen=True)
class Seen(Event):
    """It has answered how it stands; its log lines come once."""

    status: WorkerStatus


@dataclass(frozen=True)
class Died(Event):
    """It has died, or was killed because it hangs."""

    reason: str
    """A sentence."""
    pause: float
    """Seconds until it is started again."""


@dataclass(frozen=True)
class Left(Event):
    """It has ended because fewer are wanted."""

    closed: Closed | None
    """None where it died, or did not answer in time, while it was ending."""


Kind = Literal["open", "rollout", "status", "stop", "close"]
State = Literal["down", "opening", "running", "leaving"]


@dataclass
class _Member:
    """One worker, through all its lives."""

    name: str
    index: int
    restarts: Restarts
    state: State = "down"
    handle: Any = None
    attempt: int = -1
    due: float = 0.0
    """When a worker that is down is to be started."""
    since: float = 0.0
    """When the present state began."""
    asked: float = 0.0
    """When the last status was asked for."""
    ticks: int = 1
    """Of its next rollout."""
    calls: dict[Any, Kind] = field(default_factory=dict)
    """Those in flight, by reference."""
    status: WorkerStatus | None = None
    """The last one; None since it was started."""

    def in_flight(self, kind: Kind) -> int:
        return sum(k == kind for k in self.calls.values())

    def forget(self) -> None:
        """What belonged to the last process."""
        self.handle, self.status = None, None
        self.calls.clear()


class Pool:
    """Rollout workers PREFIX-0 to PREFIX-(n-1); `resize` says how many, `poll` does everything.

    start: (index, attempt) -> the handle of a new RolloutWorker; attempts of an index are counted from 0 and do not
    repeat, not even after it was gone.
    piece_seconds: what a rollout should take; its ticks follow.
    in_flight: rollouts that each worker has at a time, so that it need not wait for the driver.
    status_seconds: between two looks at each worker.
    patience: seconds without an answer to such a look after which a worker that acts is taken for dead.
    start_patience: seconds after its start in which it must act; a cluster may have to find room for it first.
    close_timeout: seconds that a worker has for its last rows when it leaves.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        start: Callable[[int, int], Any],
        *,
        prefix: str = "actor",
        policy: RestartPolicy = RestartPolicy(),
        piece_seconds: float = 0.5,
        in_flight: int = 2,
        status_seconds: float = 1.0,
        patience: float = 120.0,
        start_patience: float = 600.0,
        close_timeout: float = 10.0,
        calls: Calls | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._start, self._prefix, self._policy = start, prefix, policy
        self._piece_seconds, self._in_flight = piece_seconds, in_flight
        self._status_seconds, self._patience, self._start_patience = status_seconds, patience, start_patience
        self._close_timeout = close_timeout
        self._calls: Calls = RayCalls() if calls is None else calls
        self._clock, self._sleep = clock, sleep
        self._members: dict[int, _Member] = {}
        self._attempts: dict[int, int] = {}
        self.size = 0
        """Workers that are wanted."""
        self.held = False
        """Whether no rollout is begun for now, by workers that are ready for one."""

    def resize(self, size: int) -> None:
        """Wants so many workers from now on: those missing are started, the last ones too many end with their rows."""
        if size < 0:
            raise ValueError(f"a pool of {size} workers cannot be; actors must be at least 0")
        self.size = size

    def handles(self) -> dict[str, Any]:
        """Name -> handle of every worker that has a process and is to stay; those that are opening are among them."""
        return {m.name: m.handle for m in self._members.values() if m.state in ("opening", "running")}

    def statuses(self) -> dict[str, WorkerStatus | None]:
        """Name -> what it said last, None where it has not since it was started."""
        return {m.name: m.status for _, m in sorted(self._members.items())}

    @property
    def running(self) -> int:
        """Workers that act."""
        return sum(m.state == "running" for m in self._members.values())

    def poll(self) -> list[Event]:
        """Does what is due and returns what has happened since, without waiting for anything.

        Raises what a worker raised in a rollout or while it was opened (but for an OSError there: it is taken for a
        death, the replay may be away), and PartFailed once one has died too often or cannot be made.
        """
        now = self._clock()
        self._adjust(now)
        events: list[Event] = []
        owners = {ref: member for member in self._members.values() for ref in member.calls}
        # rollouts first: what a worker did before it died counts, and a death drops its other calls
        for ref in sorted(self._calls.ready(list(owners)), key=lambda ref: owners[ref].calls[ref] != "rollout"):
            member = owners[ref]
            kind = member.calls.pop(ref, None)  # gone where its worker has just died
            if kind is not None:
                events += self._answered(member, kind, ref, now)
        for member in list(self._members.values()):
            events += self._look(member, now)
        for member in self._members.values():
            self._ask(member, now)
        return events

    def stop(self, timeout: float) -> list[Event]:
        """Ends all workers, with `timeout` seconds for their last rows, and kills those that are left then."""
        self.resize(0)
        events: list[Event] = []
        deadline = self._clock() + timeout
        while self._members and self._clock() < deadline:
            events += self.poll()
            self._sleep(0.01)
        self.kill()
        return events

    def kill(self) -> None:
        """Ends all processes at once."""
        for member in self._members.values():
            if member.handle is not None:
                self._calls.kill(member.handle)
        self._members.clear()
        self.size = 0

    # How

    def _adjust(self, now: float) -> None:
        """Starts and ends workers as the size and the pauses say."""
        for index in range(self.size):
            if index not in self._members:
                self._members[index] = _Member(f"{self._prefix}-{index}", index, Restarts(self._policy), due=now)
        for index, member in list(self._members.items()):
            if index >= self.size and member.state == "down":
                del self._members[index]
            elif index >= self.size and member.state in ("opening", "running"):
                member.state, member.since = "leaving", now
                member.calls[member.handle.stop.remote()] = "stop"
                member.calls[member.handle.close.remote(self._close_timeout)] = "close"
            elif index < self.size and member.state == "down" and now >= member.due:
                member.attempt = self._attempts[index] = self._attempts.get(index, -1) + 1
                member.state, member.since, member.asked, member.ticks = "opening", now, now, 1
                member.handle = self._start(index, member.attempt)
                member.calls[member.handle.open.remote()] = "open"
                member.calls[member.handle.status.remote()] = "status"

    def _ask(self, member: _Member, now: float) -> None:
        """Keeps enough calls in flight."""
        if member.state in ("opening", "running") and not member.in_flight("status"):
            if now - member.asked >= self._status_seconds:
                member.calls[member.handle.status.remote()] = "status"
                member.asked = now
        if member.state == "running" and not self.held:
            for _ in range(self._in_flight - member.in_flight("rollout")):
                member.calls[member.handle.rollout.remote(member.ticks)] = "rollout"

    def _answered(self, member: _Member, kind: Kind, ref: Any, now: float) -> list[Event]:
        try:
            result = self._calls.get(ref)
        except RayTaskError as error:
            cause = error.cause
            if member.state == "leaving":
                log.warning("event=part_failed part=%s call=%s reason=%r", member.name, kind, str(cause))
                return [self._left(member, None)]
            if kind == "open" and isinstance(cause, OSError) and not isinstance(cause, PermissionError):
                return self._died(member, f"it could not be opened: {cause}", now)
            raise cause from None
        except RayActorError as error:
            if error.actor_init_failed:
                raise PartFailed(f"{member.name} cannot be made: {one_line(error)}") from error
            return self._died(member, one_line(error), now)
        except RayError as error:
            return self._died(member, one_line(error), now)
        match kind:
            case "open":
                if member.state == "opening":
                    seconds = now - member.since
                    member.state, member.since = "running", now
                    return [Started(member.name, member.attempt, seconds)]
            case "rollout":
                member.ticks = next_ticks(member.ticks, result, self._piece_seconds)
                return [Arrived(member.name, result)]
            case "status":
                member.status = result
                return [Seen(member.name, result)]
            case "close":
                return [self._left(member, result)]
        return []

    def _look(self, member: _Member, now: float) -> list[Event]:
        """Ends a worker that hangs, says that an environment does, or does not leave."""
        if member.state == "leaving":
            late = now - member.since > self._close_timeout + self._patience
            return [self._left(member, None)] if late else []
        if member.state == "down":
            return []
        if member.status is not None and member.status.hung is not None:
            return self._died(member, member.status.hung, now)
        if member.state == "opening" and now - member.since > self._start_patience:
            return self._died(member, f"it did not act within {self._start_patience:g} s of its start", now)
        if member.state == "running" and member.in_flight("status") and now - member.asked > self._patience:
            return self._died(member, f"it has not answered for {self._patience:g} s", now)
        return []

    def _died(self, member: _Member, reason: str, now: float) -> list[Event]:
        if member.state == "leaving":
            return [self._left(member, None)]
        self._calls.kill(member.handle)
        member.forget()
        pause = pause_after(member.restarts, member.name, reason, now)
        member.state, member.since, member.due = "down", now, now + pause
        return [Died(member.name, reason, pause)]

    def _left(self, member: _Member, closed: Closed | None) -> Left:
        self._calls.kill(member.handle)
        member.forget()
        del self._members[member.index]
        log.info("event=part_left part=%s", member.name)
        return Left(member.name, closed)


def next_ticks(asked: int, piece: Piece, seconds: float) -> int:
    """Ticks of the next rollout, for one that takes `seconds`: from a piece, at most twice as many as were `asked`."""
    if piece.ticks == 0 or piece.seconds <= 0:
        return asked
    return max(1, min(int(piece.ticks * seconds / piece.seconds), 2 * asked, MOST_TICKS))


def one_line(error: Exception) -> str:
    """What Ray tells of a death, on one line: what a constructor raised, or how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^~")]
    if any(line.startswith('File "') for line in lines):  # a traceback ends with what was raised
        return lines[-1]
    told = " ".join(line for line in lines if not re.match(r"\w+: ", line))  # without the ids of all there is
    return told.partition(" Some common causes")[0]
