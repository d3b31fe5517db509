"""Presets: each can be trained with, and sets what the official code sets."""

from __future__ import annotations

import inspect
from dataclasses import asdict, replace

import pytest

from deploy import presets
from deploy.config import ALGORITHMS, RunConfig, flatten
from deploy.presets import PRESETS
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.tdmpc2.config import PRESETS as TDMPC2_SIZES
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.envs.registry import load

FRESH = {name: RunConfig(name, "x:y", agent=algorithm.config()) for name, algorithm in ALGORITHMS.items()}
LATEST = {name: replace(config, agent=replace(config.agent, recipe="latest")) for name, config in FRESH.items()}


@pytest.mark.parametrize(("algorithm", "name"), [(a, name) for a in PRESETS for name in PRESETS[a]])
@pytest.mark.parametrize("fresh", [FRESH, LATEST], ids=["paper", "latest"])
def test_a_preset_sets_what_it_says_and_nothing_else(fresh, algorithm, name):
    before, preset = flatten(asdict(fresh[algorithm])), PRESETS[algorithm][name]
    after = flatten(asdict(presets.apply(fresh[algorithm], [name])))
    wanted = {**preset.values, **(preset.latest if fresh is LATEST else {})}
    assert {key: after[key] for key in wanted} == wanted
    assert {k: v for k, v in after.items() if k not in wanted} == {k: v for k, v in before.items() if k not in wanted}


@pytest.mark.parametrize("algorithm", PRESETS)
def test_an_unknown_preset_is_named(algorithm):
    with pytest.raises(ValueError) as caught:
        presets.apply(FRESH[algorithm], ["laptop", "7"])
    assert str(caught.value) == f"preset '7' is none of {', '.join(PRESETS[algorithm])}"


def test_tdmpc2_has_its_sizes():
    assert list(PRESETS["tdmpc2"]) == [str(name) for name in TDMPC2_SIZES]
    assert presets.apply(FRESH["tdmpc2"], ["5"]).agent == TDMPC2Config()


def test_later_presets_win():
    wide = presets.apply(FRESH["dreamerv3"], ["dmc_vision", "size50m"])
    assert (wide.agent.units, wide.agent.deter, wide.agent.train_ratio) == (512, 4096, 512.0)
    assert presets.apply(FRESH["dreamerv3"], ["size50m", "dmc_vision"]).agent.units == 256
    atari = presets.apply(FRESH["dreamerv3"], ["atari"])
    assert presets.apply(atari, ["dmc_vision"]).env.options == {**atari.env.options, "size": 64}


OFFICIAL = {
    # name: rows, environments, action repeat, train ratio, units; recipe paper, then latest
    "dmc_proprio": ((300_000, 16, 2, 512, 256), (1_100_000, 16, 1, 1024, 64)),
    "dmc_vision": ((600_000, 16, 2, 512, 256), (1_100_000, 16, 1, 256, 1024)),
    "atari": ((51_000_000, 16, 4, 32, 1024),) * 2,
    "atari100k": ((110_000, 1, 4, 256, 1024),) * 2,
    "crafter": ((1_100_000, 1, 1, 512, 1024),) * 2,
    "procgen": ((110_000_000, 16, 1, 64, 1024),) * 2,
    "dmlab": ((26_000_000, 16, 4, 32, 1024),) * 2,
    "minecraft": ((1_000_000, 16, 1, 32, 1024),) * 2,
    "bsuite": ((1_000_000, 1, 1, 1024, 1024),) * 2,
    "loconav": ((1_000_000, 16, 1, 256, 1024),) * 2,
}
"""What the two official codes set; steps where they leave them open are ours."""


@pytest.mark.parametrize("name", OFFICIAL)
def test_tasks_are_set_as_officially(name):
    for fresh, expected in zip((FRESH, LATEST), OFFICIAL[name], strict=True):
        c = presets.apply(fresh["dreamerv3"], [name])
        repeat = c.env.action_repeat
        assert (c.steps // repeat, c.env.num, repeat, c.agent.train_ratio, c.agent.units) == expected
        assert c.agent.dtype == "bfloat16"
        assert (c.agent.batch_size, c.agent.batch_length, c.agent.context) == (16, 64, 1)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("dmc_vision", "dmcpixels"), ("atari", "atari"), ("atari100k", "atari"), ("crafter", "crafter")],
)
def test_options_are_those_of_the_environments(name, backend):
    given = presets.apply(LATEST["dreamerv3"], [name]).env.options
    assert given
    assert set(given) <= set(inspect.signature(load(backend).make).parameters)


def test_every_task_preset_says_command_score_and_cost():
    for name, preset in PRESETS["dreamerv3"].items():
        if name.startswith("size"):
            assert set(preset.values) == {f"agent.{k}" for k in ("units", "hidden", "deter", "classes", "depth")}
            continue
        assert f"--preset {name}" in preset.text, name
        assert "Score" in preset.text, name
        assert "ost:" in preset.text or "cost:" in preset.text, name


def test_sizes_are_the_defaults_at_12m():
    assert presets.apply(FRESH["dreamerv3"], ["size12m"]).agent == DreamerV3Config()
