"""blocks_*.npz: the shared blocks and TD-MPC2's heads, one group of keys each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.tdmpc2.config import RECIPES, TDMPC2Config, discount
from telamon.agents.tdmpc2.losses import termination_statistics
from telamon.agents.tdmpc2.networks import Networks, Params, bounded_log_std
from telamon.agents.tdmpc2.policy import Sample, entropy_bonus, sample, squashed_entropy
from telamon.distributional import symexp, symlog, tdmpc2_two_hot
from telamon.interop.tdmpc2 import from_reference, to_reference
from telamon.networks import grouped_softmax, mish, norm_layer
from telamon.normalizers import RunningScale
from tests.parity.fixture import Fixture, jit
from tests.parity.report import Line, compare, compare_tree

DEFAULTS = TDMPC2Config()
"""Settings that the files do not record (simnorm_dim, log_std bounds, tau, discount bounds) are the defaults."""


def elementwise(fixture: Fixture) -> Iterator[Line]:
    """symlog, symexp, mish, simnorm, the log_std bound, LayerNorm far from 0, the discount heuristic."""
    functions = {
        "symlog": symlog,
        "symexp": symexp,
        "mish": mish,
        "simnorm": lambda x: grouped_softmax(x, DEFAULTS.simnorm_dim),
        "log_std": lambda x: bounded_log_std(x, DEFAULTS.log_std_min, DEFAULTS.log_std_max),
        "layernorm_large": _bare_norm,
    }
    for group, function in functions.items():
        if f"{group}/y" in fixture:
            x = fixture["log_std/raw" if group == "log_std" else f"{group}/x"]
            yield compare(f"{group}/y", "logit", jit(function)(jnp.asarray(x)), fixture[f"{group}/y"])
    if "discount/T" in fixture:
        gamma = [
            discount(int(t), DEFAULTS.discount_denom, DEFAULTS.discount_min, DEFAULTS.discount_max)
            for t in fixture["discount/T"]
        ]
        yield compare("discount/gamma", "constant", gamma, fixture["discount/gamma"])


def two_hot(fixture: Fixture) -> Iterator[Line]:
    """Bins, encoding, decoding and cross-entropy with their gradients, for every number of bins K recorded."""
    for name in sorted(key.removeprefix("bins/") for key in fixture if key.startswith("bins/")):
        bins = fixture[f"bins/{name}"]
        spec = tdmpc2_two_hot(len(bins), float(bins[0]), float(bins[-1]))
        yield compare(f"bins/{name}", "latent", spec.bins, bins)
        x, logits = jnp.asarray(fixture["two_hot/x"][:, 0]), jnp.asarray(fixture[f"decode/{name}_logits"])
        ours = {
            f"two_hot/{name}": ("two_hot", jit(spec.encode)(x)),
            f"decode/{name}_value": ("plan_value", jit(spec.decode)(logits)[:, None]),
            f"decode/{name}_grad_of_sum": ("gradient", jit(jax.grad(lambda v, s=spec: s.decode(v).sum()))(logits)),
            f"soft_ce/{name}_loss": ("cross_entropy", jit(spec.cross_entropy)(logits, x)[:, None]),
            f"soft_ce/{name}_grad_of_mean": (
                "gradient", jit(jax.grad(lambda v, s=spec, x=x: s.cross_entropy(v, x).mean()))(logits)),
        }  # fmt: skip
        for key, (kind, value) in ours.items():
            yield compare(key, kind, value, fixture[key])


def layers(fixture: Fixture) -> Iterator[Line]:
    """Normed layers and MLPs: the agent's own modules, cut to the recorded sizes."""
    modules = Networks(DEFAULTS, obs_dim=1, action_dim=1).modules
    plain, normed = modules["reward"], modules["dynamics"]
    for group, prefix, module in (
        ("normed_linear", "_pi.0.", plain.clone(out=None)),
        ("normed_linear_simnorm", "_pi.0.", normed),
        ("mlp_plain", "_pi.", plain),
        ("mlp_simnorm", "_pi.", normed),
    ):
        if f"{group}/y" not in fixture:
            continue
        x, y = fixture[f"{group}/x"], fixture[f"{group}/y"]
        named = {key: v for key, v in fixture.under(f"{group}/").items() if key not in ("x", "y")}
        params = from_reference({prefix + key: v for key, v in named.items()})["pi"]
        widths = tuple(_width(params[f"layer{i}"]) for i in range(len(params)))
        hidden = widths if module.out is None else widths[:-1]
        module = module.clone(hidden=hidden, out=None if module.out is None else widths[-1])
        yield compare(f"{group}/y", "logit", jit(module.apply)({"params": params}, jnp.asarray(x)), y)


