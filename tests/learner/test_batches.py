"""Batches made ahead of the updates, latents sent behind them, and what bounds both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from learner import limiter
from learner.background import Beside
from learner.batches import DEPTH, WRITE_BACKS, Batches, Source, WriteBacks, Written, fresh_latents, origin
from learner.limiter import Totals
from learner.update import Outcome
from telamon.data import Window, WriteBack
from telamon.telemetry.stopwatch import Stopwatch
from tests.waiting import SECONDS, until


def window(number: int = 0, batch: int = 2) -> Window:
    """All of whose windows begin at row `number`."""
    flags = np.zeros((batch, 3), bool)
    return Window(
        env_id=np.arange(batch, dtype=np.int32), first_row=np.full(batch, number, np.int64), obs={},
        reward=np.zeros((batch, 3), np.float32), is_first=flags, is_last=flags, is_terminal=flags,
        action=np.zeros((batch, 3, 1), np.float32), incarnation=7,
    )  # fmt: skip


def number(found: Any) -> int:
    return int(found.window.first_row[0])


class Tickets:
    """Admits as many updates as were given."""

    def __init__(self, given: int = 0) -> None:
        self.given = threading.Semaphore(given)
        self.asked = 0

    def give(self, count: int) -> None:
        self.given.release(count)

    def __call__(self, timeout: float) -> bool:
        self.asked += 1
        return self.given.acquire(timeout=timeout) if timeout else self.given.acquire(blocking=False)


class Sampler:
    """Serves window 0, 1, 2, ...; raises what it is told to instead."""

    def __init__(self) -> None:
        self.served = self.asked = 0
        self.error: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def __call__(self) -> Window:
        self.asked += 1
        self.open.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.served += 1
        return window(self.served - 1)


@pytest.fixture
def sampler():
    return Sampler()


@pytest.fixture
def make(sampler):
    """Makes Batches over the sampler, which end with the test."""
    made = []

    def make(admit: Callable[[float], bool], place=lambda window: window) -> Batches:
        made.append(Batches(sampler, admit, place, lambda lack: None, Beside()))
        return made[-1]

    yield make
    sampler.open.set()
    for batches in made:
        batches.end()


def test_batches_come_in_order_with_their_rows(make):
    batches = make(Tickets(3), lambda window: replace(window, first_row=window.first_row + 100))
    found = [batches.get(SECONDS) for _ in range(3)]
    assert [number(batch) for batch in found] == [100, 101, 102]
    assert [int(batch.origin.first_row[0]) for batch in found] == [0, 1, 2]
    assert {batch.origin.incarnation for batch in found} == {7}


def test_no_more_are_made_than_fit(make, sampler):
    tickets = Tickets(100)
    batches = make(tickets)
    until(lambda: sampler.served == DEPTH)
    asked = tickets.asked
    time.sleep(0.3)
    assert (sampler.served, tickets.asked) == (DEPTH, asked)
    assert batches.ahead == DEPTH
    batches.get(SECONDS)
    until(lambda: sampler.served == DEPTH + 1)
    assert batches.ahead == DEPTH


def test_none_is_made_that_was_not_admitted(make, sampler):
    tickets = Tickets(1)
    batches = make(tickets)
    assert batches.get(SECONDS) is not None
    assert batches.get(0.3) is None
    assert (sampler.asked, batches.ahead) == (1, 0)
    tickets.give(1)
    assert number(batches.get(SECONDS)) == 1


@pytest.mark.parametrize("error", [LookupError("no rows"), TimeoutError("no shard")])
def test_a_batch_that_cannot_be_sampled_is_sampled_again_under_its_admission(make, sampler, error, caplog):
    sampler.error = error
    batches = make(Tickets(1))
    until(lambda: sampler.asked >= 3)
    assert batches.get(0.1) is None
    sampler.error = None
    assert number(batches.get(SECONDS)) == 0
    assert batches.get(0.1) is None
    assert ("event=no_windows error=no shard" in caplog.text) == isinstance(error, TimeoutError)


@pytest.mark.parametrize("error", [ValueError("a mistake"), KeyError("a mistake"), PermissionError("a mistake")])
def test_any_other_error_is_raised_in_the_loop(make, sampler, error):
    sampler.error = error
    batches = make(Tickets(1))
    with pytest.raises(type(error), match="a mistake"):
        until(lambda: batches.get(0.1) is not None)
    assert sampler.asked == 1


def test_an_error_of_the_limiter_is_raised_in_the_loop(make):
    def fails(timeout):
        raise RuntimeError("the limiter has stopped")

    batches = make(fails)
    with pytest.raises(RuntimeError, match="the limiter has stopped"):
        until(lambda: batches.get(0.1) is not None)


def test_what_is_ready_is_given_out_before_an_error(make, sampler):
    batches = make(Tickets(2))
    until(lambda: sampler.served == DEPTH)
    sampler.error = ValueError("a mistake")
    batches._admit.give(1)
    assert [number(batches.get(SECONDS)) for _ in range(DEPTH)] == [0, 1]
    with pytest.raises(ValueError, match="a mistake"):
        until(lambda: batches.get(0.1) is not None)


def test_it_ends_while_it_waits_for_anything(make, sampler):
    waiting_for_admission, full = make(Tickets(0)), make(Tickets(9))
    until(lambda: full.ahead == DEPTH)
    waiting_for_admission.end()
    full.end()
    sampler.error = LookupError("no rows")
    without_rows = make(Tickets(9))
    until(lambda: sampler.asked > DEPTH)
    without_rows.end()


def test_an_error_in_its_way_to_the_end_is_not_one_of_the_run(make, sampler):
    sampler.open.clear()
    batches = make(Tickets(1))
    until(lambda: sampler.asked == 1)
    batches.stop()
    sampler.error = RuntimeError("this client is closed")
    sampler.open.set()
    batches.end()
    assert batches.get(0) is None


def test_waiting_is_booked_by_what_was_missing():
    watch = Stopwatch(("rows", "batch", "other"), "other")
    tickets, samples, asked = Tickets(0), threading.Semaphore(0), []

    def sample():
        asked.append(None)
        samples.acquire(timeout=SECONDS)
        return window()

    def get(timeout):
        """Whether there was a batch, and what was waited for."""
        before = watch.seconds
        found = batches.get(timeout)
        watch.now("other")
        return found is not None, {k: s - before[k] for k, s in watch.seconds.items()}

    batches = Batches(sample, tickets, lambda window: window, watch.now, Beside())
    try:
        # nothing is admitted: rows are missing
        found, waited = get(0.3)
        assert (found, waited["rows"] > 0.2, waited["batch"]) == (False, True, 0)
        # admitted after that wait: the sampling of this batch could not have been done ahead
        tickets.give(2)
        until(lambda: len(asked) == 1)
        found, waited = get(0.3)
        assert (found, waited["rows"] > 0.2, waited["batch"]) == (False, True, 0)
        samples.release()
        assert get(SECONDS)[0]
        # the next one had been admitted already: what is missing is the batch itself
        until(lambda: len(asked) == 2)
        found, waited = get(0.3)
        assert (found, waited["rows"], waited["batch"] > 0.2) == (False, 0, True)
    finally:
        samples.release(9)
        batches.end()


class Ticking:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def takes(self, seconds: float) -> None:
        self.at += seconds


def test_what_the_thread_spends_is_told_apart():
    clock, beside, tickets, failed = Ticking(), Beside(), Tickets(DEPTH), []

    def sample():
        clock.takes(2.0)
        if not failed:
            failed.append(None)
            raise LookupError("no rows")
        return window()

    def place(window):
        clock.takes(0.5)
        return window

    batches = Batches(sample, tickets, place, lambda lack: None, beside, clock=clock)
    try:
        until(lambda: beside == Beside(sample=(1 + DEPTH) * 2.0, copy=DEPTH * 0.5))
    finally:
        batches.end()


# write-backs


class Replay:
    """Takes write-backs; two rows of each are stale."""

    def __init__(self) -> None:
        self.taken: list[WriteBack] = []
        self.error: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def write_back(self, update: WriteBack) -> int:
        self.open.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.taken.append(update)
        return update.row.size - 2


class Gate:
    def wait_to_train(self, timeout: float) -> bool:
        return True

    def trained(self) -> None: ...

    def look(self) -> None: ...

    def totals(self) -> Totals:
        return Totals()

    def status(self) -> limiter.Status:
        raise AssertionError


def outcome(value: float = 0.0, streak: int = 0) -> Outcome:
    latents = {"made": jnp.full((2, 2), value, jnp.bfloat16), "place": jnp.arange(8.0).reshape(2, 2, 2)}
    return Outcome({}, jnp.int32(streak), jnp.int32(streak), latents)


@pytest.fixture
def replay():
    return Replay()


@pytest.fixture
def writing(replay):
    written = Written()
    local = lambda tree: {k: np.asarray(v) for k, v in tree.items()}
    found = WriteBacks(Source(replay, Gate()), 1, local, written, Beside())
    yield found, written
    replay.open.set()
    found.end()


def test_latents_are_those_of_the_rows_behind_the_context():
    for windows in (window(10), origin(window(10))):
        found = fresh_latents(windows, 1, outcome(3.0).write_back)
        assert found.incarnation == 7
        np.testing.assert_array_equal(found.env_id, [0, 0, 1, 1])
        np.testing.assert_array_equal(found.row, [11, 12, 11, 12])
        assert (found.env_id.dtype, found.row.dtype) == (np.int32, np.int64)
        assert found.latents["made"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(found.latents["made"].astype(np.float32), [3, 3, 3, 3])
        np.testing.assert_array_equal(found.latents["place"], np.arange(8).reshape(4, 2))


def test_latents_are_sent_in_the_order_of_their_updates(replay, writing):
    write_backs, written = writing
    for value in range(6):
        write_backs.put(origin(window(value)), outcome(value))
    assert write_backs.drain(SECONDS)
    assert [int(update.row[0]) for update in replay.taken] == [1, 2, 3, 4, 5, 6]
    assert written == Written(written=6 * 2, stale=6 * 2)


def test_latents_of_a_skipped_update_are_not_sent(replay, writing):
    write_backs, written = writing
    for streak in (0, 1, 2, 0):
        write_backs.put(origin(window()), outcome(streak, streak))
    assert write_backs.drain(SECONDS)
    assert [float(update.latents["made"][0]) for update in replay.taken] == [0, 0]
    assert written.skipped == 2


def test_an_update_without_latents_sends_none(replay, writing):
    write_backs, written = writing
    write_backs.put(origin(window()), outcome()._replace(write_back=None))
    assert write_backs.drain(SECONDS)
    assert (replay.taken, written) == ([], Written())


def test_updates_wait_before_memory_grows(replay, writing):
    write_backs, _ = writing
    replay.open.clear()
    put = []

    def fill():
        for value in range(WRITE_BACKS + 3):
            write_backs.put(origin(window(value)), outcome())
            put.append(value)

    thread = threading.Thread(target=fill)
    thread.start()
    until(lambda: len(put) == WRITE_BACKS + 1)  # one is being sent
    time.sleep(0.3)
    assert len(put) == WRITE_BACKS + 1
    assert not write_backs.drain(0)
    replay.open.set()
    thread.join(SECONDS)
    assert write_backs.drain(SECONDS)
    assert len(replay.taken) == WRITE_BACKS + 3


def test_fetching_and_sending_is_booked(replay):
    clock, beside = Ticking(), Beside()
    fetch = lambda tree: clock.takes(0.25) or {k: np.asarray(v) for k, v in tree.items()}
    write_backs = WriteBacks(Source(replay, Gate()), 1, fetch, Written(), beside, clock)
    for streak in (0, 1, 0):  # nothing is sent of the second one
        write_backs.put(origin(window()), outcome(streak=streak))
    assert write_backs.drain(SECONDS)
    write_backs.end()
    assert beside == Beside(write_back=0.5)


def test_latents_for_shards_that_are_away_are_dropped_and_counted(replay, writing):
    write_backs, written = writing
    replay.error = TimeoutError("no shard")
    write_backs.put(origin(window()), outcome())
    assert write_backs.drain(SECONDS)
    assert written == Written(dropped=4)
    dropped = [0]

    class Partly(Replay):
        def write_back(self, update):
            dropped[0] += 3  # of a shard that is away
            return 1

    counted = Written()
    partly = WriteBacks(Source(Partly(), Gate(), lambda: dropped[0]), 1, lambda tree: tree, counted, Beside())
    partly.put(origin(window()), outcome())
    assert partly.drain(SECONDS)
    partly.end()
    assert counted == Written(written=1, dropped=3)


def test_any_other_error_of_a_write_back_is_raised_in_the_loop(replay, writing):
    write_backs, _ = writing
    replay.error = ValueError("no such environment")

    def keep_putting():
        while True:
            write_backs.put(origin(window()), outcome())

    with pytest.raises(ValueError, match="no such environment"):
        keep_putting()
    with pytest.raises(ValueError, match="no such environment"):
        write_backs.drain(SECONDS)


def test_what_waits_is_dropped_at_the_end(replay, writing):
    write_backs, _ = writing
    replay.open.clear()
    for value in range(3):
        write_backs.put(origin(window(value)), outcome())
    until(lambda: len(write_backs._outbox._items) == 2)
    write_backs.stop()
    replay.open.set()
    write_backs.end()
    assert [int(update.row[0]) for update in replay.taken] == [1]
