"""What the actors tell of themselves, read as Prometheus reads it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from actors.collector import LENGTHS, RETURNS, Collector, Doing
from actors.metrics import ActorMetrics, EvalFigures, EvaluatorMetrics, Figures, figures_of
from actors.rollout import DELAYS, Snapshot, Snapshots, Unroll
from telamon.data import Counters
from telamon.envs.counting import Fault
from telamon.telemetry.histogram import Histogram
from tests.actors import parts
from tests.actors.parts import Table
from tests.probe import Probe


def kept(bounds, values):
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram.counted


FIGURES = Figures(
    ticks=10, rows=20, resets=4, transitions=16, action_repeat=2, episodes=3, environments=2, refused_rows=1,
    lost_rows=5, version=7, newest=9, doing="replay", seconds={"acting": 1.5, "replay": 2.5},
    returns=kept(RETURNS, (-30.0, 0.5, 900.0)), lengths=kept(LENGTHS, (4, 5, 5)), delays=kept(DELAYS, (0.002, 0.4)),
)  # fmt: skip
EVALUATED = EvalFigures(evaluations=4, seconds=10.0, version=12, mean_return=-3.5)


def page(metrics, figures):
    registry = CollectorRegistry()
    metrics(lambda: figures, registry)
    return registry


def samples(registry):
    """(name, labels) -> value, of every sample but those of buckets."""
    return {
        (s.name, *s.labels.values()): s.value
        for family in registry.collect()
        for s in family.samples
        if not s.name.endswith("_bucket")
    }


def test_the_whole_page_of_a_rollout_worker():
    registry = page(ActorMetrics, FIGURES)
    expected = {
        ("ticks_total",): 10, ("rows_total",): 20, ("transitions_total",): 16, ("env_steps_total",): 32,
        ("episodes_total",): 3, ("refused_rows_total",): 1, ("lost_rows_total",): 5, ("environments",): 2,
        ("snapshot_version",): 7, ("snapshot_lag_versions",): 2,
        ("seconds_total", "acting"): 1.5, ("seconds_total", "replay"): 2.5, ("seconds_total", "idle"): 0,
        ("seconds_total", "snapshot"): 0, ("seconds_total", "environment"): 0,
        ("episode_length_steps_count",): 3, ("episode_length_steps_sum",): 14,
        ("snapshot_delay_seconds_count",): 2, ("snapshot_delay_seconds_sum",): 0.402,
        ("returned_total", "positive"): 900.5, ("returned_total", "negative"): 30,
    }  # fmt: skip
    assert samples(registry) == {
        (f"telamon_actor_{name}", *labels): pytest.approx(value) for (name, *labels), value in expected.items()
    }
    value = lambda name, bound: registry.get_sample_value(f"telamon_actor_{name}_bucket", {"le": bound})
    returns = [value("episode_return", bound) for bound in ("-50.0", "-20.0", "0.0", "1.0", "500.0", "1000.0", "+Inf")]
    assert returns == [0, 1, 1, 2, 2, 3, 3]
    assert [value("episode_length_steps", bound) for bound in ("2.0", "5.0", "+Inf")] == [0, 3, 3]
    assert [value("snapshot_delay_seconds", bound) for bound in ("0.001", "0.003", "0.3", "1.0")] == [0, 1, 1, 2]


def test_a_rollout_worker_that_has_not_begun():
    found = samples(page(ActorMetrics, Figures()))
    assert found["telamon_actor_snapshot_version",] == -1
    assert {value for key, value in found.items() if key != ("telamon_actor_snapshot_version",)} == {0}
    # the same series from the beginning: a rate over a counter's first rise must not miss it
    assert found.keys() == samples(page(ActorMetrics, FIGURES)).keys()


def test_the_whole_page_of_an_evaluator():
    assert samples(page(EvaluatorMetrics, EVALUATED)) == {
        ("telamon_evaluator_evaluations_total",): 4,
        ("telamon_evaluator_evaluation_seconds_count",): 4,
        ("telamon_evaluator_evaluation_seconds_sum",): 10.0,
        ("telamon_evaluator_snapshot_version",): 12,
        ("telamon_evaluator_return",): -3.5,
    }
    assert ("telamon_evaluator_return",) not in samples(page(EvaluatorMetrics, EvalFigures()))


def test_figures_are_asked_for_at_each_look():
    now = [FIGURES]
    registry = CollectorRegistry()
    ActorMetrics(lambda: now[0], registry)
    for ticks in (11, 12):
        now[0] = replace(FIGURES, ticks=ticks)
        assert registry.get_sample_value("telamon_actor_ticks_total") == ticks


def test_bounds_ascend_and_cover_what_there_is():
    for bounds in (RETURNS, LENGTHS, DELAYS):
        assert list(bounds) == sorted(set(bounds))
        assert all(math.isfinite(bound) for bound in bounds)
    assert [-bound for bound in reversed(RETURNS)] == list(RETURNS)


def test_figures_of_a_collector():
    env = parts.make_env(0, lengths=(7,), faults=[Fault("nan_reward", env=1, t=3)], on_error="rebuild")
    c = Collector(parts.make_agent(), env, Table(), 3, Counters())
    episodes = list(itertools.chain.from_iterable(c.tick(parts.params(1)) for _ in range(30)))
    f = figures_of(c)
    assert (f.ticks, f.rows, f.environments, f.refused_rows) == (30, 60, 2, 1)
    assert (f.transitions, f.episodes) == (c.counters.transitions, len(episodes)) != (0, 0)
    assert f.env_steps == f.transitions * env.spec.action_repeat
    assert f.returns == kept(RETURNS, [e.total_reward for e in episodes])
    assert f.lengths == kept(LENGTHS, [e.length for e in episodes])
    assert f.seconds.keys() == set(get_args(Doing))
    assert f.doing == "idle"
    assert min(f.seconds[doing] for doing in ("acting", "environment", "replay")) > 0
    assert f == replace(figures_of(c), seconds=f.seconds)


def test_figures_since_a_resumption_begin_at_0():
    base = Figures(ticks=4, rows=8, resets=2, transitions=6, episodes=1, refused_rows=1, lost_rows=2, version=3)
    f = FIGURES.since(base)
    assert (f.ticks, f.rows, f.resets, f.transitions, f.episodes, f.refused_rows, f.lost_rows) == (
        6,
        12,
        2,
        10,
        2,
        0,
        3,
    )
    assert f.env_steps == 20
    assert (f.version, f.environments, f.seconds, f.returns) == (7, 2, FIGURES.seconds, FIGURES.returns)
    assert samples(page(ActorMetrics, FIGURES.since(FIGURES)))["telamon_actor_env_steps_total",] == 0


def test_figures_of_an_unroll():
    jax_envs = pytest.importorskip("telamon.envs.jax", reason="gymnax is not installed")
    env = jax_envs.make("Pendulum-v1", 3, 5, max_steps_in_episode=7)
    agent = Probe(env.spec, parts.PLAN)
    u = Unroll(agent, env, Table(), 3, Counters(), (), longest=8)
    for ticks in range(1, 13):
        u.tick(None)
        assert figures_of(u).ticks == ticks  # and not those that were unrolled ahead
    f = figures_of(u)
    assert (f.rows, f.environments, f.refused_rows, f.episodes) == (36, 3, 0, 3)
    assert f.lengths.total == 21
    assert f.returns.below > 0  # a pendulum earns nothing else


def test_the_time_from_the_offer_of_a_snapshot_to_its_use():
    now = iter([0.0, 0.5, 10.0, 10.002])
    snapshots = Snapshots(clock=lambda: next(now))
    for version in range(2):
        snapshots.offer(Snapshot(version, "params"))
        snapshots.take()
    assert snapshots.waited.counted == kept(DELAYS, (0.5, 10.002 - 10.0))
