"""DreamerV3's losses, in the order of the paper: world model, then critic and actor (arXiv:2301.04104).

Differs from the paper (and follows the code behind its scores): squared errors have no factor of one half, the
continuation is learned as (1 - terminal) * discount, the critic also learns from replayed rows, all sums over time are
means. No loss is masked where an episode begins: windows run over episodes.

Axes: B batch, T trained rows, N = B * T imagined trajectories (row b * T + t), H imagined steps, S latents, C classes,
K bins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from telamon.agents.dreamerv3.config import RECIPES, DreamerV3Config
from telamon.agents.dreamerv3.distributions import binary_loss, divergence, latent_entropy, sg
from telamon.agents.dreamerv3.networks import Feature, Networks, Params, encode_action
from telamon.agents.dreamerv3.rssm import RSSM, Observed, State
from telamon.distributional import TwoHot
from telamon.normalizers import PercentileRange, ReturnNormalizer


class Batch(NamedTuple):
    """The trained rows of B windows, and what leads into them."""

    obs: Mapping[str, jax.Array]
    """[B, T, ...]."""
    prev_action: jax.Array
    """[B, T, A], encoded: the action chosen one row earlier."""
    reward: jax.Array
    """[B, T], on entering each row."""
    is_first: jax.Array
    is_last: jax.Array
    is_terminal: jax.Array
    carry: State
    """The stored state of the row before the first."""


class WorldModel(NamedTuple):
    """Intermediates of the world model's losses."""

    posterior: Observed
    prior_logits: jax.Array
    """[B, T, S, C], raw."""
    divergence: jax.Array
    """[B, T], before free nats."""
    losses: dict[str, jax.Array]
    """[B, T] per term; `rec/KEY` for each observation."""


class Imagined(NamedTuple):
    """What the model foresees from N starts under the present policy. Nothing here has a gradient."""

    deter: jax.Array
    """[H, N, D], of the states in which an action is chosen; index 0 is the start."""
    stoch: jax.Array
    """[H, N, S * C]."""
    action: dict[str, jax.Array]
    """[H, N, ...]."""
    last: Feature
    """([N, D], [N, S * C]) of the state after the last action. Apart, so that the long arrays are never copied."""

    @property
    def feature(self) -> Feature:
        return self.deter, self.stoch


class ActorCritic(NamedTuple):
    """Intermediates of learning in imagination, time first."""

    reward: jax.Array
    """[H, N], expected on entering states 1..H."""
    continuation: jax.Array
    """[H + 1, N]."""
    value: jax.Array
    """[H + 1, N], of the critic."""
    slow_value: jax.Array
    """[H, N], of the slow critic."""
    returns: jax.Array
    """[H, N] lambda returns."""
    log_prob: jax.Array
    """[H, N], of all action parts together."""
    entropy: dict[str, jax.Array]
    """[H, N] per action key."""
    randomness: dict[str, jax.Array]
    """[] per action key, in 0..1."""
    advantage: jax.Array
    """[H, N], scaled."""
    norm: PercentileRange
    """The return normaliser after these returns."""
    losses: dict[str, jax.Array]
    """`policy` and `value`, [H, N] before the mean."""


class Replayed(NamedTuple):
    """Intermediates of the critic's loss on replayed rows."""

    value: jax.Array
    """[B, T]."""
    slow_value: jax.Array
    """[B, T - 1]."""
    returns: jax.Array
    """[B, T - 1]."""
    loss: jax.Array
    """[B, T - 1]."""


class Found(NamedTuple):
    """Everything that one evaluation of the loss computes."""

    model: WorldModel
    imagined: Imagined
    actor_critic: ActorCritic
    replayed: Replayed
    losses: dict[str, jax.Array]
    """Mean of each term, before its scale."""


def world_model(params: Params, nets: Networks, rssm: RSSM, batch: Batch, gumbel: jax.Array) -> WorldModel:
    """Reconstruction, reward, continuation, dynamics and representation losses (eq. 4 and 5); gumbel [B, T, S, C]."""
    c, dyn = nets.config, params["dyn"]
    tokens = nets.encode(params, batch.obs, lead=2)
    post = rssm.observe(dyn, batch.carry, tokens, batch.prev_action, batch.is_first, gumbel)
    feature = features(post)

    rec = nets.reconstruction(nets.decode(params, feature), batch.obs)
    losses = {f"rec/{key}": each for key, each in rec.items()}
    losses["rew"] = nets.two_hot.cross_entropy(nets.reward(params, feature), batch.reward)
    target = (1 - batch.is_terminal.astype(jnp.float32)) * c.discount
    losses["con"] = binary_loss(nets.continuation(params, feature), target)

    # The prior sees the same deter as the posterior; free nats count after the sum over latents.
    prior = rssm.prior(dyn, post.deter)
    dyn_divergence = divergence(sg(post.logits), prior, c.unimix)
    losses["dyn"] = jnp.maximum(dyn_divergence, c.free_nats)
    losses["rep"] = jnp.maximum(divergence(post.logits, sg(prior), c.unimix), c.free_nats)
    return WorldModel(post, prior, dyn_divergence, losses)


