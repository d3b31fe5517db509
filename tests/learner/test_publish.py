"""Snapshots on their way, with workers that answer when a test lets them. No Ray is started."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from learner.publish import Publisher
from tests.waiting import SECONDS, until


class Reference:
    """Stands for what the object store gives for a tree."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


class Worker:
    """Stands for a handle: keeps its calls until a test answers them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any, Future]] = []
        self.set_params = self

    def remote(self, version: int, references: list[Reference]) -> Worker:
        (reference,) = references
        self.calls.append((version, reference, Future()))
        return self

    def future(self) -> Future:
        return self.calls[-1][2]

    def answer(self, error: Exception | None = None) -> None:
        version, _, future = self.calls[-1]
        self.calls[-1] = version, None, future  # a call that has ended holds its arguments no more
        if error is None:
            future.set_result(version)
        else:
            future.set_exception(error)

    @property
    def versions(self) -> list[int]:
        return [version for version, _, _ in self.calls]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def params(value: float) -> dict[str, Any]:
    return {"w": jnp.full((3, 2), value), "b": jnp.zeros(4, jnp.bfloat16)}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def publisher(clock):
    found = Publisher(Reference, clock)
    yield found
    found.end()


def test_each_snapshot_is_put_once_and_pushed_to_all(publisher):
    a, b = Worker(), Worker()
    publisher.set_workers({"a": a, "b": b})
    assert a.versions == b.versions == []
    publisher.publish(4, params(1.0))
    assert a.versions == b.versions == [4]
    (_, one, _), (_, two, _) = a.calls[0], b.calls[0]
    assert one is two
    assert {k: type(v) for k, v in one.tree.items()} == {"w": np.ndarray, "b": np.ndarray}
    np.testing.assert_array_equal(one.tree["w"], np.ones((3, 2)))
    status = publisher.status()
    assert (status.snapshots, status.snapshot_bytes) == (1, 3 * 2 * 4 + 4 * 2)


def test_a_worker_that_is_busy_is_left_out_and_then_gets_the_newest(publisher):
    slow, fast = Worker(), Worker()
    publisher.set_workers({"slow": slow, "fast": fast})
    for version in range(1, 5):
        publisher.publish(version, params(version))
        fast.answer()
        until(lambda version=version: publisher.status().pushes == version)
    assert slow.versions == [1]
    assert fast.versions == [1, 2, 3, 4]
    assert publisher.status().skipped == 3
    assert publisher.status().behind == {"fast": 0}
    slow.answer()
    until(lambda: slow.versions == [1, 4])
    assert publisher.status().behind == {"slow": 3, "fast": 0}
    slow.answer()
    assert publisher.settle(SECONDS)
    assert slow.versions == [1, 4]  # which is the newest, so that nothing more is to be sent
    assert publisher.status().behind == {"slow": 0, "fast": 0}


def test_a_new_worker_gets_the_newest_at_once(publisher):
    old, new = Worker(), Worker()
    publisher.set_workers({"a": old})
    publisher.publish(1, params(1))
    old.answer()
    until(lambda: publisher.status().pushes == 1)
    publisher.set_workers({"a": old, "b": new})
    assert (old.versions, new.versions) == ([1], [1])
    replacement = Worker()
    publisher.set_workers({"a": replacement, "b": new})
    assert replacement.versions == [1]
    publisher.publish(2, params(2))
    assert old.versions == [1]


def test_the_answer_of_a_worker_that_was_replaced_is_not_its_successors(publisher):
    old, new = Worker(), Worker()
    publisher.set_workers({"a": old})
    publisher.publish(1, params(1))
    publisher.set_workers({"a": new})
    publisher.publish(2, params(2))  # the new one is busy with 1
    old.answer()
    until(lambda: publisher.status().pushes == 1)
    assert (old.versions, new.versions) == ([1], [1])
    assert publisher.status().behind == {}
    new.answer()
    until(lambda: new.versions == [1, 2])


def test_a_push_that_failed_is_said_once_and_tried_again_with_the_next_snapshot(publisher, caplog):
    worker = Worker()
    publisher.set_workers({"a": worker})
    for version in range(1, 4):
        publisher.publish(version, params(version))
        worker.answer(RuntimeError("the actor died\nand a long story"))
        until(lambda version=version: publisher.status().failed == version)
    assert worker.versions == [1, 2, 3]
    (said,) = [record.getMessage() for record in caplog.records if "push_failed" in record.getMessage()]
    assert said == "event=push_failed worker=a version=1 error='the actor died'"
    assert not publisher.settle(0)
    publisher.publish(4, params(4))
    worker.answer()
    assert publisher.settle(SECONDS)


def test_the_time_to_an_answer_is_from_the_publishing(publisher, clock):
    a, b = Worker(), Worker()
    publisher.set_workers({"a": a, "b": b})
    clock.now = 10.0
    publisher.publish(1, params(1))
    clock.now = 11.0
    a.answer()
    until(lambda: publisher.status().pushes == 1)
    assert publisher.status().ack_seconds == (1.0, 1.0)
    assert publisher.status().push_seconds == 1.0
    clock.now = 13.0
    b.answer()
    until(lambda: publisher.status().pushes == 2)
    assert publisher.status().ack_seconds == pytest.approx((2.0, 2.98))
    assert publisher.status().push_seconds == 1.0 + 3.0


def test_what_nobody_needs_is_held_by_nobody(publisher):
    slow, fast = Worker(), Worker()
    publisher.set_workers({"slow": slow, "fast": fast})
    alive = []
    for version in range(1, 20):
        publisher.publish(version, params(version))
        alive.append(weakref.ref(fast.calls[-1][1]))
        fast.answer()
        until(lambda version=version: publisher.status().pushes == version)
    gc.collect()
    # the one that the slow worker is busy with, and the newest
    assert [version for version, ref in enumerate(alive, 1) if ref() is not None] == [1, 19]
    slow.answer()
    until(lambda: slow.versions == [1, 19])
    slow.answer()
    publisher.end()
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_an_error_of_the_object_store_is_raised_where_it_is_published():
    def full(tree):
        raise RuntimeError("the object store is full")

    publisher = Publisher(full)
    with pytest.raises(RuntimeError, match="the object store is full"):
        publisher.publish(1, params(1))
    publisher.end()
