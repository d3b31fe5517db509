"""Files of a run directory: replaced whole, and used by one command that trains at a time."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deploy import config as configs
from deploy import local
from deploy.config import CheckpointConfig, EvalConfig, RunConfig
from deploy.files import LOCK_FILE, alone_in, replace_text
from tests.harness import TINY

CONFIG = RunConfig(
    "tdmpc2", "counting:continuous", eval=EvalConfig(every=0), checkpoint=CheckpointConfig(every=10), agent=TINY
)


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    replace_text(path, "old")
    monkeypatch.setattr(type(path), "replace", lambda self, target: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        replace_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize("resume", [False, True])
def test_two_commands_never_train_in_one_directory(tmp_path, resume):
    if resume:
        configs.save(CONFIG, tmp_path)
    with alone_in(tmp_path):
        before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        with pytest.raises(ValueError, match=f"another .* is at work in {tmp_path}; end it first"):
            local.train(CONFIG, tmp_path, resume, Console(file=io.StringIO()))
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert LOCK_FILE in before
