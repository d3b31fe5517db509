"""The DreamerV3 reference's parameter names and layouts -> our parameter trees.

There are two generations of names: those of its latest code, and those of the code behind the published scores
(`paper`). Two layouts of `paper` differ as well: its two-hot layers have one more output than bins, which that code
drops after the product, and the first kernel of its decoder has the rows of deter before those of stoch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np

from telamon.agents.dreamerv3.networks import Params

Recipe = Literal["paper", "latest"]

_LATEST = (
    (r"enc/mlp(\d+)norm", r"enc/mlp/layer\1/norm"),
    (r"enc/mlp(\d+)", r"enc/mlp/layer\1/linear"),
    (r"enc/cnn(\d+)norm", r"enc/conv\1/norm"),
    (r"enc/cnn(\d+)", r"enc/conv\1/conv"),
    (r"dyn/dynin0norm", r"dyn/in_deter/norm"),
    (r"dyn/dynin0", r"dyn/in_deter/linear"),
    (r"dyn/dynin1norm", r"dyn/in_stoch/norm"),
    (r"dyn/dynin1", r"dyn/in_stoch/linear"),
    (r"dyn/dynin2norm", r"dyn/in_action/norm"),
    (r"dyn/dynin2", r"dyn/in_action/linear"),
    (r"dyn/dynhid0norm", r"dyn/hidden/norm"),
    (r"dyn/dynhid0", r"dyn/hidden/linear"),
    (r"dyn/dyngru", r"dyn/gates"),
    (r"dyn/prior(\d+)norm", r"dyn/prior/layer\1/norm"),
    (r"dyn/prior(\d+)", r"dyn/prior/layer\1/linear"),
    (r"dyn/priorlogit", r"dyn/prior/logits"),
    (r"dyn/obs(\d+)norm", r"dyn/posterior/layer\1/norm"),
    (r"dyn/obs(\d+)", r"dyn/posterior/layer\1/linear"),
    (r"dyn/obslogit", r"dyn/posterior/logits"),
    (r"dec/mlp/linear(\d+)", r"dec/mlp/layer\1/linear"),
    (r"dec/mlp/norm(\d+)", r"dec/mlp/layer\1/norm"),
    (r"dec/vec/(.+)/(?:pred|logits)", r"dec/out_\1"),
    (r"dec/sp0", r"dec/space"),
    (r"dec/sp1norm", r"dec/stoch0/norm"),
    (r"dec/sp1", r"dec/stoch0/linear"),
    (r"dec/sp2", r"dec/stoch1"),
    (r"dec/spnorm", r"dec/norm"),
    (r"dec/conv(\d+)norm", r"dec/conv\1/norm"),
    (r"dec/conv(\d+)", r"dec/conv\1/conv"),
    (r"dec/imgout", r"dec/image"),
    (r"(rew|con|val)/mlp/linear(\d+)", r"\1/layer\2/linear"),
    (r"(rew|con|val)/mlp/norm(\d+)", r"\1/layer\2/norm"),
    (r"(rew|con|val)/head/logits?", r"\1/OUT"),
    (r"pol/mlp/linear(\d+)", r"pol/mlp/layer\1/linear"),
    (r"pol/mlp/norm(\d+)", r"pol/mlp/layer\1/norm"),
    (r"pol/head/(.+)/mean", r"pol/mean_\1"),
    (r"pol/head/(.+)/stddev", r"pol/std_\1"),
    (r"pol/head/(.+)/logits", r"pol/logits_\1"),
)
_PAPER = (
    (r"enc/mlp(\d+)/norm", r"enc/mlp/layer\1/norm"),
    (r"enc/mlp(\d+)", r"enc/mlp/layer\1/linear"),
    (r"dyn/dynin0/norm", r"dyn/in_deter/norm"),
    (r"dyn/dynin0", r"dyn/in_deter/linear"),
    (r"dyn/dynin1/norm", r"dyn/in_stoch/norm"),
    (r"dyn/dynin1", r"dyn/in_stoch/linear"),
    (r"dyn/dynin2/norm", r"dyn/in_action/norm"),
    (r"dyn/dynin2", r"dyn/in_action/linear"),
    (r"dyn/dyn0/norm", r"dyn/hidden/norm"),
    (r"dyn/dyn0", r"dyn/hidden/linear"),
    (r"dyn/dyncore", r"dyn/gates"),
    (r"dyn/img(\d+)/norm", r"dyn/prior/layer\1/norm"),
    (r"dyn/img(\d+)", r"dyn/prior/layer\1/linear"),
    (r"dyn/imglogit", r"dyn/prior/logits"),
    (r"dyn/obs(\d+)/norm", r"dyn/posterior/layer\1/norm"),
    (r"dyn/obs(\d+)", r"dyn/posterior/layer\1/linear"),
    (r"dyn/obslogit", r"dyn/posterior/logits"),
    (r"dec/mlp(\d+)/norm", r"dec/mlp/layer\1/norm"),
    (r"dec/mlp(\d+)", r"dec/mlp/layer\1/linear"),
    (r"dec/out_(.+)/out", r"dec/out_\1"),
    (r"(rew|con)/h(\d+)/norm", r"\1/layer\2/norm"),
    (r"(rew|con)/h(\d+)", r"\1/layer\2/linear"),
    (r"(rew|con)/dist/out", r"\1/OUT"),
    (r"critic/h(\d+)/norm", r"val/layer\1/norm"),
    (r"critic/h(\d+)", r"val/layer\1/linear"),
    (r"critic/dist/out", r"val/OUT"),
    (r"actor/h(\d+)/norm", r"pol/mlp/layer\1/norm"),
    (r"actor/h(\d+)", r"pol/mlp/layer\1/linear"),
    (r"actor/(.+)/std", r"pol/std_\1"),
    (r"actor/(.+)/out", r"pol/MEAN_\1"),
)
RULES: dict[Recipe, tuple[tuple[str, str], ...]] = {"latest": _LATEST, "paper": _PAPER}
"""(reference's layer, ours). OUT is the layer after the last; MEAN is mean beside a std, else logits."""


def from_reference(named: Mapping[str, np.ndarray], recipe: Recipe, num_bins: int) -> Params:
    """{reference name: array} -> our tree of jax arrays, of whichever modules are named.

    Raises ValueError for an unknown name.
    """
    flat: dict[str, np.ndarray] = {}
    for name, value in named.items():
        layer, _, field = name.rpartition("/")
        found = next(((p, t) for p, t in RULES[recipe] if re.fullmatch(p, layer)), None)
        if found is None or field not in ("kernel", "bias", "scale"):
            raise ValueError(f"{name!r} is no parameter of DreamerV3 in its generation of names {recipe!r}")
        flat[f"{re.sub(*found, layer)}/{field}"] = value

    params: Params = {}
    for path, value in flat.items():
        if recipe == "paper":
            value = _paper_layout(path, value, flat, num_bins)
        *inner, leaf = _resolved(path, flat).split("/")
        node = params
        for key in inner:
            node = node.setdefault(key, {})
        node[leaf] = jnp.asarray(value)
    return params


def _resolved(path: str, flat: Mapping[str, np.ndarray]) -> str:
    """The placeholders of RULES filled in."""
    module = path.partition("/")[0]
    if "/OUT/" in path:
        hidden = {m[1] for p in flat if (m := re.match(rf"{module}/layer(\d+)/", p))}
        return path.replace("OUT", f"layer{len(hidden)}")
    if (m := re.match(r"pol/MEAN_(.+)/\w+", path)) is not None:
        return path.replace("MEAN", "mean" if f"pol/std_{m[1]}/bias" in flat else "logits")
    return path


def _paper_layout(path: str, value: np.ndarray, flat: Mapping[str, np.ndarray], num_bins: int) -> np.ndarray:
    if path.startswith(("rew/OUT/", "val/OUT/")):
        return value[..., :num_bins]
    if path == "dec/mlp/layer0/linear/kernel":
        deter = flat["dyn/in_deter/linear/kernel"].shape[0]
        return np.concatenate([value[deter:], value[:deter]])
    return value
