"""The pool on workers that are only told of: what it asks, when it starts again, when it gives up. And the restarts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors.metrics import Figures
from actors.pool import (
    MOST_TICKS,
    Arrived,
    Died,
    Event,
    Left,
    Pool,
    RestartPolicy,
    Restarts,
    Seen,
    Started,
    next_ticks,
)
from actors.rollout import Piece
from actors.worker import Closed, WorkerStatus
from telamon.envs.base import EnvError

POLICY = RestartPolicy(first=1.0, factor=2.0, longest=5.0, budget=4, window=100.0)
PIECE = Piece(10, 20, 2, 18, (), None, None, 0, 0.5, 0.0, "done")
DEATH = (
    "The worker died\n\tclass_name: RolloutWorker\n\tpid: 7\n unexpectedly. Some common causes include: (1) the moon"
)
"""Much as Ray tells it."""
STATUS = WorkerStatus("?", 1, "here", True, Figures(), None, None, (0.0, 0.0), ())


# Restarts


def test_the_pause_grows_with_every_death_and_shrinks_as_they_are_forgotten():
    restarts = Restarts(POLICY)
    assert [restarts.died(t) for t in (0.0, 10.0, 20.0, 30.0)] == [1.0, 2.0, 4.0, 5.0]
    # at 115 those of 0 and 10 are forgotten; at 400 all are
    assert restarts.died(115.0) == 4.0
    assert restarts.died(400.0) == 1.0


def test_one_death_too_many_within_the_window_is_given_up():
    restarts = Restarts(POLICY)
    assert [restarts.died(float(t)) for t in range(5)][-2:] == [5.0, None]
    slow = Restarts(POLICY)
    assert all(slow.died(26.0 * t) is not None for t in range(100))
    assert Restarts(replace(POLICY, budget=0)).died(0.0) is None


def test_a_pause_never_overflows():
    restarts = Restarts(replace(POLICY, budget=10_000))
    assert max(restarts.died(0.0) for _ in range(5000)) == 5.0


# Sizes of pieces


@pytest.mark.parametrize(
    ("asked", "piece", "expected"),
    [
        (10, PIECE, 10),
        (10, replace(PIECE, seconds=0.3), 16),
        (10, replace(PIECE, seconds=0.01), 20),  # twice as many at most
        (10, replace(PIECE, seconds=50.0), 1),
        (10, replace(PIECE, ticks=2, seconds=0.5, wait_seconds=0.4), 2),  # what waits is asked for less at once too
        (10, replace(PIECE, ticks=0, seconds=2.0), 10),
        (MOST_TICKS, replace(PIECE, ticks=MOST_TICKS, seconds=0.1), MOST_TICKS),
    ],
)
def test_the_next_piece_is_to_last_as_long_as_it_should(asked, piece, expected):
    assert next_ticks(asked, piece, 0.5) == expected


# The pool


class Worker:
    """A handle whose calls are answered when a test says so."""

    def __init__(self, index: int, attempt: int) -> None:
        self.index, self.attempt = index, attempt
        self.waiting: list[Ref] = []
        """Calls that were not answered, oldest first."""
        self.killed = False

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(self, method)

    def kinds(self) -> list[str]:
        return [ref.method for ref in self.waiting]

    def answer(self, method: str, result: Any = None) -> None:
        """Answers the oldest call of `method`; an exception as a result is raised."""
        ref = next(ref for ref in self.waiting if ref.method == method)
        self.waiting.remove(ref)
        ref.result, ref.done = result, True

    def die(self) -> None:
        for ref in list(self.waiting):
            self.answer(ref.method, RayActorError(error_msg=DEATH))


class Method:
    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name = worker, name

    def remote(self, *args: Any) -> Ref:
        ref = Ref(self.name, args)
        self.worker.waiting.append(ref)
        return ref


class Ref:
    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.method, self.args = method, args
        self.result: Any = None
        self.done = False


class Site:
    """What Ray would be, with a clock that tests move on."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.workers: list[Worker] = []
        self.pool = Pool(self.start, **{
            "policy": POLICY, "calls": self, "clock": lambda: self.now, "sleep": self.sleep, "patience": 60.0,
            "start_patience": 600.0, "close_timeout": 5.0, **options,
        })  # fmt: skip

    def start(self, index: int, attempt: int) -> Worker:
        self.workers.append(Worker(index, attempt))
        return self.workers[-1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ready(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        return [ref for ref in refs if ref.done]

    def get(self, ref: Ref) -> Any:
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result

    def kill(self, handle: Worker) -> None:
        handle.killed = True

    def poll(self, seconds: float = 0.0) -> list[Event]:
        self.now += seconds
        return self.pool.poll()

    def open(self, worker: Worker) -> list[Event]:
        worker.answer("open", 2)
        worker.answer("status", STATUS)
        return self.poll()


def running(size: int, **options: Any) -> Site:
    """Workers 0 to `size` - 1, all of which act."""
    site = Site(**options)
    site.pool.resize(size)
    site.poll()
    for worker in list(site.workers):
        site.open(worker)
    return site


def raised(error: Exception) -> RayTaskError:
    """As Ray gives what a worker has raised."""
    return RayTaskError("rollout", "Traceback ...", error)


def test_a_worker_is_opened_and_then_always_has_its_next_calls():
    site = Site()
    site.pool.resize(1)
    assert site.poll() == []
    (worker,) = site.workers
    assert (worker.index, worker.attempt, worker.kinds()) == (0, 0, ["open", "status"])
    assert list(site.pool.handles()) == ["actor-0"]
    assert site.pool.running == 0
    worker.answer("open", 2)
    assert site.poll(3.0) == [Started("actor-0", 0, 3.0)]
    assert site.pool.running == 1
    assert worker.kinds() == ["status", "rollout", "rollout"]
    worker.answer("rollout", PIECE)
    assert site.poll() == [Arrived("actor-0", PIECE)]
    assert worker.kinds() == ["status", "rollout", "rollout"]
    worker.answer("status", STATUS)
    assert site.pool.statuses() == {"actor-0": None}
    assert site.poll(1.0) == [Seen("actor-0", STATUS)]
    assert site.pool.statuses() == {"actor-0": STATUS}
    assert worker.kinds() == ["rollout", "rollout", "status"]


def test_looks_are_a_while_apart():
    site = running(1, status_seconds=2.0)
    (worker,) = site.workers
    site.poll(1.9)
    assert "status" not in worker.kinds()
    site.poll(0.2)
    site.poll(10.0)  # not answered: none is added
    assert worker.kinds().count("status") == 1


def test_pieces_become_as_long_as_they_should_be():
    site = running(1)
    (worker,) = site.workers
    asked = []
    for _ in range(12):
        ref = next(ref for ref in worker.waiting if ref.method == "rollout")
        asked.append(ref.args[0])
        worker.answer("rollout", replace(PIECE, ticks=asked[-1], seconds=0.01 * asked[-1]))
        site.poll()
    assert asked[:4] == [1, 1, 2, 4]
    assert asked[-1] == 50


def test_a_dead_worker_is_started_again_after_a_pause_with_another_attempt():
    site = running(2)
    dead = site.workers[1]
    dead.answer("rollout", PIECE)  # done before it died
    dead.die()
    assert site.poll() == [Arrived("actor-1", PIECE), Died("actor-1", "The worker died unexpectedly.", 1.0)]
    assert dead.killed
    assert list(site.pool.handles()) == ["actor-0"]
    assert site.pool.statuses()["actor-1"] is None
    site.poll(0.9)
    assert len(site.workers) == 2
    site.poll(0.2)
    again = site.workers[2]
    assert (again.index, again.attempt, again.kinds()) == (1, 1, ["open", "status"])
    assert [type(e) for e in site.open(again)] == [Started, Seen]
    assert [w.killed for w in site.workers] == [False, True, False]


def test_a_death_while_opening_counts_too_and_so_does_a_replay_that_is_away():
    site = Site()
    site.pool.resize(1)
    site.poll()
    site.workers[0].die()
    assert [e.pause for e in site.poll()] == [1.0]
    site.poll(1.0)
    site.workers[1].answer("open", raised(TimeoutError("the replay server did not answer")))
    (event,) = site.poll()
    assert event == Died("actor-0", "it could not be opened: the replay server did not answer", 2.0)


def test_too_many_deaths_end_the_run_with_a_sentence():
    site = Site()
    site.pool.resize(1)
    for _ in range(4):
        site.poll(5.0)
        site.workers[-1].die()
        site.poll()
    site.poll(5.0)
    site.workers[-1].die()
    with pytest.raises(RuntimeError) as caught:
        site.poll()
    assert str(caught.value) == (
        "actor-0 died 5 times within 100 s, the last time because: The worker died unexpectedly.; the bound is restarts"
    )
    assert len(site.workers) == 5
    assert site.workers[-1].killed


@pytest.mark.parametrize("call", ["rollout", "open"])
@pytest.mark.parametrize("error", [EnvError("environment 1 broke"), PermissionError("wrong token"), ValueError("no")])
def test_what_a_worker_raises_is_raised(call, error):
    site = running(1) if call == "rollout" else Site()
    site.pool.resize(1)
    site.poll()
    site.workers[0].answer(call, raised(error))
    with pytest.raises(type(error)) as caught:
        site.poll()
    assert caught.value is error


def test_a_worker_whose_environment_hangs_is_killed_and_replaced():
    site = running(1)
    site.poll(1.0)
    sentence = "environment 0 (x:y) has not returned for 60 s; the bound is env.timeout"
    site.workers[0].answer("status", replace(STATUS, hung=sentence))
    assert site.poll()[1:] == [Died("actor-0", sentence, 1.0)]
    assert site.workers[0].killed
    site.poll(1.0)
    assert site.workers[1].attempt == 1
    assert [type(e) for e in site.open(site.workers[1])] == [Started, Seen]


def test_a_worker_that_says_nothing_is_taken_for_dead():
    site = running(1)
    site.poll(1.0)
    assert site.poll(60.0) == []
    assert site.poll(0.1) == [Died("actor-0", "it has not answered for 60 s", 1.0)]
    assert site.workers[0].killed


@pytest.mark.parametrize("there", [False, True])
def test_a_worker_that_never_opens_is_taken_for_dead_later(there):
    site = Site()
    site.pool.resize(1)
    site.poll()
    if there:  # and something in its environments' making hangs
        site.workers[0].answer("status", STATUS)
    assert site.poll(600.0) == [Seen("actor-0", STATUS)] * there
    assert site.poll(0.1) == [Died("actor-0", "it did not act within 600 s of its start", 1.0)]
    assert site.workers[0].killed


def test_one_that_cannot_be_made_is_not_tried_again():
    site = Site()
    site.pool.resize(1)
    site.poll()
    told = (
        "The actor died because of an error raised in its creation task, ray::RolloutWorker.__init__() (pid=1)\n"
        '           ^^^^^^^^\n  File "worker.py", line 3, in __init__\n    import env\n           ^^^\n'
        "ModuleNotFoundError: No module named 'env'"
    )
    site.workers[0].answer("open", RayActorError(error_msg=told, actor_init_failed=True))
    with pytest.raises(RuntimeError, match=r"^actor-0 cannot be made: ModuleNotFoundError: No module named 'env'$"):
        site.poll()


def test_it_grows_and_shrinks():
    site = running(1)
    site.pool.resize(3)
    site.poll()
    assert [(w.index, w.attempt) for w in site.workers] == [(0, 0), (1, 0), (2, 0)]
    for worker in site.workers[1:]:
        site.open(worker)
    assert site.pool.running == 3
    site.pool.resize(1)
    site.poll()
    assert list(site.pool.handles()) == ["actor-0"]
    for worker in site.workers[1:]:
        assert worker.kinds() == ["rollout", "rollout", "stop", "close"]
        assert not worker.killed
    # what was under way still counts, and nothing new is asked for
    leaving = site.workers[1]
    leaving.answer("rollout", PIECE)
    leaving.answer("stop")
    assert site.poll(5.0) == [Arrived("actor-1", PIECE)]
    assert leaving.kinds() == ["rollout", "close"]
    closed = Closed(Figures(rows=7), False)
    leaving.answer("close", closed)
    assert site.poll() == [Left("actor-1", closed)]
    assert leaving.killed
    assert list(site.pool.statuses()) == ["actor-0", "actor-2"]
    # wanted again: the one that left is made anew with another attempt, the one that is leaving only after it left
    site.pool.resize(3)
    site.poll()
    assert [(w.index, w.attempt) for w in site.workers[3:]] == [(1, 1)]
    site.workers[2].die()
    assert site.poll() == [Left("actor-2", None)]
    site.poll()
    assert [(w.index, w.attempt) for w in site.workers[3:]] == [(1, 1), (2, 1)]


def test_one_that_is_down_is_not_missed_when_fewer_are_wanted():
    site = running(2)
    site.workers[1].die()
    site.poll()
    site.pool.resize(1)
    site.poll(100.0)
    assert len(site.workers) == 2
    assert list(site.pool.statuses()) == ["actor-0"]


def test_one_that_does_not_leave_is_killed():
    site = running(1)
    site.pool.resize(0)
    site.poll()
    assert site.poll(65.0) == []
    assert site.poll(0.1) == [Left("actor-0", None)]
    assert site.workers[0].killed


def test_what_breaks_while_it_leaves_ends_nothing_but_its_leaving():
    site = running(1)
    site.pool.resize(0)
    site.poll()
    site.workers[0].answer("rollout", raised(EnvError("environment 1 broke")))
    assert site.poll() == [Left("actor-0", None)]


def test_stop_waits_for_the_last_rows_and_kills_what_is_left():
    site = running(3)
    down = site.workers[2]
    down.die()
    site.poll()
    polled = itertools.count()

    def sleep(seconds: float) -> None:
        site.now += seconds
        if next(polled) == 3:
            for method in ("rollout", "rollout", "stop", "close"):
                site.workers[0].answer(method, Closed(Figures(), False) if method == "close" else PIECE)

    site.pool._sleep = sleep
    began = site.now
    events = site.pool.stop(2.0)
    assert [type(e) for e in events] == [Arrived, Arrived, Left]
    assert site.now - began == pytest.approx(2.0, abs=0.1)  # the second worker did not answer
    assert [w.killed for w in site.workers] == [True, True, True]
    assert site.pool.handles() == {}
    assert site.poll() == []
    assert len(site.workers) == 3


def test_no_reference_is_kept_of_what_is_gone():
    site = running(2)
    for _ in range(100):
        site.workers[0].answer("rollout", PIECE)
        site.poll(0.5)
    site.workers[1].die()
    site.poll()
    member = site.pool._members[0]
    assert len(member.calls) == 3
    assert site.pool._members[1].calls == {}


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="a pool of -1 workers cannot be"):
        Site().pool.resize(-1)


def test_workers_that_are_held_are_made_ready_and_wait():
    site = Site()
    site.pool.held = True
    site.pool.resize(1)
    site.poll()
    (worker,) = site.workers
    site.open(worker)
    assert site.pool.running == 1
    assert "rollout" not in worker.kinds()
    site.pool.held = False
    site.poll()
    assert worker.kinds().count("rollout") == 2
