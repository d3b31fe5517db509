"""train_*.npz: three consecutive updates: each from the recorded state before it; the optimiser on recorded gradients;
and all three running freely.

Moments of the optimiser lie in NAME_opt.npz beside a file, and are read with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from telamon.agents.dreamerv3 import losses, optim
from telamon.agents.dreamerv3.agent import DreamerV3, TrainState, UpdateNoise
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.dreamerv3.distributions import binary_loss, unimix
from telamon.agents.dreamerv3.losses import Batch, Found
from telamon.agents.dreamerv3.networks import Params, encode_action
from telamon.data import ActionSpec, Window
from telamon.normalizers import PercentileRange, ReturnNormalizer
from tests.parity import dreamerv3
from tests.parity.dreamerv3 import all_states, flat, nested, picked, recipe
from tests.parity.fixture import Fixture, Refused, jit
from tests.parity.report import Line, compare, compare_tree

PAPER_TERMS = {"rew": "reward", "con": "cont", "policy": "actor", "value": "critic", "repval": "replay_critic"}
"""Our loss terms -> what the paper's code calls them; others have one name."""

BALANCE = {"rewstats": 0.1, "constats": 0.5}
"""Statistics of the paper's code, means of a loss over rows whose target is above a bound and over the others."""

IMMATERIAL = {"data/stepid", "data/consec"}
"""Bookkeeping of the reference's replay."""

step = jit(DreamerV3.update_with_intermediates, static_argnums=0)


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of all updates of the file. Raises Refused for moments without the file that they belong to."""
    if not any(key.startswith("loss/u") for key in fixture):
        whole = fixture.path.name.replace("_opt.npz", ".npz")
        raise Refused(
            f"{fixture.path} holds moments alone, which are checked with their updates: pass {whole} beside it"
        )
    learner = built(fixture)
    batch = learner.batch(window(fixture, learner))
    updates = len(fixture.numbered(r"loss/u(\d+)/"))
    running = recorded_state(fixture, learner, 0)
    yield counts(fixture, running, 0)
    for u in range(1, updates + 1):
        noise, never_used = draws(fixture, learner, u)
        start = recorded_state(fixture, learner, u - 1)
        state, metrics, found, grads = step(learner, start, batch, noise)
        yield from terms(fixture, learner, u, batch, metrics, found)
        recorded = dreamerv3.params(fixture, f"grad/u{u}/", learner.config.num_bins)
        yield compare_tree(f"grad/u{u}/*", "whole_gradient", flat(grads), flat(recorded))
        yield from normaliser(fixture, u, state, "")
        yield compare(f"writeback/u{u}/deter", "forward", found.model.posterior.deter, fixture[f"writeback/u{u}/deter"])
        stoch = found.model.posterior.stoch
        yield compare(f"writeback/u{u}/stoch", "exact", picked(stoch), picked(fixture[f"writeback/u{u}/stoch"]))
        more = unneeded(learner, start.params, start.slow, batch, found, never_used)
        yield from balance(fixture, u, batch, found, more)
        if u == 1:
            yield from intermediates(fixture, learner, batch, found, more)

        running, own, _, _ = step(learner, running, batch, noise)
        yield from logged(fixture, u, metrics, own, found, more)
        yield from moved(fixture, learner, u, running)
        yield counts(fixture, running, u)
        if u > 1:
            yield from normaliser(fixture, u, running, ", running freely")
    yield from optimiser(fixture, learner, updates)
    fixture.read |= IMMATERIAL & fixture.keys()


# what a file holds, as the agent takes it


def built(fixture: Fixture) -> DreamerV3:
    """The agent of the file."""
    names = [key.removeprefix("noise/u1/img_act/") for key in fixture if key.startswith("noise/u1/img_act/")]
    rows = {key: x for key, x in fixture.under("data/").items() if key not in names}
    return dreamerv3.agent(fixture, "param/0/", rows, {name: fixture[f"data/{name}"] for name in names})


def window(fixture: Fixture, learner: DreamerV3) -> Window:
    """The recorded rows; of their latents, those of the context."""
    rows, context = fixture.under("data/"), learner.config.context
    prefix = "dyn/" if "dyn/deter" in rows else ""
    latents = {"deter": rows[f"{prefix}deter"], "stoch": picked(rows[f"{prefix}stoch"])}
    if latents["stoch"].ndim != 3:
        raise Refused(f"{fixture.path} holds latents of shape {latents['stoch'].shape}, which must be [B, T, S]")
    action = {key: rows[key] for key, _ in learner.env.actions}
    count = len(rows["reward"])
    return Window(
        env_id=np.zeros(count, np.int32),
        first_row=np.zeros(count, np.int64),
        obs={key: rows[key] for key, _ in learner.env.obs},
        reward=rows["reward"],
        is_first=rows["is_first"],
        is_last=rows["is_last"],
        is_terminal=rows["is_terminal"],
        action=next(iter(action.values())) if isinstance(learner.env.action, ActionSpec) else action,
        latents={key: x[:, :context] for key, x in latents.items()},
    )


def draws(fixture: Fixture, learner: DreamerV3, u: int) -> tuple[UpdateNoise, dict[str, jax.Array]]:
    """The noise of an update, and the action noise of its last imagined states, which nothing depends on."""
    time_first = lambda name: jnp.asarray(fixture[f"noise/u{u}/{name}"].swapaxes(0, 1))
    action = {key: time_first(f"img_act/{key}") for key, _ in learner.env.actions}
    noise = UpdateNoise(
        observed=jnp.asarray(fixture[f"noise/u{u}/obs_gumbel"]),
        imagined=time_first("img_gumbel"),
        action={key: x[:-1] for key, x in action.items()},
    )
    return noise, {key: x[-1] for key, x in action.items()}


def recorded_state(fixture: Fixture, learner: DreamerV3, u: int) -> TrainState:
    """The state after update `u`, but for the optimiser's."""
    bins = learner.config.num_bins
    state = learner.start(
        dreamerv3.params(fixture, f"param/{u}/", bins), dreamerv3.slow_critic(fixture, f"slow/{u}/", bins)
    )
    norm = PercentileRange(*(jnp.asarray(fixture[key]) for key in normaliser_keys(fixture, u)))
    return state._replace(norm=norm, updates=jnp.asarray(u, jnp.int32))


