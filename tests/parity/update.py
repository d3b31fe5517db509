"""update_*.npz: consecutive updates: every quantity of each from the recorded state before it; and running freely."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.tdmpc2 import optim
from telamon.agents.tdmpc2.agent import TDMPC2, Found, TrainState, UpdateNoise, split
from telamon.agents.tdmpc2.config import RECIPES, TDMPC2Config
from telamon.agents.tdmpc2.losses import Batch
from telamon.interop.tdmpc2 import to_reference
from tests.parity.fixture import Fixture, agent, jit
from tests.parity.report import ABSOLUTE, SCALED, Line, compare, compare_tree, magnitude

KINDS = {
    "mid/next_z": "latent",
    "mid/td_target": "value",
    "mid/zs": "latent",
    "mid/q_logits": "logit",
    "mid/reward_logits": "logit",
    "mid/termination_logits": "logit",
    "mid/pi_action": "logit",
    "mid/pi_q_scaled": "value",
    "mid/pi_scaled_entropy": "logit",
    "mid/pi_entropy": "logit",
    "mid/pi_log_pi": "logit",
    "loss/consistency_loss": "loss",
    "loss/reward_loss": "loss",
    "loss/value_loss": "loss",
    "loss/termination_loss": "loss",
    "loss/total_loss": "loss",
    "loss/pi_loss": "norm",  # a mean of values, which are less exact than logits
    "stat/grad_norm": "norm",
    "stat/pi_grad_norm": "norm",
    "stat/termination_rate": "loss",
    "stat/termination_f1": "loss",
    "after_scale": "scale",
}
"""Recorded arrays and scalars of one update -> kind of tolerance."""

TREES = {
    "grad_wm/": "gradient",
    "grad_pi/": "gradient",
    "after/": "parameter",
    "after_target/": "target",
    "adam_m/": "gradient",
    "adam_v/": "gradient",
}
"""Recorded groups of named tensors -> kind of tolerance. `adam_v` is compared as its root, which is what Adam uses."""


step = jit(TDMPC2.update_with_intermediates, static_argnums=0)


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of all updates of the file."""
    learner = agent(fixture, "paper" if any(key.endswith("mid/pi_log_pi") for key in fixture) else "latest")
    yield compare("cfg/discount", "constant", learner.gamma, fixture["cfg/discount"])
    if "cfg/bin_size" in fixture:
        yield compare("cfg/bin_size", "constant", learner.networks.two_hot.step, fixture["cfg/bin_size"])

    updates = fixture.numbered(r"u(\d+)/")
    start = running = learner.start(fixture.params("init/"), fixture.params("init_target/")["q"])
    left: dict[str, np.ndarray] = {}  # recipe `paper`: the policy gradient that the previous update left, clipped
    slack: dict[str, np.ndarray] = {}
    for k, u in enumerate(updates, 1):
        batch, noise = inputs(fixture, u)
        state, metrics, found = step(learner, start, batch, noise)
        ours = quantities(metrics, found)
        for name, kind in KINDS.items():
            if u + name in fixture:
                yield compare(u + name, kind, ours[name], fixture[u + name], entropy_slack(name, found, noise))
        moved = step_slack(fixture, u, k, learner.config)
        target_moved = {name: learner.config.tau * x for name, x in moved.items() if name.startswith("_Qs.")}
        trees = named_tensors(found, state, left)
        for name, kind in TREES.items():
            if recorded := fixture.under(u + name):
                recorded = _root(recorded) if name == "adam_v/" else recorded
                allowance = {"after/": moved, "after_target/": target_moved}.get(name, {})
                yield compare_tree(f"{u}{name}*", kind, trees[name], recorded, allowance)

        running = step(learner, running, batch, noise)[0]
        slack = {name: slack.get(name, 0.0) + x for name, x in moved.items()}
        if k > 1:
            after, target = to_reference(running.params), to_reference({"q": running.target_q})
            yield compare_tree(f"{u}after/*, running freely", "parameter", after, fixture.under(f"{u}after/"), slack)
            yield compare_tree(
                f"{u}after_target/*, running freely", "target", target, fixture.under(f"{u}after_target/"), slack
            )
            yield compare(f"{u}after_scale, running freely", "scale", running.scale, fixture[f"{u}after_scale"])
        if k < len(updates):
            start = recorded_state(fixture, u, k, learner, state)
            if RECIPES[learner.config.recipe].stale_policy_norm:
                coefficient = np.asarray(optim.clip_coefficient(metrics["pi_grad_norm"], learner.config.grad_clip_norm))
                left = {name: g * coefficient for name, g in to_reference({"pi": found.pi_grads}).items()}
                norm = np.sqrt(
                    sum((fixture[f"{updates[k]}grad_wm/{name}"].astype(np.float64) ** 2).sum() for name in left)
                )
                yield compare(f"{u}carried policy norm", "norm", jnp.sqrt(state.optim.stale_square), norm)


