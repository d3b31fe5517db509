"""Acts in a batch of environments and appends one row per environment per tick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import numpy as np

from telamon.agents.base import Action as Chosen
from telamon.agents.base import Agent, Mode, PyTree
from telamon.data import Counters, Rows, as_dtype
from telamon.envs.base import Action, BatchedEnv, EnvError, Step, map_action, random_action, zero_action
from telamon.keys import Stream, generator, stream
from telamon.telemetry.histogram import Histogram
from telamon.telemetry.stopwatch import Stopwatch


class Sink(Protocol):
    """The part of a `Replay` that takes rows."""

    def append(self, rows: Rows) -> None: ...


class Episode(NamedTuple):
    """A finished training episode."""

    env: int
    total_reward: float
    length: int
    """Agent steps."""


Doing = Literal["idle", "snapshot", "acting", "replay", "environment"]
"""What an actor does, or waits for; `replay`: for credit, or for a replay server that is away."""


_SIZES = tuple(digit * 10.0**power for power in range(5) for digit in (1, 2, 5))
LENGTHS = _SIZES
"""Upper bounds of the histogram of episodes' lengths, in agent steps."""
RETURNS = (*(-size for size in reversed(_SIZES)), 0.0, *_SIZES)
"""That of their returns."""


class Books:
    """Returns and lengths of episodes: of those that are going on in a batch of environments, and of all that ended."""

    def __init__(self, agent: Agent, num_envs: int) -> None:
        self._agent = agent
        self.total_reward = np.zeros(num_envs)
        self.length = np.zeros(num_envs, np.int64)
        self.returns, self.lengths = Histogram(RETURNS), Histogram(LENGTHS)
        """Of the episodes that have ended since this was made."""

    def enter(self, step: Step, counters: Counters) -> list[Episode]:
        """Takes in new observations, and counts their transitions; returns the episodes that they end.

        Raises EnvError for a termination that the agent was told would not come.
        """
        if step.is_terminal.any() and not self._agent.learns_terminations:
            env = int(np.flatnonzero(step.is_terminal)[0])
            raise EnvError(
                f"environment {env} ({self._agent.env.id}) terminated at step {self.length[env] + 1} of its episode, "
                "but this agent was told that episodes only run out of time; set agent.episodic"
            )
        self.total_reward = np.where(step.is_first, 0, self.total_reward + step.reward)
        self.length = np.where(step.is_first, 0, self.length + 1)
        counters.transitions += int((~step.is_first).sum())
        ended = [
            Episode(int(e), float(self.total_reward[e]), int(self.length[e])) for e in np.flatnonzero(step.is_last)
        ]
        counters.episodes += len(ended)
        for episode in ended:
            self.returns.observe(episode.total_reward)
            self.lengths.observe(episode.length)
        return ended


def jit_act(agent: Agent, num_envs: int, mode: Mode) -> Any:
    """`act(params, carry, obs, is_first, key, tick)`, jitted with its draws inside: one dispatch per tick.

    Its program is called `act`, that of mode `eval` `act_eval`: it is another one, and neither is compiled again.
    """

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

    act.__name__ = {"train": "act", "eval": "act_eval"}[mode]
    return jax.jit(act)


def random_draws(seed: int, index: tuple[int, ...], tick: int) -> np.random.Generator:
    """What the random actions of one tick are drawn from."""
    return generator(seed, Stream.RANDOM_ACTION, *index, tick)


def _zeroed(action: np.ndarray, where: np.ndarray) -> np.ndarray:
    """`action` [E, ...], zero in the environments `where` [E]."""
    return np.where(where.reshape(-1, *[1] * (action.ndim - 1)), np.zeros((), action.dtype), action)


def params_like(agent: Agent) -> PyTree:
    """Shapes and types of acting parameters."""
    return jax.eval_shape(lambda key: agent.acting_params(agent.init(key)), jax.random.key(0))


