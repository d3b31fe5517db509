"""net_*.npz: every network of DreamerV3 once, filtering, imagination, and two ticks of acting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from telamon.agents.dreamerv3 import losses
from telamon.agents.dreamerv3.agent import ActNoise, Carry, DreamerV3
from telamon.agents.dreamerv3.distributions import BoundedNormal, binary_loss, divergence, latent_entropy
from telamon.agents.dreamerv3.networks import Params, encode_action
from telamon.agents.dreamerv3.rssm import State
from telamon.data import ActionSpec
from tests.parity import dreamerv3
from tests.parity.dreamerv3 import all_states, picked
from tests.parity.fixture import Fixture, Refused, jit
from tests.parity.report import Line, compare

Arrays = Mapping[str, jax.Array]


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of all outputs of the file."""
    given = fixture.under("in/")
    part = lambda prefix: {key.removeprefix(prefix): x for key, x in given.items() if key.startswith(prefix)}
    learner = dreamerv3.agent(fixture, "param/", part("obs/"), part("prevact/"))
    params = dreamerv3.params(fixture, "param/", learner.config.num_bins)
    slow = dreamerv3.slow_critic(fixture, "param/", learner.config.num_bins)
    try:
        ours = jit(outputs, static_argnums=0)(learner, params, slow, given)
    except KeyError as missing:
        raise Refused(f"{fixture.path} holds no in/{missing.args[0]}, which its outputs depend on") from missing
    for name, recorded in fixture.under("out/").items():
        if name not in ours:
            fixture.read.remove(f"out/{name}")
        elif name.endswith("stoch"):
            yield compare(f"out/{name}", "exact", picked(ours[name]), picked(recorded))
        else:
            yield compare(f"out/{name}", "exact" if recorded.dtype.kind == "i" else "forward", ours[name], recorded)


def outputs(learner: DreamerV3, params: Params, slow: Params, given: Arrays) -> dict[str, jax.Array]:
    """{name under out/: our array}."""
    nets, rssm, c, actions = learner.networks, learner.rssm, learner.config, learner.env.actions
    part = lambda prefix: {key.removeprefix(prefix): x for key, x in given.items() if key.startswith(prefix)}
    obs, noise, dyn = part("obs/"), part("noise/"), params["dyn"]
    prev_action = encode_action(actions, part("prevact/"), lead=2)
    carry = State(given["carry/deter"], given["carry/stoch"])
    tokens = nets.encode(params, obs, lead=2)
    out = {"enc/tokens": tokens}

    state, _ = rssm.imagine_step(dyn, carry, prev_action[:, 0], noise["step_gumbel"])
    out |= {"core/deter": state.deter, "prior/logit": rssm.prior(dyn, carry.deter)}
    never = jnp.zeros(len(tokens), bool)
    step = rssm.observe_step(dyn, carry, tokens[:, 0], prev_action[:, 0], never, noise["step_gumbel"])
    out |= {"step/deter": step.deter, "step/stoch": step.stoch, "step/logit": step.logits}

    post = rssm.observe(dyn, carry, tokens, prev_action, obs["is_first"], noise["obs_gumbel"])
    prior = rssm.prior(dyn, post.deter)
    out |= {
        "observe/deter": post.deter,
        "observe/stoch": post.stoch,
        "observe/logit": post.logits,
        "observe/prior_logit": prior,
        "observe/kl_raw": divergence(post.logits, prior, c.unimix),
        "observe/post_entropy": latent_entropy(post.logits, c.unimix),
        "observe/prior_entropy": latent_entropy(prior, c.unimix),
    }

    feature = losses.features(post)
    decoded = nets.decode(params, feature)
    kinds = {key: "pred" if space.classes is None else "logits" for key, space in learner.env.obs}
    out |= {f"dec/{key}/{kinds[key]}": x for key, x in decoded.items()}
    out |= {f"dec/{key}/loss": x for key, x in nets.reconstruction(decoded, obs).items()}

    logits = {
        "rew": nets.reward(params, feature),
        "val": nets.value(params["val"], feature),
        "slowval": nets.value(slow, feature),
    }
    out |= {f"{name}/logits": x for name, x in logits.items()}
    out |= {f"{name}/pred": nets.two_hot.decode(x) for name, x in logits.items()}
    going_on = nets.continuation(params, feature)
    out |= {
        "feat2tensor": jnp.concatenate(feature, -1),
        "rew/loss": nets.two_hot.cross_entropy(logits["rew"], obs["reward"]),
        "con/logit": going_on,
        "con/prob": jax.nn.sigmoid(going_on),
        "con/loss": binary_loss(going_on, (1 - obs["is_terminal"].astype(jnp.float32)) * c.discount),
    }
    for key, policy in nets.policy(params, feature).items():
        if isinstance(policy, BoundedNormal):
            raw = {"mean": policy.mean, "stddev": policy.std}
        else:
            raw = {"logits": jnp.stack(policy.logits, -2).reshape(*policy.logits[0].shape[:-1], *policy.shape, -1)}
        raw |= {"logp": policy.log_prob(given[f"act/{key}"]), "entropy": policy.entropy()}
        out |= {f"pol/{key}/{name}": x for name, x in raw.items()}

    start = State(post.deter[:, -1], post.stoch[:, -1])
    return out | _foreseen(learner, params, start, part("imagine/act/"), noise) | _acted(learner, params, given, carry)


