"""What a launch and other commands say to each other through the run directory."""

from __future__ import annotations

import io
import json
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from deploy import running
from deploy.running import Request, RunStatus
from telamon.telemetry.live import Part
from tests.waiting import until


def status(**changed) -> RunStatus:
    parts = [Part("learner", "here pid 1", "training", "12 updates"), Part("actor-0", "there pid 2", "acts")]
    return RunStatus(**{"seconds": time.time(), "state": "running", "summary": "1,000 of 2,000 env steps",
                        "actors": 2, "parts": parts, "notes": ["logs RUN/logs"], "numbers": {"rows": 5.0},
                        **changed})  # fmt: skip


def text(found: RunStatus, run_dir: Path = Path("nowhere")) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(running.screen(found, run_dir))
    return console.file.getvalue()


def rows(shown: str) -> dict[str, str]:
    """First word of a line -> the rest of it."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines() if line.strip()}


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


@pytest.mark.parametrize("state", running.RUNNING)
def test_a_status_of_a_minute_ago_is_that_of_a_dead_run(monkeypatch, state):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert status(state=state, seconds=1e9 - 59.9).alive
    assert not status(state=state, seconds=1e9 - 60).alive


@pytest.mark.parametrize(
    "content", ["", "[]", '{"seconds": 1}', '{"parts": [{"name": "x", "what": 1}]}', "[" * 100_000]
)
def test_a_damaged_status_is_refused(tmp_path, content):
    (tmp_path / running.STATUS_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"status\.json is damaged"):
        running.read(tmp_path)


FITTING = {
    '"abc"': ("state", "summary", "control", "refusal", "waits", "command"),
    "null": ("control", "refusal"),
    "3": ("seconds", "actors"),
}
"""Value -> the keys that may have it."""


@pytest.mark.parametrize("key", [f.name for f in fields(RunStatus)])
@pytest.mark.parametrize("value", ['"abc"', "null", "true", "[3]", "3", "NaN", '{"train/return": null}', "1" * 400])
def test_a_status_with_a_value_of_another_type_is_refused_by_its_key(tmp_path, key, value):
    written = status(rates={"updates": 1.0})
    running.write(written, tmp_path)
    path = tmp_path / running.STATUS_FILE
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, key: "HERE"}).replace('"HERE"', value))
    if key in FITTING.get(value, ()):
        assert running.read(tmp_path) is not None
    else:
        with pytest.raises(ValueError, match=rf"status\.json is damaged: {key}.* is no "):
            running.read(tmp_path)


@pytest.mark.parametrize(
    ("part", "says"),
    [(3, r"parts\[1\] is no object"), ({"name": 3}, r"parts\[1\]\.name=3 is no text"),
     ({"lag": 1.5}, r"parts\[1\]\.lag=1.5 is no whole number"), ({"where": None}, r"parts\[1\]\.where=None is no text"),
     ({"rates": [1]}, r"parts\[1\]\.rates=\[1\] is no object of numbers"),
     ({"counts": {"rows": "5"}}, r"parts\[1\]\.counts=.* is no object of numbers"),
     ({"memory": "big"}, r"parts\[1\]\.memory='big' is no whole number"),
     ({"new": 1}, r"parts\[1\]\.new=1 is no known key")],
)  # fmt: skip
def test_a_part_with_a_value_of_another_type_is_refused_by_its_key(tmp_path, part, says):
    running.write(status(), tmp_path)
    path = tmp_path / running.STATUS_FILE
    values = json.loads(path.read_text())
    values["parts"][1] = {**values["parts"][1], **part} if isinstance(part, dict) else part
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"status\.json is damaged: {says}"):
        running.read(tmp_path)


def test_figures_that_are_not_finite_are_no_damage(tmp_path):
    numbers = {"train/return": float("nan"), "eval/return": float("inf"), "env_steps": 1.0, "asked_env_steps": 9.0}
    running.write(status(numbers=numbers, rates={"env_steps": 1e-320, "updates": 1.0}), tmp_path)
    found = running.read(tmp_path)
    said = rows(text(found))
    assert said["return"] == "nan in training inf in evaluation"
    assert "left" not in said["speed"]
    assert "left" not in rows(text(replace(found, numbers={"asked_env_steps": 9.0})))["speed"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"id": "x"}', '{"id": "x", "actors": "many"}', '{"id": "x", "actors": 1e999}']
)
def test_a_damaged_request_is_refused(tmp_path, content):
    (tmp_path / running.CONTROL_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"control\.json is damaged"):
        running.requested(tmp_path)


def test_no_launch_at_all(tmp_path):
    assert running.requested(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="nothing has been trained there"):
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


def test_a_status_of_an_older_version_is_read(tmp_path):
    running.write(status(), tmp_path)
    path = tmp_path / running.STATUS_FILE
    values = json.loads(path.read_text())
    for new in ("rates", "waits", "command"):
        del values[new]
    for part in values["parts"]:
        for new in ("counts", "rates", "lag", "memory"):
            del part[new]
    path.write_text(json.dumps(values))
    found = running.read(tmp_path)
    assert found.command == "launch"
    assert [part.name for part in found.parts] == ["learner", "actor-0"]
    assert "here pid 1" in text(found)


def test_the_screen_says_how_fast_how_well_and_who_waits(tmp_path):
    (tmp_path / "checkpoints" / "000000001000-000000000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000000000500-000000000003").mkdir()
    parts = [
        Part("learner", "here pid 1", "training", "12 updates", rates={"updates": 3.456}, memory=3 * 2**29),
        Part("actor-0", "there pid 2", "acts", rates={"rows": 1234.5}, lag=2, memory=2**27),
    ]
    numbers = {"env_steps": 1000.0, "asked_env_steps": 2000.0, "train/return": 12.34, "eval/return": -5.0}
    found = status(
        parts=parts, numbers=numbers, rates={"env_steps": 100.0, "updates": 3.456},
        waits="the learner waits for rows",
    )  # fmt: skip
    said = rows(text(found, tmp_path))
    assert said["state"].startswith("running, as of ")
    assert said["speed"] == "100 env steps/s 3.46 updates/s 0:00:10 left"
    assert said["return"] == "12.3 in training -5.0 in evaluation"
    assert said["checkpoint"].startswith("000000001000-000000000007, written 0:0")
    assert said["waits"] == "the learner waits for rows"
    assert said["part"] == "where now speed lag memory done"
    assert said["learner"] == "here pid 1 training 3.46 updates/s 1.50 GiB 12 updates"
    assert said["actor-0"] == "there pid 2 acts 1,234 rows/s 2 128 MiB"
    over = rows(text(replace(found, state="finished"), tmp_path))
    assert over["state"].startswith("finished 0:00:")
    assert over.keys() & {"speed", "waits", "part", "learner"} == set()
    assert "learner" in rows(text(replace(found, state="failed"), tmp_path))


def test_a_run_without_workers_cannot_be_scaled(tmp_path):
    running.write(status(command="train"), tmp_path)
    with pytest.raises(RuntimeError, match="is a run of `telamon train`, which has no workers"):
        running.ask(tmp_path, 3, timeout=0.0)
    assert running.requested(tmp_path) is None


@pytest.mark.parametrize(
    ("raised", "state"), [(None, "finished"), (ValueError, "failed"), (KeyboardInterrupt, "stopped")]
)
def test_a_run_tells_how_it_stands_until_it_has_ended(tmp_path, raised, state):
    told = []

    def make(state):
        told.append(state)
        return status(state=state, command="train")

    def run():
        with running.telling(tmp_path, make, seconds=0.01) as teller:
            assert running.read(tmp_path).state == "starting"
            teller.state = "running"
            until(lambda: told.count("running") > 2)
            assert running.read(tmp_path).alive
            if raised is not None:
                raise raised
            teller.state = "finished"

    if raised is None:
        run()
    else:
        with pytest.raises(raised):
            run()
    assert told[-1] == running.read(tmp_path).state == state


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(running, "replace_text", fail)
    with running.telling(tmp_path, lambda state: status(state=state), seconds=60) as teller:
        teller.state = "finished"
    assert caplog.text.count("event=status_not_written error='no space left'") == 2


def test_somebody_who_watches_sees_it_change_until_it_ends(tmp_path):
    turns = iter([status(summary="two"), status(state="finished", summary="three")])
    running.write(status(summary="one"), tmp_path)
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    last = running.watch(tmp_path, console, sleep=lambda seconds: running.write(next(turns), tmp_path))
    assert last.state == "finished"
    shown = out.getvalue()
    assert shown.index("one") < shown.index("two") < shown.index("three")


def test_ctrl_c_ends_the_watching_alone(tmp_path):
    def interrupted(seconds):
        raise KeyboardInterrupt

    running.write(status(), tmp_path)
    assert running.watch(tmp_path, Console(file=io.StringIO()), sleep=interrupted).alive
