"""Every term of the loss against the same in numpy, and where its gradient goes (docs/numerics.md, B8, B11)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.agents.dreamerv3 import losses
from telamon.agents.dreamerv3.losses import lambda_returns
from telamon.data import ActionSpec
from tests.telamon.agents.dreamerv3 import tiny

AGENT = tiny.agent()
C = AGENT.config
B, T, H = C.batch_size, C.batch_length, C.imag_length
KEY = jax.random.key(0)
DISCRETE = tiny.agent(tiny.EnvSpec("discrete", tiny.ENV.obs, ActionSpec((), (5,)), None), recipe="latest", imag_last=2)

wide = lambda x: np.asarray(x, np.float64)


def batch(agent=AGENT):
    return agent.batch(tiny.window(agent))


def evaluate(agent=AGENT, params=None, state=None, **changes):
    """(total, found) with some of the parameters, the state or the batch changed."""
    state = state or tiny.state(agent)
    state = state._replace(params=state.params | (params or {}))
    return tiny.evaluate(agent, state, batch(agent)._replace(**changes), tiny.update_noise(agent, KEY))


def two_hot(y, bins):
    """Weights on the two bins around y, linear between them as they are."""
    y = np.clip(wide(y), bins[0], bins[-1])
    below = np.clip(np.searchsorted(bins, y, side="right") - 1, 0, len(bins) - 2)
    upper = (y - bins[below]) / (bins[below + 1] - bins[below])
    eye = np.eye(len(bins))
    return eye[below] * (1 - upper[..., None]) + eye[below + 1] * upper[..., None]


def cross_entropy(logits, y, agent=AGENT):
    logits = wide(logits)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -(two_hot(y, np.asarray(agent.networks.two_hot.bins)) * logs).sum(-1)


def returns_of(reward, discount, value, lam):
    """The recursion of B11 in a loop; all [T, ...]."""
    out, later = [], value[-1]
    for t in reversed(range(len(reward))):
        later = reward[t] + discount[t] * ((1 - lam[t]) * value[t] + lam[t] * later)
        out.append(later)
    return np.stack(out[::-1])


# B11

REWARD, BOOT = np.arange(5.0), 10 * np.arange(1.0, 6)
NONE, AT_2 = np.zeros(5), np.eye(5)[2]


@pytest.mark.parametrize(
    ("lam", "discount", "last", "terminal", "expected"),
    [
        (0.95, 0.99, NONE, NONE, [54.179844, 55.491592, 55.29675, 53.5]),
        (0.95, 0.99, NONE, AT_2, [3.8710003, 2.0, 55.29675, 53.5]),
        (0.95, 0.99, AT_2, NONE, [31.803852, 31.7, 55.29675, 53.5]),
        (0.95, 1.0, NONE, 1 - np.array([0.997, 0.997, 0.5, 0.997, 0.997]), [29.794964, 29.349062, 55.998024, 53.85]),
        (0.0, 0.99, NONE, NONE, [20.8, 31.7, 42.6, 53.5]),
        (1.0, 0.99, NONE, NONE, [57.831295, 57.40535, 55.965, 53.5]),
    ],
)
def test_lambda_returns_pinned(lam, discount, last, terminal, expected):
    """Reward, discount and value of a transition are those of the state on which it arrives."""
    args = (REWARD, discount * (1 - terminal), BOOT, lam * (1 - last))
    got = lambda_returns(*(jnp.asarray(x[1:], jnp.float32) for x in args))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_lambda_returns_of_a_constant_reward_are_a_geometric_series():
    d = np.float32(0.9)
    full = lambda x: jnp.full(7, x, jnp.float32)
    got = lambda_returns(full(2), full(d), full(5), full(1))
    n = np.arange(7, 0, -1)
    np.testing.assert_allclose(got, 2 * (1 - d**n) / (1 - d) + d**n * 5, rtol=1e-5)


# world model


def test_the_continuation_is_learned_as_a_soft_target_of_true_ends_alone():
    _, found = tiny.found(AGENT)
    feature = losses.features(found.model.posterior)
    logit = wide(tiny.jit(AGENT.networks.continuation)(tiny.params(AGENT), feature))
    target = np.full((B, T), 1 - 1 / 333)
    target[0, 2] = 0  # the true end; the time limit of window 1 is none
    expected = target * np.log1p(np.exp(-logit)) + (1 - target) * np.log1p(np.exp(logit))
    np.testing.assert_allclose(found.model.losses["con"], expected, rtol=1e-5)
    _, ended = evaluate(is_last=jnp.ones((B, T), bool))
    np.testing.assert_array_equal(ended.model.losses["con"], found.model.losses["con"])


def test_the_reward_is_learned_raw():
    _, found = tiny.found(AGENT)
    logits = tiny.jit(AGENT.networks.reward)(tiny.params(AGENT), losses.features(found.model.posterior))
    np.testing.assert_allclose(found.model.losses["rew"], cross_entropy(logits, batch().reward), rtol=1e-5)


def test_free_nats_count_after_the_sum_over_latents():
    _, found = tiny.found(AGENT)
    post, prior = (wide(x) for x in (found.model.posterior.logits, found.model.prior_logits))
    mixed = lambda x: 0.99 * np.exp(x) / np.exp(x).sum(-1, keepdims=True) + 0.01 / C.classes
    each = (mixed(post) * np.log(mixed(post) / mixed(prior))).sum(-1)
    summed = each.sum(-1)
    assert 0 < (summed < C.free_nats).sum() < B * T  # both sides of the floor
    clip = lambda x: np.maximum(x, C.free_nats)
    assert (np.abs(clip(summed) - clip(each).sum(-1)) > 0.01).any()  # the other order would show
    np.testing.assert_allclose(found.model.divergence, summed, rtol=1e-3, atol=1e-5)
    for name in ("dyn", "rep"):
        np.testing.assert_allclose(found.model.losses[name], clip(summed), rtol=1e-3)


def test_nothing_is_masked_where_an_episode_begins():
    _, found = tiny.found(AGENT)
    assert batch().is_first.sum() == 2
    for name, each in found.model.losses.items():
        assert each.shape == (B, T)
        assert (each > 0).all(), name
        np.testing.assert_allclose(found.losses[name], wide(each).mean(), rtol=1e-5)


def test_the_total_is_the_scaled_sum_of_means():
    scales = {"rec/zeta": 1, "rec/alpha": 1, "rew": 1, "con": 1, "dyn": 1, "rep": 0.1, "policy": 1, "value": 1,
              "repval": 0.3}  # fmt: skip
    total, found = tiny.found(AGENT)
    assert set(found.losses) == set(scales)
    np.testing.assert_allclose(total, sum(s * found.losses[name] for name, s in scales.items()), rtol=1e-6)
    assert total.dtype == jnp.float32


# imagination


def test_imagination_starts_from_every_row_batch_first():
    _, found = tiny.found(AGENT)
    np.testing.assert_array_equal(found.imagined.deter[0].reshape(B, T, -1), found.model.posterior.deter)
    stoch = found.imagined.stoch[0].reshape(B, T, C.stoch, C.classes)
    np.testing.assert_array_equal(stoch, found.model.posterior.stoch)


def test_imagination_starts_from_the_last_rows_where_asked():
    c = DISCRETE.config
    _, found = tiny.found(DISCRETE)
    assert found.imagined.deter.shape == (H, 2 * B, c.deter)
    np.testing.assert_array_equal(found.imagined.deter[0].reshape(B, 2, -1), found.model.posterior.deter[:, -2:])
    assert found.replayed.loss.shape == (B, 1)
    assert set(np.unique(found.imagined.action["action"])) <= set(range(5))
    assert found.imagined.action["action"].shape == (H, 2 * B)


@pytest.mark.parametrize("agent", [AGENT, DISCRETE], ids=["paper", "latest"])
def test_actor_and_critic_learn_as_the_reference_does(agent):
    """Recipe `paper` takes the start's continuation from replay, 1 or 0; `latest` predicts it."""
    _, found = tiny.found(agent)
    rows, params, nets = agent.config.imag_last or T, tiny.params(agent), agent.networks
    acting, imagined = found.actor_critic, found.imagined
    feature = tuple(jnp.concatenate([x, last[None]]) for x, last in zip(imagined.feature, imagined.last, strict=True))
    logits = tiny.jit(
        lambda params, slow: (
            nets.continuation(params, feature), nets.reward(params, feature),
            nets.value(params["val"], feature), nets.value(slow, feature),
        )
    )  # fmt: skip
    ended, reward, value_logits, slow = map(wide, logits(params, tiny.state(agent).slow))
    con = 1 / (1 + np.exp(-ended))
    if agent is AGENT:
        con[0] = 1 - wide(batch(agent).is_terminal).reshape(-1)
        assert set(np.unique(con[0])) == {0, 1}
    np.testing.assert_allclose(acting.continuation, con, rtol=1e-5)

    decode = lambda logits: (np.exp(logits) @ np.asarray(nets.two_hot.bins)) / np.exp(logits).sum(-1)
    reward, value, slow = decode(reward)[1:], decode(value_logits), decode(slow)[:-1]
    for ours, theirs in ((acting.reward, reward), (acting.value, value), (acting.slow_value, slow)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)

    returns = returns_of(reward, con[1:], value[1:], np.full_like(reward, 0.95))
    np.testing.assert_allclose(acting.returns, returns, rtol=1e-3, atol=1e-4)
    weight = np.cumprod(con, 0)[:-1]  # the start's own continuation counts
    low = 0.99 * 0.5 + 0.01 * np.percentile(returns, 5)
    high = 0.99 * 2.5 + 0.01 * np.percentile(returns, 95)
    np.testing.assert_allclose(acting.norm, [low, high], rtol=1e-4)
    advantage = (returns - value[:-1]) / (high - low)  # the offset is not subtracted
    np.testing.assert_allclose(acting.advantage, advantage, rtol=1e-3, atol=2e-4)

    policy = tiny.jit(nets.policy)(params, imagined.feature)["action"]
    log_prob, entropy = wide(policy.log_prob(imagined.action["action"])), wide(policy.entropy())
    expected = -weight * (log_prob * advantage + 3e-4 * entropy)
    np.testing.assert_allclose(acting.losses["policy"], expected, rtol=2e-3, atol=5e-4)
    target = cross_entropy(value_logits[:-1], returns, agent) + cross_entropy(value_logits[:-1], slow, agent)
    np.testing.assert_allclose(acting.losses["value"], weight * target, rtol=2e-3, atol=5e-4)
    assert acting.losses["value"].shape == (H, B * rows)
    for name in ("policy", "value"):
        np.testing.assert_allclose(found.losses[name], wide(acting.losses[name]).mean(), rtol=1e-5)


