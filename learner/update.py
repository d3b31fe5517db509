"""One donated, jitted update that never lets anything non-finite in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.base import Agent, PyTree, Report
from telamon.data import Window


class LearnerState(NamedTuple):
    """The agent's train state and the count of updates that were skipped."""

    train: PyTree
    skipped: jax.Array
    """int32: updates skipped in all."""
    streak: jax.Array
    """int32: updates skipped in a row, up to now."""


def init(agent: Agent, key: jax.Array) -> LearnerState:
    """A fresh state; compiled as one program, which is faster than op by op."""
    # two zeros: a buffer cannot be donated twice
    return LearnerState(jax.jit(agent.init)(key), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def make_update(agent: Agent) -> Any:
    """`update(state, window, key, index) -> (state, metrics, write_back)`, jitted; donates `state`.

    Update `index` draws from `fold_in(key, index)`, so a resumed run repeats its draws. Where any metric is not
    finite, the old state is kept, the skip is counted, and the caller must drop the write-back. (A gradient that is
    not finite shows in its norm, which agents report.)
    """

    def update(
        state: LearnerState, window: Window, key: jax.Array, index: jax.Array
    ) -> tuple[LearnerState, Mapping[str, jax.Array], PyTree]:
        noise = agent.draw_update_noise(jax.random.fold_in(key, index))
        new, metrics, write_back = agent.update(state.train, window, noise)
        ok = jnp.isfinite(jnp.stack([jnp.asarray(v, jnp.float32) for v in metrics.values()])).all()
        train = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state.train)
        skipped = state.skipped + jnp.where(ok, 0, 1)
        streak = jnp.where(ok, 0, state.streak + 1)
        return LearnerState(train, skipped, streak), OrderedDict(metrics), write_back  # a dict would come back sorted

    return jax.jit(update, donate_argnums=0)


def make_report(agent: Agent) -> Any:
    """`report(state, window, key) -> Report`, jitted; everything that it draws comes from `key`."""

    def report(state: LearnerState, window: Window, key: jax.Array) -> Report:
        found = agent.report(state.train, window, agent.draw_report_noise(key))
        return found._replace(losses=OrderedDict(found.losses), open_loop=OrderedDict(found.open_loop))

    return jax.jit(report)


def first_non_finite(metrics: Mapping[str, Any]) -> str | None:
    """Name of the first metric, in the order in which the update computed them, that is not finite."""
    return next((name for name, value in metrics.items() if not np.isfinite(value)), None)
