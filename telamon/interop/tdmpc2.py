"""The TD-MPC2 reference's parameter names and layout <-> our parameter trees.

A reference name is `MODULE.LAYER.FIELD`, for example `_encoder.state.0.ln.weight`. Its weights are (out, in), ours
(in, out); the members of `_Qs` are stacked on axis 0 in both. A layer with an `ln` is a NormedLinear of ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.tdmpc2.networks import Params

MODULES = {
    "_encoder.state": "encoder",
    "_dynamics": "dynamics",
    "_reward": "reward",
    "_Qs": "q",
    "_pi": "pi",
    "_termination": "termination",
}
"""Reference module -> ours. A target network is a tree that holds `_Qs` alone."""

NORMED = {
    "weight": ("linear", "kernel"),
    "bias": ("linear", "bias"),
    "ln.weight": ("norm", "scale"),
    "ln.bias": ("norm", "bias"),
}
PLAIN = {"weight": ("kernel",), "bias": ("bias",)}
"""Reference field -> path within one of our layers, with and without a norm."""


def from_reference(named: Mapping[str, np.ndarray]) -> Params:
    """{reference name: array} -> our tree of jax arrays, of whichever modules are named.

    Raises ValueError for an unknown name.
    """
    params: Params = {}
    for name, value in named.items():
        module = next((m for m in MODULES if name.startswith(f"{m}.")), None)
        layer, _, field = name[len(module) + 1 :].partition(".") if module else ("", "", "")
        fields = NORMED if f"{module}.{layer}.ln.weight" in named else PLAIN
        if module is None or not layer.isdecimal() or field not in fields:
            raise ValueError(
                f"{name!r} is no parameter of a single-task TD-MPC2 model with vector observations; "
                f"known are {', '.join(MODULES)}, each with .LAYER.weight, .bias, .ln.weight and .ln.bias"
            )
        inner = [MODULES[module], f"layer{layer}", *fields[field]]
        leaf = inner.pop()
        node = params
        for key in inner:
            node = node.setdefault(key, {})
        node[leaf] = jnp.asarray(_transposed(value, field))
    return params


def to_reference(params: Params) -> dict[str, np.ndarray]:
    """Our tree, of whichever modules it holds -> {reference name: array}: the inverse of `from_reference`."""
    named = {}
    for module, ours in MODULES.items():
        for layer, tree in sorted(params.get(ours, {}).items()):
            for field, path in (NORMED if "norm" in tree else PLAIN).items():
                value = tree
                for key in path:
                    value = value[key]
                named[f"{module}.{layer.removeprefix('layer')}.{field}"] = _transposed(value, field)
    return named


def _transposed(value: np.ndarray | jax.Array, field: str) -> np.ndarray:
    """Weights change between (..., out, in) and (..., in, out); everything else stays."""
    value = np.asarray(value)
    return value.swapaxes(-1, -2) if field == "weight" else value