def imagine(
    params: Params, nets: Networks, rssm: RSSM, start: State, gumbel: jax.Array, action_noise: Mapping[str, jax.Array]
) -> Imagined:
    """H steps of the prior under the policy from states [N, ...]; gumbel [H, N, S, C], action noise [H, N, ...]."""
    params, start = sg(params), sg(start)

    def step(state: State, noise: tuple[jax.Array, Mapping[str, jax.Array]]) -> tuple[State, Any]:
        gumbel, action_noise = noise
        feature = state.deter, state.stoch.reshape(state.stoch.shape[0], -1)
        policy = nets.policy(params, feature)
        action = {key: policy[key].sample(action_noise[key]) for key, _ in nets.actions}
        state, _ = rssm.imagine_step(params["dyn"], state, encode_action(nets.actions, action, lead=1), gumbel)
        return state, (*feature, action)

    last, (deter, stoch, action) = jax.lax.scan(step, start, (gumbel, action_noise))
    return Imagined(deter, stoch, action, (last.deter, last.stoch.reshape(last.stoch.shape[0], -1)))


def lambda_returns(reward: jax.Array, discount: jax.Array, value: jax.Array, lam: jax.Array) -> jax.Array:
    """R_t = reward_t + discount_t ((1 - lam_t) value_t + lam_t R_{t+1}), with R = value after the last; all [T, ...].

    Index t is the transition t -> t + 1: its reward, its discount, and the value of the state on which it arrives
    (eq. 7, whose index is off by one from the code's).
    """

    def step(later: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, discount, value, lam = x
        now = reward + discount * ((1 - lam) * value + lam * later)
        return now, now

    return jax.lax.scan(step, value[-1], (reward, discount, value, lam), reverse=True)[1]


def actor_critic(
    params: Params,
    slow: Params,
    norm: PercentileRange,
    nets: Networks,
    imagined: Imagined,
    known_start: jax.Array | None,
) -> ActorCritic:
    """Actor and critic losses on imagined states (eq. 8 to 12); gradients reach the policy and the critic alone.

    known_start: [N] continuation of the starts as replayed (recipe `paper`), or None for the model's own.
    """
    c, two_hot = nets.config, nets.two_hot
    fixed, feature, last = sg(params), imagined.feature, imagined.last
    value_logits = nets.value(params["val"], feature)

    # Each head on states 0..H-1 and on the last, which has no action.
    reward = two_hot.decode(joined(nets.reward(fixed, feature)[1:], nets.reward(fixed, last)))
    continuation = jax.nn.sigmoid(joined(nets.continuation(fixed, feature), nets.continuation(fixed, last)))
    if known_start is not None:
        continuation = jnp.concatenate([known_start[None], continuation[1:]])
    value = sg(two_hot.decode(joined(value_logits, nets.value(fixed["val"], last))))
    slow_value = sg(two_hot.decode(nets.value(slow, feature)))

    # The discount is in the continuation. A state's weight is the chance that imagination got there, start included.
    weight = sg(jnp.cumprod(continuation, 0)[:-1])
    lam = jnp.full_like(reward, c.lam)
    returns = lambda_returns(reward, continuation[1:], value[1:], lam)
    norm = normalizer(c).update(norm, returns)
    advantage = sg((returns - value[:-1]) / normalizer(c).scale(norm))

    policy = nets.policy(params, feature)
    log_prob = total({key: policy[key].log_prob(imagined.action[key]) for key, _ in nets.actions})
    entropy = {key: policy[key].entropy() for key, _ in nets.actions}
    losses = {
        "policy": -weight * (log_prob * advantage + c.actent * total(entropy)),
        "value": weight * critic_loss(two_hot, value_logits, returns, slow_value, c.slowreg),
    }
    randomness = {key: sg(policy[key].randomness()).mean() for key, _ in nets.actions}
    return ActorCritic(
        reward, continuation, value, slow_value, returns, log_prob, entropy, randomness, advantage, norm, losses
    )


def normalizer(config: DreamerV3Config) -> ReturnNormalizer:
    """Of the returns that advantages are divided by."""
    return ReturnNormalizer(config.return_rate, floor=config.return_floor)


def replay_value(
    params: Params, slow: Params, nets: Networks, post: Observed, batch: Batch, boot: jax.Array
) -> Replayed:
    """The critic's loss on replayed rows, bootstrapped by imagined returns `boot` [B, T].

    Its gradient reaches the model. Only as many of the last rows as `boot` has are used.
    """
    c, rows = nets.config, boot.shape[1]
    feature = tuple(x[:, -rows:] for x in features(post))
    reward, is_last, is_terminal = (
        x[:, -rows:].astype(jnp.float32) for x in (batch.reward, batch.is_last, batch.is_terminal)
    )
    logits = nets.value(params["val"], (feature[0], feature[1]))
    slow_value = sg(nets.two_hot.decode(nets.value(slow, (sg(feature[0][:, :-1]), sg(feature[1][:, :-1])))))

    time = lambda x: x[:, 1:].swapaxes(0, 1)
    discount, lam = (1 - is_terminal) * c.discount, (1 - is_last) * c.lam
    returns = sg(lambda_returns(time(reward), time(discount), time(boot), time(lam))).swapaxes(0, 1)
    loss = critic_loss(nets.two_hot, logits[:, :-1], returns, slow_value, c.slowreg)
    return Replayed(nets.two_hot.decode(logits), slow_value, returns, (1 - is_last[:, :-1]) * loss)


def critic_loss(
    two_hot: TwoHot, logits: jax.Array, returns: jax.Array, slow_value: jax.Array, slowreg: float
) -> jax.Array:
    """Cross entropy [...] towards the returns, and towards what the slow critic predicts."""
    target = sg(two_hot.encode(returns) + slowreg * two_hot.encode(slow_value))
    return -(target * jax.nn.log_softmax(logits, -1)).sum(-1)


def loss(
    params: Params,
    slow: Params,
    norm: PercentileRange,
    nets: Networks,
    rssm: RSSM,
    batch: Batch,
    noise: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
) -> tuple[jax.Array, Found]:
    """The scaled sum of all terms, and everything found on the way.

    noise: Gumbel of the posterior [B, T, S, C] and of the imagined prior [H, N, S, C]; imagined actions' [H, N, ...].
    """
    c = nets.config
    observed_noise, imagined_noise, action_noise = noise
    model = world_model(params, nets, rssm, batch, observed_noise)

    starts = c.imag_last or batch.reward.shape[1]
    last_rows = lambda x: x[:, -starts:].reshape(-1, *x.shape[2:])
    start = State(last_rows(model.posterior.deter), last_rows(model.posterior.stoch))
    imagined = imagine(params, nets, rssm, start, imagined_noise, action_noise)
    known = 1 - last_rows(batch.is_terminal).astype(jnp.float32) if RECIPES[c.recipe].replayed_start else None
    acting = actor_critic(params, slow, norm, nets, imagined, known)

    boot = acting.returns[0].reshape(-1, starts)
    replayed = replay_value(params, slow, nets, model.posterior, batch, boot)

    terms = {**model.losses, **acting.losses, "repval": replayed.loss}
    means = OrderedDict((name, term.mean()) for name, term in terms.items())  # a dict would come back sorted
    weighted = {name: getattr(c.loss_scales, name.partition("/")[0]) * mean for name, mean in means.items()}
    return total(weighted), Found(model, imagined, acting, replayed, means)


def features(post: Observed) -> Feature:
    """(deter, flattened stoch)."""
    return post.deter, post.stoch.reshape(*post.stoch.shape[:-2], -1)


def joined(first: jax.Array, last: jax.Array) -> jax.Array:
    """[H, N, ...] and [N, ...] -> [H + 1, N, ...]."""
    return jnp.concatenate([first, last[None]])


def total(terms: Mapping[str, jax.Array]) -> jax.Array:
    """The sum of a mapping's values."""
    values = list(terms.values())
    return sum(values[1:], values[0])


def statistics(found: Found, config: DreamerV3Config) -> dict[str, jax.Array]:
    """The reference's scalars beside the losses: entropies, returns, values."""
    model, acting = found.model, found.actor_critic
    scaled_returns = (acting.returns - acting.norm.low) / normalizer(config).scale(acting.norm)
    return {
        "dyn_ent": latent_entropy(model.prior_logits, config.unimix).mean(),
        "rep_ent": latent_entropy(model.posterior.logits, config.unimix).mean(),
        "adv": acting.advantage.mean(),
        "adv_std": acting.advantage.std(),
        "adv_mag": jnp.abs(acting.advantage).mean(),
        "rew": acting.reward.mean(),
        "con": acting.continuation.mean(),
        "ret": scaled_returns.mean(),
        "ret_min": scaled_returns.min(),
        "ret_max": scaled_returns.max(),
        "ret_rate": (jnp.abs(scaled_returns) >= 1).astype(jnp.float32).mean(),
        "val": acting.value.mean(),
        "slowval": acting.slow_value.mean(),
        "weight": jnp.cumprod(acting.continuation, 0).mean(),
        **{f"ent/{key}": entropy.mean() for key, entropy in acting.entropy.items()},
        **{f"rand/{key}": value for key, value in acting.randomness.items()},
    }
