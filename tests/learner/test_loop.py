"""The learner's loop over an embedded replay, with a gate that says exactly how many updates are due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from actors.collector import Collector
from learner import checkpoint, limiter, mesh, update
from learner.batches import Source
from learner.checkpoint import Saved
from learner.limiter import Totals
from learner.loop import Finished, LearnerSetup, Loop, blank
from replay_server.store import Store
from telamon.agents.base import Agent
from telamon.data import Counters, LimiterConfig, Schedule, TrainRatio, Window, WriteBack
from telamon.envs import counting
from telamon.keys import Stream, stream
from telamon.replay import TableSpec
from telamon.rpc.security import Endpoint
from tests.learner.parts import running
from tests.probe import ACTION_SIZE, LENGTH, Probe, Remembering
from tests.waiting import SECONDS, until

BATCH = 4
LIMITER = LimiterConfig(ratio=1.0, rows_per_update=BATCH * LENGTH, tick_rows=1, capacity=1000, band=100)
NEVER = 10**9
"""Environment steps that no test reaches."""


def make_probe(kind: type[Probe], nan_share: float = 0.0) -> Agent:
    plans = {Probe: Schedule("transitions", 0), Remembering: TrainRatio(0.6, 1, LENGTH + 1)}
    return kind(counting_env().spec, plans[kind], nan_share=nan_share)


def counting_env() -> Any:
    return counting.make("continuous", 1, 0, lengths=(7,), action_size=ACTION_SIZE)


class Recorded:
    """A replay that keeps what passes through it."""

    def __init__(self, replay: Store) -> None:
        self.replay = replay
        self.windows: list[Window] = []
        self.written: list[WriteBack] = []

    def sample(self, batch: int, purpose: str = "train") -> Window:
        self.windows.append(self.replay.sample(batch, purpose))
        return self.windows[-1]

    def write_back(self, update: WriteBack) -> int:
        self.written.append(update)
        return self.replay.write_back(update)


class Gate:
    """A limiter that knows how many updates are due; `ahead` more are let pass."""

    def __init__(self, totals: Totals, due: int, ahead: int) -> None:
        self.due, self.ahead = due, ahead
        self.admitted = self.looks = 0
        self._totals = totals

    def wait_to_train(self, timeout: float) -> bool:
        if self.admitted < self.due + self.ahead:
            self.admitted += 1
            return True
        time.sleep(timeout)
        return False

    def trained(self) -> None:
        self._totals = replace(self._totals, updates=self._totals.updates + 1)

    def look(self) -> None:
        self.looks += 1

    def totals(self) -> Totals:
        return self._totals

    def status(self) -> limiter.Status:
        waits = limiter.Waits(1.0, 2.0, "none")
        return limiter.Status(waits, (self.admitted - self.due) * LIMITER.update_rows, {"a": 3}, 1.0, 1.0, 0)


@dataclass
class Rig:
    """A loop, and everything it is connected to."""

    run_dir: Path
    agent: Agent
    due: int = 10
    """Updates, of each source."""
    ahead: int = 4
    setup: dict[str, Any] = field(default_factory=dict)
    inserted: int = 50
    published: list[tuple[int, Any]] = field(default_factory=list)
    connected: list[tuple[Sequence[Endpoint], Totals]] = field(default_factory=list)
    closed: int = 0
    away: int = 0
    """Attempts to connect that fail."""
    gate: Gate | None = None

    def __post_init__(self) -> None:
        spec = self.agent.row_spec, self.agent.window_spec
        store = Store(*spec, 1, 1000, np.random.default_rng(0), self.run_dir / "replay")
        collector = Collector(self.agent, counting_env(), store, 0, Counters())
        for _ in range(60):
            collector.tick(None)
        self.replay = Recorded(store)
        self.loop = self.make()

    def make(self) -> Loop:
        """Another loop over the same run directory."""
        setup = LearnerSetup(
            make_agent=lambda: self.agent, run_dir=self.run_dir, seed=3, endpoints=(Endpoint("a:1", "x" * 16),),
            table="run", spec=TableSpec(self.agent.row_spec, self.agent.window_spec, 1000, 1), limiter=LIMITER,
            timeout=SECONDS, checkpoint_every=NEVER, checkpoint_keep=2, max_skipped=5, first_version=1,
            meta={"config": {"a": 1}, "env_spec": asdict(self.agent.env), "versions": {}}, publish_seconds=0.0,
        )  # fmt: skip
        return Loop(replace(setup, **self.setup), self.connect, lambda *item: self.published.append(item))

    @contextmanager
    def connect(self, endpoints: Sequence[Endpoint], totals: Totals) -> Iterator[Source]:
        if self.away:
            self.away -= 1
            raise TimeoutError("no shard")
        self.connected.append((endpoints, totals))
        self.gate = Gate(
            replace(totals, inserted=self.inserted, shards={"a": (1, self.inserted)}), self.due, self.ahead
        )
        yield Source(self.replay, self.gate)  # type: ignore[arg-type]  # a loop does no more with it
        self.closed += 1

    def run(self) -> Finished:
        """All updates that are due."""
        self.loop.finish()
        return self.loop.run()

    def running(self) -> AbstractContextManager[list[Any]]:
        return running(self.loop)


class CompiledOnce:
    """A jitted function that is lowered and compiled for one kind of arguments."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: Any = None

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def lower(self, *args: Any) -> CompiledOnce:
        if self.compiled is None:
            self.compiled = self.function.lower(*args).compile()
        return self

    def compile(self) -> Any:
        return self.compiled


