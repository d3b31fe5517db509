"""Waiting for a process has an end."""

import subprocess
import sys

import pytest

from tests.waiting import SECONDS, next_line


def started(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_lines_come_one_by_one_until_the_process_ends():
    with started("print('one\\ntwo')") as process:
        assert [next_line(process) for _ in range(3)] == ["one\n", "two\n", ""]


def test_a_process_that_says_nothing_is_killed():
    with started("import time; print('not a line', end='', flush=True); time.sleep(3600)") as process:
        with pytest.raises(AssertionError, match=rf"process {process.pid} said nothing within 0.1 s"):
            next_line(process, 0.1)
        assert process.wait(SECONDS) < 0
