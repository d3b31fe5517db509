"""plan_*.npz: decisions. Each iteration from the recorded mean and std before it; then every plan runs freely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.tdmpc2 import planner
from telamon.agents.tdmpc2.agent import TDMPC2, ActNoise
from telamon.agents.tdmpc2.networks import Params
from tests.parity.fixture import OBS, Fixture, Refused, agent, jit
from tests.parity.report import Line, compare

trajectories = jit(planner.policy_trajectories, static_argnums=0)
iterate = jit(planner.iterate, static_argnums=(0, 2), static_argnames="dropout_key")
plan = jit(planner.plan, static_argnums=(0, 2), static_argnames="eval_mode")


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of all cases of the file."""
    actor = agent(fixture, "paper" if any(key.endswith("draw/uniform") for key in fixture) else "latest")
    yield compare("cfg/discount", "constant", actor.gamma, fixture["cfg/discount"])
    if "cfg/bin_size" in fixture:
        yield compare("cfg/bin_size", "constant", actor.networks.two_hot.step, fixture["cfg/bin_size"])
    params = fixture.params("init/")
    model = actor.networks, params, actor.gamma
    fixture.under("init_target/")  # no part of a decision
    for c in fixture.numbered(r"c(\d+)/"):
        z = actor.networks.encode(params, jnp.asarray(fixture[f"{c}obs"]))
        prev_mean, t0 = jnp.asarray(fixture[f"{c}prev_mean"]), jnp.asarray(fixture[f"{c}t0"])
        noise = draws(fixture, c, actor)
        pi_actions = trajectories(actor.networks, params, z[None], noise.pi_traj_eps)

        mean, std = planner.warm_start(prev_mean, t0), jnp.full_like(prev_mean, actor.config.max_std)
        for i, it in enumerate(fixture.numbered(rf"{c}it(\d+)/")):
            draw = noise.candidates[i], noise.terminal_eps[i], noise.pairs[i]
            found = iterate(*model, z[None], pi_actions, mean, std, *draw, dropout_key=None)
            actions, value = jnp.asarray(fixture[f"{it}actions"]), jnp.asarray(fixture[f"{it}value"][:, 0])
            yield compare(f"{it}actions", "plan", found.actions, fixture[f"{it}actions"])
            yield compare(f"{it}value", "plan_value", found.value[:, None], fixture[f"{it}value"])
            # From the recorded values: a score multiplies their errors, and a near tie may change places.
            refit = planner.refit(actor.config, actions, value)
            yield compare(f"{it}elite_idxs", "exact", np.sort(refit.elites), np.sort(fixture[f"{it}elite_idxs"]))
            yield compare(f"{it}elite_value", "exact", value[refit.elites][:, None], fixture[f"{it}elite_value"])
            for name, ours in (("score", refit.score[:, None]), ("mean", refit.mean), ("std", refit.std)):
                yield compare(it + name, "plan", ours, fixture[it + name])
            mean, std = jnp.asarray(fixture[f"{it}mean"]), jnp.asarray(fixture[f"{it}std"])

        decided = plan(*model, z, prev_mean, t0, noise, eval_mode=bool(fixture[f"{c}eval_mode"]))
        yield compare(f"{c}elite_pick", "exact", decided.elite, fixture[f"{c}elite_pick"])
        yield compare(f"{c}action", "plan", decided.action, fixture[f"{c}action"])
        yield compare(f"{c}new_prev_mean", "plan", decided.mean, fixture[f"{c}new_prev_mean"])
        if f"{c}nompc/z" in fixture:
            yield from without_planner(fixture, c, actor, params)


def without_planner(fixture: Fixture, c: str, actor: TDMPC2, params: Params) -> Iterator[Line]:
    """Acting from the policy prior: `act` of an agent with mpc=False."""
    actor = replace(actor, config=replace(actor.config, mpc=False))
    obs = jnp.asarray(fixture[f"{c}obs"])[None]
    noise = ActNoise(plan=draws(fixture, c, actor), policy_eps=jnp.asarray(fixture[f"{c}nompc/pi_eps"]))
    yield compare(f"{c}nompc/z", "latent", actor.networks.encode(params, obs), fixture[f"{c}nompc/z"])
    for mode, name in (("train", "action_sample"), ("eval", "action_mean")):
        action, _, _ = actor.act(params, actor.initial_carry(1), {OBS: obs}, jnp.array([True]), noise, mode)
        yield compare(f"{c}nompc/{name}", "logit", action, fixture[f"{c}nompc/{name}"])


def draws(fixture: Fixture, c: str, actor: TDMPC2) -> planner.PlanNoise:
    """The recorded draws of one case. What it did not draw is NaN, which shows up wherever it is used after all."""
    horizon, width = fixture[f"{c}prev_mean"].shape
    iterations = fixture.numbered(rf"{c}it(\d+)/")
    if not iterations:
        raise Refused(f"{fixture.path} holds no {c}it0/, so its case {c[:-1]} has no iteration to check")
    stack = lambda name: jnp.stack([jnp.asarray(fixture[f"{it}draw/{name}"]) for it in iterations])
    given = lambda name, shape: jnp.asarray(fixture[c + name]) if c + name in fixture else jnp.full(shape, jnp.nan)
    elite = "draw/uniform" if f"{c}draw/uniform" in fixture else "draw/exponential"
    return planner.PlanNoise(
        pi_traj_eps=given("draw/pi_traj_eps", (horizon, actor.config.num_pi_trajs, width)),
        candidates=stack("noise"),
        terminal_eps=stack("term_pi_eps"),
        pairs=stack("q_pair"),
        elite=jnp.asarray(fixture[c + elite], jnp.float32),
        final=given("draw/final_noise", (width,)),
        dropout=jax.random.key(0),  # unused: dropout is 0
    )
