"""The online queue against its definition: what is whole, was not served and is still held, in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from replay_server.online import OnlineQueue, passed_rows, waiting_windows

Start = tuple[int, int]  # environment, first row


@dataclass
class Model:
    """Rings of `capacity` rows, of which only the number of rows ever appended is kept."""

    length: int
    capacity: int
    head: list[int]
    whole: list[Start] = field(default_factory=list)
    """Every fresh window since the beginning, in the order in which its last row came."""
    served: frozenset[Start] = frozenset()

    def tick(self, envs: tuple[int, ...]) -> Model:
        head, whole = list(self.head), list(self.whole)
        for e in envs:
            head[e] += 1
            starts = range(1 if self.length > 1 else 0, head[e], self.length)
            whole += [(e, s) for s in starts if s + self.length == head[e]]
        return replace(self, head=head, whole=whole)

    @property
    def tail(self) -> np.ndarray:
        return np.maximum(0, np.array(self.head) - self.capacity)

    def due(self) -> list[Start]:
        return [(e, s) for e, s in self.whole if (e, s) not in self.served and s >= self.tail[e]]


def passed(num_envs: int) -> np.ndarray:
    """Of a queue from which nothing was taken."""
    return np.zeros(num_envs, np.int64)


def moved(queue: OnlineQueue, limit: int, model: Model, envs: tuple[int, ...], count: int) -> tuple[OnlineQueue, Model]:
    """Both, one tick of `envs` and one pop of `count` later; they must agree on what came out."""
    taken = queue.passed.copy()
    queue = OnlineQueue(model.length, limit, taken, queue.waiting)
    queue.append(np.array(envs, np.int32), np.array([[model.head[e] for e in envs]]))
    model = model.tick(envs)
    env, first = queue.pop(count, model.tail)
    got = list(zip(env.tolist(), first.tolist(), strict=True))
    assert got == model.due()[:count], (model, count)
    assert (env.dtype, first.dtype) == (np.int64, np.int64)
    model = replace(model, served=model.served | set(got))
    # what a process that finds only the counts after the death of this one makes of them
    head = np.array(model.head)
    for found in (taken, passed_rows(model.length, head, queue.waiting)):
        again = waiting_windows(model.length, found, model.tail, head)
        assert sorted(again) == sorted(model.due()), (model, found)
        assert [row for _, row in again] == sorted(row for _, row in again)
    return queue, model


def explore(queue: OnlineQueue, limit: int, model: Model, moves: list[tuple[tuple[int, ...], int]], depth: int) -> int:
    """Tries every sequence of `depth` moves; returns how many windows came out in all."""
    if depth == 0:
        return len(model.served)
    total = 0
    for envs, count in moves:
        after, then = moved(queue, limit, model, envs, count)
        total += explore(after, limit, then, moves, depth - 1)
    return total


# Every order of ticks and of pops after them: environments that advance together, and uneven ones.
TOGETHER = {1: ([((0,), k) for k in (0, 1, 2)], 8), 2: ([((0, 1), k) for k in (0, 1, 3)], 7)}
UNEVEN = ([(envs, k) for envs in ((0, 1), (0,), (1,)) for k in (0, 2)], 5)


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_fresh_window_comes_out_once_in_order_while_it_is_held(num_envs, length):
    """The limit is that of a store: it drops no window that is held."""
    moves, depth = TOGETHER[num_envs]
    for capacity in (length, length + 1, 2 * length, 2 * length + 1):
        limit = num_envs * (capacity // length)
        model = Model(length, capacity, [0] * num_envs)
        assert explore(OnlineQueue(length, limit, passed(num_envs)), limit, model, moves, depth) > 0


@pytest.mark.parametrize("length", [1, 2])
def test_environments_that_fall_behind_keep_the_order_too(length):
    moves, depth = UNEVEN
    for capacity in (length, 2 * length):
        model = Model(length, capacity, [0, 0])
        assert explore(OnlineQueue(length, 100, passed(2)), 100, model, moves, depth) > 0


def test_the_starts_of_the_reference():
    queue = OnlineQueue(65, 100, passed(8))
    for row in range(200):
        queue.append(np.array([3, 7], np.int32), np.array([[row, row]]))
        assert len(queue) == 2 * (row // 65)
    assert queue.waiting == [(e, s) for s in (1, 66, 131) for e in (3, 7)]


def test_the_oldest_goes_when_too_many_wait():
    queue = OnlineQueue(2, 3, passed(1))
    for row in range(11):
        queue.append(np.array([0], np.int32), np.array([[row]]))
    assert queue.waiting == [(0, 5), (0, 7), (0, 9)]
    env, first = queue.pop(2, np.array([6]))
    assert (env.tolist(), first.tolist()) == ([0, 0], [7, 9])
    assert len(queue) == 0


def test_nothing_waits_where_the_limit_is_0():
    queue = OnlineQueue(1, 0, passed(1))
    queue.append(np.array([0], np.int32), np.array([[0]]))
    assert len(queue) == 0
