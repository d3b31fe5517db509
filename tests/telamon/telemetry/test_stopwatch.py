"""What a loop does, by the seconds that it takes."""

from __future__ import annotations

import threading

from telamon.telemetry.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_each_thing_takes_from_its_beginning_to_that_of_the_next():
    clock = Clock()
    watch = Stopwatch(("a", "b", "c"), "a", clock)
    clock.at += 1.0
    watch.now("b")
    clock.at += 2.0
    watch.now("a")
    clock.at += 4.0
    watch.now("a")
    assert watch.doing == "a"
    assert watch.seconds == {"a": 5.0, "b": 2.0, "c": 0.0}


def test_what_is_being_done_counts_up_to_the_look():
    clock = Clock()
    watch = Stopwatch(("a", "b"), "a", clock)
    clock.at += 1.5
    assert watch.seconds == {"a": 1.5, "b": 0.0}
    clock.at += 1.0
    assert watch.age == 2.5
    watch.now("b")
    assert watch.age == 0.0
    assert watch.seconds == {"a": 2.5, "b": 0.0}


def test_looks_of_another_thread_never_go_back():
    watch = Stopwatch(("a", "b"), "a")
    ended = threading.Event()
    looks = []

    def look() -> None:
        while not ended.is_set():
            looks.append(watch.seconds)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(5000):
        watch.now("b")
        watch.now("a")
    ended.set()
    thread.join()
    for name in ("a", "b"):
        seen = [found[name] for found in looks]
        assert seen == sorted(seen)
