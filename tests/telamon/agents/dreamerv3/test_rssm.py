"""The recurrent state-space model against the same in numpy, and as loops (docs/numerics.md, B14, B15)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.agents.dreamerv3 import losses
from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import DreamerV3Config, size
from telamon.agents.dreamerv3.networks import encode_action
from telamon.agents.dreamerv3.rssm import RSSM, State, by_block, dense, flat
from telamon.data import ActionSpec
from tests.telamon.agents.dreamerv3 import tiny

KEY = jax.random.key(0)
AGENT = tiny.agent()
RNN, DYN = AGENT.rssm, tiny.params(AGENT)["dyn"]
C = AGENT.config
N, T = 3, 5

sigmoid = lambda x: 1 / (1 + np.exp(-x))
silu = lambda x: x * sigmoid(x)
rms = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4) * scale


def layer(p, x):
    return silu(rms(x @ p["linear"]["kernel"] + p["linear"]["bias"], p["norm"]["scale"]))


def blockwise(p, x):
    """Each of g slices of x through a matrix of its own."""
    g = p["kernel"].shape[0]
    return np.concatenate([s @ w for s, w in zip(np.split(x, g, -1), p["kernel"], strict=True)], -1) + p["bias"]


def reference_core(p, deter, stoch, action):
    """The spec, word for word, in float64: deter [N, D], stoch [N, S, C], encoded action [N, A] -> [N, D]."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    deter, stoch, action = (np.asarray(x, np.float64) for x in (deter, stoch, action))
    g, n = C.blocks, len(deter)
    action = action / np.maximum(1, np.abs(action))
    shared = np.concatenate(
        [layer(p["in_deter"], deter), layer(p["in_stoch"], stoch.reshape(n, -1)), layer(p["in_action"], action)], -1
    )
    x = np.concatenate([np.concatenate([s, shared], -1) for s in np.split(deter, g, -1)], -1)
    x = silu(rms(blockwise(p["hidden"]["linear"], x), p["hidden"]["norm"]["scale"]))  # one norm over all of it
    x = blockwise(p["gates"], x).reshape(n, g, 3, -1)  # reset, candidate, update within each block
    reset, candidate, update = (x[:, :, i].reshape(n, -1) for i in range(3))
    update = sigmoid(update - 1)
    return update * np.tanh(sigmoid(reset) * candidate) + (1 - update) * deter


def carry(seed: int = 0, n: int = N) -> State:
    rng = np.random.default_rng(seed)
    stoch = jax.nn.one_hot(rng.integers(0, C.classes, (n, C.stoch)), C.classes)
    return State(jnp.asarray(rng.normal(size=(n, C.deter)), jnp.float32), stoch)