def _foreseen(learner: DreamerV3, params: Params, start: State, actions: Arrays, noise: Arrays) -> dict[str, jax.Array]:
    """Imagination from the last filtered state: after given actions, and under the policy."""
    rssm, dyn = learner.rssm, params["dyn"]
    state, opened = start, []
    encoded = encode_action(learner.env.actions, actions, lead=2)
    for i in range(encoded.shape[1]):
        state, logits = rssm.imagine_step(dyn, state, encoded[:, i], noise["imagine_open_gumbel"][:, i])
        opened.append((state.deter, state.stoch, logits))
    out = dict(zip(("deter", "stoch", "logit"), (jnp.stack(x, 1) for x in zip(*opened, strict=True)), strict=True))
    out = {f"imagine_open/{name}": x for name, x in out.items()}

    step_first = lambda x: x.swapaxes(0, 1)
    prefix = "imagine_pol_act/"
    drawn = {key.removeprefix(prefix): step_first(x) for key, x in noise.items() if key.startswith(prefix)}
    gumbel = step_first(noise["imagine_pol_gumbel"])
    imagined = losses.imagine(params, learner.networks, rssm, start, gumbel, drawn)
    deter, stoch = (x[:, 1:] for x in all_states(imagined))
    out |= {
        "imagine_pol/deter": deter,
        "imagine_pol/stoch": stoch.reshape(*stoch.shape[:2], *start.stoch.shape[1:]),
        "imagine_pol/logit": rssm.prior(dyn, deter),
    }
    return out | {f"imagine_pol/act/{key}": step_first(x) for key, x in imagined.action.items()}


def _acted(learner: DreamerV3, params: Params, given: Arrays, start: State) -> dict[str, jax.Array]:
    """Two ticks."""
    prev_action = encode_action(learner.env.actions, {k: given[f"prevact/{k}"] for k, _ in learner.env.actions}, lead=2)
    carry, out = Carry(start, prev_action[:, 0]), {}
    for i in (0, 1):
        noise = ActNoise(
            latent=given[f"noise/act{i}/latent_gumbel"],
            action={key: given[f"noise/act{i}/action/{key}"] for key, _ in learner.env.actions},
        )
        obs = {key: given[f"obs/{key}"][:, i] for key, _ in learner.env.obs}
        action, carry, latents = learner.act(params, carry, obs, given["obs/is_first"][:, i], noise, "train")
        named = {"action": action} if isinstance(learner.env.action, ActionSpec) else action
        out |= {f"act{i}/action/{key}": x for key, x in named.items()}
        out |= {f"act{i}/deter": latents["deter"], f"act{i}/stoch": latents["stoch"].astype(jnp.int32)}
    return out
