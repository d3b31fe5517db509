"""The workers without Ray: what its processes would be asked, here in this one, against a replay server."""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import ray

from actors import worker
from actors.collector import jit_act
from actors.evaluate import Film, evaluate
from actors.worker import EvalWorker, RolloutWorker, describe
from replay_server.__main__ import Served
from telamon.envs.base import EnvError
from telamon.envs.counting import Counting, Fault
from telamon.keys import Stream, generator, stream
from telamon.replay import StreamSuperseded
from tests import service
from tests.actors import parts
from tests.probe import Probe, acted
from tests.waiting import SECONDS, until


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers in this process: its allocator stays, a reference is what it refers to, and logging ends as it was."""
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(worker, "PATIENCE", SECONDS)
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with service.serve_open(tmp_path) as served:
        yield served


@pytest.fixture
def make(served: Served) -> Iterator[Callable[..., RolloutWorker]]:
    """Makes rollout workers, which are closed in the end."""
    made: list[RolloutWorker] = []

    def make(**changed: Any) -> RolloutWorker:
        made.append(RolloutWorker(parts.worker_setup(service.endpoint_of(served.info), **changed)))
        return made[-1]

    yield make
    for w in made:
        w._stack.close()
        if w._client is not None:
            w._client._release()


@pytest.fixture
def evaluator() -> Iterator[Callable[..., EvalWorker]]:
    """Makes evaluators, whose pages are closed in the end."""
    made: list[EvalWorker] = []

    def make(**changed: Any) -> EvalWorker:
        made.append(EvalWorker(parts.eval_setup(**changed)))
        return made[-1]

    yield make
    for w in made:
        w._stack.close()


def held(served: Served, name: str, env: int) -> np.ndarray:
    """A column of the rows that the server holds of an environment."""
    column: np.ndarray = served.tables.get("t")._store._content.ring.held(name, env)
    return column


def read(url: str) -> dict[str, str]:
    """Sample -> value of a page."""
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        page = answer.read().decode()
    return dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))


def test_describe_tells_what_the_environments_are_like(monkeypatch):
    closed = []
    monkeypatch.setattr(Counting, "close", lambda self: closed.append(self))
    assert describe(parts.make_env) == parts.make_env(0).spec
    assert len(closed) == 2
    with pytest.raises(EnvError, match="no environment"):
        describe(lambda seed: (_ for _ in ()).throw(EnvError("there is no environment 'x'")))


def test_its_rows_reach_the_replay_and_its_status_tells(make, served):
    w = make()
    status = w.status()
    assert (status.name, status.open, status.metrics, status.figures.rows) == ("actor-0", False, None, 0)
    assert w.open() == 2
    piece = w.rollout(20)
    assert piece.rows == 40
    closed = w.close(60.0)
    assert not closed.unsent
    assert closed.figures.rows == served.tables.get("t").stats().rows == 40
    status = w.status()
    assert status.open
    f = status.figures
    assert (f.ticks, f.rows, f.resets, f.transitions, f.episodes, f.lost_rows) == (20, 40, 6, 36, 4, 0)
    assert (f.version, f.newest, f.lag, f.doing, status.hung) == (None, None, 0, "idle", None)
    assert f.seconds["acting"] > 0
    assert (f.environments, f.env_steps, f.refused_rows, sum(f.returns.counts)) == (2, 36, 0, 4)
    assert f.lengths.total == 4 * 7
    assert status.memory > 2**20
    assert any("event=start name=actor-0 env=counting:continuous num_envs=2" in line for line in status.log)
    assert w.status().log == ()


def test_snapshots_are_copied_and_used_from_the_next_tick_on(make, served):
    w = make()
    assert w.set_params(4, [parts.on_host(40)]) == 4  # before it is open
    w.open()
    assert w.rollout(2).first_version == 4
    w.set_params(6, [parts.on_host(60)])
    w.set_params(5, [parts.on_host(50)])
    assert (w.status().figures.version, w.status().figures.newest, w.status().figures.lag) == (4, 6, 2)
    piece = w.rollout(2)
    assert (piece.first_version, piece.last_version) == (6, 6)
    w.close(60.0)
    updates, _, _ = acted(held(served, "action", 0))
    assert updates.tolist() == [40, 40, 60, 60]
    status = w.status()
    assert (status.figures.version, status.figures.lag) == (6, 0)
    assert 0 <= status.delays[0] <= status.delays[1]
    assert sum(status.figures.delays.counts) == 2


def test_it_waits_for_a_snapshot_where_it_may_not_act_at_random(make, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 0.01)
    w = make(acts_at_random=False)
    w.open()
    assert w.rollout(5).ended == "snapshot"
    w.set_params(0, [parts.on_host(0)])
    assert w.rollout(5).ticks > 0


def test_it_stops(make):
    w = make()
    w.open()
    w.stop()
    piece = w.rollout(5)
    assert (piece.ticks, piece.ended) == (0, "stopped")


def test_another_life_goes_on_with_the_stream_and_its_rings(make, served):
    first = make()
    first.open()
    first.rollout(5)
    assert first._rollout.flush()
    second = make(attempt=1)
    second.open()
    second.rollout(5)
    second.close(60.0)
    is_first = held(served, "is_first", 0)
    assert is_first.nonzero()[0].tolist() == [0, 5]
    action = held(served, "action", 0)
    assert not np.isin(action[:5], action[5:]).any()
    assert served.tables.get("t").num_envs == 2
    with pytest.raises(StreamSuperseded):  # whatever the first would still send is refused
        until(lambda: first.rollout(5) and not first._rollout.flush())


def test_rows_without_credit_wait_and_are_counted_as_unsent(make, served, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 0.05)
    w = make(buffer_ticks=2)
    w.open()
    table = served.tables.get("t")
    # credit counts once something can be sampled
    until(lambda: w.rollout(5) and w._rollout.flush() and table.stats().items > 0)
    before = w.status().figures.rows
    table.grant(0)
    until(lambda: w.rollout(5).ended == "replay")
    assert w.status().figures.rows == before + 6  # two ticks fill the buffer, and the third has to wait
    piece = w.rollout(5)
    assert (piece.ticks, piece.ended) == (0, "replay")
    assert piece.wait_seconds > 0
    closed = w.close(0.0)
    assert closed.unsent
    table.grant(-1)
    until(lambda: table.stats().rows == before + 6)


def test_environments_that_are_not_the_runs_are_refused(make):
    w = make(env={"lengths": (9,)})
    with pytest.raises(
        ValueError, match=r"actor-0 has environments .*, but the run was started with .*same environment"
    ):
        w.open()


def test_an_environment_that_hangs_is_told(make, monkeypatch, capsys):
    released = threading.Event()
    step = Counting.step
    monkeypatch.setattr(
        Counting, "step", lambda self, a: (released.wait(60) if self._index == 1 else None, step(self, a))[1]
    )
    w = make(env_timeout=5.0)
    w.open()
    thread = threading.Thread(target=lambda: w.rollout(1))
    thread.start()
    try:
        until(lambda: w.status().hung)
        assert w.status().hung == (
            "environment 1 (counting:continuous) has not returned for 5 s; the bound is env.timeout"
        )
        assert w.status().figures.doing == "environment"
    finally:
        released.set()
        thread.join()
    capsys.readouterr()  # the watchdog speaks to stderr too


def test_an_environment_that_breaks_is_the_callers_to_hear_of(make):
    w = make(env={"faults": [Fault("nan_reward", env=1, t=3)]})
    w.open()
    with pytest.raises(EnvError, match=r"environment 1 \(counting:continuous\): reward is nan at step 3"):
        w.rollout(10)


def test_its_page_shows_what_it_does(make):
    w = make()
    w.open()
    w.set_params(3, [parts.on_host(0)])
    w.rollout(10)
    url = w.status().metrics
    assert url is not None
    values = read(url)
    assert values["telamon_actor_ticks_total"] == "10.0"
    assert values["telamon_actor_rows_total"] == "20.0"
    assert values["telamon_actor_episodes_total"] == "2.0"
    assert values["telamon_actor_episode_length_steps_sum"] == "14.0"
    assert values["telamon_actor_lost_rows_total"] == "0.0"
    assert values["telamon_actor_environments"] == "2.0"
    assert values["telamon_actor_snapshot_version"] == "3.0"
    assert values["telamon_actor_snapshot_lag_versions"] == "0.0"
    assert values["telamon_actor_snapshot_delay_seconds_count"] == "1.0"
    for doing in ("acting", "environment", "replay"):
        assert float(values[f'telamon_actor_seconds_total{{doing="{doing}"}}']) > 0
    w.close(60.0)
    with pytest.raises(OSError):
        urllib.request.urlopen(url)


# The evaluator


def test_without_a_snapshot_there_is_nothing_to_evaluate(evaluator, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 0.01)
    assert evaluator().evaluate(0) is None


def test_an_evaluation_is_that_of_a_local_run(evaluator):
    w = evaluator(env={"lengths": (3, 7, 5)})
    w.set_params(9, [parts.on_host(100)])
    found = w.evaluate(7)
    assert found is not None
    env = parts.make_env(int(generator(3, Stream.EVAL, 7).integers(2**31)), 3, lengths=(3, 7, 5))
    agent = Probe(env.spec, parts.PLAN)
    key = stream(3, Stream.EVAL, 7)
    expected = evaluate(agent, jit_act(agent, 3, "eval"), parts.params(100), env, key)
    np.testing.assert_array_equal(found.returns, expected.total_reward)
    assert found.lengths.tolist() == expected.length.tolist() == [3, 7, 5]
    assert (found.index, found.version, found.film) == (7, 9, None)
    status = w.status()
    assert (status.name, status.figures.version, status.figures.newest) == ("evaluator", 9, 9)
    # the next one has the newest parameters
    w.set_params(12, [parts.on_host(200)])
    again = w.evaluate(8)
    assert again is not None
    assert again.version == 12
    assert (again.returns > found.returns).all()


def test_a_film_is_made_of_the_first_episode_where_one_is_wanted(evaluator, monkeypatch):
    monkeypatch.setattr(Counting, "render", lambda self: np.full((4, 6, 3), self._t, np.uint8))
    w = evaluator(env={"lengths": (5, 7, 7)}, encode=lambda frames: np.stack(frames).tobytes())
    w.set_params(0, [parts.on_host(0)])
    found = w.evaluate(0)
    assert found is not None
    assert found.film is not None
    film = np.frombuffer(found.film, np.uint8).reshape(-1, 4, 6, 3)
    assert film[:, 0, 0, 0].tolist() == list(range(6))


def test_a_film_has_a_bound():
    env = parts.make_env(0, 1)
    env.render = lambda index: np.zeros((2, 2, 3), np.uint8)
    film = Film(most=3)
    for _ in range(5):
        film(env)
    assert len(film.frames) == 3


def test_an_evaluators_page_shows_what_it_found(evaluator, monkeypatch):
    w = evaluator()
    shown = lambda: read(w.status().metrics)
    before = shown()
    assert before["telamon_evaluator_evaluations_total"] == "0.0"
    assert before["telamon_evaluator_snapshot_version"] == "-1.0"
    assert "telamon_evaluator_return" not in before
    w.set_params(9, [parts.on_host(100)])
    found = [w.evaluate(index) for index in range(2)]
    after = shown()
    assert after["telamon_evaluator_evaluations_total"] == after["telamon_evaluator_evaluation_seconds_count"] == "2.0"
    assert float(after["telamon_evaluator_evaluation_seconds_sum"]) == pytest.approx(sum(f.seconds for f in found))
    assert after["telamon_evaluator_snapshot_version"] == "9.0"
    assert float(after["telamon_evaluator_return"]) == pytest.approx(found[1].returns.mean())
    assert float(after["process_resident_memory_bytes"]) > 0


def test_an_evaluation_that_is_stopped_finds_nothing(evaluator):
    w = evaluator()
    w.set_params(0, [parts.on_host(0)])
    w.stop()
    assert w.evaluate(0) is None


def test_an_evaluator_tells_of_an_environment_that_is_not_the_runs_and_of_one_that_breaks(evaluator):
    w = evaluator(env={"lengths": (9,)})
    w.set_params(0, [parts.on_host(0)])
    with pytest.raises(ValueError, match="evaluator has environments"):
        w.evaluate(0)
    w = evaluator(env={"faults": [Fault("raise", env=0)]})
    w.set_params(0, [parts.on_host(0)])
    with pytest.raises(EnvError, match="told to break"):
        w.evaluate(0)


def test_a_snapshot_is_copied_out_of_the_object_store(evaluator):
    # aligned as arrays in the object store are, so that JAX could alias it
    raw = np.zeros(4096 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    shared = raw[start : start + 4096].view(np.float32)
    w = evaluator()
    w.set_params(0, [{"a": shared, "b": (np.ones(2, jax.numpy.bfloat16),)}])
    snapshot = w._snapshots.take()
    assert snapshot is not None
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(snapshot.params))
    assert snapshot.params["b"][0].dtype == jax.numpy.bfloat16
    shared[:] = 1
    assert (np.asarray(snapshot.params["a"]) == 0).all()
