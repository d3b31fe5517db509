"""What the rest of the system may ask of an agent. Both agents are frozen dataclasses with pure, jittable methods.

Nothing at or below this line knows of threads, sockets, files or Ray. All randomness enters as explicit arrays:
`draw_act_noise` and `draw_update_noise` make one pytree from one key, so that a test can inject recorded draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax

from telamon.data import EnvSpec, RowSpec, Schedule, TrainRatio, Window, WindowSpec

PyTree = Any
Mode = Literal["train", "eval"]
Action = jax.Array | Mapping[str, jax.Array]
"""[E, *action shape], or one such array per key of a dict action."""


class OpenLoop(NamedTuple):
    """An observation as it was and as the world model foresaw it, for N windows of T rows.

    Images are uint8 [N, T, height, width, channels]; vectors float32 [N, T, size], in the environment's own units.
    """

    truth: jax.Array
    prediction: jax.Array


class Report(NamedTuple):
    """What a look at an agent finds; nothing of the agent changes."""

    losses: Mapping[str, jax.Array]
    """Scalars."""
    open_loop: Mapping[str, OpenLoop]
    """By observation key; empty for an agent that predicts no observations."""
    observed: jax.Array
    """int32: leading rows of each window that the model saw; the rest it foresaw from the actions alone."""


class Agent(Protocol):
    """A world-model agent for one EnvSpec. Axes: E environments, B batch, T time."""

    @property
    def env(self) -> EnvSpec: ...

    @property
    def row_spec(self) -> RowSpec:
        """What replay must store."""
        ...

    @property
    def window_spec(self) -> WindowSpec:
        """What replay must serve."""
        ...

    @property
    def batch_size(self) -> int:
        """Windows per update."""
        ...

    @property
    def learns_terminations(self) -> bool:
        """Whether a true termination means anything to this agent; if not, an environment that has one is refused."""
        ...

    @property
    def acts_at_random(self) -> bool:
        """Whether actors act uniformly at random until the first update, instead of by the fresh policy."""
        ...

    def schedule(self, num_envs: int) -> Schedule | TrainRatio:
        """How many updates are due."""
        ...

    def capacity(self, num_envs: int) -> int:
        """Rows per environment that the agent's preset keeps."""
        ...

    def init(self, key: jax.Array) -> PyTree:
        """TrainState, a NamedTuple: parameters, targets, optimisers, normalisers, counters.

        A learner over several devices gathers all fields on each but `optim`, which networks never read.
        """
        ...

    def acting_params(self, state: PyTree) -> PyTree:
        """The part of a TrainState that an actor needs."""
        ...

    def initial_carry(self, num_envs: int) -> PyTree:
        """What an actor carries from tick to tick, leaves [E, ...]."""
        ...

    def act(
        self,
        params: PyTree,
        carry: PyTree,
        obs: Mapping[str, jax.Array],
        is_first: jax.Array,
        noise: PyTree,
        mode: Mode,
    ) -> tuple[Action, PyTree, Mapping[str, jax.Array]]:
        """(action [E, ...], carry, latents to store with the row)."""
        ...

    def update(
        self, state: PyTree, window: Window, noise: PyTree
    ) -> tuple[PyTree, Mapping[str, jax.Array], Mapping[str, jax.Array] | None]:
        """(state, scalar metrics, latents to write back or None). One gradient step.

        Latents are [B, T, ...], for the T rows of each window that follow its context.
        """
        ...

    def report(self, state: PyTree, window: Window, noise: PyTree) -> Report:
        """Losses without any change of state, and open-loop predictions."""
        ...

    def draw_act_noise(self, key: jax.Array, num_envs: int) -> PyTree: ...

    def draw_update_noise(self, key: jax.Array) -> PyTree: ...

    def draw_report_noise(self, key: jax.Array) -> PyTree: ...


jax.tree_util.register_dataclass(
    Window,
    data_fields=["env_id", "first_row", "obs", "reward", "is_first", "is_last", "is_terminal", "action", "latents"],
    meta_fields=[],
    drop_fields=["incarnation"],  # static, it would compile an update anew after every restore
)
