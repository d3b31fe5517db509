"""The terminal view, in both of its forms, with the clock in the test's hand."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from telamon.telemetry.live import (
    LINE_SECONDS,
    PANEL_SECONDS,
    RATE_SECONDS,
    LiveView,
    Part,
    Rate,
    Rates,
    parts_table,
    size,
    speed,
    summarised,
)
from tests.waiting import SECONDS


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def plain_view(clock, total=1000):
    out = io.StringIO()
    return LiveView("tdmpc2 on task", total, Console(file=out, width=40), clock), out


def panel_view(clock):
    out = Terminal()
    return LiveView("tdmpc2 on task", 1000, Console(file=out, force_terminal=True, width=100), clock), out


def test_lines_carry_every_fact(clock):
    view, out = plain_view(clock)
    with view:
        clock.now += LINE_SECONDS
        view.update(env_steps=0, updates=0)
        clock.now += 60
        metrics = {"train/return": 50.0, "eval/return": 70.0, "loss/value_loss": 0.1234, "time/env_steps_per_s": 5.0}
        view.update(env_steps=600, updates=300, metrics=metrics)
        view.update(metrics={"train/return": 40.0})
        clock.now += LINE_SECONDS
        view.update(env_steps=750, updates=375)
    lines = out.getvalue().splitlines()
    assert lines[0] == "tdmpc2 on task: 1,000 env steps"
    assert lines[1] == "0/1,000 env steps (0%) | time: 0:00:15 elapsed | updates: 0"
    assert lines[2] == (
        "600/1,000 env steps (60%) | time: 0:01:15 elapsed  0:00:40 left | speed: 10.0 env steps/s  5.0 updates/s"
        " | updates: 300 | return: 50.0 last  50.0 best | eval: 70.0 last  70.0 best | loss: value 0.123"
    )
    assert "750/1,000 env steps (75%)" in lines[3]
    assert "return: 40.0 last  50.0 best" in lines[3]
    assert len(lines) == 5  # the last one on leaving, then nothing
    assert "\x1b" not in out.getvalue()


def test_lines_come_no_faster_than_their_interval(clock):
    view, out = plain_view(clock)
    with view:
        for step in range(1000):
            clock.now += LINE_SECONDS / 100
            view.update(env_steps=step)
    assert 10 <= len(out.getvalue().splitlines()) - 2 <= 11


def test_a_new_status_shows_at_once_and_once(clock):
    view, out = plain_view(clock)
    with view:
        view.update(status="compiling update")
        view.update(status="compiling update")
        assert out.getvalue().count("now: compiling update") == 1
        view.update(status="")
        assert "now:" not in out.getvalue().splitlines()[-1]


def test_a_count_in_the_status_does_not_make_it_new(clock):
    view, out = plain_view(clock)
    with view:
        for due in range(2500, 0, -1):
            view.update(status=f"{due:,} updates due")
        assert out.getvalue().count("updates due") == 1
        clock.now += LINE_SECONDS
        view.update(status="7 updates due")
        assert out.getvalue().splitlines()[-1].endswith("now: 7 updates due")


def test_a_forced_colour_log_file_still_gets_lines(clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    view, out = plain_view(clock)
    with view:
        view.update(env_steps=10, status="evaluating")
    assert "\x1b[?25l" not in out.getvalue()
    assert "now: evaluating" in out.getvalue()


def test_panel_redraws_in_place_and_gives_the_cursor_back(clock):
    view, out = panel_view(clock)
    with view:
        clock.now += 10
        view.update(env_steps=500, updates=250, metrics={"eval/return": 123.4, "loss/total_loss": 1.0})
        first = out.getvalue()
        view.update(env_steps=501)
        assert out.getvalue() == first
        clock.now += PANEL_SECONDS
        view.update(env_steps=502)
        assert "502 / 1,000 env steps" in out.getvalue()
    text = out.getvalue()
    assert "tdmpc2 on task" in text
    assert "123.4 last  123.4 best" in text
    assert "\x1b[1A" in text  # moves up to draw over itself
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


PARTS = [Part("learner", "here pid 1", "waits for rows", "7 updates"), Part("actor-0", "there pid 2", "acts")]


def test_the_panel_shows_who_runs_where(clock):
    view, out = panel_view(clock)
    with view:
        view.update(parts=PARTS, notes=["logs RUN/logs"], status="running")
    for text in ("learner", "here pid 1", "waits for rows", "7 updates", "there pid 2", "logs RUN/logs"):
        assert text in out.getvalue()


def test_lines_tell_who_runs_where_when_that_changes(clock):
    view, out = plain_view(clock)

    def said(parts):
        clock.now += LINE_SECONDS
        before = len(out.getvalue().splitlines())
        view.update(env_steps=1, parts=parts, notes=["logs RUN/logs"])
        return out.getvalue().splitlines()[before + 1 :]

    with view:
        assert said([PARTS[0], Part("actor-0", "", "starting")]) == []
        every = ["  learner  here pid 1  waits for rows  7 updates", "  actor-0  there pid 2  acts", "  logs RUN/logs"]
        assert said(PARTS) == every
        assert said([PARTS[0], Part("actor-0", "there pid 2", "waits")]) == []
        assert len(said([PARTS[0], Part("actor-0", "there pid 3", "acts")])) == 3


def test_time_left_waits_for_updates(clock):
    """Random actions are fast; a promise made from them would be far too early."""
    view, out = plain_view(clock)
    with view:
        clock.now += LINE_SECONDS
        view.update(env_steps=0)
        clock.now += LINE_SECONDS
        view.update(env_steps=500)
        assert "speed:" in out.getvalue().splitlines()[-1]
        assert "left" not in out.getvalue().splitlines()[-1]


def test_rate_is_the_mean_over_its_window():
    rate = Rate()
    assert rate.add(0, 0.0) != rate.add(0, 0.5)  # NaN: too early
    assert rate.add(20, 2.0) == 10.0
    for second in range(3, 3 + int(RATE_SECONDS)):
        last = rate.add(20 + 5 * (second - 2), float(second))
    assert last == 5.0  # the faster start has left the window


def test_a_counter_that_goes_back_has_begun_again():
    rate = Rate()
    rate.add(1000, 0.0)
    assert rate.add(1100, 10.0) == 10.0
    assert rate.add(5, 11.0) != rate.add(5, 11.0)  # NaN: a process that was started again
    assert rate.add(25, 13.0) == 10.0


def test_parts_get_their_speeds():
    rates = Rates()
    before = [Part("actor-0", "here", "acts", counts={"rows": 10}), Part("actor-1", "here", "acts")]
    after = [Part("actor-0", "here", "acts", counts={"rows": 30}), Part("actor-1", "here", "acts")]
    assert [part.rates for part in rates.of_parts(before, 0.0)] == [{}, {}]
    assert [part.rates for part in rates.of_parts(after, 4.0)] == [{"rows": 5.0}, {}]


def actors(count, now="acts"):
    return [Part(f"actor-{i}", f"pid {i}", now, rates={"rows": 2.0}, lag=i, memory=2**20) for i in range(count)]


def test_many_of_a_kind_are_summed_up():
    learner = Part("learner", "pid 9", "training")
    assert summarised([learner, *actors(4)], most=3) == [learner, *actors(4)]  # one line for one would save none
    *shown, rest, shard = summarised([learner, *actors(6), *actors(3, "waits")[:2], Part("shard-0", "", "serves")], 3)
    assert shown == [learner, *actors(3)]
    assert shard.name == "shard-0"
    assert rest == Part("5 more actors", "", "3 acts, 2 waits", rates={"rows": 10.0}, lag=5, memory=5 * 2**20)


def test_a_table_has_the_columns_of_which_something_is_known():
    def headings(*parts):
        return [str(column.header) for column in parts_table(parts).columns]

    assert headings(Part("a", "here", "acts")) == ["part", "where", "now"]
    assert headings(Part("a", "here", "acts"), Part("b", "", "", "7 rows", lag=0)) == [
        "part", "where", "now", "lag", "done",
    ]  # fmt: skip


def test_numbers_are_short():
    assert [speed(x) for x in (0.01234, 3.456, 99.94, 99.96, 12345.6)] == ["0.0123", "3.46", "99.9", "100", "12,346"]
    assert [size(x) for x in (2**20, 3 * 2**29)] == ["1 MiB", "1.50 GiB"]


def said(terminal):
    """What comes next from the other end of a pty; nothing once that is closed."""
    assert select.select([terminal], [], [], SECONDS)[0], f"nothing within {SECONDS:g} s"
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux reports that it is closed
        return b""


def test_ctrl_c_leaves_a_clean_terminal(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(
        "import os, signal, time\n"
        # a test run in the background inherits an ignored SIGINT, and Python then leaves it ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from rich.console import Console\n"
        "from telamon.telemetry.live import LiveView\n"
        "with LiveView('task', 10, Console()) as view:\n"
        "    view.update(env_steps=3, status='ready')\n"
        # past the calls that may swallow an interrupt; past the console, which holds back what is printed
        "    os.write(1, b'WAITS')\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, str(script)], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        seen = b""
        while b"WAITS" not in seen:
            more = said(ours)
            assert more, seen.decode()  # the process has ended before
            seen += more
        process.send_signal(signal.SIGINT)
        while more := said(ours):
            seen += more
        assert process.wait(SECONDS) != 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"KeyboardInterrupt" in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