def normaliser_keys(fixture: Fixture, u: int) -> tuple[str, str]:
    """Of the low and the high percentile."""
    names = ("low/value", "high/value") if recipe(fixture) == "paper" else ("lo", "hi")
    return f"norm/{u}/retnorm/{names[0]}", f"norm/{u}/retnorm/{names[1]}"


# what is compared


def terms(
    fixture: Fixture, learner: DreamerV3, u: int, batch: Batch, metrics: Mapping[str, jax.Array], found: Found
) -> Iterator[Line]:
    """The total loss; every term's mean and its elements."""
    paper, scales = recipe(fixture) == "paper", learner.config.loss_scales
    yield compare(f"loss/u{u}/total", "mean", metrics["total_loss"], fixture[f"loss/u{u}/total"])
    each = elements(found)
    for term, mean in found.losses.items():
        key = term.removeprefix("rec/")
        key = PAPER_TERMS.get(key, key) if paper else key
        yield compare(f"loss/u{u}/mean/{key}", "mean", mean, fixture[f"loss/u{u}/mean/{key}"])
        if paper:
            name, ours = f"loss/u{u}/elem_scaled/{key}", getattr(scales, term.partition("/")[0]) * each[term]
        else:
            name, ours = f"loss/u{u}/elem/{key}", each[term]
            if term in found.actor_critic.losses:
                ours = ours.mean(1).reshape(batch.reward.shape[0], -1)
        yield compare(name, "forward", ours, fixture[name])


def balance(fixture: Fixture, u: int, batch: Batch, found: Found, more: Mapping[str, jax.Array]) -> Iterator[Line]:
    """Reward and continuation losses by target, the latter against 0 and 1."""
    losses_and_targets = {
        "rewstats": (found.model.losses["rew"], batch.reward),
        "constats": (more["hard_con"], 1 - batch.is_terminal.astype(jnp.float32)),
    }
    for name, bound in BALANCE.items():
        loss, target = map(np.asarray, losses_and_targets[name])
        for sign, rows in (("pos", target > bound), ("neg", target <= bound)):
            if (key := f"loss/u{u}/mean/{name}/{sign}") in fixture:
                yield compare(key, "mean", loss[rows].mean(), fixture[key])