def test_the_return_scale_has_a_floor():
    low = tiny.state(AGENT)
    low = low._replace(norm=low.norm._replace(low=jnp.float32(0.0), high=jnp.float32(0.1)))
    _, found = evaluate(state=low)
    acting = found.actor_critic
    assert acting.norm.high - acting.norm.low < 1
    np.testing.assert_allclose(acting.advantage, acting.returns - acting.value[:-1], rtol=1e-5, atol=1e-6)


def test_the_slow_critic_regularises_and_never_bootstraps():
    _, found = tiny.found(AGENT)
    state = tiny.state(AGENT)
    _, other = evaluate(state=state._replace(slow=tiny.params(AGENT, 7)["val"]))
    for one, two in ((found.actor_critic, other.actor_critic), (found.replayed, other.replayed)):
        np.testing.assert_array_equal(one.returns, two.returns)
        np.testing.assert_array_equal(one.value, two.value)
        assert (np.abs(one.slow_value - two.slow_value) > 1e-4).any()
    np.testing.assert_array_equal(found.actor_critic.advantage, other.actor_critic.advantage)
    assert found.losses["value"] != other.losses["value"]
    assert found.losses["repval"] != other.losses["repval"]


# replayed rows


@pytest.mark.parametrize("agent", [AGENT, DISCRETE], ids=["all rows", "last rows"])
def test_the_critic_learns_from_replayed_rows_as_the_reference_does(agent):
    _, found = tiny.found(agent)
    rows, nets, given = agent.config.imag_last or T, agent.networks, batch(agent)
    feature = [x[:, -rows:] for x in losses.features(found.model.posterior)]
    boot = np.zeros((B, rows))
    for b in range(B):
        for t in range(rows):
            boot[b, t] = found.actor_critic.returns[0, b * rows + t]
    reward, last, terminal = (wide(x)[:, -rows:].T for x in (given.reward, given.is_last, given.is_terminal))
    discount, lam = (1 - terminal) * (1 - 1 / 333), (1 - last) * 0.95
    returns = returns_of(reward[1:], discount[1:], boot.T[1:], lam[1:]).T
    np.testing.assert_allclose(found.replayed.returns, returns, rtol=1e-5, atol=1e-6)

    value = tiny.jit(nets.value)
    logits = value(tiny.params(agent)["val"], feature)
    slow = nets.two_hot.decode(value(tiny.state(agent).slow, feature))[:, :-1]
    each = cross_entropy(logits[:, :-1], returns, agent) + cross_entropy(logits[:, :-1], slow, agent)
    each = (1 - last.T[:, :-1]) * each
    np.testing.assert_allclose(found.replayed.loss, each, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.losses["repval"], each.mean(), rtol=1e-3)  # masked rows count in the mean


