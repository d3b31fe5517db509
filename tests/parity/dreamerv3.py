"""The DreamerV3 agent that a golden file describes: recipe, sizes, observations, actions, parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import DreamerV3Config, LossScales
from telamon.agents.dreamerv3.losses import Imagined, joined
from telamon.agents.dreamerv3.networks import Feature, Params
from telamon.data import BARE_ACTION, ActionSpec, ArraySpec, EnvSpec
from telamon.interop.dreamerv3 import from_reference
from tests.parity.fixture import Fixture, Refused

Recipe = Literal["paper", "latest"]

HEADS = "(rewhead|conhead|policy|value|actor|critic)"
SETTINGS = {
    "units": rf"units|(enc|dec)\.simple\.units|{HEADS}\.units",
    "hidden": r"hidden|dyn\.rssm\.hidden",
    "deter": r"deter|dyn\.rssm\.deter",
    "stoch": r"stoch|dyn\.rssm\.stoch",
    "classes": r"classes|dyn\.rssm\.classes",
    "blocks": r"blocks|dyn\.rssm\.blocks",
    "layers": r"(enc|dec)\.simple\.layers|(policy|value|actor|critic)\.layers",
    "head_layers": r"(rewhead|conhead)\.layers",
    "num_bins": rf"bins|{HEADS}\.bins",
    "unimix": r"dyn\.rssm\.unimix",
    "min_std": r"(policy|actor)\.minstd",
    "max_std": r"(policy|actor)\.maxstd",
    "depth": r"depth|(enc|dec)\.simple\.depth",
    "kernel": r"(enc|dec)\.simple\.kernel",
    "mults": r"mults",
    "strided": r"(enc|dec)\.simple\.(strided|outer)",
    "bspace": r"bspace|dec\.simple\.(bspace|block_space)",
    "batch_size": r"B",
    "batch_length": r"T",
    "context": r"replay_context",
    "free_nats": r"dyn\.rssm\.free_nats|rssm_loss\.free",
    "horizon": r"horizon",
    "imag_length": r"H|imag_length",
    "imag_last": r"imag_last",
    "lam": r"(imag|repl)_loss\.lam|return_lambda(_replay)?",
    "actent": r"imag_loss\.actent|actent",
    "slowreg": r"(imag|repl)_loss\.slowreg|slowreg",
    "lr": r"opt\.lr",
    "warmup": r"opt\.warmup",
    "agc": r"opt\.agc",
    "beta1": r"opt\.beta1",
    "beta2": r"opt\.beta2",
    "eps": r"opt\.eps",
    "weight_decay": r"opt\.wd",
    "slow_rate": r"slowvalue\.rate|slow_critic_fraction",
    "slow_every": r"slowvalue\.every|slow_critic_update",
    "return_rate": r"retnorm\.rate",
    "return_floor": r"retnorm\.limit",
    "loss_scales.rec": r"loss_scales\.(rec|dec_cnn|dec_mlp)",
    "loss_scales.rew": r"loss_scales\.(rew|reward)",
    "loss_scales.con": r"loss_scales\.(con|cont)",
    "loss_scales.dyn": r"loss_scales\.dyn",
    "loss_scales.rep": r"loss_scales\.rep",
    "loss_scales.policy": r"loss_scales\.(policy|actor)",
    "loss_scales.value": r"loss_scales\.(value|critic)",
    "loss_scales.repval": r"loss_scales\.(repval|replay_critic)",
}
"""Our field -> all names of it in both generations of the reference's config, which must agree."""

BUILT_IN = {
    "opt.momentum": 1, "opt.anneal": 0, "opt.globclip": 0, "opt.pmin": 1e-3, "ac_grads": 0, "dyn.rssm.imglayers": 2,
    "dyn.rssm.obslayers": 1, "dyn.rssm.dynlayers": 1, "dyn.rssm.absolute": 0, "dyn.rssm.block_norm": 0,
    "enc.simple.symlog": 1, "enc.simple.debug_outer": 1, "enc.simple.minres": 4, "dec.simple.debug_outer": 1,
    "dec.simple.minres": 4, "dec.simple.block_norm": 0, "dec.simple.hidden_stoch": 1, "dec.simple.space_hidden": 0,
    "rewhead.block_norm": 0, "conhead.block_norm": 0, "actor.block_norm": 0, "critic.block_norm": 0,
    "actor.unimix": 0.01, "contdisc": 1, "imag_loss.slowtar": 0, "repl_loss.slowtar": 0, "retnorm.perclo": 5,
    "retnorm.perchi": 95, "retnorm.debias": 0, "reward_grad": 1, "repval_loss": 1, "repval_grad": 1,
}  # fmt: skip
"""Settings of the reference that are not offered: the only value of each."""

IMMATERIAL = r"config/(img|.*\.outscale|.*\.block_fans|opt\.details|policy\.unimix)|meta/.*"
"""Initialisation, logging, what other keys say; and a setting that the latest reference has but does not read."""

RESERVED = set("reward is_first is_last is_terminal stepid consec deter stoch dyn/deter dyn/stoch".split())
"""Names of rows' arrays that are neither observation nor action."""


def recipe(fixture: Fixture) -> Recipe:
    """Files do not name their recipe, but the paper's code called the policy `actor`."""
    return "paper" if any(key.startswith("config/actor.") for key in fixture) else "latest"