SHARED = {
    "make_update": lru_cache(lambda *args, make=update.make_update: CompiledOnce(make(*args))),
    "make_snapshot": lru_cache(update.make_snapshot),
    "make_report": lru_cache(update.make_report),
    "init": lru_cache(lambda agent: jax.jit(partial(update.fresh, agent))),
}


@pytest.fixture
def rig(tmp_path, monkeypatch) -> Callable[..., Rig]:
    # each loop compiles anew; here all share what was compiled once
    for name in ("make_update", "make_snapshot", "make_report"):
        monkeypatch.setattr(update, name, SHARED[name])
    monkeypatch.setattr(
        update,
        "init",
        lambda agent, key, mesh: jax.device_put(SHARED["init"](agent)(key), update.shardings(agent, mesh)),
    )

    def make(kind: type[Probe] = Probe, nan_share: float = 0.0, **changed: Any) -> Rig:
        return Rig(tmp_path, make_probe(kind, nan_share), **changed)

    return make


def replayed(rig: Rig, windows: Sequence[Window]) -> update.LearnerState:
    """What plain updates on these windows make of a fresh state."""
    one = mesh.make_mesh(jax.devices())
    state = update.init(rig.agent, stream(3, Stream.INIT), one)
    step = update.make_update(rig.agent, one)
    for index, window in enumerate(windows):
        state, _ = step(state, mesh.place(window, one), stream(3, Stream.UPDATE), np.uint32(index))
    return state


