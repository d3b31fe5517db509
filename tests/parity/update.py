"""update_*.npz: consecutive updates from one initial state, free-running, every recorded quantity of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.tdmpc2 import optim
from telamon.agents.tdmpc2.agent import Found, TrainState, UpdateNoise
from telamon.agents.tdmpc2.config import RECIPES
from telamon.agents.tdmpc2.losses import Batch
from telamon.interop.tdmpc2 import to_reference
from tests.parity.fixture import Fixture, agent, jit
from tests.parity.report import Line, compare, compare_tree

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
    "loss/pi_loss": "loss",
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
    "adam_m/": "moment",
    "adam_v/": "moment",
}
"""Recorded groups of named tensors -> kind of tolerance. `adam_v` is compared as its root, which is what Adam uses."""


def check(fixture: Fixture) -> Iterator[Line]:
    """Lines of all updates of the file."""
    updates = fixture.numbered(r"u(\d+)/")
    learner = agent(fixture, "paper" if any(key.endswith("mid/pi_log_pi") for key in fixture) else "latest")
    yield compare("cfg/discount", "constant", learner.gamma, fixture["cfg/discount"])
    if "cfg/bin_size" in fixture:
        yield compare("cfg/bin_size", "constant", learner.networks.two_hot.step, fixture["cfg/bin_size"])

    state = learner.start(fixture.params("init/"), fixture.params("init_target/")["q"])
    step = jit(learner.update_with_intermediates)
    pi_grads: dict[str, np.ndarray] = {}  # what the previous update left lying in the policy's gradient, recipe `paper`
    for u in updates:
        batch, noise = inputs(fixture, u)
        if left := {name: fixture[key] for key in fixture if (name := key.removeprefix(f"{u}grad_wm/")) in pi_grads}:
            norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in left.values()))
            yield compare(f"{u}carried policy norm", "norm", jnp.sqrt(state.optim.stale_square), norm)
        state, metrics, found = step(state, batch, noise)
        ours = quantities(metrics, found)
        for name, kind in KINDS.items():
            if u + name in fixture:
                yield compare(u + name, kind, ours[name], fixture[u + name], _slack(name, found))
        trees = named_tensors(found, state, pi_grads)
        for name, kind in TREES.items():
            if recorded := fixture.under(u + name):
                yield compare_tree(f"{u}{name}*", kind, trees[name], _root(recorded) if name == "adam_v/" else recorded)
        if RECIPES[learner.config.recipe].stale_policy_norm:
            clip = optim.clip_coefficient(metrics["pi_grad_norm"], learner.config.grad_clip_norm)
            pi_grads = {name: g * clip for name, g in to_reference({"pi": found.pi_grads}).items()}


def inputs(fixture: Fixture, u: str) -> tuple[Batch, UpdateNoise]:
    """The recorded batch and draws of one update. Recorded scalars have a last axis of 1, ours have none."""
    reward = fixture[f"{u}batch/reward"]
    terminated = fixture[f"{u}batch/terminated"] if f"{u}batch/terminated" in fixture else np.zeros_like(reward)
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


def _slack(name: str, found: Found) -> np.ndarray | float:
    """Near saturation ln(1 - a^2 + 1e-6) magnifies one rounding of a by up to 2e6: as many logit tolerances more."""
    if name not in ("mid/pi_entropy", "mid/pi_log_pi"):
        return 0.0
    a = np.asarray(found.policy.sample.action, np.float64)
    return 0.01 * (1 / (np.maximum(1 - a**2, 0) + 1e-6)).sum(-1, keepdims=True)