def sequence(seed: int = 0):
    """Tokens, previous actions beyond [-1, 1], resets in the middle, and noise, [N, T, ...]."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(N, T, *shape)), jnp.float32)
    first = np.zeros((N, T), bool)
    first[0, 0], first[1, 3] = True, True
    gumbel = jax.random.gumbel(jax.random.key(seed), (N, T, C.stoch, C.classes))
    return draw(RNN.token_width), 2 * draw(RNN.action_width), jnp.asarray(first), gumbel


def quiet_step(p, state, action):
    """(state, prior logits) after an action, drawn without noise."""
    return RNN.imagine_step(p, state, action, jnp.zeros(state.stoch.shape))


core = tiny.jit(quiet_step)
observe = tiny.jit(RNN.observe)
observe_step = tiny.jit(RNN.observe_step)
imagine_step = tiny.jit(RNN.imagine_step)


def test_the_core_is_the_references():
    action = 2 * jax.random.normal(KEY, (N, RNN.action_width))  # some beyond 1
    state = carry()
    np.testing.assert_allclose(
        core(DYN, state, action)[0].deter, reference_core(DYN, *state, action), rtol=2e-5, atol=2e-6
    )


def test_the_prior_and_the_posterior_are_the_references():
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), DYN)
    tokens, action, _, gumbel = (x[:, 0] for x in sequence())
    state = carry()
    after, logits = core(DYN, state, action)
    deter = reference_core(DYN, *state, action)
    x = layer(p["prior"]["layer1"], layer(p["prior"]["layer0"], deter))
    expected = x @ p["prior"]["logits"]["kernel"] + p["prior"]["logits"]["bias"]
    np.testing.assert_allclose(logits.reshape(N, -1), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after.stoch.argmax(-1), logits.argmax(-1))  # no noise was given

    seen = observe_step(DYN, state, tokens, action, jnp.zeros(N, bool), gumbel)
    x = layer(p["posterior"]["layer0"], np.concatenate([deter, np.asarray(tokens, np.float64)], -1))
    expected = x @ p["posterior"]["logits"]["kernel"] + p["posterior"]["logits"]["bias"]
    np.testing.assert_allclose(seen.logits.reshape(N, -1), expected, rtol=1e-4, atol=1e-5)
    mixed = jnp.log(0.99 * jax.nn.softmax(seen.logits, -1) + 0.01 / C.classes)
    np.testing.assert_array_equal(seen.stoch.argmax(-1), (mixed + gumbel).argmax(-1))


def test_without_gates_the_state_decays_by_the_bias_of_the_update_gate():
    """sigmoid(-1) = 0.2689414 of the candidate, which is 0."""
    silent = DYN | {"gates": jax.tree.map(jnp.zeros_like, DYN["gates"])}
    state = carry()
    after, _ = core(silent, state, jnp.ones((N, RNN.action_width)))
    np.testing.assert_allclose(after.deter, 0.7310586 * state.deter, rtol=1e-6)


def test_blocks_meet_only_in_the_shared_input():
    """Where the embedding of deter ignores its input, a block's new state depends on no other block's old one."""
    deaf = DYN | {"in_deter": jax.tree.map(jnp.zeros_like, DYN["in_deter"])}
    # nor through the norm, once it is made constant by a huge bias
    hidden = DYN["hidden"]["linear"]
    deaf["hidden"] = DYN["hidden"] | {"linear": hidden | {"bias": jnp.full_like(hidden["bias"], 1e6)}}
    state, action = carry(n=1), jnp.ones((1, RNN.action_width))
    after = lambda deter, p: quiet_step(p, state._replace(deter=deter), action)[0].deter[0]
    jacobian = tiny.jit(jax.jacobian(after))
    g, w = C.blocks, C.deter // C.blocks
    apart, joined = (np.abs(jacobian(state.deter, p)).reshape(g, w, g, w).max((1, 3)) for p in (deaf, DYN))
    assert (np.diag(apart) > 0.1).all()
    assert (apart[~np.eye(g, dtype=bool)] < 1e-6).all()
    assert (joined[~np.eye(g, dtype=bool)] > 1e-6).all()


def test_layouts_by_block():
    x = jnp.arange(12.0).reshape(2, 6)
    assert by_block(x, 3).shape == (3, 2, 2)
    np.testing.assert_array_equal(by_block(x, 3)[1], [[2, 3], [8, 9]])
    np.testing.assert_array_equal(flat(by_block(x, 3)), x)
    kernel = jax.random.normal(KEY, (3, 4, 2))
    v = jax.random.normal(KEY, (4,))
    np.testing.assert_allclose(v @ dense(kernel), jnp.concatenate([v @ k for k in kernel]), rtol=1e-5)


def test_actions_beyond_1_are_scaled_onto_it_without_gradient():
    action = jnp.array([[3.0, -0.5], [-7.0, 1.0]])
    state = carry(n=2)
    np.testing.assert_array_equal(
        core(DYN, state, action)[0].deter, core(DYN, state, jnp.array([[1.0, -0.5], [-1, 1]]))[0].deter
    )
    slope = tiny.jit(jax.grad(lambda a: quiet_step(DYN, state, a)[0].deter.sum()))
    inside = jnp.array([[0.999999, -0.5], [-0.999999, 0.999999]])
    np.testing.assert_allclose(slope(action)[0, 0], slope(inside)[0, 0] / 3, rtol=1e-3)  # a / sg(|a|)


# sequences


def test_the_initial_state_is_zeros():
    state = RNN.initial(4)
    assert (state.deter.shape, state.stoch.shape) == ((4, C.deter), (4, C.stoch, C.classes))
    assert not np.asarray(state.deter).any()
    assert not np.asarray(state.stoch).any()
    assert set(DYN) == {"in_deter", "in_stoch", "in_action", "hidden", "gates", "prior", "posterior"}  # none is learned


def test_observing_is_a_loop_of_steps():
    tokens, action, first, gumbel = sequence()
    seen, state = observe(DYN, carry(), tokens, action, first, gumbel), carry()
    for t in range(T):
        one = observe_step(DYN, state, tokens[:, t], action[:, t], first[:, t], gumbel[:, t])
        for whole, step in zip(seen, one, strict=True):
            np.testing.assert_allclose(whole[:, t], step, rtol=1e-5, atol=1e-6)
        state = State(one.deter, one.stoch)


def test_each_step_draws_with_its_own_noise():
    tokens, action, first, gumbel = sequence()
    seen = observe(DYN, carry(), tokens, action, first, gumbel)
    for t in range(T):
        other = observe(DYN, carry(), tokens, action, first, gumbel.at[:, t].set(-gumbel[:, t] * 9))
        np.testing.assert_array_equal(other.stoch[:, :t], seen.stoch[:, :t])
        np.testing.assert_array_equal(other.deter[:, : t + 1], seen.deter[:, : t + 1])
        assert (other.stoch[:, t] != seen.stoch[:, t]).any()


def test_a_reset_forgets_state_and_action():
    tokens, action, _, gumbel = (x[:, 0] for x in sequence())
    first = jnp.ones(N, bool)
    seen = observe_step(DYN, carry(), tokens, action, first, gumbel)
    fresh = observe_step(DYN, RNN.initial(N), tokens, jnp.zeros_like(action), jnp.zeros(N, bool), gumbel)
    for one, other in zip(seen, fresh, strict=True):
        np.testing.assert_array_equal(one, other)
    empty = State(*(np.zeros_like(x) for x in carry()))
    np.testing.assert_allclose(seen.deter, reference_core(DYN, *empty, np.zeros(action.shape)), rtol=2e-5, atol=2e-6)


def test_a_reset_forgets_an_encoded_action_even_if_it_was_the_first_class():
    """Masked before its encoding, an index would become class 0."""
    env = tiny.EnvSpec("discrete", tiny.ENV.obs, ActionSpec((), (3,)), None)
    agent = tiny.agent(env)
    rssm, dyn = agent.rssm, tiny.params(agent)["dyn"]
    step = tiny.jit(rssm.observe_step)
    tokens, gumbel = sequence()[0][:, 0], sequence()[3][:, 0]
    encode = lambda index: encode_action(env.actions, {"action": jnp.full(N, index)}, lead=1)
    reset = [step(dyn, carry(), tokens, encode(i), jnp.ones(N, bool), gumbel).deter for i in (0, 1)]
    nothing = step(dyn, carry(), tokens, jnp.zeros((N, 3)), jnp.ones(N, bool), gumbel).deter
    np.testing.assert_array_equal(reset[0], nothing)
    np.testing.assert_array_equal(reset[1], nothing)
    kept = step(dyn, carry(), tokens, encode(0), jnp.zeros(N, bool), gumbel).deter
    zeros = step(dyn, carry(), tokens, jnp.zeros((N, 3)), jnp.zeros(N, bool), gumbel).deter
    assert (np.abs(kept - zeros) > 1e-4).any()


def test_gradients_flow_through_the_carry_up_to_a_reset():
    tokens, action, first, gumbel = sequence()
    last = lambda tokens: RNN.observe(DYN, carry(), tokens, action, first, gumbel).deter[:, -1].sum()
    slope = np.abs(tiny.jit(jax.grad(last))(tokens)).max(-1)
    assert (slope[0, :-1] > 0).all()  # all but its own, which is seen after deter
    assert (slope[1, :3] == 0).all()  # a reset at 3
    assert slope[1, 3] > 0
    assert (slope[:, -1] == 0).all()


def test_imagination_is_a_loop_of_steps_under_the_policy_from_its_start():
    state = tiny.state(AGENT)
    _, found = tiny.found(AGENT)
    imagined, noise = found.imagined, tiny.update_noise(AGENT, KEY)
    states = [jnp.concatenate([x, last[None]]) for x, last in zip(imagined.feature, imagined.last, strict=True)]
    assert states[0].shape == (C.imag_length + 1, 18, C.deter)
    at = State(imagined.deter[0], imagined.stoch[0].reshape(-1, C.stoch, C.classes))
    policy = tiny.jit(AGENT.networks.policy)
    for i in range(C.imag_length):
        drawn = policy(state.params, losses.features(at))["action"].sample(noise.action["action"][i])
        np.testing.assert_allclose(imagined.action["action"][i], drawn, rtol=1e-4, atol=1e-5)
        at, _ = imagine_step(DYN, at, drawn, noise.imagined[i])
        np.testing.assert_allclose(states[0][i + 1], at.deter, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(states[1][i + 1], at.stoch.reshape(18, -1), atol=1e-6)


def test_states_are_in_the_compute_dtype_and_logits_in_float32():
    half = RSSM(tiny.config(dtype="bfloat16"), RNN.action_width, RNN.token_width)
    start = State(*(x.astype(jnp.bfloat16) for x in carry()))
    seen = jax.eval_shape(half.observe, DYN, start, *sequence())
    assert [x.dtype for x in seen] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    ahead, logits = jax.eval_shape(half.imagine_step, DYN, start, jnp.zeros((N, RNN.action_width)), sequence()[3][:, 0])
    assert [x.dtype for x in (*ahead, logits)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


def test_recurrent_kernels_start_at_the_scale_of_all_blocks_together():
    """Of one block alone they would be 2.8 times as large."""
    agent = DreamerV3(DreamerV3Config(**size("size1m")), tiny.ENV)
    fresh = tiny.jit(agent.rssm.init)(KEY)
    assert fresh["hidden"]["linear"]["kernel"].shape == (8, 256, 64)
    assert fresh["gates"]["kernel"].shape == (8, 64, 192)
    assert float(fresh["hidden"]["linear"]["kernel"].std()) == pytest.approx(1 / np.sqrt(2048), rel=0.02)
    assert float(fresh["gates"]["kernel"].std()) == pytest.approx(1 / np.sqrt(512), rel=0.02)
    for name in ("prior", "posterior"):
        assert float(fresh[name]["logits"]["kernel"].std()) == pytest.approx(1 / 8, rel=0.05)
    for name, leaf in tiny.leaves(fresh).items():
        assert (leaf == 1).all() if "scale" in name else leaf.any() == ("kernel" in name), name


def test_no_two_layers_start_alike():
    fresh = tiny.jit(RNN.init)(KEY)
    kernels = [leaf.ravel()[:16].tobytes() for name, leaf in tiny.leaves(fresh).items() if "kernel" in name]
    assert len(set(kernels)) == len(kernels) == 10