def same(one: Any, two: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


def load(rig: Rig, name: str) -> checkpoint.Checkpoint:
    return checkpoint.load(
        rig.run_dir / "checkpoints", name, jax.eval_shape(partial(update.fresh, rig.agent), stream(3, Stream.INIT))
    )


@pytest.mark.parametrize("kind", [Probe, Remembering])
def test_updates_are_those_of_a_plain_loop(rig, kind):
    found = rig(kind)
    finished = found.run()
    assert finished == Finished("finished", Counters(50, 0, 0, 10, 0), finished.version, "000000000050-000000000010")
    state = replayed(found, found.replay.windows[:10])
    assert same(load(found, finished.checkpoint).state, state)
    version, params = found.published[-1]
    assert version == finished.version
    assert same(params, found.agent.acting_params(state.train))


def test_a_run_that_finishes_makes_the_updates_that_are_due_and_no_more(rig):
    found = rig(due=7, ahead=50)
    assert found.run().counters.updates == 7
    assert found.gate.totals().updates == 7
    assert found.gate.looks == 1
    assert found.loop.status().stage == "finished"


@pytest.mark.parametrize(("rank", "told"), [(0, [10, 13]), (1, [])])
def test_a_trace_is_made_of_so_many_updates_by_the_leading_process(rig, monkeypatch, rank, told):
    monkeypatch.setattr("learner.tracing.WARM_TICKS", 0)  # this gate has no rows come
    found = rig(due=20, setup={"profile": 3})
    found.loop._setup = replace(found.loop._setup, rank=rank)
    at = []
    note = lambda *args, **options: at.append(found.loop.status().updates)
    monkeypatch.setattr(jax.profiler, "start_trace", note)
    monkeypatch.setattr(jax.profiler, "stop_trace", note)
    found.run()
    assert at == told


def test_a_run_whose_shards_are_gone_finishes_without_them(rig, monkeypatch, caplog):
    monkeypatch.setattr("learner.loop.QUIET_SECONDS", 0.5)
    found = rig(due=7, ahead=-3)
    assert found.run().counters.updates == 4
    assert "event=updates_left_out" in caplog.text


# snapshots


def test_an_agent_that_acts_before_it_has_learned_is_published_at_once(rig):
    found = rig(Remembering, due=0, ahead=0)
    with found.running():
        until(lambda: found.published)
    version, params = found.published[0]
    assert version == 1
    assert same(
        params,
        found.agent.acting_params(
            update.init(found.agent, stream(3, Stream.INIT), mesh.make_mesh(jax.devices())).train
        ),
    )


def test_an_agent_that_acts_at_random_is_published_after_its_burst(rig):
    burst = 40  # updates; all but what the band covers come before the first snapshot
    found = rig(due=burst, ahead=0)
    found.run()
    first = int(found.published[0][1].updates)
    # two batches and the next update's are admitted ahead of those made
    least = burst - LIMITER.band // LIMITER.update_rows
    assert least - 3 <= first <= burst
    versions = [version for version, _ in found.published]
    assert versions == list(range(1, len(versions) + 1))
    assert int(found.published[-1][1].updates) == burst


def test_snapshots_are_as_far_apart_as_they_shall_be(rig):
    found = rig(Remembering, due=30, setup={"publish_seconds": 1000.0})
    found.run()
    assert [int(params.updates) for _, params in found.published] == [0, 30]


def test_no_snapshot_is_taken_while_one_is_on_its_way(rig):
    found, gone = rig(Remembering, due=30), threading.Event()
    publish = found.published.append

    def slow(version, params):
        publish((version, params))
        gone.wait(SECONDS)

    found.loop = Loop(found.loop._setup, found.connect, slow)
    with found.running():
        until(lambda: found.loop.status().counters.updates == 34)
        assert len(found.published) == 1
        assert found.loop.status().version == 1
        gone.set()
    assert [version for version, _ in found.published] == [1, 2]
    assert int(found.published[1][1].updates) == 34


def test_an_error_of_publishing_ends_the_run(rig):
    found = rig(Remembering)

    def fail(version, params):
        raise RuntimeError("the object store is full")

    found.loop = Loop(found.loop._setup, found.connect, fail)
    with pytest.raises(RuntimeError, match="the object store is full"):
        found.run()


# write-backs and updates that are not finite


def test_latents_go_back_to_their_rows(rig):
    found = rig(Remembering)
    found.run()
    assert len(found.replay.written) == 10
    for made, (window, sent) in enumerate(zip(found.replay.windows, found.replay.written, strict=False), 1):
        assert (sent.latents["made"].astype(np.float32) == made).all()
        np.testing.assert_array_equal(sent.row, (window.first_row[:, None] + [1, 2, 3]).ravel())
        np.testing.assert_array_equal(sent.env_id, window.env_id.repeat(3))
        where = window.obs["where"][:, 1:]
        np.testing.assert_array_equal(sent.latents["place"], (where[..., 1] * 16 + where[..., 2]).ravel())
    assert found.loop.status().written.written == sum(sent.row.size for sent in found.replay.written)


def test_an_update_that_is_skipped_is_counted_and_sends_no_latents(rig, caplog):
    found = rig(Remembering, nan_share=0.4, due=20, setup={"max_skipped": 21})
    finished = found.run()
    skipped = finished.counters.skipped
    assert 0 < skipped < 20
    assert finished.counters.updates == 20
    assert len(found.replay.written) == 20 - skipped
    assert found.loop.status().written.skipped == skipped
    assert caplog.text.count("event=update_skipped") == skipped
    assert load(found, finished.checkpoint).meta["counters"]["skipped"] == skipped
    assert int(load(found, finished.checkpoint).state.train.updates) == 20 - skipped
    assert all(np.isfinite(params.memory) for _, params in found.published)


def test_too_many_skipped_updates_in_a_row_end_the_run(rig):
    found = rig(nan_share=1.0)
    with pytest.raises(update.NonFiniteUpdate) as caught:
        found.run()
    assert str(caught.value) == (
        "5 updates in a row were skipped because bad_loss was not finite, the last one update 5; "
        "the parameters are those before; the bound is max_skipped"
    )
    assert found.closed == 1
    assert checkpoint.names(found.run_dir / "checkpoints") == []


# checkpoints


def test_a_run_goes_on_from_its_checkpoint(rig):
    found = rig(Remembering)
    found.loop.count(7, 2)
    first = found.run()
    drawn = len(found.replay.windows)
    found.loop, found.inserted = found.make(), 80
    second = found.run()
    assert second.counters == Counters(80, 7, 2, 20, 0)
    assert second.version > first.version
    assert found.connected[1][1] == Totals(50, 10, {"a": [1, 50]})
    # updates are numbered over the whole run, and so are their draws
    state, step, one = (
        load(found, first.checkpoint).state,
        update.make_update(found.agent),
        mesh.make_mesh(jax.devices()),
    )
    for index, window in enumerate(found.replay.windows[drawn : drawn + 10], 10):
        state, _ = step(state, mesh.place(window, one), stream(3, Stream.UPDATE), np.uint32(index))
    assert same(load(found, second.checkpoint).state, state)
    meta = load(found, second.checkpoint).meta
    assert meta["version"] == second.version
    assert meta["limiter"] == {"inserted": 80, "updates": 20, "shards": {"a": [1, 80]}}
    assert meta["config"] == {"a": 1}
    versions = [version for version, _ in found.published]
    assert versions == list(range(1, second.version + 1))


def test_versions_go_on_above_all_that_were_published(rig):
    found = rig(Remembering)
    first = found.run()
    found.setup = {"first_version": first.version + 100}
    found.loop = found.make()
    before = len(found.published)
    found.run()
    assert found.published[before][0] == first.version + 100


def test_a_restored_run_publishes_at_once(rig):
    found = rig()
    first = found.run()
    found.loop, found.due, found.ahead = found.make(), 0, 0
    before = len(found.published)
    with found.running():
        until(lambda: len(found.published) > before)
    version, params = found.published[before]
    assert (version, int(params.updates)) == (first.version + 1, 10)


def test_checkpoints_are_written_by_environment_steps(rig):
    found = rig(setup={"checkpoint_every": 10}, due=1000, ahead=0)
    directory = found.run_dir / "checkpoints"
    with found.running():
        until(lambda: found.loop.status().counters.updates > 5)
        assert checkpoint.names(directory) == []
        written = []
        for transitions in (9, 10, 19, 30, 41):
            found.loop.count(transitions, transitions // 7)
            if transitions in (10, 30, 41):
                until(lambda: len(checkpoint.names(directory)) > 0 and checkpoint.names(directory)[0] not in written)
                written.append(checkpoint.names(directory)[0])
                assert load(found, written[-1]).meta["counters"]["transitions"] == transitions
            else:
                updates = found.loop.status().counters.updates
                until(lambda updates=updates: found.loop.status().counters.updates > updates + 5)
                assert checkpoint.names(directory)[:1] == written[-1:]
    # the last one is written at the end; `checkpoint_keep` are kept
    names = checkpoint.names(directory)
    assert len(names) == 2
    assert names[1] == written[-1]


def test_a_damaged_checkpoint_is_passed_over(rig, caplog):
    found = rig()
    first = found.run()
    found.loop = found.make()
    second = found.run()
    path = found.run_dir / "checkpoints"
    (path / second.checkpoint / "loop.npz").write_bytes(b"")
    found.loop, found.due, found.ahead = found.make(), 0, 0
    assert found.run().counters.updates == first.counters.updates
    assert f"event=checkpoint_damaged name={second.checkpoint}" in caplog.text
    for name in checkpoint.names(path):
        (path / name / "loop.npz").write_bytes(b"")
    found.loop = found.make()
    with pytest.raises(ValueError, match=r"none of the \d checkpoints under .* is whole; the log says why"):
        found.run()


# what others ask


def test_a_report_is_of_the_windows_of_the_next_update(rig):
    found = rig(Remembering, due=0, ahead=1000)
    asked = found.loop.report(5)
    with found.running():
        report = asked.result(SECONDS)
        again = found.loop.report(5).result(SECONDS)
        other = found.loop.report(6).result(SECONDS)
    assert float(report.losses["torn"]) == 0
    assert report.open_loop["where"].truth.shape == (BATCH, LENGTH, 3)
    assert float(report.losses["noise"]) == float(again.losses["noise"]) != float(other.losses["noise"])
    with pytest.raises(RuntimeError, match="the learner has finished"):
        found.loop.report(7).result(SECONDS)


def test_a_report_that_will_not_come_is_refused(rig):
    found = rig(due=0, ahead=0)
    asked = found.loop.report(5)
    with found.running():
        until(lambda: found.loop.status().stage == "waiting for rows")
        assert not asked.done()
    with pytest.raises(RuntimeError, match="the learner has finished"):
        asked.result(SECONDS)


def test_shards_that_move_are_connected_anew(rig):
    found = rig(Remembering, due=5, ahead=0)
    moved = (Endpoint("b:2", "x" * 16),)
    with found.running() as ended:
        until(lambda: found.loop.status().counters.updates == 5)
        found.loop.set_shards(found.connected[0][0])  # no news
        until(lambda: found.loop.status().stage == "waiting for rows")
        found.away = 2
        found.loop.set_shards(moved)
        until(lambda: found.loop.status().counters.updates == 10)
    assert [endpoints for endpoints, _ in found.connected] == [(Endpoint("a:1", "x" * 16),), moved]
    assert found.connected[1][1].updates == 5
    assert found.closed == 2
    (finished,) = ended
    assert finished.counters.updates == 10
    assert int(load(found, finished.checkpoint).state.train.updates) == 10
    assert found.gate.totals().updates == 10


def test_a_loop_stops_where_there_are_no_shards(rig):
    found = rig(away=10**9)
    with found.running() as ended:
        until(lambda: found.loop.status().stage != "starting")
    assert ended[0].reason == "stopped"
    assert ended[0].counters.updates == 0


def test_a_wrong_token_ends_the_run(rig):
    found = rig()

    def refused(endpoints, totals):
        raise PermissionError("wrong token")

    found.loop._connect = refused
    with pytest.raises(PermissionError, match="wrong token"):
        found.run()


def test_an_error_of_sampling_ends_the_run(rig, monkeypatch):
    found = rig()

    def fail(batch):
        raise ValueError("a mistake")

    found.replay.sample = fail
    with found.running() as ended:
        until(lambda: ended)
    assert str(ended[0]) == "a mistake"
    assert found.closed == 1


def test_a_batch_that_cannot_be_split_is_refused(rig, monkeypatch):
    found = rig()
    monkeypatch.setattr(mesh, "make_mesh", lambda devices, fsdp: type("Mesh", (), {"size": 3})())
    with pytest.raises(ValueError, match=r"agent\.batch_size=4 cannot be split evenly over 3 devices"):
        found.run()


def test_status_says_how_it_stands(rig):
    found = rig(due=5, ahead=0)
    assert found.loop.status().stage == "starting"
    assert found.loop.status().limiter is None
    assert found.loop.devices == ()
    with found.running():
        until(lambda: found.loop.status().counters.updates == 5)
        until(lambda: found.loop.status().stage == "waiting for rows")
        status = found.loop.status()
        assert list(status.metrics) == ["torn", "digest", "newest", "bad_loss", "worse_loss"]
        assert status.metrics["torn"] == 0
        assert status.limiter.headroom == {"a": 3}
        assert status.updates == 5
        assert status.update_seconds > 0
        assert 0 <= status.batch_wait_ratio <= 1
        until(lambda: found.loop.status().seconds["rows"] > status.seconds["rows"])
    assert found.loop.devices == tuple(str(device) for device in jax.devices())


def test_all_of_a_loops_time_is_accounted_for(rig):
    found = rig(Remembering, due=0, ahead=0)
    before = time.monotonic()
    found.loop = found.make()
    made = time.monotonic()

    def seconds() -> Mapping[str, float]:
        began = time.monotonic()
        seconds = found.loop.status().seconds
        assert began - made - 1e-6 < sum(seconds.values()) < time.monotonic() - before + 1e-6
        return seconds

    assert [doing for doing, spent in seconds().items() if spent > 0] == ["other"]
    with found.running():
        until(lambda: seconds()["rows"] > 0)
        assert seconds()["compute"] == 0
        found.gate.ahead = 1000
        until(lambda: found.loop.status().counters.updates > 10)
        found.loop.report(1).result(SECONDS)
    ended = seconds()
    assert all(spent > 0 for doing, spent in ended.items() if doing != "batch"), ended
    later = found.loop.status().seconds
    assert {doing for doing in ended if later[doing] > ended[doing]} == {"other"}
    beside = asdict(found.loop.status().beside)
    assert all(spent > 0 for spent in beside.values()), beside


def test_a_process_counts_what_it_has_done_itself(rig):
    found = rig(Remembering, nan_share=0.4, due=20, setup={"max_skipped": 21})
    first = found.run()
    status = found.loop.status()
    assert (status.updates, status.skipped) == (20, first.counters.skipped)
    found.loop = found.make()
    second = found.run()
    status = found.loop.status()
    assert (second.counters.updates, status.counters.updates, status.updates) == (40, 40, 20)
    assert 0 < status.skipped == second.counters.skipped - first.counters.skipped
    assert status.trained_rows == 20 * BATCH * LENGTH


def test_a_checkpoint_has_an_age(rig):
    found = rig(setup={"checkpoint_every": 10}, due=1000, ahead=0)
    with found.running():
        until(lambda: found.loop.status().updates > 5)
        status = found.loop.status()
        assert (status.saved, status.checkpoint) == (Saved(), None)
        assert status.checkpoint_age == pytest.approx(sum(status.seconds.values()), abs=60)
        found.loop.count(10, 1)
        until(lambda: found.loop.status().checkpoint is not None)
        status = found.loop.status()
        assert status.saved.checkpoints == 1
        life = sum(found.loop.status().seconds.values())
        assert 0 < status.saved.seconds < life
        assert 0 < status.checkpoint_age < life - status.saved.seconds


def test_devices_are_asked_once_they_are_known(rig, monkeypatch):
    found = rig(due=1, ahead=0)
    assert found.loop.device_bytes() == {}
    found.run()
    assert found.loop.device_bytes().keys() == {str(device) for device in jax.devices()}
    assert found.loop.status().devices == len(jax.devices())


@pytest.mark.parametrize("kind", [Probe, Remembering])
def test_a_blank_batch_is_as_a_replay_serves_it(rig, kind):
    found = rig(kind)
    served = found.replay.sample(BATCH)
    made = blank(found.agent.row_spec, found.agent.window_spec, BATCH)
    shape = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shape(made) == shape(served)


def test_nothing_is_compiled_after_the_first_updates(rig):
    compiled = []
    listen = lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    found = rig(Remembering, due=0, ahead=0)
    with found.running():
        until(lambda: found.loop.status().stage == "waiting for rows")
        found.gate.ahead = 3
        until(lambda: found.loop.status().counters.updates == 3 and len(found.published) > 2)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            found.gate.ahead = 30
            until(lambda: found.loop.status().counters.updates == 30)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert found.loop.status().compiled.programs > 0  # the first checkpoint, if all else was compiled by other tests
    assert found.loop.status().compiled.again == 0
