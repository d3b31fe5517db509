"""blocks.npz of DreamerV3: layers, distributions, returns, normaliser, optimiser; one group of keys each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from telamon.agents.dreamerv3 import distributions as dist
from telamon.agents.dreamerv3 import optim
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.dreamerv3.losses import lambda_returns
from telamon.agents.dreamerv3.networks import EPS, BlockLinear, Conv, concat, scaled
from telamon.data import ArraySpec
from telamon.distributional import dreamer_two_hot
from telamon.networks import Linear, ema, rms_norm
from telamon.normalizers import ReturnNormalizer
from tests.parity import dreamerv3
from tests.parity.dreamerv3 import nested
from tests.parity.fixture import Fixture, jit
from tests.parity.report import Line, compare, compare_tree

Arrays = Mapping[str, jax.Array]

CONFIG = DreamerV3Config()
"""Settings that the file does not record (shares of uniform probability, bounds, rates) are the defaults."""

MISSING = -3e38
"""Stands in files for minus infinity, which marks a missing float."""


def layers(fixture: Fixture) -> Iterator[Line]:
    """Linear, block-diagonal and convolution layers, the norm, the activation."""
    group = lambda name: {key: jnp.asarray(x) for key, x in fixture.under(f"{name}/").items()}
    for name in ("linear", "blocklinear", "conv_s1", "conv_s2", "convT_s2"):
        g = group(name)
        kernel = g["kernel"]
        module = {
            "linear": lambda k: Linear(k.shape[1], scaled()),
            "blocklinear": lambda k: BlockLinear(k.shape[0] * k.shape[2], k.shape[0]),
            "conv_s1": lambda k: Conv(k.shape[3], k.shape[0]),
            "conv_s2": lambda k: Conv(k.shape[3], k.shape[0], stride=2),
            "convT_s2": lambda k: Conv(k.shape[3], k.shape[0], upsample=True),
        }[name](kernel)
        y = jit(module.apply)({"params": {"kernel": kernel, "bias": g["bias"]}}, g["x"])
        yield compare(f"{name}/y", "forward", y.reshape(g["y"].shape), fixture[f"{name}/y"])
    g = group("rmsnorm")
    yield compare("rmsnorm/y", "forward", jit(rms_norm, static_argnums=2)(g["x"], g["scale"], EPS), g["y"])
    yield compare("silu/y", "forward", jit(nn.silu)(group("silu")["x"]), fixture["silu/y"])


def two_hot(fixture: Fixture) -> Iterator[Line]:
    """Bins, prediction and loss with its gradient, for every number of bins K recorded."""
    for g in fixture.numbered(r"twohot(\d+)/"):
        logits, target = jnp.asarray(fixture[f"{g}logits"]), jnp.asarray(fixture[f"{g}target"])
        spec = dreamer_two_hot(logits.shape[-1])
        yield compare(f"{g}bins", "constant", spec.bins, fixture[f"{g}bins"])
        yield compare(f"{g}pred", "forward", jit(spec.decode)(logits), fixture[f"{g}pred"])
        cross_entropy = lambda x, y, spec=spec: (spec.cross_entropy(x, y).sum(), spec.cross_entropy(x, y))
        grad, loss = jit(jax.grad(cross_entropy, has_aux=True))(logits, target)
        yield compare(f"{g}loss", "forward", loss, fixture[f"{g}loss"])
        yield compare(f"{g}grad_loss_sum", "whole_gradient", grad, fixture[f"{g}grad_loss_sum"])
        nothing = fixture[f"{g}pred_zero_logits"]
        zeros = jit(spec.decode)(jnp.zeros((*nothing.shape, logits.shape[-1])))
        yield compare(f"{g}pred_zero_logits", "exact", zeros, nothing)


def latents(fixture: Fixture) -> Iterator[Line]:
    """Mixed categoricals: probabilities, divergence with free nats, straight-through draws, their gradients."""
    u = {key: jnp.asarray(x) for key, x in fixture.under("unimix/").items()}
    for name, value in jit(_latents)(u).items():
        kind = "whole_gradient" if "grad" in name else "forward"
        yield compare(f"unimix/{name}", kind, value, fixture[f"unimix/{name}"])


def _latents(u: Arrays) -> dict[str, jax.Array]:
    share, sg = CONFIG.unimix, jax.lax.stop_gradient
    kl_free = lambda post, prior: jnp.maximum(dist.divergence(post, prior, share), u["free_nats"])
    drawn = lambda logits: dist.one_hot_sample(logits, u["gumbel"], share)
    return {
        "mixed_logits": dist.unimix(u["post"], share),
        "kl": dist.divergence(u["post"], u["prior"], share),
        "entropy": dist.latent_entropy(u["post"], share),
        "kl_free": kl_free(u["post"], u["prior"]),
        "grad_dyn_prior": jax.grad(lambda x: kl_free(sg(u["post"]), x).sum())(u["prior"]),
        "grad_rep_post": jax.grad(lambda x: kl_free(x, sg(u["prior"])).sum())(u["post"]),
        "sample": drawn(u["post"]),
        "st_grad": jax.grad(lambda x: (drawn(x) * u["st_weight"]).sum())(u["post"]),
    }


def outputs(fixture: Fixture) -> Iterator[Line]:
    """Distributions of actions, continuation and observations."""
    g = {key: jnp.asarray(x) for name in ("categorical", "bounded_normal", "binary", "symlog_mse")
         for key, x in ((f"{name}/{k}", x) for k, x in fixture.under(f"{name}/").items())}  # fmt: skip
    for name, value in jit(_outputs)(g).items():
        yield compare(name, "forward", value, fixture[name])


def _outputs(g: Arrays) -> dict[str, jax.Array]:
    action = g["categorical/action"]
    raw, mixed = (dist.Categorical((dist.unimix(g["categorical/logits"], share),), ()) for share in (0.0, 0.01))
    mean, raw_std = g["bounded_normal/raw_mean"], g["bounded_normal/raw_std"]
    normal = dist.bounded_normal(mean, raw_std, CONFIG.min_std, CONFIG.max_std, mean.shape[-1:])
    return {
        "categorical/logp": raw.log_prob(action),
        "categorical/entropy": raw.entropy(),
        "categorical/logp_unimix": mixed.log_prob(action),
        "categorical/entropy_unimix": mixed.entropy(),
        "bounded_normal/mean": normal.mean,
        "bounded_normal/stddev": normal.std,
        "bounded_normal/logp": normal.log_prob(g["bounded_normal/action"]),
        "bounded_normal/entropy": normal.entropy(),
        "binary/loss": dist.binary_loss(g["binary/logit"], g["binary/target"]),
        "binary/prob": jax.nn.sigmoid(g["binary/logit"]),
        "symlog_mse/loss": dist.symlog_error(g["symlog_mse/pred"], g["symlog_mse/target"], 1, 0.0),
    }


def returns(fixture: Fixture) -> Iterator[Line]:
    """Lambda returns [B, L - 1] of rows [B, L], and the return scale after each of several batches."""
    for g in fixture.numbered(r"lambda(\d+)/"):
        row = {name: jnp.asarray(fixture[g + name], jnp.float32).T[1:] for name in ("last", "term", "rew", "boot")}
        discount, lam = (1 - row["term"]) * fixture[f"{g}disc"], (1 - row["last"]) * fixture[f"{g}lam"]
        ret = jit(lambda_returns)(row["rew"], discount, row["boot"], lam)
        yield compare(f"{g}ret", "forward", ret.T, fixture[f"{g}ret"])
    normalizer = ReturnNormalizer(CONFIG.return_rate, floor=CONFIG.return_floor)
    update, state, states = jit(normalizer.update), normalizer.init(), []
    for x in fixture["retnorm/x"]:
        state = update(state, jnp.asarray(x))
        states.append((state.low, normalizer.scale(state)))
    for name, values in zip(("offset", "scale"), zip(*states, strict=True), strict=True):
        yield compare(f"retnorm/{name}", "forward", jnp.stack(values), fixture[f"retnorm/{name}"])


def optimiser(fixture: Fixture) -> Iterator[Line]:
    """Updates from recorded gradients: clipped gradients, moments, parameters. And one step of the slow critic."""
    config = DreamerV3Config(lr=float(fixture["optim/lr"]), warmup=int(fixture["optim/warmup"]))
    clip, transform = optim.adaptive_clip(config.agc), optim.make(config)
    params = nested(fixture.under("optim/param/0/"))
    state = transform.init(params)
    update = jit(lambda *args: (clip.update(args[0], optax.EmptyState(), args[2])[0], *transform.update(*args)))
    for i in range(1, len(fixture.numbered(r"optim/grad/(\d+)/")) + 1):
        grads = nested(fixture.under(f"optim/grad/{i}/"))
        clipped, steps, state = update(grads, state, params)
        params = optax.apply_updates(params, steps)
        for name, kind, tree in (
            ("agc", "whole_gradient", clipped),
            ("nu", "square", optax.tree_utils.tree_get(state, "nu")),
            ("mu", "momentum", optax.tree_utils.tree_get(state, "ema")),
            ("param", "step", params),
        ):
            recorded = fixture.under(f"optim/{name}/{i}/")
            yield compare_tree(f"optim/{name}/{i}/*", kind, dreamerv3.flat(tree), recorded)
    slow = ema(jnp.asarray(fixture["ema/slow"]), jnp.asarray(fixture["ema/online"]), CONFIG.slow_rate)
    yield compare("ema/out", "forward", slow, fixture["ema/out"])


def concatenation(fixture: Fixture) -> Iterator[Line]:
    """Named observations as one vector; missing ones are 0."""
    values = {key: np.where(x <= MISSING, -np.inf, x) if x.dtype.kind == "f" else x
              for key, x in fixture.under("dictconcat/in/").items()}  # fmt: skip
    width = fixture["dictconcat/out"].shape[-1]
    quantities = {key: ArraySpec(x.shape[1:]) for key, x in values.items() if x.dtype.kind == "f"}
    (category,) = values.keys() - quantities.keys()
    classes = width - sum(space.size for space in quantities.values())
    spaces = tuple((quantities | {category: ArraySpec((), "int32", classes)}).items())
    ours = concat(spaces, {key: jnp.asarray(x) for key, x in values.items()}, squash=True, lead=1)
    yield compare("dictconcat/out", "forward", ours, fixture["dictconcat/out"])


PARTS = {
    "linear": layers,
    r"twohot\d+": two_hot,
    "unimix": latents,
    "categorical": outputs,
    r"lambda\d+": returns,
    "optim": optimiser,
    "dictconcat": concatenation,
}
"""A group of keys -> the check of it and of those that are recorded with it."""

GROUPS = tuple(PARTS)
"""Patterns of first parts of keys, of which a file of blocks has one or more."""


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of every supported group that the file holds."""
    for group, part in PARTS.items():
        if any(re.match(f"{group}/", key) for key in fixture):
            yield from part(fixture)
