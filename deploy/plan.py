"""The sizes of a cluster run, worked out before anything starts: tables, rate limiter, memory. No Ray here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deploy import local
from deploy.config import ClusterConfig, RunConfig
from telamon.agents.base import Agent
from telamon.data import LimiterConfig
from telamon.replay import TableSpec

UNEVEN = 2
"""Share of a run's rows that one environment may bring, in fair shares. Files are sparse: what it does not bring costs
nothing."""
TICKS_AHEAD = 8
"""Ticks of all environments by which either side may be further ahead than it must, to hide the time between two looks
of the limiter. What actors are ahead was acted with old parameters."""


@dataclass(frozen=True)
class Plan:
    """What follows from a config and an agent."""

    table: TableSpec
    """Of each shard."""
    limiter: LimiterConfig
    unroll_ticks: int
    """Of all environments, that fit into the band: what workers of JAX environments may act at once."""
    shard_bytes: int
    """Of each shard, once the rings of the first workers are full."""


def make_plan(config: RunConfig, cluster: ClusterConfig, agent: Agent, capacity: int | None) -> Plan:
    """capacity: rows of each ring where that is settled, by the first start of a run; None: not yet.

    Raises ValueError where the agent's schedule cannot be kept, or its batch cannot be split over the learners."""
    num_envs = cluster.actors * config.env.num
    # twice a fair share of a short run: a worker that is faster than the others must not lose its first rows for it
    rows = capacity or min(agent.capacity(num_envs), UNEVEN * local.capacity(config, agent, num_envs))
    agent.schedule(num_envs)  # refuses what could never start
    shares = lambda actors: math.ceil(actors / cluster.replay_shards) * config.env.num
    table = TableSpec(agent.row_spec, agent.window_spec, rows, shares(cluster.most_actors))
    if agent.batch_size % cluster.learners:
        raise ValueError(f"agent.batch_size={agent.batch_size} cannot be split evenly over learners={cluster.learners}")
    limiter = _limiter(config, cluster, agent, rows * num_envs)
    shard_bytes = agent.row_spec.nbytes * rows * shares(cluster.actors)
    return Plan(table, limiter, max(1, limiter.band // num_envs), shard_bytes)


def _limiter(config: RunConfig, cluster: ClusterConfig, agent: Agent, capacity: int) -> LimiterConfig:
    num_envs = cluster.actors * config.env.num
    trained = agent.batch_size * (agent.window_spec.length - agent.window_spec.context)
    most = cluster.most_actors * config.env.num
    schedule = agent.schedule(num_envs)
    make = lambda band: LimiterConfig.following(schedule, trained, most, capacity, band)
    if cluster.band is not None:
        return make(cluster.band)
    wide = make(2**62)
    return replace(wide, band=wide.smallest_band + math.ceil(wide.update_rows) + TICKS_AHEAD * num_envs)
