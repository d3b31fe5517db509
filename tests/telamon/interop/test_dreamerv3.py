"""The reference's parameter names and layouts become our trees; unknown names do not."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.data import ActionSpec, ArraySpec, EnvSpec
from telamon.interop.dreamerv3 import RULES, from_reference

GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = dict(units=16, hidden=16, deter=32, stoch=4, classes=4, blocks=4, num_bins=63)
VECTORS = (("position", ArraySpec((3,))), ("velocity", ArraySpec((2,))))
DISCRETE, CONTINUOUS = ActionSpec((), (4,)), ActionSpec((2,))


def recorded(folder: str, case: str, prefix: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / folder / f"{case}.npz") as file:
        return {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix) and "/slow" not in key}


def shapes(tree) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in flatten_dict(tree, sep="/").items()}


@pytest.mark.parametrize(
    ("folder", "case", "prefix", "recipe", "action"),
    [
        ("dreamerv3", "net_vec_disc", "param/", "latest", DISCRETE),
        ("dreamerv3", "net_vec_cont", "param/", "latest", CONTINUOUS),
        ("dreamerv3_paper", "train_vec_disc", "param/0/", "paper", DISCRETE),
        ("dreamerv3_paper", "train_vec_cont", "param/0/", "paper", CONTINUOUS),
    ],
)
def test_vector_models_have_our_names_and_shapes(folder, case, prefix, recipe, action):
    agent = DreamerV3(DreamerV3Config(recipe=recipe, **SIZES), EnvSpec("e", VECTORS, action, None))
    ours = jax.eval_shape(agent.init, jax.random.key(0)).params
    named = recorded(folder, case, prefix)
    imported = from_reference(named, recipe, 63)
    assert shapes(imported) == shapes(ours)
    assert len(named) == len(jax.tree.leaves(imported))


@pytest.mark.parametrize(("case", "strided"), [("net_img_cont", False), ("net_img_strided", True)])
def test_image_models_have_our_names_and_shapes(case, strided):
    size = dict(depth=4, mults=(1, 2, 2)) if strided else dict(depth=2, mults=(2, 4))
    config = DreamerV3Config(recipe="latest", **SIZES | dict(units=12, hidden=12), **size, strided=strided, bspace=4)
    images = (("image", ArraySpec((16, 16, 3), "uint8")),)
    ours = jax.eval_shape(DreamerV3(config, EnvSpec("e", images, CONTINUOUS, None)).init, jax.random.key(0)).params
    assert shapes(from_reference(recorded("dreamerv3", case, "param/"), "latest", 63)) == shapes(ours)


def test_values_are_taken_as_they_are():
    named = recorded("dreamerv3", "net_vec_cont", "param/")
    ours = from_reference(named, "latest", 63)
    for theirs, path in {
        "dyn/dyngru/kernel": ("dyn", "gates", "kernel"),
        "dyn/dynhid0norm/scale": ("dyn", "hidden", "norm", "scale"),
        "pol/head/action/stddev/bias": ("pol", "std_action", "bias"),
        "val/head/logits/kernel": ("val", "layer3", "kernel"),
        "rew/head/logits/kernel": ("rew", "layer1", "kernel"),
        "con/head/logit/bias": ("con", "layer1", "bias"),
        "dec/mlp/linear0/kernel": ("dec", "mlp", "layer0", "linear", "kernel"),
    }.items():
        node = ours
        for key in path:
            node = node[key]
        np.testing.assert_array_equal(node, named[theirs])


def test_the_papers_layouts():
    """Two-hot layers lose their unused last output; the decoder's first rows are those of stoch."""
    named = recorded("dreamerv3_paper", "train_vec_disc", "param/0/")
    ours = from_reference(named, "paper", 63)
    assert named["critic/dist/out/kernel"].shape == (16, 64)
    np.testing.assert_array_equal(ours["val"]["layer3"]["kernel"], named["critic/dist/out/kernel"][:, :63])
    np.testing.assert_array_equal(ours["rew"]["layer1"]["bias"], named["rew/dist/out/bias"][:63])
    kernel, theirs = ours["dec"]["mlp"]["layer0"]["linear"]["kernel"], named["dec/mlp0/kernel"]
    np.testing.assert_array_equal(kernel[:16], theirs[32:])
    np.testing.assert_array_equal(kernel[16:], theirs[:32])
    np.testing.assert_array_equal(ours["pol"]["logits_action"]["kernel"], named["actor/action/out/kernel"])


def test_a_part_of_the_modules_will_do():
    named = recorded("dreamerv3", "net_vec_disc", "param/val/")
    assert set(from_reference({f"val/{key}": x for key, x in named.items()}, "latest", 63)) == {"val"}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("dyn/dyngru2/kernel", "latest"),
        ("dyn/dyngru/weight", "latest"),
        ("critic/h0/kernel", "latest"),
        ("val/mlp/linear0/kernel", "paper"),
        ("kernel", "paper"),
    ],
)
def test_an_unknown_name_is_refused(name, recipe):
    sentence = f"'{name}' is no parameter of DreamerV3 in its generation of names '{recipe}'"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        from_reference({name: np.zeros(3)}, recipe, 63)


@pytest.mark.parametrize("recipe", RULES)
def test_no_name_has_two_meanings(recipe):
    """Of all recorded names, each is matched by one rule alone."""
    files = {
        "latest": ("dreamerv3", "net_dict_mixed", "param/"),
        "paper": ("dreamerv3_paper", "train_vec_cont", "param/0/"),
    }
    for name in recorded(*files[recipe]):
        layer = name.rpartition("/")[0]
        assert sum(bool(re.fullmatch(pattern, layer)) for pattern, _ in RULES[recipe]) == 1, name
