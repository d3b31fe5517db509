"""The list of a run's pages that Prometheus reads."""

from __future__ import annotations

import json

import pytest

from deploy.discovery import TARGETS_FILE, Target, Targets


def test_file_and_text_say_the_same(tmp_path):
    targets = Targets(tmp_path)
    assert json.loads(targets.text()) == []
    targets.update(
        [Target("learner", "learner", "http://10.0.0.1:90/metrics"), Target("actor", "actor-1", "http://a:7/m")]
    )
    file = tmp_path / TARGETS_FILE
    assert file.read_text() == targets.text()
    assert json.loads(targets.text()) == [
        {"targets": ["a:7"],
         "labels": {"run": str(tmp_path), "role": "actor", "part": "actor-1", "instance": "actor-1"}},
        {"targets": ["10.0.0.1:90"],
         "labels": {"run": str(tmp_path), "role": "learner", "part": "learner", "instance": "learner"}},
    ]  # fmt: skip
    assert targets.counts() == {"actor": 1, "learner": 1}
    assert targets.url("learner") == "http://10.0.0.1:90/metrics"
    assert targets.url("driver") is None


def test_a_part_on_another_port_keeps_its_labels(tmp_path):
    targets = Targets(tmp_path)
    targets.update([Target("actor", "actor-0", "http://a:7/metrics")])
    before = json.loads(targets.text())[0]
    targets.update([Target("actor", "actor-0", "http://a:8/metrics")])
    after = json.loads(targets.text())[0]
    assert after["labels"] == before["labels"]
    assert after["targets"] != before["targets"]


def test_a_list_of_a_process_that_was_killed_is_replaced_at_once(tmp_path):
    first = Targets(tmp_path)
    first.update([Target("actor", "actor-0", "http://a:7/metrics")])
    Targets(tmp_path).update(())
    assert json.loads((tmp_path / TARGETS_FILE).read_text()) == []


def test_what_the_disk_did_not_take_is_tried_again(tmp_path):
    targets = Targets(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            targets.update(())
    (tmp_path / "run").mkdir()
    targets.update(())
    assert (tmp_path / "run" / TARGETS_FILE).exists()


def test_the_file_is_written_only_when_something_has_changed(tmp_path):
    targets = Targets(tmp_path)
    pages = [Target("actor", "actor-0", "http://a:7/metrics"), Target("actor", "actor-1", "http://a:8/metrics")]
    targets.update(pages)
    (tmp_path / TARGETS_FILE).unlink()
    targets.update(reversed(pages))
    assert not (tmp_path / TARGETS_FILE).exists()
    targets.update(pages[:1])
    assert (tmp_path / TARGETS_FILE).exists()
