"""An agent that tells on whoever feeds it: what it is given shows in its actions, its metrics and its parameters.

It belongs to counting environments with ACTION_SIZE action elements, whose rewards encode the actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.base import OpenLoop, Report
from telamon.data import ArraySpec, EnvSpec, RowSpec, Schedule, TrainRatio, Window, WindowSpec

ACTION_SIZE = 4
SCALE = 1024
"""Counts are acted out in units of 1 / SCALE, which float32 holds exactly."""
LENGTH = 3
"""Rows per window."""


class State(NamedTuple):
    updates: jax.Array
    """int32: updates that were applied."""
    memory: jax.Array
    """float32: depends on every window and every draw of every update, and on their order."""


def position(where: Any) -> Any:
    """(environment, episode, t) [..., 3] -> one small number [...] for (episode, t)."""
    return where[..., 1] * 16 + where[..., 2]


@dataclass(frozen=True)
class Probe:
    """Acts (updates, position, ticks in this episode, noise), each in units of 1 / SCALE but for the noise."""

    env: EnvSpec
    plan: Schedule | TrainRatio
    rows: int = 1000
    """Rows per environment that it keeps."""
    nan_share: float = 0.0
    """Share of updates whose `bad_loss` is not finite."""
    learns_terminations: bool = False
    batch_size: int = 4

    @property
    def row_spec(self) -> RowSpec:
        return RowSpec(self.env.obs, self.env.action.array)

    @property
    def window_spec(self) -> WindowSpec:
        return WindowSpec(LENGTH)

    @property
    def acts_at_random(self) -> bool:
        return True

    def schedule(self, num_envs: int) -> Schedule | TrainRatio:
        return self.plan

    def capacity(self, num_envs: int) -> int:
        return self.rows

    def init(self, key: jax.Array) -> State:
        return State(jnp.zeros((), jnp.int32), jax.random.normal(key))

    def acting_params(self, state: State) -> State:
        return state

    def initial_carry(self, num_envs: int) -> jax.Array:
        return jnp.zeros(num_envs, jnp.int32)

    def draw_act_noise(self, key: jax.Array, num_envs: int) -> jax.Array:
        return jax.random.uniform(key, (num_envs,), minval=-0.5, maxval=0.5)

    def draw_update_noise(self, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key)

    def act(
        self,
        params: State,
        carry: jax.Array,
        obs: Mapping[str, jax.Array],
        is_first: jax.Array,
        noise: jax.Array,
        mode: str,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        carry = jnp.where(is_first, 0, carry + 1)
        updates = jnp.full(carry.shape, params.updates)
        last = jnp.zeros_like(noise) if mode == "eval" else jnp.clip(noise + 0.01 * params.memory, -1, 1)
        action = [updates / SCALE, position(obs["where"]) / SCALE, carry / SCALE, last]
        return jnp.stack(action, -1).astype(jnp.float32), carry, {}

    def update(self, state: State, window: Window, noise: jax.Array) -> tuple[State, dict[str, jax.Array], None]:
        digest = (window.first_row + window.env_id / 8).mean() + window.reward.mean() + noise
        bad = jnp.where(noise < self.nan_share, jnp.nan, 0.0)
        metrics = {
            "torn": torn(window),
            "digest": digest,
            "newest": window.first_row.max(),
            "bad_loss": bad,
            "worse_loss": -bad,
        }
        return State(state.updates + 1, 0.9 * state.memory + 0.1 * digest + bad), metrics, None

    def draw_report_noise(self, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key)

    def report(self, state: State, window: Window, noise: jax.Array) -> Report:
        losses = {"torn": torn(window), "newest": window.first_row.max(), "noise": noise}
        return Report(losses, {}, jnp.zeros((), jnp.int32))


@dataclass(frozen=True)
class Remembering(Probe):
    """Has latents, learns from those of the context row, replaces those of the others, and foresees `where`.

    A row's latents are its position and which update made them: 0 for the act itself, updates from 1 on.
    """

    learns_terminations: bool = True

    @property
    def acts_at_random(self) -> bool:
        return False

    @property
    def row_spec(self) -> RowSpec:
        latents = (("made", ArraySpec((), "bfloat16")), ("place", ArraySpec(())))
        return RowSpec(self.env.obs, self.env.action.array, latents)

    @property
    def window_spec(self) -> WindowSpec:
        return WindowSpec(
            LENGTH + 1, context=1, cross_episodes=True, closed_only=False, start="windows", latents="context",
            online=True, annotate=True,
        )  # fmt: skip

    def latents(self, where: jax.Array, made: jax.Array | int) -> dict[str, jax.Array]:
        return {"made": jnp.full(where.shape[:-1], made, jnp.bfloat16), "place": position(where)}

    def act(self, params, carry, obs, is_first, noise, mode):
        action, carry, _ = super().act(params, carry, obs, is_first, noise, mode)
        return action, carry, self.latents(obs["where"], 0)

    def update(self, state: State, window: Window, noise: jax.Array) -> Any:
        seen = {k: v.astype(jnp.float32).mean() for k, v in window.latents.items()}
        new, metrics, _ = super().update(state, window, noise)
        new = new._replace(memory=new.memory + 0.01 * seen["made"] + 0.001 * seen["place"])
        wrong = (window.latents["place"] != position(window.obs["where"][:, :1])).sum()
        metrics |= {"torn": torn_across(window), "misplaced": wrong, "made": seen["made"]}
        return new, metrics, self.latents(window.obs["where"][:, 1:], state.updates + 1)

    def report(self, state: State, window: Window, noise: jax.Array) -> Report:
        losses = {"torn": torn_across(window), "newest": window.first_row.max(), "noise": noise}
        where = window.obs["where"][:, 1:]
        return Report(losses, {"where": OpenLoop(where, where + state.memory)}, jnp.ones((), jnp.int32))


def torn(window: Window) -> jax.Array:
    """How many windows are not what one counting environment gave in a row."""
    where, reward, action = window.obs["where"], window.reward, window.action
    weights = jnp.arange(1, ACTION_SIZE + 1, dtype=jnp.float32)
    wrong = [
        (where[..., 0] != window.env_id[:, None]).any(1),
        (where[:, 1:, 1] != where[:, :-1, 1]).any(1),
        (where[:, 1:, 2] != where[:, :-1, 2] + 1).any(1),
        (window.is_first != (where[..., 2] == 0)).any(1),
        (jnp.abs(reward[:, 1:] - action[:, :-1] @ weights) > 1e-5).any(1),
        (window.is_last[..., None] & (action != 0)).any((1, 2)),
    ]
    return jnp.stack(wrong).any(0).sum()


def torn_across(window: Window) -> jax.Array:
    """How many windows are not consecutive rows of one counting environment, episodes back to back, as annotated."""
    where, first, last = window.obs["where"], window.is_first, window.is_last
    begins = where[..., 2] == 0
    here, then = where[:, :-1], where[:, 1:]
    wrong = [
        (where[..., 0] != window.env_id[:, None]).any(1),
        ~first[:, 0],
        (first[:, 1:] != begins[:, 1:]).any(1),
        (last[:, :-1] != begins[:, 1:]).any(1),
        (then[..., 1] != here[..., 1] + begins[:, 1:]).any(1),
        (then[..., 2] != jnp.where(begins[:, 1:], 0, here[..., 2] + 1)).any(1),
    ]
    return jnp.stack(wrong).any(0).sum()


def acted(action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(updates, position, ticks in this episode) [...] that made an action [..., ACTION_SIZE]."""
    return tuple(np.rint(action[..., i] * SCALE).astype(int) for i in range(3))  # type: ignore[return-value]  # three of them
