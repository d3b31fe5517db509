"""Presets, recipes, the discount heuristic, and values that cannot work."""

from __future__ import annotations

import jax
import pytest

from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import PRESETS, RECIPES, TDMPC2Config, discount
from telamon.data import ActionSpec, ArraySpec, EnvSpec
from telamon.networks import param_count
from tests.telamon.agents.tdmpc2 import tiny


def shapes(preset: int, obs: int, action: int):
    env = EnvSpec("sizes", (("obs", ArraySpec((obs,))),), ActionSpec((action,)), 500)
    agent = TDMPC2(TDMPC2Config(**PRESETS[preset]), env)
    return jax.eval_shape(agent.init, jax.random.key(0)).params


@pytest.mark.parametrize(
    ("preset", "walker", "dog"),
    [
        (1, 1_214_651, 1_339_387),
        (5, 4_960_618, 5_159_082),
        (19, 18_062_442, 18_561_194),
        (48, 47_208_298, 48_081_066),
        (317, 312_595_417, 314_983_449),
    ],
)
def test_parameters_of_a_preset(preset, walker, dog):
    assert param_count(shapes(preset, 24, 6)) == walker
    assert param_count(shapes(preset, 223, 38)) == dog


def test_parameters_of_each_module_of_preset_5():
    counts = {name: param_count(tree) for name, tree in shapes(5, 24, 6).items()}
    assert counts == {"encoder": 139_520, "dynamics": 794_112, "reward": 582_245, "q": 2_911_225, "pi": 533_516}


def test_defaults_are_preset_5_with_recipe_paper():
    assert TDMPC2Config(**PRESETS[5]) == TDMPC2Config()
    assert TDMPC2Config().recipe == "paper"


def test_the_recipes_differ_in_everything_they_name():
    paper, latest = RECIPES["paper"], RECIPES["latest"]
    assert (paper.squashed_entropy, paper.q_dropout_always, paper.stale_policy_norm) == (True, True, True)
    assert (latest.squashed_entropy, latest.q_dropout_always, latest.stale_policy_norm) == (False, False, False)
    assert (paper.elite_draw, latest.elite_draw) == ("inverse_cdf", "gumbel")


@pytest.mark.parametrize(
    ("steps", "gamma"),
    [(1, 0.95), (50, 0.95), (100, 0.95), (200, 0.975), (250, 0.98), (500, 0.99), (1000, 0.995), (2000, 0.995)],
)
def test_discount_follows_from_the_episode_length(steps, gamma):
    assert discount(steps) == pytest.approx(gamma, rel=1e-12)
    assert tiny.agent(episode_length=steps).gamma == discount(steps)


def test_the_configured_episode_length_wins_over_the_environments():
    assert tiny.agent().episode_length == tiny.ENV.episode_length
    assert tiny.agent(episode_length=123).episode_length == 123


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(recipe="original"), "agent.recipe='original' must be one of paper, latest"),
        (dict(dtype="float16"), "agent.dtype='float16' must be one of float32, bfloat16"),
        (dict(env_batching="loop"), "agent.env_batching='loop' must be one of auto, vmap, map"),
        (dict(horizon=0), "agent.horizon=0 must be above 0"),
        (dict(lr=float("nan")), "agent.lr=nan must be above 0"),
        (dict(discount_denom=0), "agent.discount_denom=0 must be above 0"),
        (dict(num_q=1), "agent.num_q=1 must be 2 or more"),
        (dict(num_bins=1), "agent.num_bins=1 must be 2 or more"),
        (dict(vmin=3.0, vmax=3.0), "agent.vmin=3.0 must be below agent.vmax=3.0"),
        (dict(latent_dim=20), "agent.latent_dim=20 must be a multiple of agent.simnorm_dim=8"),
        (dict(dropout=1.0), r"agent.dropout=1.0 must lie in \[0, 1\)"),
        (dict(log_std_min=2.0), "agent.log_std_min=2.0 must be below agent.log_std_max=2.0"),
        (dict(tau=0.0), r"agent.tau=0.0 must lie in \(0, 1\]"),
        (dict(num_pi_trajs=513), r"agent.num_pi_trajs=513 must lie in 0..agent.num_samples=512"),
        (dict(num_elites=513), "agent.num_elites=513 must not exceed agent.num_samples=512"),
        (dict(min_std=3.0), r"agent.min_std=3.0 must lie in \[0, agent.max_std=2.0\]"),
        (dict(temperature=-1.0), "agent.temperature=-1.0 must not be negative"),
        (dict(episode_length=0), "agent.episode_length=0 must be above 0"),
        (dict(discount_min=0.999), "agent.discount_min=0.999, agent.discount_max=0.995 must rise within 0..1"),
        (dict(seed_steps=-1), "agent.seed_steps=-1 must not be negative"),
    ],
)
def test_values_that_cannot_work_are_refused_with_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        TDMPC2Config(**changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (
            EnvSpec("gym:CartPole-v1", (("obs", ArraySpec((4,))),), ActionSpec((), (2,)), 500),
            "continuous actions, but gym:CartPole-v1 has discrete actions .* choose an ENV with a Box",
        ),
        (
            EnvSpec("pixels", (("image", ArraySpec((64, 64, 3), "uint8")),), ActionSpec((2,)), 500),
            r"takes vector observations, but 'image' of pixels has shape \(64, 64, 3\); choose an ENV with vector",
        ),
        (
            EnvSpec("endless", (("obs", ArraySpec((4,))),), ActionSpec((2,)), None),
            "endless has no known time limit; set agent.episode_length",
        ),
    ],
)
def test_an_environment_that_it_cannot_learn_is_refused_with_one_sentence(env, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        TDMPC2(TDMPC2Config(), env)
    assert "\n" not in str(refusal.value)


def test_a_given_episode_length_serves_where_the_environment_has_none():
    env = EnvSpec("endless", (("obs", ArraySpec((4,))),), ActionSpec((2,)), None)
    assert TDMPC2(TDMPC2Config(episode_length=200), env).gamma == pytest.approx(0.975)
