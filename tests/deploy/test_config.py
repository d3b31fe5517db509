"""Configs: what is refused, and that a run directory gives back what a run was started with."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import yaml

from deploy import config as configs
from deploy.config import ALGORITHMS, SAFE_TO_CHANGE, CheckpointConfig, EnvConfig, EvalConfig, ReportConfig, RunConfig
from telamon.agents.dreamerv3.config import DreamerV3Config, LossScales
from telamon.agents.tdmpc2.config import TDMPC2Config

CONFIG = RunConfig("tdmpc2", "dmc:cartpole-swingup")
DREAMER = RunConfig("dreamerv3", "dmc:walker-walk", agent=DreamerV3Config())


def with_value(key: str, value: object, config: object = CONFIG) -> RunConfig:
    """`config` with one key of the form GROUP.NAME changed."""
    group, _, name = key.rpartition(".")
    if group:
        return replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return replace(config, **{name: value})


LEAST = {
    "steps": 1, "seed": 0, "log_every": 1, "max_skipped": 1, "env.num": 1, "eval.every": 0, "eval.episodes": 1,
    "report.every": 0, "report.keep": 1, "checkpoint.every": 1, "checkpoint.keep": 1,
}  # fmt: skip


@pytest.mark.parametrize("key", LEAST)
def test_the_least_value_is_taken_and_one_below_is_refused(key):
    low = LEAST[key]
    assert configs.flatten(asdict(with_value(key, low)))[key] == low
    with pytest.raises(ValueError) as caught:
        with_value(key, low - 1)
    assert str(caught.value) == f"{key}={low - 1} must be at least {low}"


@pytest.mark.parametrize(("key", "unit"), [("env.timeout", "seconds"), ("memory_limit", "GiB")])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_sizes_are_positive(key, unit, value):
    assert configs.flatten(asdict(with_value(key, 0.1)))[key] == 0.1
    with pytest.raises(ValueError) as caught:
        with_value(key, value)
    assert str(caught.value) == f"{key}={value} must be above 0 {unit}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((name, 0) for name in ("enc_dim", "mlp_dim", "latent_dim", "num_enc_layers", "simnorm_dim", "batch_size",
                                 "horizon", "iterations", "num_samples", "num_elites", "buffer_size", "episode_length",
                                 "lr", "grad_clip_norm", "discount_denom")),
        *((name, -1) for name in ("seed_steps", "num_pi_trajs", "temperature", "min_std", "dropout")),
        ("num_q", 1), ("latent_dim", 511), ("num_pi_trajs", 513), ("num_elites", 513), ("dropout", 1.0), ("tau", 1.5),
        ("recipe", "newest"), ("lr", math.nan),
    ],
)  # fmt: skip
def test_an_agents_bounds_name_value_and_knob(key, value):
    with pytest.raises(ValueError) as caught:
        with_value(f"agent.{key}", value)
    assert f"agent.{key}={value!r} must" in str(caught.value)
    assert "\n" not in str(caught.value)


CHANGED = replace(
    CONFIG, steps=5, memory_limit=2.5, env=EnvConfig(3, 4, "rebuild", 1e-5, {"a": 1, "b": 0.5, "c": True, "d": "x"}),
    eval=EvalConfig(7, 8), report=ReportConfig(6, 5), checkpoint=CheckpointConfig(9, 1),
    agent=TDMPC2Config(recipe="latest", lr=3e-7, seed_steps=0, mpc=False, vmin=-5, dtype="bfloat16"),
)  # fmt: skip


DREAMER_CHANGED = replace(
    DREAMER, agent=DreamerV3Config(recipe="latest", mults=(1, 2), strided=False, loss_scales=LossScales(rep=0.5))
)


@pytest.mark.parametrize("config", [CONFIG, CHANGED, DREAMER, DREAMER_CHANGED])
def test_a_run_directory_gives_the_config_back(tmp_path, config):
    configs.save(config, tmp_path)
    found = configs.load(tmp_path)
    assert found == config
    assert {k: type(v) for k, v in asdict(found).items()} == {k: type(v) for k, v in asdict(config).items()}
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_config_is_replaced_as_a_whole(tmp_path, monkeypatch):
    configs.save(CONFIG, tmp_path)
    monkeypatch.setattr(Path, "replace", lambda self, target: 1 / 0)  # killed before the rename
    with pytest.raises(ZeroDivisionError):
        configs.save(CHANGED, tmp_path)
    assert configs.load(tmp_path) == CONFIG


def written(run_dir: Path, text: str) -> Path:
    (run_dir / "config.yaml").write_text(text)
    return run_dir


def edited(key: str, value: object) -> str:
    values = asdict(CONFIG)
    *groups, name = key.split(".")
    inner = values
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return yaml.safe_dump(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged: it holds None where keys are expected"),
        ("- 1", r"is damaged: it holds \[1\] where keys are expected"),
        ("a: [1", "is damaged: while parsing a flow sequence .* line 1"),
        (edited("agent", 3), "is damaged: agent holds 3 where keys are expected"),
        (edited("agent.lrr", 3), "has keys that this version does not know: agent.lrr$"),
        (edited("colour", "red"), "has keys that this version does not know: colour$"),
        ("steps: 5", "lacks keys without a default: algorithm, task$"),
        (edited("steps", "1e6"), "has steps: '1e6', which is no int$"),  # so YAML reads 1e6
        (edited("steps", True), "has steps: True, which is no int$"),
        (edited("agent.lr", "3e-4"), "has agent.lr: '3e-4', which is no float$"),
        (edited("agent.mpc", 1), "has agent.mpc: 1, which is no bool$"),
        (edited("task", 7), "has task: 7, which is no str$"),
        (edited("env.on_error", "ignore"), r"has env.on_error: 'ignore', which is no .*\['stop', 'rebuild'\]$"),
        (edited("memory_limit", "much"), r"has memory_limit: 'much', which is no float \| None$"),
        (edited("env.options", {"a": [1]}), r"has env.options: \{'a': \[1\]\}, which is no "),
        (edited("algorithm", "dreamer"), "has algorithm: 'dreamer', which is no "),
        (edited("algorithm", ["tdmpc2"]), "has algorithm: \\['tdmpc2'\\], which is no "),
        (edited("algorithm", "dreamerv3"), "has keys that this version does not know: agent.consistency_coef, "),
        (edited("steps", 0), "^steps=0 must be at least 1$"),
    ],
)
def test_a_config_file_that_cannot_be_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        configs.load(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "config.yaml") in str(caught.value) or message.startswith("^")


def test_what_is_missing_has_its_default(tmp_path):
    # written by an earlier version, which did not know the rest
    found = configs.load(written(tmp_path, "{algorithm: tdmpc2, task: 'x:y', memory_limit: 3, agent: {lr: 1}}"))
    assert found == RunConfig("tdmpc2", "x:y", memory_limit=3, agent=TDMPC2Config(lr=1))


def test_a_missing_agent_is_the_algorithms_default(tmp_path):
    found = configs.load(written(tmp_path, "{algorithm: dreamerv3, task: 'x:y'}"))
    assert found == RunConfig("dreamerv3", "x:y", agent=DreamerV3Config())


def test_algorithm_and_agent_belong_together():
    for config, agent, sentence in (
        (CONFIG, DreamerV3Config(), "algorithm=tdmpc2 takes a TDMPC2Config, not a DreamerV3Config"),
        (DREAMER, TDMPC2Config(), "algorithm=dreamerv3 takes a DreamerV3Config, not a TDMPC2Config"),
    ):
        with pytest.raises(ValueError) as caught:
            replace(config, agent=agent)
        assert str(caught.value) == sentence
    with pytest.raises(ValueError, match=r"^algorithm='ppo' is none of tdmpc2, dreamerv3$"):
        RunConfig("ppo", "x:y")
    assert get_args(configs.Name) == tuple(ALGORITHMS)


def test_options_are_read_as_what_they_look_like():
    words = ["size=64", "scale=0.5", "big=1e3", "gray=true", "sticky=False", "actions=all", "name=a=b", "empty="]
    assert configs.parse_options(words) == {
        "size": 64, "scale": 0.5, "big": 1000.0, "gray": True, "sticky": False, "actions": "all", "name": "a=b",
        "empty": "",
    }  # fmt: skip
    for word in ("size", "=3", "a b=3"):
        with pytest.raises(ValueError) as caught:
            configs.parse_options([word])
        assert str(caught.value) == f"env.options takes KEY=VALUE, and {word!r} is none"


def test_what_the_run_sets_is_no_option():
    with pytest.raises(ValueError) as caught:
        with_value("env.options", {"seed": 3, "size": 64, "action_repeat": 2})
    assert str(caught.value) == "env.options holds action_repeat, seed, which the run itself sets"


def test_what_is_no_run_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        configs.load(tmp_path)
    assert str(caught.value) == f"{tmp_path} is no run directory: it holds no config.yaml"


def test_flatten():
    assert configs.flatten({"a": 1, "b": {"c": 2, "d": {"e": None}}, "f": []}) == {
        "a": 1,
        "b.c": 2,
        "b.d.e": None,
        "f": [],
    }


def test_differing_keys_are_named_with_both_values():
    assert configs.differing_keys(CONFIG, CONFIG) == []
    other = with_value("agent.seed_steps", 3, with_value("env.action_repeat", 4, with_value("task", "x:y")))
    assert configs.differing_keys(CONFIG, other) == [
        "task (dmc:cartpole-swingup -> x:y)",
        "env.action_repeat (None -> 4)",
        "agent.seed_steps (None -> 3)",
    ]


def test_options_differ_one_by_one():
    old, new = with_value("env.options", {"size": 64, "gray": True}), with_value("env.options", {"size": 96})
    assert configs.differing_keys(old, new) == ["env.options.size (64 -> 96)", "env.options.gray (True -> None)"]


OTHER = {"paper": "latest", "auto": "map", "float32": "bfloat16", "stop": "rebuild"}


def other_value(value: object) -> object:
    """Another value that its key allows, too."""
    match value:
        case bool():
            return not value
        case int():
            return 2 * value
        case float():
            return 0.99 * value
        case str():
            return OTHER.get(value, "x:y")
    return 8


def test_every_key_is_safe_or_refused():
    # the table of safe keys names keys that exist, and whatever is not in it is refused
    groups = {f.name for f in fields(RunConfig) if is_dataclass(getattr(CONFIG, f.name))}
    flat = configs.flatten(asdict(CONFIG))
    assert SAFE_TO_CHANGE <= flat.keys() | groups
    for key, value in flat.items():
        if key in ("algorithm", "env.options"):  # the one goes with an agent, the other has keys of its own
            continue
        new = other_value(value)
        safe = key in SAFE_TO_CHANGE or key.partition(".")[0] in SAFE_TO_CHANGE
        expected = [] if safe else [f"{key} ({value} -> {new})"]
        assert configs.differing_keys(CONFIG, with_value(key, new)) == expected


def test_the_default_run_directory_is_a_plain_path():
    assert configs.default_run_dir(CONFIG) == Path("runs/tdmpc2-dmc-cartpole-swingup-seed1")
    own = replace(CONFIG, task="envs/mine.py:make", seed=3)
    assert configs.default_run_dir(own) == Path("runs/tdmpc2-envs-mine.py-make-seed3")
