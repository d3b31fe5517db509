"""Acts in a batch of environments and appends one row per environment per tick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from telamon.agents.base import Action as Chosen
from telamon.agents.base import Agent, Mode, PyTree
from telamon.data import Counters, Rows, as_dtype
from telamon.envs.base import Action, BatchedEnv, EnvError, Step, map_action, random_action, zero_action
from telamon.keys import Stream, generator, stream
from telamon.replay import Replay


class Episode(NamedTuple):
    """A finished training episode."""

    env: int
    total_reward: float
    length: int
    """Agent steps."""


def jit_act(agent: Agent, num_envs: int, mode: Mode) -> Any:
    """`act(params, carry, obs, is_first, key, tick)`, jitted with its draws inside: one dispatch per tick."""

    def act(
        params: PyTree,
        carry: PyTree,
        obs: Mapping[str, jax.Array],
        is_first: jax.Array,
        key: jax.Array,
        tick: jax.Array,
    ) -> tuple[Chosen, PyTree, Mapping[str, jax.Array]]:
        noise = agent.draw_act_noise(jax.random.fold_in(key, tick), num_envs)
        return agent.act(params, carry, obs, is_first, noise, mode)

    return jax.jit(act)


def _zeroed(action: np.ndarray, where: np.ndarray) -> np.ndarray:
    """`action` [E, ...], zero in the environments `where` [E]."""
    return np.where(where.reshape(-1, *[1] * (action.ndim - 1)), np.zeros((), action.dtype), action)


class Collector:
    """One tick: act on the pending observations, append their rows, step the environments.

    The observations that a tick ends with are already counted as transitions and appended with the next tick's
    actions: updates made in between count the newest transition and the next action sees their parameters, exactly
    as in a loop that acts, steps and then trains.
    """

    def __init__(self, agent: Agent, env: BatchedEnv, replay: Replay, seed: int, counters: Counters) -> None:
        self._agent, self._env, self._replay, self._seed = agent, env, replay, seed
        self._act = jit_act(agent, env.num_envs, "train")
        self._key = stream(seed, Stream.ACT)
        self._env_id = np.arange(env.num_envs, dtype=np.int32)
        self._tick = 0
        self._carry = agent.initial_carry(env.num_envs)
        self._total_reward = np.zeros(env.num_envs)
        self._length = np.zeros(env.num_envs, np.int64)
        self._step: Step | None = None
        self.counters = counters

    @property
    def tick_count(self) -> int:
        return self._tick

    def tick(self, params: PyTree | None) -> list[Episode]:
        """Advances every environment by one row; returns the episodes that ended. `params` None acts at random.

        Raises EnvError where an environment gives what must not be learned from.
        """
        if self._step is None:
            self._enter(self._env.reset())
        step = self._step
        assert step is not None
        action, latents = self._choose(params, step)
        self._replay.append(
            Rows(self._env_id, step.obs, step.reward, step.is_first, step.is_last, step.is_terminal, action, latents)
        )
        self.counters.rows += self._env.num_envs
        self._tick += 1
        return self._enter(self._env.step(action))

    def _choose(self, params: PyTree | None, step: Step) -> tuple[Action, dict[str, np.ndarray]]:
        num_envs, spec = self._env.num_envs, self._env.spec.action
        if step.is_last.all() and not self._agent.row_spec.latents:
            return zero_action(spec, num_envs), {}  # ignored by a reset tick: no plan wasted
        if params is None:
            action = random_action(spec, num_envs, generator(self._seed, Stream.RANDOM_ACTION, self._tick))
            latents = {k: np.zeros((num_envs, *a.shape), as_dtype(a.dtype)) for k, a in self._agent.row_spec.latents}
        else:
            chosen, self._carry, made = self._act(
                params, self._carry, step.obs, step.is_first, self._key, np.uint32(self._tick)
            )
            action = map_action(np.asarray, chosen)
            latents = {k: np.asarray(v) for k, v in made.items()}
        return map_action(lambda a: _zeroed(a, step.is_last), action), latents

    def _enter(self, step: Step) -> list[Episode]:
        """Takes new observations as pending and keeps the books of their episodes."""
        if step.is_terminal.any() and not self._agent.learns_terminations:
            env = int(np.flatnonzero(step.is_terminal)[0])
            raise EnvError(
                f"environment {env} ({self._env.spec.id}) terminated at step {self._length[env] + 1} of its episode, "
                "but this agent was told that episodes only run out of time; set agent.episodic"
            )
        self._step = step
        self._total_reward = np.where(step.is_first, 0, self._total_reward + step.reward)
        self._length = np.where(step.is_first, 0, self._length + 1)
        self.counters.transitions += int((~step.is_first).sum())
        ended = [
            Episode(int(e), float(self._total_reward[e]), int(self._length[e])) for e in np.flatnonzero(step.is_last)
        ]
        self.counters.episodes += len(ended)
        return ended

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything from which `set_state` continues; without the environments' part where they cannot be saved."""
        leaves = {f"carry/{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self._carry))}
        env = self._env.get_state() if self._step is not None else None
        return {
            "tick": np.asarray(self._tick),
            "total_reward": self._total_reward,
            "length": self._length,
            **leaves,
            **{f"env/{k}": v for k, v in (env or {}).items()},
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> bool:
        """Continues from `get_state`. False: the environments could not be saved, so the episodes that were going on
        are abandoned and new ones begin (the carry is reset with them, by is_first)."""
        self._tick = int(state["tick"])
        leaves, treedef = jax.tree.flatten(self._carry)
        self._carry = jax.tree.unflatten(treedef, [state[f"carry/{i}"] for i in range(len(leaves))])
        env = {k.removeprefix("env/"): v for k, v in state.items() if k.startswith("env/")}
        if env:
            self._total_reward, self._length = state["total_reward"].copy(), state["length"].copy()
            self._step = self._env.set_state(env)
        return bool(env) or self._tick == 0
