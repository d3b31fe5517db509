"""A run that is killed or stopped anywhere and resumed is, bit for bit, the run that was left alone."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from rich.console import Console

from deploy import config as configs
from deploy import local, running
from deploy.config import CheckpointConfig, EnvConfig, EvalConfig, ReportConfig, RunConfig
from learner import checkpoint
from replay_server import durable, persist
from telamon.data import Clock
from telamon.envs.counting import Counting
from tests.harness import TINY, Harness, Killed, after, assert_same, kill, lines, once, probing, rows, stop
from tests.probe import Remembering

UNEVEN = (3, 7, 5)
KINDS = {
    "one env": {"num_envs": 1},
    "three envs": {"num_envs": 3, "steps": 130, "random": 10},
    "latents and a train ratio": {"num_envs": 3, "steps": 130, "kind": Remembering, "report": ReportConfig(every=25)},
}
"""Random phase, burst, one update per transition, several checkpoints, lines, evaluations; or what DreamerV3 needs."""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(local.openloop, "show", lambda *args: set())


def turns(harness: Harness, run_dir: Path) -> int:
    """How often an uninterrupted run asks whether to stop."""
    count = 0

    def asked(run: local.Run) -> bool:
        nonlocal count
        count += 1
        return False

    harness.run(run_dir, stopped=asked)
    return count


def kept(run_dir: Path) -> tuple[list[str], list[str], list[str]]:
    """(checkpoints, marks, what is half done) in a run directory."""
    directory = run_dir / "checkpoints"
    half_done = sorted(p.name for p in directory.iterdir() if p.name.startswith("."))
    return checkpoint.names(directory)[::-1], persist.names(run_dir / "replay"), half_done


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_turn_twice(monkeypatch, tmp_path, kind):
    harness = probing(monkeypatch, lengths=UNEVEN, eval=EvalConfig(every=40, episodes=2), every=30, **KINDS[kind])
    total = turns(harness, tmp_path / "whole")
    whole = harness.run(tmp_path / "whole", resume=True)
    rng = np.random.default_rng(total)
    # from before the first checkpoint to the last turn
    for turn in np.linspace(1, total - 1, 9).astype(int):
        run_dir = tmp_path / str(turn)
        harness.run(run_dir, stopped=after(turn, kill))
        harness.run(run_dir, resume=True, stopped=after(int(rng.integers(1, total)), kill))
        assert_same(harness.run(run_dir, resume=True), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_at_any_turn(monkeypatch, tmp_path, kind):
    harness = probing(monkeypatch, lengths=UNEVEN, **KINDS[kind])
    total = turns(harness, tmp_path / "whole")
    whole = harness.run(tmp_path / "whole", resume=True)
    # every turn between two lines of losses, and some in the random phase and the burst
    for turn in [0, 1, 10, 22, 30, *range(total - 8, total)]:
        run_dir = tmp_path / str(turn)
        stopped = harness.run(run_dir, stopped=after(turn, stop))
        resumed = harness.run(run_dir, resume=True, stopped=stop)  # stopped again at once
        assert resumed.counters == stopped.counters
        assert_same(harness.run(run_dir, resume=True), whole)


def test_a_clock_is_restored_to_the_last_digit(monkeypatch, tmp_path):
    # 1 / 0.6 is no float: what updates account for is rounded, and rounds differently from another start
    harness = probing(monkeypatch, kind=Remembering)
    whole = harness.run(tmp_path / "whole")
    assert whole.clock.prev is not None
    assert whole.clock.prev != round(whole.clock.prev, 6)
    stopped = harness.run(tmp_path / "run", stopped=once(lambda run: run.counters.updates == 9, stop))
    with harness.open(tmp_path / "run") as run:
        assert run.clock == Clock()
        run.restore()
        assert run.clock == stopped.clock
    assert harness.run(tmp_path / "run", resume=True).clock == whole.clock


def test_a_stop_during_an_evaluation_gives_it_up_and_repeats_it(monkeypatch, tmp_path):
    harness = probing(monkeypatch, eval=EvalConfig(every=40, episodes=2))
    whole = harness.run(tmp_path / "whole")
    # the first turn is the evaluation at step 0; its third tick is asked whether to stop
    stopped = harness.run(tmp_path / "run", stopped=after(3, stop))
    assert stopped.counters.rows == 0
    assert lines(tmp_path / "run") == []
    assert_same(harness.run(tmp_path / "run", resume=True), whole)


def steps_of_a_save(monkeypatch: pytest.MonkeyPatch, arm: int, die_at: int) -> list[str]:
    """Dies before the `die_at`-th change that the `arm`-th save makes on disk; lists the changes as they come."""
    made: list[str] = []
    saves = 0

    def watched(function, name):
        def run(*args, **kwargs):
            if armed:
                if len(made) == die_at:
                    raise Killed  # the dead do nothing more, not even in a `finally`
                made.append(name)
                if len(made) == die_at:
                    if name == "rmtree":  # in the middle of it
                        os.unlink(next(p for p in Path(args[0]).rglob("*") if p.is_file()))
                    raise Killed
            return function(*args, **kwargs)

        return run

    armed = False
    save = local.Run.save

    def counted(self):
        nonlocal armed, saves
        saves += 1
        armed = saves == arm
        save(self)
        armed = False

    monkeypatch.setattr(local.Run, "save", counted)
    monkeypatch.setattr(durable, "write_through", watched(durable.write_through, "write"))
    for owner, name in ((Path, "rename"), (Path, "write_text"), (np, "savez"), (ocp.StandardCheckpointer, "save")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name), name))
    unlink, rmtree = Path.unlink, shutil.rmtree
    monkeypatch.setattr(persist.Path, "unlink", watched(unlink, "unlink"))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", watched(rmtree, "rmtree"))
    return made


def test_killed_at_every_step_of_a_checkpoint(monkeypatch, tmp_path):
    # The third save is the first that drops a checkpoint and a mark; between saves a reset tick leaves transitions as
    # they are, so that names by transitions would collide.
    make = lambda patch: probing(patch, lengths=(5,), every=10, checkpoint=CheckpointConfig(every=10, keep=2))
    whole = make(monkeypatch).run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        harness = make(patch)
        made = steps_of_a_save(patch, arm=3, die_at=-1)
        harness.run(tmp_path / "counted")
    assert made == [
        *("write", "write", "rename"),  # the mark: a chunk, the manifest, its final name
        *("save", "savez", "write_text", "rename"),  # the checkpoint
        *("rename", "rmtree"),  # of the oldest one
        *("unlink", "unlink"),  # its mark, and the chunk that only it needed
    ]
    for die_at in range(1, len(made) + 1):
        run_dir = tmp_path / str(die_at)
        with monkeypatch.context() as patch:
            harness = make(patch)
            died = steps_of_a_save(patch, arm=3, die_at=die_at)
            harness.run(run_dir)
        assert died == made[:die_at]
        run = make(monkeypatch).run(run_dir, resume=True)
        assert_same(run, whole)
        checkpoints, marks, half_done = kept(run_dir)
        assert checkpoints == marks == kept(tmp_path / "whole")[0]
        assert half_done == []


def test_stopped_then_killed_in_the_last_checkpoint_again_and_again(monkeypatch, tmp_path):
    # Stops come at arbitrary turns, so their checkpoints' names never come again: what they leave must still go.
    whole = probing(monkeypatch, lengths=UNEVEN).run(tmp_path / "whole")
    for turn in (30, 50, 70):
        with monkeypatch.context() as patch:
            harness = probing(patch, lengths=UNEVEN)
            steps_of_a_save(patch, arm=1 if turn == 30 else 2, die_at=4)  # the mark is made, the checkpoint is not
            harness.run(tmp_path / "run", resume=turn > 30, stopped=after(turn, stop))
    assert_same(probing(monkeypatch, lengths=UNEVEN).run(tmp_path / "run", resume=True), whole)
    checkpoints, marks, half_done = kept(tmp_path / "run")
    assert checkpoints == marks == kept(tmp_path / "whole")[0]
    assert half_done == []


@pytest.fixture
def interrupted(monkeypatch, tmp_path):
    """A harness and a run directory with two checkpoints, made at 20 and 40 of 60 transitions."""
    harness = probing(monkeypatch, lengths=UNEVEN, every=20)
    harness.run(tmp_path / "run", stopped=after(105, kill))
    assert len(kept(tmp_path / "run")[0]) == 2
    return harness, tmp_path / "run"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = {"truncate": truncate, "empty": empty, "remove": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(interrupted, tmp_path, caplog, damage):
    harness, run_dir = interrupted
    newest, older = checkpoint.names(run_dir / "checkpoints")
    whole = harness.run(tmp_path / "whole")
    files = [p.relative_to(run_dir) for p in sorted((run_dir / "checkpoints" / newest).rglob("*")) if p.is_file()]
    assert len(files) > 5
    chunks = {c.name for c in (run_dir / "replay").glob("chunk-*")}
    manifest = (run_dir / "replay" / f"mark-{older}.json").read_text()
    files += [Path("replay", f"mark-{newest}.json")]
    files += [Path("replay", c) for c in sorted(chunks) if c not in manifest]
    assert len(files) > 7
    for file in files:
        copy = tmp_path / "copy"
        shutil.copytree(run_dir, copy)
        if (copy / file).stat().st_size:  # Orbax writes an empty marker or two
            DAMAGES[damage](copy / file)
        else:
            (copy / file).unlink()
        caplog.clear()
        with harness.open(copy) as run:
            assert run.restore() == older, file
        (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert f"event=checkpoint_damaged name={newest} error=" in record.getMessage()
        assert file.name in record.getMessage()
        shutil.rmtree(copy)
    # the last kind of damage, once more and to the end: the damaged checkpoint does not stay
    DAMAGES[damage](run_dir / files[-1])
    assert_same(harness.run(run_dir, resume=True), whole)
    assert kept(run_dir) == kept(tmp_path / "whole")


def test_a_damaged_checkpoint_is_none_of_those_kept(interrupted):
    harness, run_dir = interrupted
    damaged, older = checkpoint.names(run_dir / "checkpoints")
    truncate(run_dir / "checkpoints" / damaged / "loop.npz")
    between = harness.run(run_dir, resume=True, stopped=once(lambda run: run.counters.transitions == 30, stop))
    newest, second = checkpoint.names(run_dir / "checkpoints")
    assert older == second < newest < damaged
    with harness.open(run_dir) as run:
        assert run.restore() == newest
        assert run.counters == between.counters


def test_nothing_whole_is_left(interrupted, caplog):
    harness, run_dir = interrupted
    for name in checkpoint.names(run_dir / "checkpoints"):
        truncate(run_dir / "checkpoints" / name / "loop.npz")
    with harness.open(run_dir) as run, pytest.raises(ValueError) as caught:
        run.restore()
    assert str(caught.value) == f"none of the 2 checkpoints under {run_dir}/checkpoints is whole; log.txt says why"
    assert [r.getMessage().count("loop.npz is missing or damaged") for r in caplog.records] == [1, 1]


def test_killed_before_the_first_checkpoint(monkeypatch, tmp_path):
    harness = probing(monkeypatch, every=1000)
    whole = harness.run(tmp_path / "whole")
    harness.run(tmp_path / "run", stopped=after(60, kill))
    assert len(lines(tmp_path / "run")) > 2
    assert_same(harness.run(tmp_path / "run", resume=True), whole)


def test_resuming_a_finished_run_changes_nothing(monkeypatch, tmp_path):
    harness = probing(monkeypatch, eval=EvalConfig(every=60, episodes=2))
    harness.run(tmp_path / "run")

    def kept():
        """All that is not of the wall clock, as status.json is."""
        files = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and "events" not in p.name]
        return {p: p.read_bytes() for p in files if p.name != running.STATUS_FILE}

    before = kept()
    harness.run(tmp_path / "run", resume=True)
    assert kept() == before


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_run_with_more_steps_goes_on_as_if_it_had_had_them(monkeypatch, tmp_path, num_envs):
    # the capacity of its replay follows from its steps
    harness = probing(monkeypatch, num_envs=num_envs, random=10)
    whole = harness.run(tmp_path / "whole", steps=120)
    harness.run(tmp_path / "run", steps=60)
    longer = harness.run(tmp_path / "run", resume=True, steps=120)
    assert longer.counters.transitions >= 120
    assert_same(longer, whole)
    assert longer.replay.stats().rows_held == longer.counters.rows
    # and fewer than were made: nothing is due, nothing is lost
    done = harness.run(tmp_path / "run", resume=True, steps=30)
    assert done.counters == longer.counters
    assert_same(done, whole)


def test_changed_intervals_count_from_the_last_time(monkeypatch, tmp_path):
    seldom = {"eval": EvalConfig(every=24, episodes=1), "log_every": 12, "checkpoint": CheckpointConfig(every=24)}
    often = {"eval": EvalConfig(every=4, episodes=1), "log_every": 4, "checkpoint": CheckpointConfig(every=4)}
    fours = list(range(52, 101, 4))
    for first, then, evaluated, logged in ((often, seldom, [72, 96], [60, 72, 84, 96]), (seldom, often, fours, fours)):
        run_dir = tmp_path / str(len(evaluated))
        harness = probing(monkeypatch, steps=100)
        harness.run(run_dir, steps=50, **first)
        before = len(lines(run_dir))
        run = harness.run(run_dir, resume=True, **then)
        new = lines(run_dir)[before:]
        assert [line["step"] for line in new if "eval/return" in line] == evaluated
        assert [line["step"] for line in new if "loss/bad_loss" in line] == logged
        assert run.progress == local.Progress(evaluated[-1], logged=logged[-1], saved=evaluated[-1])


def test_an_environment_that_cannot_be_saved_begins_new_episodes(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(Counting, "get_state", lambda self: None)
    harness = probing(monkeypatch, lengths=(7,), every=25)
    harness.run(tmp_path / "run", stopped=after(60, kill))
    assert "event=episodes_abandoned" not in caplog.text
    run = harness.run(tmp_path / "run", resume=True)
    (record,) = [r for r in caplog.records if "event=episodes_abandoned" in r.getMessage()]
    assert "env=counting:continuous" in record.getMessage()
    assert "new episodes begin" in record.getMessage()
    (held,) = rows(run)
    where, is_first, is_last = held["obs/where"], held["is_first"], held["is_last"]
    # 25 transitions are 3 episodes of 8 rows and 4 observations, the last of which was never appended
    assert where[27].tolist() == [0, 3, 3]
    assert not is_last[27]
    assert is_first[28]
    assert where[28].tolist() == [0, 0, 0]
    assert held["reward"][28] == 0
    assert lines(tmp_path / "run")[-1]["learner/torn"] == 0
    np.testing.assert_array_equal(is_first, where[:, 2] == 0)
    # its first transition counts its own return, not the abandoned episode's
    returns = [line["train/return"] for line in lines(tmp_path / "run") if "train/return" in line]
    sums = [held["reward"][a:b].astype(float).sum() for a, b in [(0, 8), (8, 16), (16, 24), (28, 36), (36, 44)]]
    np.testing.assert_allclose(returns[:5], sums)


@pytest.mark.parametrize("savable", [True, False])
def test_nothing_is_abandoned_before_the_first_tick(monkeypatch, tmp_path, caplog, savable):
    if not savable:
        monkeypatch.setattr(Counting, "get_state", lambda self: None)
    harness = probing(monkeypatch)
    whole = harness.run(tmp_path / "whole")
    harness.run(tmp_path / "run", stopped=stop)
    assert_same(harness.run(tmp_path / "run", resume=True), whole)
    assert "event=episodes_abandoned" not in caplog.text


# which run directories and configs are taken


CONFIG = RunConfig("tdmpc2", "counting:continuous", eval=EvalConfig(every=0))


@pytest.fixture
def started(tmp_path):
    configs.save(CONFIG, tmp_path)
    return tmp_path


def test_a_run_is_not_started_over_another(started):
    with pytest.raises(ValueError) as caught:
        local.check_run_dir(CONFIG, started, resume=False)
    assert str(caught.value) == (
        f"{started} already holds a run; add --resume to continue it, or --run-dir for another"
    )


def test_what_is_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        local.check_run_dir(CONFIG, tmp_path / "none", resume=True)
    assert str(caught.value) == (f"{tmp_path}/none holds no run to resume (no config.yaml); leave --resume away")
    local.check_run_dir(CONFIG, tmp_path / "none", resume=False)
    assert not (tmp_path / "none").exists()


def test_a_changed_config_is_refused_by_its_keys(started):
    other = replace(CONFIG, seed=2, steps=5, agent=replace(CONFIG.agent, lr=1e-3), env=EnvConfig(num=2))
    with pytest.raises(ValueError) as caught:
        local.check_run_dir(other, started, resume=True)
    assert str(caught.value) == (
        f"{started} was started with another config; differing keys: "
        "seed (1 -> 2), env.num (1 -> 2), agent.lr (0.0003 -> 0.001)"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 7},
        {"log_every": 7},
        {"memory_limit": 7.0},
        {"max_skipped": 7},
        {"eval": EvalConfig(every=7, episodes=7)},
        {"checkpoint": CheckpointConfig(every=7, keep=7)},
        {"env": EnvConfig(timeout=7.0, on_error="rebuild")},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_touches_no_data_may_change(started, changed):
    local.check_run_dir(replace(CONFIG, **changed), started, resume=True)


def test_a_resumed_run_records_what_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "execute", lambda *args: True)
    tiny = replace(CONFIG, agent=TINY)
    local.train(tiny, tmp_path / "run", False, Console(quiet=True))
    local.train(replace(tiny, steps=2_000_000), tmp_path / "run", True, Console(quiet=True))
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == asdict(replace(tiny, steps=2_000_000))


# the real agent on a real environment


def test_tdmpc2_on_dm_control(monkeypatch, tmp_path):
    config = RunConfig(
        "tdmpc2", "dmc:cartpole-swingup", steps=1090, log_every=10, eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=50), agent=TINY,
    )  # fmt: skip
    harness = Harness(monkeypatch, config, lambda spec: configs.make_agent(config, spec))
    whole = harness.run(tmp_path / "whole")
    assert len(lines(tmp_path / "whole")) == 1 + 10  # an episode; losses at 1002, when the burst is done, 1010, ...
    for reached, then in (
        (lambda run: run.env_steps == 820, kill),  # in the random phase, in the middle of an episode
        (lambda run: run.counters.updates == 200, stop),  # in the burst: a stop saves there
        (lambda run: run.env_steps == 1070, kill),  # between planned actions
    ):
        harness.run(tmp_path / "run", resume=(tmp_path / "run").exists(), stopped=once(reached, then))
    assert_same(harness.run(tmp_path / "run", resume=True), whole)
