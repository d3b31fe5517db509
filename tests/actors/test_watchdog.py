from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from actors import watchdog
from actors.watchdog import EXIT_CODE, watch
from telamon.envs.counting import Counting, make
from tests.waiting import SECONDS, until

TIMEOUT = 0.2


@pytest.fixture
def stopped():
    """A list that gets the exit code, in place of the process's end."""
    codes: list[int] = []
    return codes


def wait_for(codes: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not codes and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_hanging_environment_is_named(monkeypatch, stopped, capsys, caplog):
    caplog.set_level(logging.INFO)
    env = make("continuous", 3, 0)
    env.reset()
    released = threading.Event()
    step = Counting.step
    monkeypatch.setattr(
        Counting, "step", lambda self, a: (released.wait(SECONDS) if self._index == 1 else None, step(self, a))[1]
    )
    started = time.monotonic()
    with watch(env, TIMEOUT, stop=lambda code: (stopped.append(code), released.set())):
        env.step(env._row.reward[:, None].repeat(2, 1))
    assert stopped == [EXIT_CODE] == [70]
    assert time.monotonic() - started >= TIMEOUT
    assert capsys.readouterr().err == (
        "telamon: environment 1 (counting:continuous) has not returned for 0.2 s; the bound is env.timeout\n"
    )
    assert "event=env_hangs env=1 id=counting:continuous seconds=0.2" in caplog.text


def test_a_hanging_first_reset_is_named(monkeypatch, stopped, capsys):
    released = threading.Event()
    monkeypatch.setattr(Counting, "reset", lambda self: released.wait(SECONDS))
    env = make("continuous", 1, 0, on_error="rebuild")
    with watch(env, TIMEOUT, stop=lambda code: (stopped.append(code), released.set())):
        env.reset()
    assert stopped == [EXIT_CODE]
    assert "environment 0" in capsys.readouterr().err


def test_a_busy_environment_is_left_alone(monkeypatch, stopped):
    # One environment that is being stepped whenever anybody looks: only its ticks tell it from a hanging one.
    env = make("continuous", 1, 0, lengths=(1000,))
    now, looks, step = 0.0, 0, Counting.step

    def clock():
        nonlocal looks
        looks += 1
        return now

    def slowly(self, action):
        nonlocal now
        before = looks
        until(lambda: looks > before or stopped)
        now += TIMEOUT / 4
        return step(self, action)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(Counting, "step", slowly)
    row = env.reset()
    with watch(env, TIMEOUT, stop=stopped.append):
        for _ in range(16):
            row = env.step(row.reward[:, None].repeat(2, 1) * 0)
    assert stopped == []


def test_what_happens_between_ticks_is_no_matter(stopped):
    env = make("continuous", 1, 0)
    env.reset()
    with watch(env, TIMEOUT, stop=stopped.append):
        wait_for(stopped, 3 * TIMEOUT)  # an update, an evaluation
    assert stopped == []


def test_nothing_is_watched_afterwards(stopped):
    env = make("continuous", 1, 0)
    with watch(env, TIMEOUT, stop=stopped.append):
        pass
    assert "env-watchdog" not in {t.name for t in threading.enumerate()}
    env.active = 0
    wait_for(stopped, 2 * TIMEOUT)
    assert stopped == []
