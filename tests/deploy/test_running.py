"""What a launch and other commands say to each other through the run directory."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from rich.console import Console

from deploy import running
from deploy.running import Request, RunStatus
from telamon.telemetry.live import Part


def status(**changed) -> RunStatus:
    parts = [Part("learner", "here pid 1", "training", "12 updates"), Part("actor-0", "there pid 2", "acts")]
    return RunStatus(**{"seconds": time.time(), "state": "running", "summary": "1,000 of 2,000 env steps",
                        "actors": 2, "parts": parts, "notes": ["logs RUN/logs"], "numbers": {"rows": 5.0},
                        **changed})  # fmt: skip


def text(found: RunStatus) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(running.screen(found))
    return console.file.getvalue()


def test_a_status_is_what_was_written(tmp_path):
    written = status()
    running.write(written, tmp_path)
    assert running.read(tmp_path) == written
    shown = text(written)
    for word in ("running", "learner", "here pid 1", "12 updates", "actor-0", "logs RUN/logs", "1,000 of 2,000"):
        assert word in shown


def test_a_launch_that_died_is_told_from_one_that_lives(tmp_path):
    old = status(seconds=time.time() - 3600)
    assert status().alive
    assert not old.alive
    assert not status(state="finished").alive
    assert "gone: it was running 3600 s ago" in text(old)
    running.write(old, tmp_path)
    with pytest.raises(RuntimeError, match="no launch is running"):
        running.ask(tmp_path, 3, timeout=60)


@pytest.mark.parametrize("content", ["", "[]", '{"seconds": 1}', '{"parts": [{"name": "x", "what": 1}]}'])
def test_a_damaged_status_is_refused(tmp_path, content):
    (tmp_path / running.STATUS_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"status\.json is damaged"):
        running.read(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"id": "x"}', '{"id": "x", "actors": "many"}'])
def test_a_damaged_request_is_refused(tmp_path, content):
    (tmp_path / running.CONTROL_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"control\.json is damaged"):
        running.requested(tmp_path)


def test_no_launch_at_all(tmp_path):
    assert running.requested(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="no `telamon launch` has run there"):
        running.read(tmp_path)


@pytest.mark.parametrize("refusal", [None, "actors=99 is too many"])
def test_a_request_is_answered(tmp_path, refusal):
    running.write(status(), tmp_path)

    def serve():
        while (request := running.requested(tmp_path)) is None:
            time.sleep(0.01)
        running.write(status(control=request.id, refusal=refusal), tmp_path)

    server = threading.Thread(target=serve)
    server.start()
    if refusal is None:
        running.ask(tmp_path, 3, timeout=60)
    else:
        with pytest.raises(ValueError, match="too many"):
            running.ask(tmp_path, 3, timeout=60)
    server.join()
    request = running.requested(tmp_path)
    assert request == Request(json.loads((tmp_path / running.CONTROL_FILE).read_text())["id"], 3)


def test_a_request_that_nobody_answers(tmp_path):
    running.write(status(), tmp_path)
    with pytest.raises(TimeoutError, match="--timeout"):
        running.ask(tmp_path, 3, timeout=0.0)
