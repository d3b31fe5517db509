"""Logging: events to the run's file, warnings also to stderr, others' handlers untouched."""

import logging
import re

import pytest

from telamon.telemetry import logs
from telamon.telemetry.logs import PACKAGES, setup_buffer, setup_logging


@pytest.fixture(autouse=True)
def _restore():
    root = logging.getLogger()
    handlers, levels = list(root.handlers), {name: logging.getLogger(name).level for name in PACKAGES}
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_events_go_to_the_file_and_warnings_to_stderr_too(tmp_path, capsys):
    setup_logging(tmp_path)
    log = logging.getLogger("learner.loop")
    log.debug("event=too_fine")
    log.info("event=checkpoint step=%d", 1000)
    log.warning("event=stall seconds=%.1f", 2.5)
    logging.getLogger("some.library").info("chatter")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    stamp = r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert len(lines) == 2
    assert re.fullmatch(stamp + r" level=INFO logger=learner\.loop event=checkpoint step=1000", lines[0])
    assert re.fullmatch(stamp + r" level=WARNING logger=learner\.loop event=stall seconds=2\.5", lines[1])
    assert capsys.readouterr().err.splitlines() == [lines[1]]


def test_times_are_utc(tmp_path):
    setup_logging(tmp_path)
    record = logging.makeLogRecord({"name": "deploy", "levelno": logging.INFO, "created": 0.0, "msecs": 0.0})
    (handler,) = [h for h in logging.getLogger().handlers if h.name == "telamon-file"]
    assert handler.format(record).startswith("time=1970-01-01T00:00:00.000Z ")


def test_level_is_the_callers(tmp_path):
    setup_logging(tmp_path, logging.DEBUG)
    logging.getLogger("actors").debug("event=fine")
    assert "event=fine" in (tmp_path / "log.txt").read_text()


def test_a_second_call_moves_the_log_and_appends(tmp_path, capsys):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    setup_logging(first)
    logging.getLogger("deploy").warning("event=one")
    setup_logging(second)
    logging.getLogger("deploy").warning("event=two")
    setup_logging(first)
    logging.getLogger("deploy").warning("event=three")
    assert [line.split()[-1] for line in (first / "log.txt").read_text().splitlines()] == ["event=one", "event=three"]
    assert [line.split()[-1] for line in (second / "log.txt").read_text().splitlines()] == ["event=two"]
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_handlers_of_others_stay(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        setup_logging(tmp_path)
        logging.getLogger("deploy").info("event=seen")
    assert "event=seen" in caplog.text


def test_a_buffer_keeps_the_newest_lines_and_says_how_many_it_lost():
    buffer = setup_buffer(lines=2)
    for event in ("one", "two", "three"):
        logging.getLogger("actors").info("event=%s", event)
    lost, *kept = buffer.drain()
    assert lost == "event=lines_dropped count=1"
    assert [line.split()[-1] for line in kept] == ["event=two", "event=three"]
    assert kept[0].startswith("time=")
    assert buffer.drain() == []


def test_logs_of_parts_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "PART_LOG_BYTES", 1000)
    files = logs.PartLogs(tmp_path / "logs")
    for i in range(100):
        files.write("actor-0", [f"event=line number={i:03d}", "100% as it is"])
    files.close()
    files = logs.PartLogs(tmp_path / "logs")
    files.write("actor-0", ["event=last"])
    files.close()
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {"actor-0.log", "actor-0.log.1"}
    assert all(p.stat().st_size <= 1000 for p in (tmp_path / "logs").iterdir())
    assert (tmp_path / "logs" / "actor-0.log").read_text().endswith("number=099\n100% as it is\nevent=last\n")