class Collector:
    """One tick: act on the pending observations, append their rows, step the environments.

    The observations that a tick ends with are already counted as transitions and appended with the next tick's
    actions: updates made in between count the newest transition and the next action sees their parameters, exactly
    as in a loop that acts, steps and then trains.

    index: of this actor's own streams of randomness, below those of `seed`; a run with one actor has none.
    """

    def __init__(
        self, agent: Agent, env: BatchedEnv, replay: Sink, seed: int, counters: Counters, index: tuple[int, ...] = ()
    ) -> None:
        self._agent, self.env, self._replay = agent, env, replay
        self._act = jit_act(agent, env.num_envs, "train")
        self._key = stream(seed, Stream.ACT, *index)
        self._seed, self._index = seed, index
        self._env_id = np.arange(env.num_envs, dtype=np.int32)
        self._tick = 0
        self._carry = agent.initial_carry(env.num_envs)
        self.books = Books(agent, env.num_envs)
        self._step: Step | None = None
        self.counters = counters
        self.stopwatch: Stopwatch[Doing] = Stopwatch(get_args(Doing), "idle")

    @property
    def tick_count(self) -> int:
        return self._tick

    def prepare(self) -> None:
        """Compiles what acts with parameters, for a `tick` that will not have to."""
        num_envs = self.env.num_envs
        obs = {k: jax.ShapeDtypeStruct((num_envs, *a.shape), as_dtype(a.dtype)) for k, a in self.env.spec.obs}
        is_first = jax.ShapeDtypeStruct((num_envs,), bool)
        self._act.lower(params_like(self._agent), self._carry, obs, is_first, self._key, np.uint32(0)).compile()

    def tick(self, params: PyTree | None) -> list[Episode]:
        """Advances every environment by one row; returns the episodes that ended. `params` None acts at random.

        Raises EnvError where an environment gives what must not be learned from.
        """
        watch = self.stopwatch
        if self._step is None:
            watch.now("environment")
            self._enter(self.env.reset())
        step = self._step
        assert step is not None
        watch.now("acting")
        action, latents = self._choose(params, step)
        watch.now("replay")
        self._replay.append(
            Rows(self._env_id, step.obs, step.reward, step.is_first, step.is_last, step.is_terminal, action, latents)
        )
        self.counters.rows += self.env.num_envs
        self._tick += 1
        watch.now("environment")
        ended = self._enter(self.env.step(action))
        watch.now("idle")
        return ended

    def _choose(self, params: PyTree | None, step: Step) -> tuple[Action, dict[str, np.ndarray]]:
        num_envs, spec = self.env.num_envs, self.env.spec.action
        if step.is_last.all() and not self._agent.row_spec.latents:
            return zero_action(spec, num_envs), {}  # ignored by a reset tick: no plan wasted
        if params is None:
            action = random_action(spec, num_envs, random_draws(self._seed, self._index, self._tick))
            latents = {k: np.zeros((num_envs, *a.shape), as_dtype(a.dtype)) for k, a in self._agent.row_spec.latents}
        else:
            chosen, self._carry, made = self._act(
                params, self._carry, step.obs, step.is_first, self._key, np.uint32(self._tick % 2**32)
            )
            action = map_action(np.asarray, chosen)
            latents = {k: np.asarray(v) for k, v in made.items()}
        return map_action(lambda a: _zeroed(a, step.is_last), action), latents

    def _enter(self, step: Step) -> list[Episode]:
        """Takes new observations as pending and keeps the books of their episodes."""
        ended = self.books.enter(step, self.counters)
        self._step = step
        return ended

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything from which `set_state` continues; without the environments' part where they cannot be saved."""
        leaves = {f"carry/{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self._carry))}
        env = self.env.get_state() if self._step is not None else None
        return {
            "tick": np.asarray(self._tick),
            "total_reward": self.books.total_reward,
            "length": self.books.length,
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
            self.books.total_reward, self.books.length = state["total_reward"].copy(), state["length"].copy()
            self._step = self.env.set_state(env)
        return bool(env) or self._tick == 0
