"""What stops a run or is passed over: it is named, and nothing bad reaches the replay, the parameters or the disk."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from deploy import local
from deploy.config import CheckpointConfig, EnvConfig, EvalConfig, RunConfig
from learner import checkpoint, update
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.envs.base import EnvError
from telamon.envs.counting import Fault
from telamon.keys import Stream, stream
from tests.harness import TINY, after, assert_same, kill, lines, probing, rows

FAULTS = {
    "nan_reward": "reward is nan",
    "inf_obs": "observation 'where' is inf",
    "raise": "RuntimeError: the counting environment was told to break",
    "missing": "observation 'where' is missing (got 'total')",
    "shape": "observation 'where' has shape (2,), expected (3,)",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_broken_environment_stops_the_run_which_then_goes_on_where_it_was(monkeypatch, tmp_path, kind):
    faults = [Fault(kind, env=1, episode=3, t=4)]
    harness = probing(monkeypatch, num_envs=2, lengths=(7,), steps=90, every=10, env={"faults": faults})
    with pytest.raises(EnvError) as caught:
        harness.run(tmp_path / "run")
    assert str(caught.value) == (
        f"environment 1 (counting:continuous): {FAULTS[kind]} at step 4 of its episode; "
        "env.on_error=rebuild would abandon the episode and go on"
    )
    # it broke in tick 28; the last checkpoint is that of 40 transitions, after 22 ticks of two environments
    assert checkpoint.names(tmp_path / "run" / "checkpoints")[0] == "000000000044-000000000000"
    mended = probing(monkeypatch, num_envs=2, lengths=(7,), steps=90, every=10)
    whole = mended.run(tmp_path / "whole")
    assert_same(mended.run(tmp_path / "run", resume=True), whole)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_broken_environment_is_rebuilt_where_that_is_asked_for(monkeypatch, tmp_path, caplog, kind):
    faults = [Fault(kind, env=1, episode=3, t=4)]
    harness = probing(
        monkeypatch, num_envs=2, lengths=(7,), steps=90, every=10, env={"faults": faults, "on_error": "rebuild"}
    )
    run = harness.run(tmp_path / "run")
    assert run.counters.transitions >= 90
    held = rows(run)
    for h in held:
        assert all(np.isfinite(v).all() for v in h.values())
    (broken,) = np.flatnonzero(held[1]["is_first"][1:] & ~held[1]["is_last"][:-1]) + 1
    assert held[1]["obs/where"][broken - 1].tolist() == [1, 3, 3]
    assert held[1]["obs/where"][broken].tolist() == [1, 1000, 0]
    assert all(line["learner/torn"] == 0 for line in lines(tmp_path / "run") if "learner/torn" in line)
    (warning,) = [r.getMessage() for r in caplog.records if "env_rebuilt" in r.getMessage()]
    assert f"env=1 id=counting:continuous step=4 reason={FAULTS[kind]!r}" in warning
    # and a kill afterwards changes nothing: a rebuilt environment is saved as what it is
    harness.run(tmp_path / "killed", stopped=after(120, kill))
    assert_same(harness.run(tmp_path / "killed", resume=True), run)


def bad_updates(run: local.Run, share: float, count: int) -> list[int]:
    """The updates that the probe makes bad: those whose draw is below its share."""
    key = stream(run.config.seed, Stream.UPDATE)
    return [i for i in range(count) if float(run.agent.draw_update_noise(jax.random.fold_in(key, i))) < share]


def test_updates_that_are_not_finite_are_skipped_and_counted(monkeypatch, tmp_path, caplog):
    harness = probing(monkeypatch, agent={"nan_share": 0.3})
    run = harness.run(tmp_path / "run")
    bad = bad_updates(run, 0.3, 59)
    assert 10 < len(bad) < 30
    assert min(bad) < 10  # in the burst too
    assert int(run.state.train.updates) == 59 - len(bad)
    assert math.isfinite(run.state.train.memory)
    assert run.counters.skipped == int(run.state.skipped) == len(bad)
    said = [r.getMessage() for r in caplog.records if "update_skipped" in r.getMessage()]
    streaks = [next(k for k in range(1, 60) if i - k not in bad) for i in bad]
    assert said == [
        f"event=update_skipped update={i + 1} in_a_row={streak} first=bad_loss"
        for i, streak in zip(bad, streaks, strict=True)
    ]
    # the lines: counted, and null where there is no number; with one environment update i comes at transition i + 2
    for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if "loss/bad_loss" in line:
            last = int(line["counters/updates"]) - 1
            assert line["counters/skipped_updates"] == len([i for i in bad if i <= last])
            assert line["loss/bad_loss"] == (None if last in bad else 0)
    harness.run(tmp_path / "killed", stopped=after(100, kill))
    assert_same(harness.run(tmp_path / "killed", resume=True), run)


@pytest.mark.parametrize(("random", "limit"), [(20, 1), (20, 5), (20, 25)])
def test_too_many_skipped_updates_in_a_row_stop_the_run(monkeypatch, tmp_path, random, limit):
    # with 5 in the middle of the burst; with 25 after it, where each transition adds one
    harness = probing(monkeypatch, random=random, every=10, max_skipped=limit, agent={"nan_share": 1.0})
    with pytest.raises(update.NonFiniteUpdate) as caught:
        harness.run(tmp_path / "run")
    in_a_row = "1 updates" if limit == 1 else f"{limit} updates"
    assert str(caught.value) == (
        f"{in_a_row} in a row were skipped because bad_loss was not finite, the last one update {limit}; "
        "the parameters are those before; the bound is max_skipped"
    )
    # the last checkpoint is whole, its parameters are the first ones
    with harness.open(tmp_path / "run") as run:
        fresh = float(run.state.train.memory)
        assert run.restore() is not None
        assert float(run.state.train.memory) == fresh
        assert int(run.state.train.updates) == 0


def test_a_termination_stops_the_run_unless_it_is_learned(monkeypatch, tmp_path):
    harness = probing(monkeypatch, env={"terminate_every": 2})
    with pytest.raises(EnvError, match=r"terminated at step 7 of its episode, but .*; set agent\.episodic$"):
        harness.run(tmp_path / "run")
    learning = probing(monkeypatch, env={"terminate_every": 2}, agent={"learns_terminations": True})
    run = learning.run(tmp_path / "other")
    assert run.counters.updates == 59
    assert rows(run)[0]["is_terminal"].sum() == 4


TRAIN = RunConfig(
    "tdmpc2", "counting:continuous", eval=EvalConfig(every=0), checkpoint=CheckpointConfig(every=10), agent=TINY
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "counting:continuos"}, "there is no environment 'counting:continuos'; did you mean"),
        ({"task": "nothing"}, "'nothing' is neither BACKEND:NAME nor"),
        ({"task": "counting:discrete"}, "tdmpc2 plans over continuous actions, but counting:discrete has discrete"),
        ({"env": EnvConfig(action_repeat=0)}, "env.action_repeat is 0; it must be at least 1"),
        ({"memory_limit": 1e-4, "steps": 10**7}, "agent.buffer_size=[0-9]+ is the largest that fits"),
        ({"memory_limit": 1e-9}, "no agent.buffer_size fits, or raise memory_limit"),
        ({"algorithm": "dreamerv3", "agent": DreamerV3Config(buffer_size=15)}, "agent.buffer_size=15 is below 16, "),
    ],
    ids=lambda value: "-".join(f"{k}={v}"[:30] for k, v in value.items()) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_cannot_be_trained_leaves_no_run_behind(tmp_path, changed, message):
    with pytest.raises((ValueError, EnvError), match=message) as caught:
        local.train(replace(TRAIN, **changed), tmp_path / "run", False, Console(quiet=True))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_one_ctrl_c_asks_and_a_second_one_interrupts():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with local.stop_on_signal() as stopped:
            assert not stopped()
            os.kill(os.getpid(), number)
            assert stopped()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