def policy(fixture: Fixture) -> Iterator[Line]:
    """The policy head: sample, mean, log_std, entropy quantities and the gradient of their mean."""
    if "pi/z" not in fixture:
        return
    squashed = RECIPES["paper" if "pi/log_pi" in fixture else "latest"].squashed_entropy
    params = fixture.params("pi/param_before/")
    z, eps = jnp.asarray(fixture["pi/z"]), jnp.asarray(fixture["pi/eps"])
    config = replace(DEFAULTS, mlp_dim=_width(params["pi"]["layer0"]), latent_dim=z.shape[-1])
    nets = Networks(config, obs_dim=1, action_dim=eps.shape[-1])

    def bonus(params: Params) -> tuple[jax.Array, tuple[Sample, jax.Array]]:
        drawn = sample(*nets.policy(params, z), eps)
        quantity = entropy_bonus(drawn, eps, squashed)
        return quantity.mean(), (drawn, quantity)

    grads, (drawn, quantity) = jit(jax.grad(bonus, has_aux=True))(params)
    ours = {
        "pi/action": drawn.action,
        "pi/mean": jnp.tanh(drawn.mean),
        "pi/log_std": drawn.log_std,
        "pi/entropy": squashed_entropy(drawn, eps)[:, None],
        "pi/scaled_entropy": quantity[:, None],
        "pi/log_pi": -quantity[:, None],
    }
    for name, value in ours.items():
        if name in fixture:
            yield compare(name, "logit", value, fixture[name])
    yield compare_tree("pi/bonus_grad/*", "gradient", to_reference(grads), fixture.under("pi/bonus_grad/"))


def q_ensemble(fixture: Fixture) -> Iterator[Line]:
    """All logits of online and target members, and the smaller and the mean of each recorded pair."""
    if "q/z" not in fixture:
        return
    z, action = jnp.asarray(fixture["q/z"]), jnp.asarray(fixture["q/action"])
    members = {which: fixture.params(f"q/{which}/")["q"] for which in ("online", "target")}
    count, num_bins = members["online"]["layer2"]["bias"].shape
    config = replace(
        DEFAULTS, mlp_dim=_width(members["online"]["layer0"]), latent_dim=z.shape[-1], num_q=count, num_bins=num_bins
    )
    if f"bins/k{num_bins}" in fixture:
        bins = fixture[f"bins/k{num_bins}"]
        config = replace(config, vmin=float(bins[0]), vmax=float(bins[-1]))
    nets = Networks(config, obs_dim=1, action_dim=action.shape[-1])
    q_pair = jit(nets.q_pair)
    for which, suffix in (("online", ""), ("target", "_target")):
        logits = jit(nets.q)(members[which], z, action)
        yield compare(f"q/all_logits{suffix}", "logit", logits, fixture[f"q/all_logits{suffix}"])
        for name, reduce in (("min", jnp.min), ("avg", jnp.mean)):
            pair = jnp.asarray(fixture[f"q/{name}_{which}_pair"])
            value = reduce(q_pair(members[which], pair, z, action), axis=0)
            yield compare(f"q/{name}_{which}", "value", value[:, None], fixture[f"q/{name}_{which}"])


def running_scale(fixture: Fixture) -> Iterator[Line]:
    """The Q scale after each of several batches, and the batches divided by it."""
    normalizer = RunningScale(DEFAULTS.tau)
    update = jit(normalizer.update)
    for group in sorted({key.rpartition("_")[0] for key in fixture if key.startswith("scale/")}):
        x, scale, scales = fixture[f"{group}_x"], normalizer.init(), []
        for batch in x:
            scale = update(scale, jnp.asarray(batch))
            scales.append(float(scale))
        yield compare(f"{group}_s", "scale", scales, fixture[f"{group}_s"])
        divided = x / np.asarray(scales, np.float32)[:, None, None]
        yield compare(f"{group}_scaled", "scale", divided, fixture[f"{group}_scaled"])


def terminations(fixture: Fixture) -> Iterator[Line]:
    """Rate and F1. The record holds probabilities, ours takes logits."""
    if "term_stat/pred" not in fixture:
        return
    p = jnp.asarray(fixture["term_stat/pred"][:, 0])
    ours = jit(termination_statistics)(jnp.log(p) - jnp.log1p(-p), jnp.asarray(fixture["term_stat/target"][:, 0]))
    for name, value in ours.items():
        yield compare(f"term_stat/{name}", "loss", value, fixture[f"term_stat/{name}"])


GROUPS = (
    "symlog symexp mish simnorm log_std layernorm_large discount bins two_hot decode soft_ce "
    "normed_linear normed_linear_simnorm mlp_plain mlp_simnorm pi q scale term_stat"
).split()
"""First parts of the keys that are checked here."""


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of every supported group that the file holds."""
    for part in (elementwise, two_hot, layers, policy, q_ensemble, running_scale, terminations):
        yield from part(fixture)


def _bare_norm(x: jax.Array) -> jax.Array:
    """The networks' LayerNorm at gain 1 and shift 0."""
    module = Networks(DEFAULTS, obs_dim=1, action_dim=1).modules["dynamics"]
    norm = norm_layer(module.norm, module.norm_eps, module.dtype)
    return norm.apply({"params": {"scale": jnp.ones(x.shape[-1]), "bias": jnp.zeros(x.shape[-1])}}, x)


def _width(layer: Mapping[str, Params]) -> int:
    return layer.get("linear", layer)["bias"].shape[-1]