def agent(fixture: Fixture, start: str, rows: Mapping[str, np.ndarray], actions: Mapping[str, np.ndarray]) -> DreamerV3:
    """The agent that the file's `config/*` and arrays [B, T, ...] describe. Raises Refused for what it cannot have.

    start: prefix of parameters, which know the numbers of classes; rows: observations among whatever else rows have.
    """
    spaces = tuple((key, array_spec(fixture, start, key, x)) for key, x in rows.items() if key not in RESERVED)
    parts = tuple((key, action_spec(fixture, start, key, x)) for key, x in actions.items())
    bare = len(parts) == 1 and parts[0][0] == BARE_ACTION
    try:
        return DreamerV3(config(fixture), EnvSpec("golden", spaces, parts[0][1] if bare else parts, None))
    except ValueError as error:
        raise Refused(f"{fixture.path}: {error}") from error


def config(fixture: Fixture) -> DreamerV3Config:
    """What `config/*` says. Raises Refused for what is not offered, ValueError for what is out of bounds."""
    settings: dict[str, Any] = {}
    for name, pattern in SETTINGS.items():
        recorded = {key: fixture[key].tolist() for key in fixture if re.fullmatch(f"config/({pattern})", key)}
        if recorded and min(recorded.values()) != max(recorded.values()):
            raise Refused(f"{fixture.path} has {recorded}, but agent.{name} is one setting for all of them")
        if recorded:
            settings[name] = next(iter(recorded.values()))
    for name, value in BUILT_IN.items():
        if (found := fixture.get(f"config/{name}", value)) != value:
            raise Refused(f"{fixture.path} has config/{name}={found}, and only {value} is offered")
    fixture.read |= {key for key in fixture if re.fullmatch(IMMATERIAL, key)}

    scales = {name.removeprefix("loss_scales."): settings.pop(name) for name in [*settings] if "." in name}
    for field in fields(DreamerV3Config):
        if isinstance(field.default, int) and field.name in settings:
            settings[field.name] = int(settings[field.name])
    if "mults" in settings:
        settings["mults"] = tuple(map(int, settings["mults"]))
    if "strided" in settings:
        settings["strided"] = bool(settings["strided"])
    return DreamerV3Config(recipe=recipe(fixture), loss_scales=LossScales(**scales), **settings)


def array_spec(fixture: Fixture, start: str, key: str, x: np.ndarray) -> ArraySpec:
    """Of an observation [B, T, ...]; the decoder's last layer has an output per class."""
    shape = x.shape[2:]
    layer = f"dec/out_{key}/out" if recipe(fixture) == "paper" else f"dec/vec/{key}/logits"
    counts = x.dtype.kind == "i"
    return ArraySpec(shape, str(x.dtype), fixture[f"{start}{layer}/bias"].size // math.prod(shape) if counts else None)


def action_spec(fixture: Fixture, start: str, key: str, x: np.ndarray) -> ActionSpec:
    """Of an action [B, T, ...]; the policy's last layer has an output per class."""
    shape = x.shape[2:]
    if x.dtype.kind == "f":
        return ActionSpec(shape)
    layer = f"actor/{key}/out" if recipe(fixture) == "paper" else f"pol/head/{key}/logits"
    elements = math.prod(shape)
    return ActionSpec(shape, (fixture[f"{start}{layer}/bias"].size // elements,) * elements)


def params(fixture: Fixture, prefix: str, num_bins: int) -> Params:
    """Our tree of the reference's parameters under `prefix`, without the slow critic."""
    named = {key: x for key, x in fixture.under(prefix).items() if not key.startswith("slow")}
    return _tree(fixture, prefix, named, num_bins)


def slow_critic(fixture: Fixture, prefix: str, num_bins: int) -> Params:
    """Our tree of the slow critic under `prefix`."""
    named = {key.removeprefix("slow"): x for key, x in fixture.under(prefix).items() if key.startswith("slow")}
    return _tree(fixture, prefix, named, num_bins)["val"]


def _tree(fixture: Fixture, prefix: str, named: Mapping[str, np.ndarray], num_bins: int) -> Params:
    if not named:
        raise Refused(f"{fixture.path} holds nothing under {prefix!r}, without which the rest cannot be checked")
    try:
        return from_reference(named, recipe(fixture), num_bins)
    except ValueError as error:
        raise Refused(f"{fixture.path}: {error}") from error


def flat(tree: Params) -> dict[str, np.ndarray]:
    """{our name: array}."""
    return {name: np.asarray(x) for name, x in flatten_dict(tree, sep="/").items()}


def picked(one_hot: object) -> np.ndarray:
    """The classes [...] of one-hot latents [..., C]; classes pass as they are."""
    x = np.asarray(one_hot)
    return x if x.dtype.kind == "i" else x.argmax(-1)


def all_states(imagined: Imagined) -> Feature:
    """The H + 1 states of an imagination, batch first: [N, H + 1, ...]."""
    deter, stoch = (joined(x, last).swapaxes(0, 1) for x, last in zip(imagined.feature, imagined.last, strict=True))
    return deter, stoch


def nested(named: Mapping[str, np.ndarray]) -> Params:
    """{a/b/kernel: array} as a tree of jax arrays, in the reference's own names."""
    return unflatten_dict({name: jnp.asarray(x) for name, x in named.items()}, sep="/")