def recorded_state(fixture: Fixture, u: str, k: int, learner: TDMPC2, ours: TrainState) -> TrainState:
    """The state after update `u`, the k-th, as recorded; only the carried policy norm, which is not, is ours."""
    state = learner.start(fixture.params(f"{u}after/"), fixture.params(f"{u}after_target/")["q"])
    mu, nu = (split(fixture.params(u + moment)) for moment in ("adam_m/", "adam_v/"))
    count = jnp.asarray(k, jnp.int32)
    world = state.optim.world._replace(count=count, mu=mu[0], nu=nu[0])
    policy = state.optim.policy._replace(count=count, mu=mu[1], nu=nu[1])
    moments = optim.OptimState(world, policy, ours.optim.stale_square)
    return state._replace(optim=moments, scale=jnp.asarray(fixture[f"{u}after_scale"]))


def inputs(fixture: Fixture, u: str) -> tuple[Batch, UpdateNoise]:
    """The recorded batch and draws of one update. Recorded scalars have a last axis of 1, ours have none."""
    reward = fixture[f"{u}batch/reward"]
    terminated = fixture.get(f"{u}batch/terminated", np.zeros_like(reward))
    batch = Batch(fixture[f"{u}batch/obs"], fixture[f"{u}batch/action"], reward[..., 0], terminated[..., 0])
    noise = UpdateNoise(
        td_eps=fixture[f"{u}draw/td_pi_eps"],
        td_pair=fixture[f"{u}draw/td_q_pair"],
        pi_eps=fixture[f"{u}draw/pi_eps"],
        pi_pair=fixture[f"{u}draw/pi_q_pair"],
        dropout=jax.random.key(0),  # unused: dropout is 0
    )
    return jax.tree.map(jnp.asarray, batch), jax.tree.map(jnp.asarray, noise)


def quantities(metrics: Mapping[str, jax.Array], found: Found) -> dict[str, np.ndarray]:
    """Our arrays under the names of KINDS, shaped as recorded."""
    column = lambda x: np.asarray(x)[..., None]
    model, policy = found.model, found.policy
    ours = {
        "mid/next_z": found.target.next_z,
        "mid/td_target": column(found.target.value),
        "mid/zs": model.zs,
        "mid/q_logits": model.q_logits,
        "mid/reward_logits": model.reward_logits,
        "mid/pi_action": policy.sample.action,
        "mid/pi_q_scaled": column(policy.q),
        "mid/pi_scaled_entropy": column(policy.bonus),
        "mid/pi_entropy": column(policy.entropy),
        "mid/pi_log_pi": column(-policy.bonus),
        "after_scale": metrics["pi_scale"],
    }
    if model.termination_logits is not None:
        ours["mid/termination_logits"] = column(model.termination_logits)
    scalars = (name for name in KINDS if name.startswith(("loss/", "stat/")))
    return ours | {name: metrics[last] for name in scalars if (last := name.rpartition("/")[2]) in metrics}


def named_tensors(
    found: Found, state: TrainState, pi_grads: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
    """Our tensors under the groups of TREES and the reference's names."""
    moments = lambda which: {
        **to_reference(getattr(state.optim.world, which)),
        **to_reference({"pi": getattr(state.optim.policy, which)}),
    }
    return {
        "grad_wm/": {**to_reference(found.grads), **pi_grads},
        "grad_pi/": to_reference({"pi": found.pi_grads}),
        "after/": to_reference(state.params),
        "after_target/": to_reference({"q": state.target_q}),
        "adam_m/": moments("mu"),
        "adam_v/": _root(moments("nu")),
    }


def _root(named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.sqrt(v) for name, v in named.items()}


def entropy_slack(name: str, found: Found, noise: UpdateNoise) -> np.ndarray | float:
    """Added to the denominators of the entropy quantities, which are n times sums over n dimensions that nearly cancel.

    The squash term carries the rounding of eps * std, and ln(1 - a^2 + 1e-6) magnifies that of a tanh by up to 2e6.
    """
    if name not in ("mid/pi_scaled_entropy", "mid/pi_entropy", "mid/pi_log_pi"):
        return 0.0
    action, log_std, eps = (
        np.asarray(x, np.float64) for x in (found.policy.sample.action, found.policy.sample.log_std, noise.pi_eps)
    )
    gaussian = 0.1 * action.shape[-1] * (np.abs(log_std) + 0.5 * eps**2)
    squash = 0.5 * np.abs(eps) * np.exp(log_std) + 0.05 / (np.maximum(1 - action**2, 0) + 1e-6)
    return (gaussian + squash).sum(-1, keepdims=True)


def step_slack(fixture: Fixture, u: str, k: int, config: TDMPC2Config) -> dict[str, np.ndarray]:
    """Added to the denominators of parameters after the k-th Adam step: how far moments within tolerance move them.

    It matters where a gradient is as small as its own rounding error: Adam divides it by its size all the same.
    """
    allowed = SCALED["gradient"] / ABSOLUTE["parameter"]
    slack = {}
    for name, v in fixture.under(f"{u}adam_v/").items():
        m = np.abs(fixture[f"{u}adam_m/{name}"].astype(np.float64))
        eps = optim.POLICY_EPS if name.startswith("_pi.") else optim.WORLD_EPS
        rate = config.lr * (config.enc_lr_scale if name.startswith("_encoder.") else 1.0)
        root = np.sqrt(v.astype(np.float64) / (1 - 0.999**k)) + eps
        slack[name] = rate * allowed * (magnitude(m) + m) / (1 - 0.9**k) / root
    return slack