def test_the_last_rows_of_episodes_teach_no_value():
    loss = np.asarray(tiny.found(AGENT)[1].replayed.loss)
    assert (loss == 0).sum() == 2
    assert loss[0, 2] == loss[1, 2] == 0


# gradients

MODEL = {"enc", "core", "posterior"}
ROUTES = {
    "rec/zeta": MODEL | {"dec"},
    "rec/alpha": MODEL | {"dec"},
    "rew": MODEL | {"rew"},
    "con": MODEL | {"con"},
    "dyn": MODEL | {"prior"},  # the posterior through earlier latents alone
    "rep": MODEL,
    "policy": {"pol"},
    "value": {"val"},
    "repval": MODEL | {"val"},
}


def parts(tree):
    """A tree of all modules with the RSSM's parts apart."""
    core = ("in_deter", "in_stoch", "in_action", "hidden", "gates")
    dyn = tree["dyn"]
    rest = {name: leaf for name, leaf in tree.items() if name != "dyn"}
    return rest | {name: dyn[name] for name in ("prior", "posterior")} | {"core": {name: dyn[name] for name in core}}


def gradients(agent):
    """{term: tree} of each mean before its scale."""
    noise, given = tiny.update_noise(agent, KEY), batch(agent)

    def terms(params):
        state = tiny.state(agent)
        found = losses.loss(params, state.slow, state.norm, agent.networks, agent.rssm, given, noise)[1]
        return found.losses

    return tiny.jit(jax.jacrev(terms))(tiny.params(agent))


