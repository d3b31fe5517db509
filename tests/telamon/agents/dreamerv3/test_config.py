"""Sizes with their parameter counts, recipes, and values that cannot work (docs/numerics.md, B15, B19)."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import jax
import pytest

from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import RECIPES, WIDTHS, DreamerV3Config, LossScales, size
from telamon.data import ActionSpec, ArraySpec, EnvSpec
from telamon.networks import param_count
from tests.telamon.agents.dreamerv3 import tiny

WALKER = EnvSpec(
    "walker",
    (("orientations", ArraySpec((14,))), ("height", ArraySpec(())), ("velocity", ArraySpec((9,)))),
    ActionSpec((6,)),
    500,
)


@cache
def shapes(name: str, env: EnvSpec = WALKER):
    agent = DreamerV3(DreamerV3Config(recipe="latest", **size(name)), env)
    return jax.eval_shape(agent.init, jax.random.key(0)).params


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("size1m", 640_867),
        ("size12m", 9_738_019),  # 9,738,533 in the code behind the paper: 514 belong to a 256th output that is dropped
        ("size25m", 21_782_947),
        ("size50m", 38_612_003),
        ("size100m", 86_622_499),
        ("size200m", 153_769_507),
        ("size400m", 345_473_059),
    ],
)
def test_parameters_of_a_size(name, count):
    assert param_count(shapes(name)) == count


def test_the_recipes_have_equally_many_parameters():
    """On vectors; their image networks differ."""
    paper = DreamerV3(DreamerV3Config(**size("size1m")), WALKER)
    assert param_count(jax.eval_shape(paper.init, jax.random.key(0)).params) == 640_867


@pytest.mark.parametrize(
    ("name", "shape", "actions", "count"),
    [
        ("size12m", (64, 64, 3), 17, 10_498_259),
        ("size200m", (64, 64, 3), 17, 165_965_075),
        ("size12m", (96, 96, 1), 18, 11_808_850),
        ("size200m", (96, 96, 1), 18, 186_936_082),
    ],
)
def test_parameters_of_an_image_model(name, shape, actions, count):
    env = EnvSpec("images", (("image", ArraySpec(shape, "uint8")),), ActionSpec((), (actions,)), None)
    assert param_count(shapes(name, env)) == count


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("size1m", dict(enc=10_112, dyn=364_416, dec=51_096, rew=57_663, con=41_153, pol=50_316, val=66_111)),
        ("size12m", dict(enc=138_752, dyn=5_783_040, dec=794_136, rew=721_407, con=656_129, pol=791_052, val=853_503)),
    ],
)
def test_parameters_of_each_module(name, counts):
    assert {module: param_count(tree) for module, tree in shapes(name).items()} == counts


def test_parameters_within_the_rssm_of_size12m():
    counts = {name: param_count(tree) for name, tree in shapes("size12m")["dyn"].items()}
    assert counts == dict(
        in_deter=524_800, in_stoch=131_584, in_action=2_048, hidden=2_101_248, gates=1_579_008,
        prior=722_432, posterior=721_920,
    )  # fmt: skip
    core = ("in_deter", "in_stoch", "in_action", "hidden", "gates")
    assert sum(counts[name] for name in core) == 4_338_688
    assert sum(param_count(shapes("size1m")["dyn"][name]) for name in core) == 273_664


def test_defaults_are_size12m_with_recipe_paper():
    assert DreamerV3Config(**size("size12m")) == DreamerV3Config()
    assert DreamerV3Config().recipe == "paper"


def test_a_size_follows_from_one_width():
    assert tuple(WIDTHS.values()) == (64, 256, 384, 512, 768, 1024, 1536)
    assert size("size200m") == dict(units=1024, hidden=1024, deter=8192, classes=64, depth=64)
    with pytest.raises(ValueError, match=r"size 'size2m' is none of size1m, .*, size400m"):
        size("size2m")


def test_the_recipes_differ_in_everything_they_name():
    paper, latest = RECIPES["paper"], RECIPES["latest"]
    assert all(getattr(paper, f.name) != getattr(latest, f.name) for f in fields(paper))
    assert (paper.policy_unimix, latest.policy_unimix) == (0.01, 0)
    assert (paper.decoder_scale, latest.decoder_scale) == (0.1, 1)
    assert (paper.squared_error_floor, latest.squared_error_floor) == (1e-8, 0)
    assert (paper.mults, latest.mults) == ((1, 2, 3, 4, 4), (2, 3, 4, 4))


def test_image_stages_are_the_recipes_unless_given():
    assert (DreamerV3Config().image_mults, DreamerV3Config().image_strided) == ((1, 2, 3, 4, 4), True)
    latest = DreamerV3Config(recipe="latest")
    assert (latest.image_mults, latest.image_strided) == ((2, 3, 4, 4), False)
    given = replace(latest, mults=(1, 1), strided=True)
    assert (given.image_mults, given.image_strided) == ((1, 1), True)


def test_the_references_settings():
    c = DreamerV3Config()
    assert c.discount == pytest.approx(0.996997, abs=5e-7)
    assert c.discount == 1 - 1 / 333
    assert (c.batch_size, c.batch_length, c.context, c.imag_length) == (16, 64, 1, 15)
    assert (c.lr, c.agc, c.beta1, c.beta2, c.eps, c.warmup, c.weight_decay) == (4e-5, 0.3, 0.9, 0.999, 1e-20, 1000, 0)
    assert (c.slow_rate, c.slow_every, c.return_rate, c.return_floor) == (0.02, 1, 0.01, 1)
    assert (c.lam, c.actent, c.slowreg, c.unimix, c.free_nats) == (0.95, 3e-4, 1, 0.01, 1)
    assert c.loss_scales == LossScales(rec=1, rew=1, con=1, dyn=1, rep=0.1, policy=1, value=1, repval=0.3)


def test_updates_per_row_and_the_gate():
    """32 trained rows per row are one update of 16 x 64 per 32 rows."""
    assert DreamerV3Config().updates_per_row == 1 / 32
    assert DreamerV3Config(train_ratio=512).updates_per_row == 0.5
    assert (DreamerV3Config().start_windows, DreamerV3Config(recipe="latest").start_windows) == (16, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(recipe="newest"), r"agent\.recipe='newest' must be one of paper, latest"),
        (dict(dtype="float16"), r"agent\.dtype='float16' must be one of float32, bfloat16"),
        (dict(units=0), r"agent\.units=0 must be above 0"),
        (dict(lr=0.0), r"agent\.lr=0\.0 must be above 0"),
        (dict(slow_every=0), r"agent\.slow_every=0 must be above 0"),
        (dict(horizon=-3), r"agent\.horizon=-3 must be above 0"),
        (dict(lr=float("nan")), r"agent\.lr=nan must be above 0"),
        (dict(context=-1), r"agent\.context=-1 must not be negative"),
        (dict(warmup=-1), r"agent\.warmup=-1 must not be negative"),
        (dict(unimix=1.5), r"agent\.unimix=1\.5 must lie in 0\.\.1"),
        (dict(lam=-0.1), r"agent\.lam=-0\.1 must lie in 0\.\.1"),
        (dict(deter=20, blocks=8), r"agent\.deter=20 must be a multiple of agent\.blocks=8"),
        (dict(num_bins=256), r"agent\.num_bins=256 must be odd"),
        (dict(num_bins=1), r"agent\.num_bins=1 must be odd and 3 or more"),
        (dict(classes=257), r"agent\.classes=257 must be at most 256"),
        (dict(min_std=0.0), r"agent\.min_std=0\.0 must lie in \(0, agent\.max_std=1\.0\]"),
        (dict(min_std=2.0), r"agent\.min_std=2\.0 must lie in \(0, agent\.max_std=1\.0\]"),
        (dict(batch_length=1), r"agent\.batch_length=1 must be 2 or more"),
        (dict(imag_last=65), r"agent\.imag_last=65 must not exceed agent\.batch_length=64"),
        (dict(report_length=1), r"agent\.report_length=1 must be 2 or more"),
        (dict(mults=()), r"agent\.mults=\(\) must be one or more positive numbers"),
        (dict(mults=(2, 0)), r"agent\.mults=\(2, 0\) must be one or more positive numbers"),
    ],
)
def test_values_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        DreamerV3Config(**changes)


@pytest.mark.parametrize("changes", [dict(warmup=0), dict(unimix=0.0), dict(train_ratio=-1.0), dict(lam=1.0)])
def test_edges_that_can(changes):
    tiny.config(**changes)
