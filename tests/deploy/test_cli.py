"""The `telamon` command: its exit codes, and that a failure is one sentence."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import cli, commands, presets, running
from deploy.cli import SUMMARIES, main
from deploy.config import RunConfig
from deploy.local import Extras
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.telemetry.live import Part


@pytest.fixture
def telamon(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: True)  # it would change this process for good

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["telamon", *args])
        with pytest.raises(SystemExit) as exit_:
            main()
        said = capsys.readouterr()
        return exit_.value.code, said.out, said.err

    return run


def test_every_command_is_listed_and_has_its_function(telamon):
    code, out, err = telamon("--help")
    assert (code, err) == (0, "")
    for name, summary in SUMMARIES.items():
        assert f"  {name}" in out
        assert summary in out
        assert callable(getattr(commands, name.replace("-", "_")))
    assert telamon() == (2, out, "")


def test_an_unknown_command_is_named(telamon):
    assert telamon("trian") == (2, "", f"telamon: 'trian' is none of {', '.join(SUMMARIES)}\n")


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_has_its_help(telamon, name):
    code, out, err = telamon(name, "--help")
    assert (code, err) == (0, "")
    assert f"usage: telamon {name} " in out


def test_wrong_usage_says_what_is_known(telamon, tmp_path):
    code, out, err = telamon(
        "train", "tdmpc2", "counting:continuous", "--stepz", "3", "--run-dir", str(tmp_path / "run")
    )
    assert (code, out) == (2, "")
    assert "--stepz" in err
    assert "--steps" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--preset", "7"], "preset '7' is none of 1, 5, 19, 48, 317, laptop"),
        (["--resume"], "RUN holds no run to resume (no config.yaml); leave --resume away"),
    ],
)
def test_a_refusal_is_one_sentence(telamon, tmp_path, args, sentence):
    run_dir = tmp_path / "run"
    code, out, err = telamon("train", "tdmpc2", "counting:continuous", "--run-dir", str(run_dir), *args)
    assert (code, out, err) == (1, "", f"telamon: {sentence.replace('RUN', str(run_dir))}\n")
    assert not run_dir.exists()


def test_the_traceback_is_there_for_those_who_ask(telamon, monkeypatch):
    monkeypatch.setenv("TELAMON_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["telamon", "train", "tdmpc2", "counting:continuous", "--steps", "0"])
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        main()


def test_a_bug_is_no_refusal(telamon, monkeypatch):
    monkeypatch.setattr(commands, "envs", lambda args: {}["missing"])
    monkeypatch.setattr(sys, "argv", ["telamon", "envs"])
    with pytest.raises(KeyError):
        main()


def test_train_gets_preset_overrides_and_run_directory(telamon, monkeypatch):
    seen = []
    monkeypatch.setattr(commands.local, "train", lambda *args: seen.append(args[:3]) or 0)
    assert telamon("train", "tdmpc2", "dmc:cartpole-swingup", "--preset", "1", "--agent.lr", "1e-3", "--resume")[0] == 0
    ((given, run_dir, resume),) = seen
    fresh = RunConfig("tdmpc2", "dmc:cartpole-swingup")
    agent = presets.apply(fresh, ["1"]).agent
    assert given == replace(fresh, agent=replace(agent, lr=1e-3))
    assert run_dir == Path("runs/tdmpc2-dmc-cartpole-swingup-seed1")
    assert resume is True


def test_what_is_shown_besides_is_no_part_of_the_run(telamon, monkeypatch):
    seen = []
    monkeypatch.setattr(commands.local, "train", lambda *args: seen.append(args) or 0)
    telamon("train", "tdmpc2", "dmc:cartpole-swingup")
    telamon("train", "tdmpc2", "dmc:cartpole-swingup", "--profile", "5", "--metrics-port", "0", "--log-level", "debug")
    plain, besides = seen
    assert plain[0] == besides[0]
    assert plain[4:] == (Extras(), logging.INFO)
    assert besides[4:] == (Extras(profile=5, metrics_port=0), logging.DEBUG)


def test_a_status_is_printed_once_where_stdout_is_no_terminal(telamon, tmp_path):
    status = running.RunStatus(time.time(), "running", "7 of 9 env steps", 0, [Part("train", "here pid 1", "training")])
    running.write(status, tmp_path)
    for args in ([], ["--once"]):
        code, out, _ = telamon("status", str(tmp_path), *args)
        assert code == 0
        assert "7 of 9 env steps" in out
        assert "here pid 1" in out
    running.write(replace(status, state="failed"), tmp_path)
    assert telamon("status", str(tmp_path))[0] == 1
    assert telamon("status", str(tmp_path / "other"))[2].endswith("status.json: nothing has been trained there\n")


def test_an_override_wins_over_the_preset(telamon, monkeypatch):
    seen = []
    monkeypatch.setattr(commands.local, "train", lambda *args: seen.append(args[0]) or 0)
    for order in (["--preset", "1", "--agent.mlp-dim", "77"], ["--agent.mlp-dim", "77", "--preset", "1"]):
        telamon("train", "tdmpc2", "dmc:cartpole-swingup", *order)
    assert [c.agent.mlp_dim for c in seen] == [77, 77]
    assert [c.agent.num_q for c in seen] == [2, 2]


@pytest.fixture
def trained(telamon, monkeypatch):
    """Parses `telamon train` and returns the config that would be trained."""
    seen = []
    monkeypatch.setattr(commands.local, "train", lambda *args: seen.append(args[0]) or 0)

    def run(*args: str) -> RunConfig:
        code, _, err = telamon("train", *args)
        assert (code, err) == (0, "")
        return seen[-1]

    return run


def test_every_algorithm_has_its_own_options(telamon):
    code, dreamer, _ = telamon("train", "dreamerv3", "--help")
    assert code == 0
    assert "--agent.imag-length" in dreamer
    assert "--agent.loss-scales.rep" in dreamer
    assert "--agent.seed-steps" not in dreamer
    for name, preset in presets.PRESETS["dreamerv3"].items():
        assert f"{name} " in dreamer
        assert preset.text.splitlines()[0][:40] in dreamer
    code, tdmpc2, _ = telamon("train", "tdmpc2", "--help")
    assert "--agent.seed-steps" in tdmpc2
    assert "--agent.imag-length" not in tdmpc2
    assert "dmc_vision" not in tdmpc2


@pytest.mark.parametrize("args", [[], ["dreamer", "x:y"], ["--preset", "1", "tdmpc2", "x:y"]])
def test_training_begins_with_the_algorithm(telamon, args):
    code, out, err = telamon("train", *args)
    assert (code, out) == (2, "")
    assert err.startswith("usage: telamon train ALGORITHM ENV ")
    assert "  dreamerv3 " in err
    assert "  tdmpc2 " in err


def test_a_config_of_the_algorithm_is_trained(trained):
    assert trained("dreamerv3", "x:y") == RunConfig("dreamerv3", "x:y", agent=DreamerV3Config())


def test_presets_combine_and_flags_win(trained):
    found = trained("dreamerv3", "x:y", "--preset", "dmc_vision", "size50m", "--env.num", "3")
    assert (found.agent.units, found.agent.train_ratio, found.env.num, found.steps) == (512, 512.0, 3, 1_200_000)
    assert found.env.options == {"size": 64}
    swapped = trained("dreamerv3", "x:y", "--preset", "size50m", "dmc_vision")
    assert swapped.agent.units == 256


def test_the_recipe_decides_what_a_preset_sets(trained):
    for flags, recipe in ((["--agent.recipe", "latest"], "latest"), (["--agent.recipe=paper"], "paper"), ([], "paper")):
        found = trained("dreamerv3", "x:y", *flags, "--preset", "dmc_proprio")
        assert found.agent.recipe == recipe
        assert found.env.action_repeat == {"latest": 1, "paper": 2}[recipe]


def test_options_of_the_environment_are_added_to_a_presets(trained):
    assert trained("dreamerv3", "x:y", "--env.options", "gray=true").env.options == {"gray": True}
    found = trained("dreamerv3", "x:y", "--env.options", "gray=true", "size=32", "--preset", "dmc_vision")
    assert found.env.options == {"size": 32, "gray": True}


def test_check_env_knows_every_agent(telamon):
    code, out, _ = telamon("check-env", "counting:dict", "--episodes", "1", "--options", "size=64")
    assert code == 0
    assert "(64, 64, 3)" in out
    assert "tdmpc2       refuses: " in out
    assert "dreamerv3    can be trained here" in out


def test_the_exit_code_is_the_commands(telamon, monkeypatch):
    monkeypatch.setattr(commands.local, "train", lambda *args: 130)
    assert telamon("train", "tdmpc2", "dmc:cartpole-swingup") == (130, "", "")
