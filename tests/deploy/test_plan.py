"""The sizes of a cluster run: what is kept where, how far either side may be ahead."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from deploy.config import ClusterConfig, EnvConfig, RunConfig, make_agent
from deploy.plan import TICKS_AHEAD, make_plan
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.data import ActionSpec, ArraySpec, EnvSpec

SPEC = EnvSpec("test:env", (("where", ArraySpec((3,))),), ActionSpec((2,)), 50)
CONFIGS = {
    "tdmpc2": RunConfig("tdmpc2", "test:env", steps=20_000, agent=TDMPC2Config()),
    "dreamerv3": RunConfig("dreamerv3", "test:env", steps=20_000, agent=DreamerV3Config()),
}


TWO = ClusterConfig(actors=2)


def planned(name, cluster=TWO, **changed):
    config = replace(CONFIGS[name], **changed)
    agent = make_agent(config, SPEC)
    return agent, make_plan(config, cluster, agent, None)


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_have_room_for_every_worker_that_may_join(name):
    cluster = ClusterConfig(actors=3, max_actors=7, replay_shards=2)
    agent, plan = planned(name, cluster, env=EnvConfig(num=5))
    assert plan.table.max_envs == 4 * 5  # the shard that has one worker more
    assert plan.limiter.tick_rows == 7 * 5
    assert 0 < plan.unroll_ticks * 15 <= plan.limiter.band
    assert plan.limiter.capacity == plan.table.capacity * 15
    assert plan.shard_bytes == agent.row_spec.nbytes * plan.table.capacity * 2 * 5


def test_a_short_run_is_kept_whole():
    _, plan = planned("tdmpc2", ClusterConfig(actors=4))
    assert plan.table.capacity == 2 * (20_000 // 4 + 20_000 // 4 // 50 + 1)  # one of four workers may be twice as fast


@pytest.mark.parametrize("name", CONFIGS)
def test_the_band_lets_both_sides_go_on(name):
    _, plan = planned(name)
    assert plan.limiter.band == plan.limiter.smallest_band + math.ceil(plan.limiter.update_rows) + 2 * TICKS_AHEAD
    _, plan = planned(name, ClusterConfig(band=500))
    assert plan.limiter.band == 500
    with pytest.raises(ValueError, match="band must be at least"):
        planned(name, ClusterConfig(band=1))


def test_the_ratio_is_the_agents():
    agent, plan = planned("dreamerv3")
    assert plan.limiter.ratio == pytest.approx(agent.config.train_ratio, rel=1e-3)
    agent, plan = planned("tdmpc2")
    assert plan.limiter.ratio == agent.schedule(2).ratio * agent.batch_size * agent.window_spec.length


def test_a_batch_that_learners_cannot_share():
    with pytest.raises(ValueError, match=r"agent\.batch_size=256 cannot be split evenly over learners=3"):
        planned("tdmpc2", ClusterConfig(learners=3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"actors": 0}, "actors=0 must be at least 1"),
        ({"mesh": {"fsdp": 0}}, "fsdp=0 must be at least 1"),
        ({"actors": 2, "max_actors": 1}, "max_actors=1 is less than actors=2"),
        ({"actors": 2, "replay_shards": 3}, "replay_shards=3 is more than actors=2"),
        ({"publish_seconds": float("nan")}, "publish_seconds=nan"),
        ({"metrics_port": 65536}, "metrics_port=65536 must be at most 65535"),
        ({"flush_every": 0.0}, "flush_every=0.0 must be above 0"),
        ({"tls_key": "key.pem"}, "TLS needs all of"),
    ],
)
def test_a_cluster_that_cannot_be(options, said):
    from deploy.config import MeshConfig

    with pytest.raises(ValueError, match=said):
        ClusterConfig(**{k: MeshConfig(**v) if k == "mesh" else v for k, v in options.items()})
