"""SIGKILL at moments that nobody chose, and the other ways in which a process ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy import config as configs
from learner import checkpoint
from telamon.envs import counting
from tests.e2e.processes import TINY_ARGS, Process, said
from tests.harness import Harness, assert_same, lines
from tests.waiting import SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@dataclass(frozen=True)
class Case:
    """A run of all phases: a random one, a burst that takes a second, training, and checkpoints all the way."""

    task: str
    args: tuple[str, ...]
    counting: dict[str, Any] = field(default_factory=dict)


CASES = {
    "three uneven counting environments": Case(
        "counting:continuous",
        ("--env.num", "3", "--steps", "600", "--agent.seed-steps", "300", "--checkpoint.every", "30"),
        {"lengths": (3, 7, 5)},
    ),
    "dm_control": Case("dmc:cartpole-swingup", ("--steps", "1200", "--checkpoint.every", "50")),
}


def newest(run_dir: Path) -> str:
    return (checkpoint.names(run_dir / "checkpoints") or [""])[0]


def writing(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(f"{checkpoint.TEMPORARY}[0-9]*"))


def in_the_random_phase(run_dir: Path) -> bool:
    return newest(run_dir).endswith("-" + 12 * "0")


def trained(run_dir: Path) -> bool:
    return said(run_dir, "loss/")


def while_writing(phase: Callable[[Path], bool]) -> Callable[[Path], bool]:
    return lambda run_dir: phase(run_dir) and writing(run_dir)


MOMENTS: dict[str, list[tuple[Callable[[Path], bool], tuple[float, float]]]] = {
    "the random phase": [(in_the_random_phase, (0, 0.02))],
    "about the burst": [(in_the_random_phase, (0.3, 2.5)), (in_the_random_phase, (1, 3))],
    "training": [(trained, (0, 1)), (trained, (0, 0.5))],
    "a checkpoint in the random phase": [(while_writing(in_the_random_phase), (0, 0.05))],
    "two checkpoints in training": [(while_writing(trained), (0, 0.03)), (while_writing(trained), (0, 0.1))],
    "anything": [(lambda run_dir: True, (0, 8)), (lambda run_dir: True, (2, 8)), (trained, (0, 3))],
}
"""Kills in turn: what must have been reached, and between which seconds after that the signal comes."""


@pytest.mark.parametrize("name", CASES)
def test_sigkill_at_any_moment(monkeypatch, tmp_path, name):
    case = CASES[name]
    rng = np.random.default_rng(len(name))
    cache = tmp_path / "cache"

    def command(run_dir: Path, resume: bool) -> Process:
        args = ["train", "tdmpc2", case.task, *TINY_ARGS, *case.args, "--log-every", "10", "--eval.every", "400",
                "--eval.episodes", "1", "--run-dir", str(run_dir), *(["--resume"] if resume else [])]  # fmt: skip
        return Process(args, cache, case.counting)

    whole = tmp_path / "whole"
    assert command(whole, resume=False).finish()[0] == 0
    killed = 0
    for moment, kills in MOMENTS.items():
        run_dir = tmp_path / moment
        for reached, (earliest, latest) in kills:
            started = (run_dir / "config.yaml").exists()
            with command(run_dir, resume=started) as process:
                if process.wait_for(lambda reached=reached, run_dir=run_dir: reached(run_dir)):
                    time.sleep(rng.uniform(earliest, latest))
                process.send(signal.SIGKILL)
                killed += process.finish()[0] == -signal.SIGKILL
        code, _, err = command(run_dir, resume=(run_dir / "config.yaml").exists()).finish()
        assert (code, err) == (0, ""), (moment, err)
        assert lines(run_dir) == lines(whole), moment
    assert killed >= 8  # some moments may come after the end

    # and what is on disk: parameters, counters, replay
    monkeypatch.setattr(counting, "make", lambda *args, make=counting.make, **kw: make(*args, **kw, **case.counting))
    config = configs.load(whole)
    harness = Harness(monkeypatch, config, lambda spec: configs.make_agent(config, spec))
    for moment in MOMENTS:
        with harness.open(tmp_path / moment) as run, harness.open(whole) as twin:
            assert run.restore() == twin.restore()
            assert_same(run, twin)
        half_done = [p.name for p in (tmp_path / moment / "checkpoints").iterdir() if p.name.startswith(".")]
        assert half_done == []
        assert len(run.replay.marks()) == config.checkpoint.keep
    assert config == configs.load(tmp_path / "training")


HANG = {"faults": [{"kind": "hang", "env": 1, "episode": 2, "t": 4}]}
"""In tick 20, at 34 transitions; the last checkpoint is that of 30, after 17 ticks of two environments."""
LAST = "000000000034-000000000000"
SMALL = ["train", "tdmpc2", "counting:continuous", *TINY_ARGS, "--eval.every", "0", "--env.num", "2",
         "--checkpoint.every", "10", "--agent.seed-steps", "1000"]  # fmt: skip
"""Random actions only: nothing is compiled, which no signal interrupts."""


def test_a_hanging_environment_ends_the_process(tmp_path):
    run_dir = tmp_path / "run"
    command = [*SMALL, "--run-dir", str(run_dir)]
    started = time.monotonic()
    code, _, err = Process([*command, "--env.timeout", "10"], tmp_path / "cache", HANG).finish()
    assert (code, err) == (
        70,
        "telamon: environment 1 (counting:continuous) has not returned for 10 s; the bound is env.timeout\n",
    )
    assert time.monotonic() - started >= 10
    assert "event=env_hangs env=1 id=counting:continuous seconds=10" in (run_dir / "log.txt").read_text()
    # what was saved by then goes on
    assert newest(run_dir) == LAST
    code, out, err = Process([*command, "--resume", "--steps", "60"], tmp_path / "cache").finish()
    assert (code, err) == (0, "")
    assert f"resumed from checkpoint {LAST}: 30 env steps" in out


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    run_dir = tmp_path / "run"
    says = tmp_path / "says"
    command = [*SMALL, "--run-dir", str(run_dir), "--env.timeout", "3600"]
    with Process(command, tmp_path / "cache", {**HANG, "says": str(says)}) as process:
        assert process.wait_for(lambda: says.exists() and says.read_text() == "hangs")
        process.send(signal.SIGINT)
        assert process.wait_for(lambda: says.read_text() == "asked")
        process.send(signal.SIGINT)
        code, _, _ = process.finish(SECONDS)
    assert code in (130, -signal.SIGINT)  # a shell shows both as 130
    assert newest(run_dir) == LAST
