"""Keeps (rows trained on) / (rows inserted) in a band around the train ratio, over any number of shards.

The clock counts in inserted rows. Each update is worth `rows_per_update / ratio` of them, and the learner's *lead* is
what its updates are worth minus what was inserted. An update is admitted while the lead stays within the band after
it; inserts may go on until the lead has fallen to the other edge. The rows between are the *headroom*, handed out as
*credit*: how many rows a shard may hold of all it ever took. The rules:

1. Before the fill (`min_rows`, `min_items`) nothing is trained on, and every look lets each shard take a band's rows,
   so no more than that comes beyond it. The fill owes no updates, or those beyond `lead`, in one burst, once per run.
2. From then on shards that can be sampled are *members*. Only rows that a member took while it was one are on the
   clock. A shard without a window to offer lets every row pass by itself: it joins with its first window.
3. The sum of all credit never exceeds the band less one tick, which may be on its way past its look at the credit.
   Credit is taken from one shard in one look and given to another in the next, when the taking is known to hold.
4. A learner that waits leaves at least a tick of headroom (`LimiterConfig.smallest_band`), and every shard has a row of
   it within two looks. So either side may wait, never both.
5. A shard that does not answer, or comes back as another incarnation, is no member until it answers again: what it took
   meanwhile is not on the clock, and its credit is free for the others. A learner that starts again starts its clock at
   zero. So no restart owes a burst, and none repeats updates; the ratio of the whole run (`Totals`) shows what it cost.

Updates are counted where they are made. The shards' own counts of windows served would not do: a batch is served before
it is trained on, and served again when its answer was lost.

No sockets here: a shard is two calls. Whoever composes a learner runs `Limiter.run` in a thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from telamon.data import LimiterConfig

log = logging.getLogger(__name__)

PATIENCE = 4
"""A shard that did not answer is asked again after as many times as long as that took: looks wait for one another."""
RECENT_SECONDS = 60.0
"""The recent ratio is the mean over about this long."""

T = TypeVar("T")
Side = Literal["learner", "writers", "none"]


@dataclass(frozen=True)
class Reading:
    """What a shard tells of its table."""

    incarnation: int
    rows: int
    """Ever appended."""
    rows_held: int
    items: int
    """What a draw chooses among now."""
    credit: int
    """The bound on `rows`; negative: none."""

    @property
    def held(self) -> int:
        """Rows that may still come."""
        return max(0, self.credit - self.rows)


class Shard(Protocol):
    """One replay server's table.

    Both calls end within a deadline of the shard's own. They raise OSError where it is down, too slow, out of room or
    back without its table: that may pass. PermissionError, and anything else, ends the limiter.
    """

    def counters(self) -> Reading: ...

    def grant(self, rows: int) -> None:
        """Sets the credit: the shard takes rows while it has taken fewer than `rows` in all, or offers no window."""
        ...


@dataclass(frozen=True)
class Totals:
    """What the whole run has done: kept with a checkpoint, given to the limiter of the learner that goes on from it."""

    inserted: int = 0
    """Rows that the limiter saw inserted: all but those that another incarnation had before it was first seen."""
    updates: int = 0
    """Updates made, those excluded that a restarted learner lost."""
    shards: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name -> (incarnation, rows) when last seen."""


@dataclass(frozen=True)
class Waits:
    """Seconds that each side has waited, and which one does now."""

    learner: float
    """In `wait_to_train`."""
    writers: float
    """Time in which a member had no credit left."""
    side: Side


@dataclass(frozen=True)
class Status:
    """How the two sides stand."""

    waits: Waits
    lead: float
    """Rows that the learner is ahead, in inserted rows; negative: behind. In [-band, band], or below in the burst."""
    headroom: Mapping[str, int]
    """Member -> rows that it may still take, when last seen."""
    run_ratio: float
    """Replayed rows per inserted row over the whole run; NaN before any."""
    recent_ratio: float
    """The same over the last minute."""
    rebases: int
    """How often a shard came back to the clock after it had dropped out."""


# the rules, as functions of counts


