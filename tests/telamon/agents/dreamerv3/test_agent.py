"""The agent as the rest of the system meets it: refusals, windows, acting, updates, reports, compilation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.agents.dreamerv3 import losses
from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.data import ActionSpec, ArraySpec, EnvSpec, WindowSpec
from tests.telamon.agents.dreamerv3 import tiny

KEY = jax.random.key(0)
AGENT = tiny.agent()
MIXED = tiny.agent(tiny.MIXED, recipe="latest", context=3, warmup=100)
MULTI = EnvSpec("multi", (("obs", ArraySpec((2,))),), ActionSpec((2, 2), (2, 3, 4, 5)), None)
FRESH = tiny.agent(MULTI, context=0)

# refusals


def seen(*obs, **changes) -> DreamerV3:
    return DreamerV3(DreamerV3Config(**changes), EnvSpec("task", obs, ActionSpec((2,)), None))


IMAGE = ArraySpec((64, 64, 3), "uint8")


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ((), "task has none"),
        ((("a", ArraySpec((4, 4, 2))),), r"'a' of task is float32 \[4, 4, 2\]; reshape or convert it"),
        ((("a", ArraySpec((4, 4, 2), "int32", 3)),), r"'a' of task is int32 \[4, 4, 2\]"),
        ((("a", ArraySpec((2, 64, 64, 3), "uint8")),), r"'a' of task is uint8 \[2, 64, 64, 3\]"),
        ((("a", ArraySpec((), "int64")),), r"'a' of task is int64 without known bounds"),
        ((("a", ArraySpec((8,), "uint8")),), r"'a' of task is uint8 without known bounds .* float32"),
        ((("a", ArraySpec((64, 65, 3), "uint8")),), r"'a' is 64x65 .* nearest valid side to 65 is 64 or 80"),
        ((("a", IMAGE), ("b", ArraySpec((64, 96, 3), "uint8"))), r"'b' of task is \[64, 96\] and 'a' is \[64, 64\]"),
    ],
)
def test_observations_that_it_cannot_learn(obs, message):
    with pytest.raises(ValueError, match=message):
        seen(*obs)


def test_images_that_the_blocks_of_the_decoder_do_not_divide():
    with pytest.raises(ValueError, match=r"agent\.deter=2048 .* 4 channels .* multiples of agent\.bspace=8"):
        seen(("a", IMAGE), depth=1)
    seen(("a", ArraySpec((3,))), depth=1)  # without images nothing is asked


@pytest.mark.parametrize("recipe", ["paper", "latest"])
def test_images_need_not_be_square(recipe):
    agent = seen(("a", ArraySpec((64, 96, 3), "uint8")), recipe=recipe)
    assert agent.networks.token_width == 4 * 6 * 64
    shapes = jax.eval_shape(agent.init, KEY).params
    feature = (jnp.zeros((2, 2048)), jnp.zeros((2, 512)))
    decoded = jax.eval_shape(agent.networks.decode, shapes, feature)
    assert decoded["a"].shape == (2, 64, 96, 3)


# what replay stores and serves


def test_rows_keep_deter_in_the_compute_dtype_and_classes_as_bytes():
    agent = tiny.agent(tiny.MIXED, dtype="bfloat16")
    columns = agent.row_spec.columns
    assert columns["latents/deter"] == ArraySpec((16,), "bfloat16")
    assert columns["latents/stoch"] == ArraySpec((2,), "uint8")
    assert columns["action/gear"] == ArraySpec((), "int32")
    assert columns["obs/left view"] == ArraySpec((12, 16, 1), "uint8")
    assert tiny.agent().row_spec.columns["action"] == ArraySpec((2,))


def test_windows_are_a_context_row_and_64_of_any_episodes():
    agent = DreamerV3(DreamerV3Config(), tiny.ENV)
    assert agent.window_spec == WindowSpec(
        length=65, context=1, cross_episodes=True, closed_only=False, start="windows", latents="context", online=True,
        annotate=True,
    )  # fmt: skip
    assert MIXED.window_spec.length == 9
    assert agent.schedule(4).ratio == 1 / 32
    assert (agent.schedule(4).start, agent.schedule(4).window) == (16, 65)
    assert agent.batch_size == 16


def test_capacity_counts_windows_over_all_environments():
    agent = tiny.agent(buffer_size=1000)
    assert (agent.capacity(1), agent.capacity(16)) == (1000 + 6, 63 + 6)


def test_it_acts_by_its_policy_from_the_start_and_learns_terminations():
    assert AGENT.learns_terminations
    assert not AGENT.acts_at_random


# batches


def test_a_batch_is_the_rows_after_the_context_each_with_the_action_before_it():
    rows = tiny.window(AGENT)
    batch = AGENT.batch(rows)
    np.testing.assert_array_equal(batch.obs["zeta"], rows.obs["zeta"][:, 1:])
    np.testing.assert_array_equal(batch.prev_action, rows.action[:, :-1])
    np.testing.assert_array_equal(batch.carry.deter, rows.latents["deter"][:, 0])
    np.testing.assert_array_equal(batch.carry.stoch.argmax(-1), rows.latents["stoch"][:, 0])
    np.testing.assert_array_equal(batch.carry.stoch.sum(-1), np.ones((3, 2)))
    for name in ("reward", "is_first", "is_last", "is_terminal"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(rows, name)[:, 1:])


def test_a_longer_context_gives_its_last_row():
    rows = tiny.window(MIXED)
    batch = MIXED.batch(rows)
    np.testing.assert_array_equal(batch.carry.deter, rows.latents["deter"][:, 2])
    np.testing.assert_array_equal(batch.reward, rows.reward[:, 3:])
    width = {"gear": 4, "keys/both hands": 8, "steer": 2}  # sorted
    assert batch.prev_action.shape == (3, 6, sum(width.values()))
    np.testing.assert_array_equal(batch.prev_action[..., :4].argmax(-1), rows.action["gear"][:, 2:-1])
    np.testing.assert_array_equal(batch.prev_action[..., -2:], rows.action["steer"][:, 2:-1])


def test_without_a_context_a_window_starts_from_nothing():
    rows = tiny.window(FRESH)
    batch = FRESH.batch(rows)
    assert rows.reward.shape == batch.reward.shape == (3, 6)
    assert not batch.carry.deter.any()
    assert not batch.carry.stoch.any()
    assert not batch.prev_action[:, 0].any()
    assert batch.prev_action.shape == (3, 6, 14)
    index = np.stack([part.argmax(-1) for part in np.split(batch.prev_action[:, 1:], [2, 5, 9], -1)], -1)
    np.testing.assert_array_equal(index, rows.action[:, :-1].reshape(3, 5, 4))


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_rewards_of_any_type_are_learned_in_float32(dtype):
    rows = tiny.window(AGENT)
    batch = AGENT.batch(replace(rows, reward=np.full(rows.reward.shape, 3, dtype)))
    assert batch.reward.dtype == jnp.float32
    np.testing.assert_array_equal(batch.reward, np.full((3, 6), 3))


# acting


def acted(agent, mode="train", carry=None, first=False, key=0, seed=0, n=4):
    obs = tiny.observations(agent.env, (n,), seed)
    params = agent.acting_params(tiny.state(agent))
    noise = tiny.act_noise(agent, jax.random.key(key), n)
    return tiny.act(agent, params, carry or agent.initial_carry(n), obs, np.full(n, first), noise, mode=mode)


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_both_modes_sample_and_the_same_noise_gives_the_same_action():
    train, evaluation = (acted(AGENT, mode) for mode in ("train", "eval"))
    assert same(train, evaluation)
    assert same(acted(AGENT, "eval"), evaluation)
    other = acted(AGENT, "eval", key=1)
    assert not np.array_equal(other[0], evaluation[0])


def test_an_action_is_the_unclipped_sample_of_the_policy_after_the_observation():
    params = tiny.params(AGENT)
    noise = tiny.act_noise(AGENT, KEY, 4)._replace(action={"action": jnp.full((4, 2), 4.0)})
    action, carry, latents = tiny.act(
        AGENT, AGENT.acting_params(tiny.state(AGENT)), AGENT.initial_carry(4), tiny.observations(tiny.ENV, (4,)),
        np.zeros(4, bool), noise, mode="train",
    )  # fmt: skip
    assert (action > 1).any()
    np.testing.assert_array_equal(carry.prev_action, action)
    policy = AGENT.networks.policy(params, (carry.state.deter, carry.state.stoch.reshape(4, -1)))["action"]
    np.testing.assert_allclose(action, policy.sample(noise.action["action"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(latents["deter"], carry.state.deter)
    np.testing.assert_array_equal(latents["stoch"], carry.state.stoch.argmax(-1))
    assert latents["stoch"].dtype == np.uint8


def test_a_reset_forgets_the_carry():
    used = acted(AGENT, seed=3)[1]
    assert same(acted(AGENT, carry=used, first=True), acted(AGENT))
    assert not same(acted(AGENT, carry=used), acted(AGENT))


def test_acting_twice_is_filtering_the_two_rows():
    """The carry holds the state and the action that the next row follows."""
    one = acted(AGENT, first=True, key=1)
    two = acted(AGENT, carry=one[1], key=2, seed=1)
    params, rows = tiny.params(AGENT), [tiny.observations(tiny.ENV, (4,), seed) for seed in (0, 1)]
    both = {key: jnp.stack([row[key] for row in rows], 1) for key in rows[0]}
    gumbel = jnp.stack([tiny.act_noise(AGENT, jax.random.key(k), 4).latent for k in (1, 2)], 1)
    seen = tiny.jit(AGENT.rssm.observe)(
        params["dyn"], AGENT.rssm.initial(4), AGENT.networks.encode(params, both, lead=2),
        jnp.stack([jnp.zeros((4, 2)), one[0]], 1), np.array([[True, False]] * 4), gumbel,
    )  # fmt: skip
    np.testing.assert_allclose(seen.deter[:, 1], two[2]["deter"], rtol=1e-5, atol=1e-6)


def test_a_dict_of_actions_has_the_environments_shapes_and_types():
    action, carry, _ = acted(MIXED)
    assert {key: (x.shape, x.dtype.name) for key, x in action.items()} == {
        "steer": ((4, 2), "float32"), "keys/both hands": ((4, 2), "int32"), "gear": ((4,), "int32"),
    }  # fmt: skip
    assert carry.prev_action.shape == (4, 14)
    np.testing.assert_array_equal(carry.prev_action[:, :4].argmax(-1), action["gear"])


def test_each_element_of_a_multi_discrete_action_stays_in_its_range():
    drawn = np.concatenate([acted(FRESH, key=key, n=16)[0] for key in range(8)])
    assert drawn.shape == (128, 2, 2)
    np.testing.assert_array_equal(drawn.max(0), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(drawn.min(0), np.zeros((2, 2)))


# updates


@cache
def updated(agent: DreamerV3, seed: int = 0, key: int = 0):
    """(state, metrics, latents) of one update."""
    noise = tiny.update_noise(agent, jax.random.key(key))
    return tiny.update(agent, tiny.state(agent), tiny.window(agent, seed), noise)


def moved(one, other) -> set[str]:
    other = tiny.leaves(other)
    return {name for name, leaf in tiny.leaves(one).items() if not np.array_equal(leaf, other[name])}


@pytest.mark.parametrize("agent", [AGENT, MIXED], ids=["vectors", "mixed"])
def test_an_update_is_finite_and_writes_back_the_trained_rows(agent):
    state, metrics, latents = updated(agent)
    assert all(np.isfinite(value) for value in metrics.values())
    assert state.updates == 1
    assert {f"rec/{key}_loss" for key, _ in agent.env.obs} <= set(metrics)
    assert {f"ent/{key}" for key, _ in agent.env.actions} <= set(metrics)
    assert latents["deter"].shape == (3, 6, 16)  # without the context
    assert (latents["stoch"].shape, latents["stoch"].dtype) == ((3, 6, 2), np.uint8)


def test_an_update_without_context_keeps_every_shape():
    """Multi-discrete actions too; what it computes is compiled by other tests."""
    state = tiny.state(FRESH)
    noise = tiny.update_noise(FRESH, KEY)
    after, metrics, latents = jax.eval_shape(FRESH.update, state, tiny.window(FRESH), noise)
    assert noise.action["action"].shape == (4, 18, 14)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert kinds(after) == kinds(state)
    assert {x.shape for x in metrics.values()} == {()}
    assert (latents["deter"].shape, latents["stoch"].shape) == ((3, 6, 16), (3, 6, 2))


def test_an_update_repeats_itself_and_depends_on_its_noise():
    assert same(updated.__wrapped__(AGENT), updated(AGENT))
    assert updated(AGENT, key=1)[1]["total_loss"] != updated(AGENT)[1]["total_loss"]


def test_every_parameter_learns():
    before, after = tiny.state(AGENT), updated(AGENT)[0]
    assert moved(before.params, after.params) == set(tiny.leaves(before.params))


def test_the_first_update_of_a_warm_up_changes_no_parameter():
    state, metrics, _ = updated(MIXED)
    assert not moved(tiny.state(MIXED).params, state.params)
    assert metrics["update_norm"] == 0
    assert metrics["grad_norm"] > 0
    assert moved(tiny.state(MIXED).optim, state.optim)


def test_latents_written_back_are_the_posterior_before_the_update():
    after, _, latents = updated(AGENT)
    batch, noise = AGENT.batch(tiny.window(AGENT)), tiny.update_noise(AGENT, KEY)
    filtered = tiny.jit(
        lambda params: losses.world_model(params, AGENT.networks, AGENT.rssm, batch, noise.observed).posterior
    )
    post = filtered(tiny.params(AGENT))
    np.testing.assert_allclose(latents["deter"], post.deter, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(latents["stoch"], post.stoch.argmax(-1))
    assert np.abs(filtered(after.params).deter - latents["deter"]).max() > 1e-2


def test_the_return_scale_follows_the_returns_before_it_divides():
    state, metrics, _ = updated(AGENT)
    assert moved(tiny.state(AGENT).norm, state.norm) == {".low", ".high"}
    assert metrics["ret_max"] > metrics["ret_min"]


def slow_after(agent, updates: int):
    """(old slow critic, critic, new slow critic) where so many updates came before; zero leaves against one leaves."""
    state = tiny.state(agent)._replace(slow={"w": jnp.zeros(2)}, updates=jnp.int32(updates))
    return agent._slow(state, {"w": jnp.ones(2)})["w"]


@pytest.mark.parametrize(("recipe", "first"), [("paper", 1.0), ("latest", 0.02)])
def test_the_slow_critic_follows_by_a_fiftieth_after_a_first_copy_in_recipe_paper(recipe, first):
    agent = tiny.agent(recipe=recipe)
    np.testing.assert_allclose([slow_after(agent, n)[0] for n in (0, 1, 7)], [first, 0.02, 0.02], rtol=1e-6)


def test_the_slow_critic_may_follow_every_few_updates():
    agent = tiny.agent(recipe="latest", slow_every=3, slow_rate=0.5)
    np.testing.assert_allclose([slow_after(agent, n)[0] for n in range(5)], [0.5, 0, 0, 0.5, 0])


def test_the_slow_critic_follows_the_updated_critic():
    state, _, _ = updated(AGENT)
    assert not moved(state.slow, state.params["val"])  # the copy of recipe paper
    latest, _, _ = updated(MIXED)
    old, new = (tiny.leaves(tree) for tree in (tiny.state(MIXED).slow, latest.params["val"]))
    for name, leaf in tiny.leaves(latest.slow).items():
        np.testing.assert_allclose(leaf, 0.98 * old[name] + 0.02 * new[name], rtol=1e-4, atol=1e-6)


def test_a_fresh_state():
    agent = tiny.agent(units=64)
    state = tiny.fresh(agent)
    assert not moved(state.slow, state.params["val"])
    assert (state.norm.low, state.norm.high, state.updates) == (0, 0, 0)
    assert set(state.params) == {"enc", "dyn", "dec", "rew", "con", "pol", "val"}
    assert set(agent.acting_params(state)) == {"enc", "dyn", "pol"}
    random = {name for name, leaf in tiny.leaves(state.params).items() if "kernel" in name and leaf.any()}
    assert moved(state.params, tiny.fresh(agent, seed=1).params) == random


def test_bf16_networks_keep_float32_parameters_norms_and_losses():
    half = tiny.agent(dtype="bfloat16")
    state, metrics, latents = updated(half)
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves((state, metrics))}
    assert kinds == {"float32", "int32"}
    assert latents["deter"].dtype == jnp.bfloat16
    exact = updated(AGENT)[1]
    for name in ("rec/zeta_loss", "rew_loss", "con_loss", "total_loss"):
        assert metrics[name] != exact[name]
        np.testing.assert_allclose(metrics[name], exact[name], rtol=0.1)


def test_draws_of_an_update_are_independent():
    agent = tiny.agent(tiny.MIXED, batch_size=32, imag_last=3)
    noise = tiny.update_noise(agent, KEY)
    assert noise.observed.shape == (32, 6, 2, 4)
    assert noise.imagined.shape == (4, 96, 2, 4)
    assert {key: x.shape for key, x in noise.action.items()} == {
        "steer": (4, 96, 2), "keys/both hands": (4, 96, 8), "gear": (4, 96, 4),
    }  # fmt: skip
    assert noise.action["steer"].std() == pytest.approx(1, abs=0.1)  # normal
    assert noise.action["gear"].mean() == pytest.approx(0.5772, abs=0.1)  # Gumbel
    drawn = [np.asarray(x).ravel()[:1500] for x in jax.tree.leaves(noise)]
    shortest = min(map(len, drawn))
    correlation = np.corrcoef([x[:shortest] for x in drawn])
    assert np.abs(correlation - np.eye(len(drawn))).max() < 0.2
    steps = np.corrcoef(np.asarray(noise.imagined).reshape(4, -1))
    assert np.abs(steps - np.eye(4)).max() < 0.2


# reports


def reported(rows, key: int = 0):
    noise = tiny.report_noise(AGENT, jax.random.key(key))
    return tiny.report(AGENT, tiny.state(AGENT), rows, noise)


def with_rows(array, at: slice, value: float):
    """Windows with one number in some of their trained rows, behind a context of 1."""
    out = array.copy()
    out[:, at.start + 1 : at.stop + 1] = value
    return out


def seeing(rows, at: slice):
    """The window with observations in some of its rows so far off that other latents are drawn."""
    return replace(rows, obs={key: with_rows(x, at, -100.0) for key, x in rows.obs.items()})


def test_a_report_gives_the_losses_of_an_update():
    report = reported(tiny.window(AGENT))
    noise = tiny.report_noise(AGENT, KEY).update
    _, metrics, _ = tiny.update(AGENT, tiny.state(AGENT), tiny.window(AGENT), noise)
    assert set(report.losses) == {name for name in metrics if name.endswith("_loss")} - {"total_loss"}
    for name, value in report.losses.items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-4)


def test_the_first_half_of_an_open_loop_prediction_uses_observations_the_second_actions_alone():
    rows = tiny.window(AGENT)
    before = reported(rows)
    assert before.observed == 2  # of 5
    shapes = {key: (x.truth.shape, x.prediction.shape) for key, x in before.open_loop.items()}
    assert shapes == {"zeta": ((3, 5, 3),) * 2, "alpha": ((3, 5, 1),) * 2}
    np.testing.assert_allclose(before.open_loop["zeta"].truth, rows.obs["zeta"][:, 1:6], rtol=1e-6)
    look = lambda report: np.asarray(report.open_loop["zeta"].prediction)
    later = reported(seeing(rows, slice(2, 6)))
    np.testing.assert_array_equal(look(later), look(before))
    assert not np.array_equal(later.open_loop["zeta"].truth, before.open_loop["zeta"].truth)
    earlier = reported(seeing(rows, slice(1, 2)))
    np.testing.assert_array_equal(look(earlier)[:, 0], look(before)[:, 0])
    assert (np.abs(look(earlier) - look(before))[:, 1:].max((0, 2)) > 1e-4).all()
    led_to_3 = with_rows(rows.action, slice(2, 3), 1.0)  # chosen after row 2
    steered = reported(replace(rows, action=led_to_3))
    np.testing.assert_array_equal(look(steered)[:, :3], look(before)[:, :3])
    assert (np.abs(look(steered) - look(before))[:, 3:].max((0, 2)) > 1e-4).all()


def test_predictions_are_in_the_environments_units():
    agent = tiny.agent(tiny.MIXED, recipe="latest", mults=(1,), kernel=1)
    noise = tiny.report_noise(agent, KEY)
    report = jax.eval_shape(agent.report, tiny.state(agent), tiny.window(agent), noise)
    kinds = {key: (x.prediction.shape, x.prediction.dtype.name) for key, x in report.open_loop.items()}
    assert kinds == {
        "sense/arm.x": ((3, 5, 3), "float32"), "level": ((3, 5, 1), "float32"), "grid": ((3, 5, 4), "float32"),
        "kind of thing": ((3, 5, 1), "float32"), "doors": ((3, 5, 2), "float32"),
        "view/right": ((3, 5, 12, 16, 3), "uint8"), "left view": ((3, 5, 12, 16, 1), "uint8"),
    }  # fmt: skip
    assert all(x.truth.shape == x.prediction.shape for x in report.open_loop.values())
    assert all(x.truth.dtype == x.prediction.dtype for x in report.open_loop.values())


def test_at_most_six_windows_are_predicted():
    noise = tiny.report_noise(tiny.agent(batch_size=9, report_length=32), KEY)
    assert noise.foreseen.shape == (3, 6, 2, 4)  # half of 6 rows


# compilation


def test_nothing_is_compiled_again_after_the_first_update_and_action():
    """Not by another window, nor by a state that an update made instead of `init`."""
    traces = []

    class Counted(DreamerV3):
        def update(self, *args):
            traces.append("update")
            return super().update(*args)

        def act(self, *args, **mode):
            traces.append("act")
            return super().act(*args, **mode)

    agent = Counted(AGENT.config, AGENT.env)
    update, act = tiny.jit(agent.update), tiny.jit(agent.act, static_argnames="mode")
    state, carry = tiny.state(AGENT), agent.initial_carry(4)
    for i in range(3):
        state, _, _ = update(state, tiny.window(agent, seed=i), tiny.update_noise(AGENT, jax.random.key(i)))
        obs, noise = tiny.observations(agent.env, (4,), seed=i), tiny.act_noise(AGENT, jax.random.key(i), 4)
        params = agent.acting_params(state)
        _, carry, _ = act(params, carry, obs, np.array([i == 0, True, False, False]), noise, mode="train")
    assert (update._cache_size(), act._cache_size()) == (1, 1)
    assert sorted(traces) == ["act", "update"]
    assert state.updates == 3
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    assert kinds(jax.eval_shape(agent.init, KEY)) == kinds(state)
