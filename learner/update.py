"""One donated, jitted update that never lets anything non-finite in, on one device or over a mesh."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from learner import mesh as meshes
from telamon.agents.base import Agent, PyTree, Report
from telamon.data import Window

log = logging.getLogger(__name__)


class NonFiniteUpdate(RuntimeError):
    """Too many updates in a row were not finite."""


class LearnerState(NamedTuple):
    """The agent's train state and the count of updates that were skipped."""

    train: PyTree
    skipped: jax.Array
    """int32: updates skipped in all."""
    streak: jax.Array
    """int32: updates skipped in a row, up to now."""


class Outcome(NamedTuple):
    """What an update tells. Its arrays are its own: they outlive the state, so that one may look at them after the next
    update was started."""

    metrics: Mapping[str, jax.Array]
    """Scalars, in the order in which they were computed."""
    skipped: jax.Array
    """int32: updates skipped in all, this one included."""
    streak: jax.Array
    """int32: updates skipped in a row; above 0: this one was, and its write-back must be dropped."""
    write_back: PyTree
    """Latents [B, T, ...] or None."""


def fresh(agent: Agent, key: jax.Array) -> LearnerState:
    """The state before the first update."""
    return LearnerState(agent.init(key), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def init(agent: Agent, key: jax.Array, mesh: Mesh | None = None) -> LearnerState:
    """A fresh state: one program, which is faster than op by op, and with a mesh straight into its shardings."""
    where = None if mesh is None else shardings(agent, mesh)
    return jax.jit(partial(fresh, agent), out_shardings=where)(key)


def shardings(agent: Agent, mesh: Mesh) -> LearnerState:
    """Where each array of a state lies."""
    placed: LearnerState = meshes.shardings(jax.eval_shape(partial(fresh, agent), jax.random.key(0)), mesh)
    return placed


def partitioned(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Lets code that is traced inside know whether it will be split over devices."""
    return nullcontext() if mesh is None or mesh.size == 1 else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def gathered(train: PyTree, mesh: Mesh | None) -> PyTree:
    """What networks read of a train state, whole on every device: once per update, not once per step of a scan.

    The optimiser's own arrays (field `optim`) stay cut: they meet nothing but the gradient's part of the same device.
    """
    if mesh is None:
        return train
    whole = lambda tree: jax.lax.with_sharding_constraint(tree, meshes.replicated(mesh))
    return train._replace(**{name: whole(getattr(train, name)) for name in train._fields if name != "optim"})


def make_update(agent: Agent, mesh: Mesh | None = None) -> Any:
    """`update(state, window, key, index) -> (state, outcome)`, jitted; donates `state`.

    Update `index` draws from `fold_in(key, index)`, so a resumed run repeats its draws. Where any metric is not
    finite, the old state is kept, the skip is counted, and the caller must drop the write-back. (A gradient that is
    not finite shows in its norm, which agents report.)

    With a mesh the state lies as `shardings` says and the window as `meshes.place` puts it; all processes of the mesh
    must call it with the same `key` and `index`. Every device draws the whole batch's numbers or its part of them: the
    draws do not depend on the mesh.
    """

    def update(state: LearnerState, window: Window, key: jax.Array, index: jax.Array) -> tuple[LearnerState, Outcome]:
        noise = agent.draw_update_noise(jax.random.fold_in(key, index))
        with partitioned(mesh):
            new, metrics, write_back = agent.update(gathered(state.train, mesh), window, noise)
        ok = jnp.isfinite(jnp.stack([jnp.asarray(v, jnp.float32) for v in metrics.values()])).all()
        train = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state.train)
        skipped = state.skipped + jnp.where(ok, 0, 1)
        streak = jnp.where(ok, 0, state.streak + 1)
        # a dict would come back sorted
        return LearnerState(train, skipped, streak), Outcome(OrderedDict(metrics), skipped, streak, write_back)

    if mesh is None:
        return jax.jit(update, donate_argnums=0)
    state, whole, batch = shardings(agent, mesh), meshes.replicated(mesh), meshes.split(mesh)
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(state, batch, whole, whole),
        out_shardings=(state, Outcome._make((whole, whole, whole, batch))),
    )


def make_snapshot(agent: Agent, mesh: Mesh) -> Any:
    """`snapshot(state) -> acting parameters`, jitted: copies of their own on every device, which outlive the state."""

    def snapshot(state: LearnerState) -> PyTree:
        return jax.tree.map(jnp.copy, agent.acting_params(state.train))

    return jax.jit(snapshot, in_shardings=(shardings(agent, mesh),), out_shardings=meshes.replicated(mesh))


def make_report(agent: Agent, mesh: Mesh | None = None) -> Any:
    """`report(state, window, key) -> Report`, jitted; everything that it draws comes from `key`."""

    def report(state: LearnerState, window: Window, key: jax.Array) -> Report:
        with partitioned(mesh):
            found = agent.report(gathered(state.train, mesh), window, agent.draw_report_noise(key))
        return found._replace(losses=OrderedDict(found.losses), open_loop=OrderedDict(found.open_loop))

    if mesh is None:
        return jax.jit(report)
    whole = meshes.replicated(mesh)
    return jax.jit(report, in_shardings=(shardings(agent, mesh), meshes.split(mesh), whole), out_shardings=whole)


def first_non_finite(metrics: Mapping[str, Any]) -> str | None:
    """Name of the first metric, in the order in which the update computed them, that is not finite."""
    return next((name for name, value in metrics.items() if not np.isfinite(value)), None)


def check_streak(index: int, streak: int, metrics: Mapping[str, Any], bound: int) -> None:
    """Logs that an update was skipped.

    index: of the update, from 1. streak: updates skipped in a row, this one included. Raises NonFiniteUpdate where they
    are `bound`.
    """
    bad = first_non_finite(metrics)
    log.warning("event=update_skipped update=%d in_a_row=%d first=%s", index, streak, bad)
    if streak >= bound:
        raise NonFiniteUpdate(
            f"{streak} updates in a row were skipped because {bad} was not finite, the last one update {index}; "
            "the parameters are those before; the bound is max_skipped"
        )