def lead(config: LimiterConfig, inserted: int, updates: int) -> float:
    """Inserted rows that the learner is ahead."""
    return updates * config.update_rows - inserted


def may_train(config: LimiterConfig, inserted: int, updates: int) -> bool:
    """Whether one more update stays in the band."""
    return lead(config, inserted, updates) + config.update_rows <= config.band


def headroom(config: LimiterConfig, inserted: int, updates: int) -> int:
    """Rows that all members together may still be given; negative while the learner is further behind."""
    return math.floor(lead(config, inserted, updates) + config.band) - config.tick_rows


def filled(config: LimiterConfig, readings: Sequence[Reading]) -> bool:
    """Whether there is enough for the first update."""
    held, items = sum(r.rows_held for r in readings), sum(r.items for r in readings)
    return held >= config.min_rows and items >= config.min_items


def allot(room: int, held: Sequence[int], used: Sequence[int], turn: int) -> list[int]:
    """Rows that each member may take from now on.

    Those that have used up theirs share equally what nobody holds; if none has, all do. A member that did not use its
    rows up gives back what exceeds its equal part, and all but one row if it took none: the next call hands that out.

    room: rows that all may take. held, used: rows that each may still take, and took since the last call.
    turn: rotates who gets the rows that do not divide.
    The result sums to at most `max(room, sum(held))`, and each is at most what it was if nobody has any to give.
    """
    empty = [s for s, rows in enumerate(held) if rows == 0]
    part = max(1, room // len(held))
    kept = [min(rows, part if took else 1) if empty else rows for rows, took in zip(held, used, strict=True)]
    takers = empty or list(range(len(held)))
    each, over = divmod(max(0, room - sum(held)), len(takers))
    for place, s in enumerate(takers):
        kept[s] += each + ((place - turn) % len(takers) < over)
    return kept


def observe(totals: Totals, name: str, reading: Reading) -> Totals:
    """The totals after a shard was read. Rows count from a name's first reading of all, and from there on by what an
    incarnation added: what another one had taken before it was seen may be old rows, restored."""
    before = totals.shards.get(name)
    if before is None:
        new = reading.rows
    else:
        incarnation, rows = before
        new = max(0, reading.rows - rows) if reading.incarnation == incarnation else 0
    shards = {**totals.shards, name: (reading.incarnation, reading.rows)}
    return replace(totals, inserted=totals.inserted + new, shards=shards)


def ratio(config: LimiterConfig, inserted: int, updates: int) -> float:
    """Replayed rows per inserted row; NaN where none was."""
    return updates * config.rows_per_update / inserted if inserted > 0 else math.nan


class Limiter:
    """One learner's controller. Threads: any may call any method; one runs `run`.

    shards: by a name that stays with the shard across its restarts.
    totals: of the run so far, from the checkpoint that the learner goes on from.
    interval: seconds between two looks. Inserts of that long must fit into the band, or writers wait between looks.
    clock: seconds, monotonic. wait: blocks on a condition for some seconds, or until it is notified.
    Raises ValueError where there are more shards than environments to write to them.
    """

    def __init__(
        self,
        config: LimiterConfig,
        shards: Mapping[str, Shard],
        *,
        totals: Totals = Totals(),
        interval: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        if not 0 < len(shards) <= config.tick_rows:
            raise ValueError(
                f"{len(shards)} shards for ticks of limiter.tick_rows={config.tick_rows} rows: there must be a shard, "
                "and each needs an environment that writes to it"
            )
        self._config, self._shards, self._interval = config, dict(shards), interval
        self._clock, self._wait = clock, wait
        self._looking = threading.Lock()
        """One look at a time; held while shards are called."""
        self._state = threading.Condition()
        """Guards what follows; never held while a shard is called."""
        self._totals = totals
        self._first = totals.updates == 0
        """Whether the fill may owe a burst."""
        self._filled = False
        self._inserted = self._admitted = 0
        """The clock: rows and updates."""
        self._members: dict[str, Reading] = {}
        """Their last readings, with the credit given since."""
        self._joined: set[str] = set()
        """Names that ever were members."""
        self._rebases = self._looks = 0
        self._learners_waiting, self._writers_wait = 0, False
        self._waited = {"learner": 0.0, "writers": 0.0}
        self._recent: deque[tuple[float, int, int]] = deque()
        """(seconds, rows inserted, updates made) at the last looks."""
        self._quiet_until: dict[str, float] = {}
        """When to ask a shard again that did not answer. Of the looks alone."""
        self._failure: Exception | None = None

    # the learner's side

    def wait_to_train(self, timeout: float) -> bool:
        """Waits until one more update may be made, and counts it as admitted; False if none may in `timeout` seconds.

        Call it once per batch, before it is sampled. A batch that could not be sampled is sampled again under the same
        admission. Raises RuntimeError once the looks have failed for good.
        """
        with self._state:
            deadline = self._clock() + timeout
            while not self._may_train():
                if self._failure is not None:
                    raise RuntimeError("the rate limiter has stopped looking at its shards") from self._failure
                began = self._clock()
                if began >= deadline:
                    return False
                self._learners_waiting += 1
                try:
                    self._wait(self._state, deadline - began)
                finally:
                    self._learners_waiting -= 1
                    self._waited["learner"] += self._clock() - began
            self._admitted += 1
            return True

    def trained(self) -> None:
        """Counts an update that was made."""
        with self._state:
            self._totals = replace(self._totals, updates=self._totals.updates + 1)

    def _may_train(self) -> bool:
        return bool(self._members) and may_train(self._config, self._inserted, self._admitted)

    # the shards' side

    def run(self, stop: threading.Event) -> None:
        """Looks at the shards again and again until `stop`; what ends it early is raised where the learner waits."""
        try:
            while not stop.is_set():
                self.look()
                stop.wait(self._interval)
        except Exception as error:  # noqa: BLE001  # not lost: the learner, who waits for this thread, raises it
            log.error("event=limiter_stopped error=%s", error)
            with self._state:
                self._failure = error
                self._state.notify_all()

    def look(self) -> None:
        """Reads every shard, moves the clock, hands out credit."""
        with self._looking:
            asked = [name for name in self._shards if self._clock() >= self._quiet_until.get(name, -math.inf)]
            readings = {name: self._ask(name, self._shards[name].counters) for name in asked}
            found = {name: reading for name, reading in readings.items() if reading is not None}
            with self._state:
                for name, reading in found.items():
                    self._totals = observe(self._totals, name, reading)
            begins = not self._filled and filled(self._config, list(found.values()))
            self._filled = self._filled or begins
            if self._filled:
                used = self._count(found)
                if begins:
                    self._begin()
                self._give(used)
            else:
                self._let(found)
            with self._state:
                self._looks += 1
                self._note(self._clock())
                self._state.notify_all()

    def _begin(self) -> None:
        """Starts the clock at the end of the fill, with the burst that it owes: by what the members had when they had
        stopped, so that no row falls between the fill and the clock."""
        with self._state:
            if self._first and self._config.lead is not None:
                self._inserted = max(0, self._totals.inserted - self._config.lead)
        log.info("event=limiter_filled rows=%d owing=%d", self._totals.inserted, self._inserted)

    def _let(self, found: Mapping[str, Reading]) -> None:
        """Lets each shard take what a look's time brings, in place of any bound that an earlier limiter has left."""
        for name, reading in found.items():
            if reading.credit != reading.rows + self._config.band:
                self._grant(name, reading.rows + self._config.band)

    def _count(self, found: Mapping[str, Reading]) -> dict[str, int]:
        """Puts on the clock what members took, and makes members of all shards that can be sampled.

        Returns what each took: none for those that have just joined.
        """
        members, used = {}, {}
        for name, reading in found.items():
            before = self._members.get(name)
            if reading.items == 0:
                # Rows pass without credit now, and wait from its first window until it has joined.
                if reading.credit != 0:
                    self._grant(name, 0)
            elif before is not None and _continues(before, reading):
                members[name], used[name] = reading, reading.rows - before.rows
            elif (joined := self._stop(name, reading)) is not None:
                members[name], used[name] = joined, 0
                self._rebases += name in self._joined
                self._joined.add(name)
                log.info("event=limiter_joined shard=%s incarnation=%d rows=%d", name, joined.incarnation, joined.rows)
        for name in self._members.keys() - members.keys():
            log.warning("event=limiter_dropped shard=%s answers=%s", name, name in found)
        with self._state:
            self._inserted += sum(used.values())
            self._members = members
        return used

    def _stop(self, name: str, reading: Reading) -> Reading | None:
        """Stops a shard where it stands, so that its rows count from a known one; None if it went away meanwhile."""
        if 0 <= reading.credit <= reading.rows:
            return reading
        if not self._grant(name, reading.rows):
            return None
        now = self._ask(name, self._shards[name].counters)
        if now is None or not _continues(reading, now):
            return None
        with self._state:
            self._totals = observe(self._totals, name, now)
        return now

    def _give(self, used: Mapping[str, int]) -> None:
        """Hands out the headroom. A member that does not take its credit is none any more."""
        with self._state:
            room = headroom(self._config, self._inserted, self._admitted)
            members = dict(self._members)
        held = [reading.held for reading in members.values()]
        rows = allot(room, held, list(used.values()), self._looks) if members else []
        for (name, reading), before, now in zip(self._members.items(), held, rows, strict=True):
            if now == before:
                continue
            if self._grant(name, reading.rows + now):
                members[name] = replace(reading, credit=reading.rows + now)
            else:
                del members[name]
        with self._state:
            self._members = members

    def _grant(self, name: str, rows: int) -> bool:
        """Whether the shard took it."""

        def grant() -> bool:
            self._shards[name].grant(rows)
            return True

        return self._ask(name, grant) is not None

    def _ask(self, name: str, call: Callable[[], T]) -> T | None:
        """What a shard answers; None if it does not, and then it is left alone for some time."""
        began = self._clock()
        try:
            answer = call()
        except PermissionError:
            raise  # no waiting will help
        except OSError as error:
            if name not in self._quiet_until:
                log.warning("event=limiter_no_answer shard=%s error=%s", name, error)
            now = self._clock()
            self._quiet_until[name] = now + PATIENCE * (now - began)
            return None
        self._quiet_until.pop(name, None)
        return answer

    def _note(self, now: float) -> None:
        """Books the time since the last look, and one point of the recent ratio."""
        if self._writers_wait:
            self._waited["writers"] += now - self._recent[-1][0]
        self._writers_wait = any(reading.held == 0 for reading in self._members.values())
        self._recent.append((now, self._totals.inserted, self._totals.updates))
        while len(self._recent) > 2 and now - self._recent[1][0] >= RECENT_SECONDS:
            self._recent.popleft()

    # what others look at

    def totals(self) -> Totals:
        """Of the whole run, now; to be kept with a checkpoint."""
        with self._state:
            return self._totals

    def waits(self) -> Waits:
        """How long each side has waited, and which one does now."""
        with self._state:
            side: Side = "learner" if self._learners_waiting else "writers" if self._writers_wait else "none"
            return Waits(self._waited["learner"], self._waited["writers"], side)

    def status(self) -> Status:
        """How the two sides stand."""
        with self._state:
            c, totals = self._config, self._totals
            _, rows, updates = self._recent[0] if self._recent else (0.0, totals.inserted, totals.updates)
            return Status(
                waits=self.waits(),
                lead=lead(c, self._inserted, self._admitted),
                headroom={name: reading.held for name, reading in self._members.items()},
                run_ratio=ratio(c, totals.inserted, totals.updates),
                recent_ratio=ratio(c, totals.inserted - rows, totals.updates - updates),
                rebases=self._rebases,
            )


def _continues(before: Reading, now: Reading) -> bool:
    """Whether the rows between two readings are known to be new, and were bounded."""
    return now.incarnation == before.incarnation and now.rows >= before.rows and now.credit >= 0