def elements(found: Found) -> dict[str, jax.Array]:
    """All terms before their mean: [B, T], [B, T - 1], and in imagination [N, H]."""
    acting = {term: x.T for term, x in found.actor_critic.losses.items()}
    return {**found.model.losses, **acting, "repval": found.replayed.loss}


def beyond(
    learner: DreamerV3, params: Params, slow: Params, batch: Batch, found: Found, last_noise: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """What the reference also computes although no loss needs it, named as under inter/.

    `hard_con` is what the paper's code takes statistics of: the continuation's loss against 0 and 1. Heads are on all
    H + 1 imagined states [N, H + 1], with the action of the last one, and on all rows of the replayed critic.
    """
    nets, two_hot, post = learner.networks, learner.networks.two_hot, found.model.posterior
    feature = all_states(found.imagined)
    value, slow_value = nets.value(params["val"], feature), two_hot.decode(nets.value(slow, feature))
    deter, stoch = (x[:, 1:] for x in feature)
    out = {
        "tokens": nets.encode(params, batch.obs, lead=2),
        "imag/feat/deter": deter,
        "imag/feat/stoch": stoch.reshape(*stoch.shape[:2], *post.stoch.shape[2:]),
        "imag/feat/logit": learner.rssm.prior(params["dyn"], deter),
        "imag/rew": two_hot.decode(nets.reward(params, feature)),
        "imag/con": jax.nn.sigmoid(nets.continuation(params, feature)),
        "imag/val": two_hot.decode(value),
        "imag/val_logits": value,
        "imag/slowval": slow_value,
        "imag/value_loss_slow": two_hot.cross_entropy(value, slow_value),
    }
    last = nets.policy(params, found.imagined.last)
    for key, policy in nets.policy(params, feature).items():
        action = losses.joined(found.imagined.action[key], last[key].sample(last_noise[key])).swapaxes(0, 1)
        out |= {f"imag/act/{key}": action, f"imag/logp/{key}": policy.log_prob(action)}
        out |= {f"imag/ent/{key}": policy.entropy()}
    seen = losses.features(post)
    replayed = nets.value(params["val"], seen)
    return out | {
        "hard_con": binary_loss(nets.continuation(params, seen), 1 - batch.is_terminal.astype(jnp.float32)),
        "repl/val": two_hot.decode(replayed),
        "repl/val_logits": replayed,
        "repl/slowval": two_hot.decode(nets.value(slow, seen)),
    }


unneeded = jit(beyond, static_argnums=0)


def intermediates(
    fixture: Fixture, learner: DreamerV3, batch: Batch, found: Found, more: Mapping[str, jax.Array]
) -> Iterator[Line]:
    """Everything under inter/, which is of the first update."""
    acting, post = found.actor_critic, found.model.posterior
    normalizer = ReturnNormalizer(floor=learner.config.return_floor)
    logits = unimix(post.logits, learner.config.unimix) if recipe(fixture) == "paper" else post.logits
    ours = {
        **more,
        "carry0/deter": batch.carry.deter,
        "carry0/stoch": batch.carry.stoch,
        "post/deter": post.deter,
        "post/stoch": post.stoch,
        "post/logit": logits,
        "prior/logit": found.model.prior_logits,
        "kl_raw": found.model.divergence,
        "imag/ret": acting.returns.T,
        "imag/retnorm_scale": normalizer.scale(acting.norm),
        "imag/retnorm_lo": acting.norm.low,
        "imag/policy_elem": acting.losses["policy"].T,
        "imag/value_elem": acting.losses["value"].T,
        "repl/boot": acting.returns[0].reshape(batch.reward.shape),
        "repl/ret": found.replayed.returns,
    }
    actions = fixture.under("inter/prevact/")
    if actions:  # the paper's code has them one-hot already
        indices = {
            key: spec.classes is not None and actions[key].dtype.kind == "f" for key, spec in learner.env.actions
        }
        given = {key: picked(x) if indices[key] else x for key, x in actions.items()}
        encoded = encode_action(learner.env.actions, {k: jnp.asarray(x) for k, x in given.items()}, lead=2)
        yield compare("inter/prevact/*", "exact", batch.prev_action, np.asarray(encoded))
    for name, value in ours.items():
        if (key := f"inter/{name}") in fixture:
            recorded = fixture[key]
            latent = name.endswith("stoch")
            kind = "exact" if latent or recorded.dtype.kind == "i" else "forward"
            yield compare(key, kind, picked(value) if latent else value, picked(recorded) if latent else recorded)


def logged(
    fixture: Fixture,
    u: int,
    metrics: Mapping[str, jax.Array],
    own: Mapping[str, jax.Array],
    found: Found,
    more: Mapping[str, jax.Array],
) -> Iterator[Line]:
    """The scalars that the reference logs; its roots of mean squares are our norms over the root of the count.

    metrics: of the update from the recorded state; own: of the one running freely, which has an optimiser's past.
    """
    acting, each = found.actor_critic, {k.removeprefix("rec/"): v for k, v in found.losses.items()}
    size = sum(math.prod(x.shape) for key, x in fixture.under("param/0/").items() if not key.startswith("slow"))
    ours = {
        **{f"loss/{key}": mean for key, mean in each.items()},
        **metrics,
        # over all H + 1 states, where ours are over those that a loss needs
        "rew": more["imag/rew"].mean(),
        "slowval": more["imag/slowval"].mean(),
        "tar": acting.returns.mean(),
        "opt/loss": metrics["total_loss"],
        "opt/grad_norm": metrics["grad_norm"],
        "opt/grad_rms": metrics["grad_norm"] / math.sqrt(size),
        "opt/update_rms": own["update_norm"] / math.sqrt(size),
        "opt/param_rms": own["param_norm"] / math.sqrt(size),
        "opt/param_count": size,
        "opt/updates": u,
    }
    for key in [key for key in fixture if key.startswith(f"metric/u{u}/")]:
        if (name := key.removeprefix(f"metric/u{u}/")) in ours:
            yield compare(key, "mean", ours[name], fixture[key])


def moved(fixture: Fixture, learner: DreamerV3, u: int, running: TrainState) -> Iterator[Line]:
    """Parameters and the slow critic after `u` updates of our own."""
    recorded = recorded_state(fixture, learner, u)
    for name, ours, theirs in (("param", running.params, recorded.params), ("slow", running.slow, recorded.slow)):
        vector = lambda tree: np.concatenate([x.reshape(-1) for _, x in sorted(flat(tree).items())])
        yield compare(f"{name}/{u}/*, running freely", "moved", vector(ours), vector(theirs))


def normaliser(fixture: Fixture, u: int, state: TrainState, how: str) -> Iterator[Line]:
    """The averaged percentiles after update `u`."""
    for key, value in zip(normaliser_keys(fixture, u), state.norm, strict=True):
        yield compare(f"{key}{how}", "mean", value, fixture[key])


def counts(fixture: Fixture, state: TrainState, u: int) -> Line:
    """All counters of updates, of which the reference and optax have several."""
    prefixes = (f"opt/{u}/count/", f"count/{u}/", f"slow/{u}/count")
    recorded = [fixture[key] for key in fixture if key.startswith(prefixes)]
    ours = [x for x in jax.tree.leaves(state.optim) if jnp.issubdtype(x.dtype, jnp.integer)] + [state.updates]
    return compare(f"count/{u}", "exact", np.unique(ours), np.unique(recorded))


def optimised(config: DreamerV3Config, params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
    """Parameters and the optimiser's state after one update."""
    steps, state = optim.make(config).update(grads, state, params)
    return optax.apply_updates(params, steps), state


optimise = jit(optimised, static_argnums=0)


def optimiser(fixture: Fixture, learner: DreamerV3, updates: int) -> Iterator[Line]:
    """Moments and parameters after each recorded gradient, on the reference's own tensors.

    These include what our parameters lack: the unused last output of the paper's two-hot layers, which counts in norms.
    """
    named = lambda prefix: {key: x for key, x in fixture.under(prefix).items() if not key.startswith("slow")}
    state = optim.make(learner.config).init(nested(named("param/0/")))
    for u in range(1, updates + 1):
        before = nested(named(f"param/{u - 1}/"))
        after, state = optimise(learner.config, before, nested(fixture.under(f"grad/u{u}/")), state)
        yield compare_tree(f"param/{u}/*, recorded gradients", "step", flat(after), named(f"param/{u}/"))
        for name, kind, field in (("nu", "square", "nu"), ("mu", "momentum", "ema")):
            if recorded := fixture.under(f"opt/{u}/{name}/"):
                yield compare_tree(f"opt/{u}/{name}/*", kind, flat(optax.tree_utils.tree_get(state, field)), recorded)