def test_each_term_moves_its_modules_and_no_other():
    found = gradients(AGENT)
    assert set(found) == set(ROUTES)
    for term, route in ROUTES.items():
        moved = {
            part for part, tree in parts(found[term]).items() if any(np.asarray(g).any() for g in jax.tree.leaves(tree))
        }
        assert moved == route, term


class Bumped:
    """Networks whose tokens are moved."""

    def __init__(self, nets, bump):
        self._nets, self._bump = nets, bump

    def encode(self, params, obs, lead):
        return self._nets.encode(params, obs, lead) + self._bump

    def __getattr__(self, name):
        return getattr(self._nets, name)


def test_divergences_move_what_they_should_and_nothing_below_the_free_nats():
    """Slopes of dyn and rep, at each row of a window without resets, to the tokens of each row."""
    given, noise = batch(), tiny.update_noise(AGENT, KEY).observed

    def terms(bump):
        model = losses.world_model(tiny.params(AGENT), Bumped(AGENT.networks, bump), AGENT.rssm, given, noise)
        return {name: model.losses[name][2] for name in ("dyn", "rep")}, model.divergence[2]

    zero = jnp.zeros((B, T, AGENT.networks.token_width))
    slopes, divergence = tiny.jit(jax.jacrev(terms, has_aux=True))(zero)
    dyn, rep = (np.abs(slopes[name][:, 2]).max(-1) for name in ("dyn", "rep"))
    pressed = np.asarray(divergence > C.free_nats)
    assert 0 < pressed.sum() < T
    for t in range(T):
        assert not dyn[t, t:].any()  # sg(posterior)
        assert not rep[t, t + 1 :].any()
        if pressed[t]:
            assert (dyn[t, :t] > 0).all()  # through deter, which has no stop in front of the prior
            assert (rep[t, : t + 1] > 0).all()
        else:
            assert not dyn[t].any()
            assert not rep[t].any()


# statistics


def test_statistics():
    _, found = tiny.found(AGENT)
    statistics, acting = tiny.jit(lambda found: losses.statistics(found, C)), found.actor_critic
    stats = statistics(found)
    low, high = acting.norm
    scaled = (acting.returns - low) / (high - low)
    np.testing.assert_allclose(
        [stats["ret"], stats["ret_min"], stats["ret_max"], stats["adv_std"], stats["adv_mag"]],
        [scaled.mean(), scaled.min(), scaled.max(), acting.advantage.std(), np.abs(acting.advantage).mean()],
        rtol=1e-5,
    )
    np.testing.assert_allclose(stats["weight"], np.cumprod(acting.continuation, 0).mean(), rtol=1e-5)
    assert {name for name in stats if "/" in name} == {"ent/action", "rand/action"}
    assert 0 < stats["rand/action"] < 1
    assert 0 < stats["rep_ent"] < C.stoch * np.log(C.classes)
    shifted = found._replace(actor_critic=acting._replace(returns=acting.returns * 0 + low + 1.5 * (high - low)))
    assert statistics(shifted)["ret_rate"] == 1
