"""The programs of both agents for TPU and for CUDA are lowered: traced, and written in what those compilers take.

They are not compiled for them here, and not run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType

from actors.collector import jit_act
from learner import mesh, update
from tests.learner.devices import AGENTS, window

PLATFORMS = ("tpu", "cuda")
KEY = jax.eval_shape(lambda: jax.random.key(0))
INDEX = jax.ShapeDtypeStruct((), np.uint32)


@pytest.fixture(params=AGENTS)
def agent(request) -> Any:
    agent = AGENTS[request.param]
    if request.param == "tdmpc2":  # "auto" asks for the backend of this process
        agent = replace(agent, config=replace(agent.config, env_batching="vmap", num_samples=32, num_elites=8))
    return agent


def state_and_window(agent: Any) -> tuple[Any, Any]:
    return jax.eval_shape(partial(update.fresh, agent), KEY), jax.eval_shape(partial(window, agent, 0))


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_updates_are_lowered(agent, platform):
    state, batch = state_and_window(agent)
    exported = export.export(update.make_update(agent), platforms=(platform,))(state, batch, KEY, INDEX)
    assert (exported.platforms, exported.nr_devices) == ((platform,), 1)
    # what comes out is a state again, and the outcome
    assert [x.shape for x in exported.out_avals[: len(jax.tree.leaves(state))]] == [
        x.shape for x in jax.tree.leaves(state)
    ]


def test_updates_over_eight_devices_are_lowered(agent):
    state, batch = state_and_window(agent)
    step = update.make_update(agent, AbstractMesh((2, 4), mesh.AXES, (AxisType.Auto, AxisType.Auto)))
    exported = export.export(step, platforms=("tpu",))(state, batch, KEY, INDEX)
    assert (exported.platforms, exported.nr_devices) == (("tpu",), 8)


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_acting_is_lowered(agent, platform):
    envs = 3
    params = jax.eval_shape(lambda key: agent.acting_params(agent.init(key)), KEY)
    carry = jax.eval_shape(partial(agent.initial_carry, envs))
    obs = {key: jax.ShapeDtypeStruct((envs, *array.shape), array.dtype) for key, array in agent.env.obs}
    first = jax.ShapeDtypeStruct((envs,), bool)
    exported = export.export(jit_act(agent, envs, "train"), platforms=(platform,))(
        params, carry, obs, first, KEY, INDEX
    )
    assert exported.platforms == (platform,)
    assert exported.out_avals[0].shape == (envs, 3)
