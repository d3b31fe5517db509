"""The client against a real server in this process, and against one that is really killed."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent import futures
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from replay_server.__main__ import Served
from telamon.data import ArraySpec, Rows, RowSpec, WriteBack
from telamon.replay import StreamSuperseded, TableSpec
from telamon.rpc import codec
from telamon.rpc.appender import Appender
from telamon.rpc.client import Client
from telamon.rpc.connection import Loans
from telamon.rpc.security import Endpoint
from telamon.rpc.shared import SharedSlots
from telamon.rpc.v1 import replay_pb2, replay_pb2_grpc
from tests.replay_server.model import CONTEXT, ROW, WINDOWS, Tracked, latents_of, rows_of
from tests.service import TOKEN, serve_open, spawn
from tests.waiting import SECONDS, until

SPEC = TableSpec(ROW, CONTEXT, capacity=200, max_envs=8)
ENVS = 2
MOMENT = 0.15
"""Seconds; a time-out that is meant to pass."""


class Site:
    """A server that can go and come back at the same address."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"unix:{directory.parent}/socket"
        self.endpoint = Endpoint(self.address, TOKEN)
        self._stack = ExitStack()
        self.served: Served

    def start(self) -> None:
        self.served = self._stack.enter_context(serve_open(self.directory, listen=self.address, drain_seconds=0.0))

    def stop(self) -> None:
        self._stack.close()

    @property
    def table(self):
        return self.served.tables.get("t")


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / "tables")
    site.start()
    yield site
    site.stop()


@pytest.fixture
def connect(site):
    """Makes clients; they are closed in the end, whatever state they are in."""
    clients: list[Client] = []

    def connect(endpoint: Endpoint | None = None, spec: TableSpec = SPEC, **options) -> Client:
        client = Client(endpoint or site.endpoint, "t", spec, **{"timeout": SECONDS, **options})
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client._release()


class Writer:
    """Appends rows that say their environment and number, and remembers the flags of those that count."""

    def __init__(self, client: Client, window=CONTEXT) -> None:
        self.client = client
        self.tracked = Tracked(client, window, ENVS, SPEC.capacity)
        self.history = self.tracked.flags

    def tick(self, is_first: bool = False, is_last: bool = False, timeout: float | None = None) -> None:
        row = np.array([len(flags) for flags in self.history])
        for flags in self.history:
            flags.append((is_first, is_last))
        flags = np.full(ENVS, is_first), np.full(ENVS, is_last)
        self.client.append(rows_of(np.arange(ENVS), row, *flags), timeout)

    def episode(self, rows: int = 6) -> None:
        for i in range(rows):
            self.tick(i == 0, i == rows - 1)

    def check(self, table) -> None:
        """Every row that was appended is held once, in order, if the ring is large enough for all."""
        assert table.stats().rows == sum(map(len, self.history))
        self.tracked.check(self.client.sample(50))


def test_rows_come_back_as_windows(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS))
    assert not writer.client.can_sample()
    with pytest.raises(LookupError, match="append more"):
        writer.client.sample(3)
    for _ in range(50):  # the ring wraps
        writer.episode()
    assert writer.client.can_sample()
    for batch in (1, 3, 7, 300):
        writer.tracked.check(writer.client.sample(batch, "report"))
    window = writer.client.sample(40)
    writer.tracked.check(window)
    assert window.latents["version"].shape == (40, 3)
    stats = writer.client.stats()
    assert (stats.rows, stats.sampled_windows) == (600, 40)
    assert stats == site.table.stats()


@pytest.mark.parametrize("shared_memory", [False, True])
def test_latents_are_written_back(connect, shared_memory):
    writer = Writer(connect(stream="w", num_envs=ENVS, shared_memory=shared_memory))
    for _ in range(10):
        writer.episode()
    window = writer.client.sample(30)
    env = np.repeat(window.env_id, 3)
    row = (window.first_row[:, None] + np.arange(3)).reshape(-1)
    assert writer.client.write_back(latents_of(env, row, 1000 + row)) == 90
    window = writer.client.sample(30, "report")
    writer.tracked.check(window)
    number = window.first_row[:, None] + np.arange(3)
    fresh = window.latents["version"] == 1000 + number
    assert (fresh | (window.latents["version"] == 0)).all()
    assert fresh.sum() > 30


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_write_back_of_many_frames(connect, shared_memory):
    """Of two updates of one row the later wins, whichever frames they travel in."""
    writer = Writer(connect(stream="w", num_envs=ENVS, shared_memory=shared_memory))
    for _ in range(30):
        writer.episode()
    env = np.tile(np.arange(ENVS), 50_000)
    row = np.repeat(np.arange(50_000) % 180, ENVS)
    assert writer.client.write_back(latents_of(env, row, np.arange(100_000))) == 100_000
    window = writer.client.sample(20)
    newest = {(e, r): v for v, (e, r) in enumerate(zip(env.tolist(), row.tolist(), strict=True))}
    for i in range(20):
        for t in range(3):
            assert window.latents["version"][i, t] == newest[window.env_id[i], window.first_row[i] + t]
    assert writer.client.write_back(latents_of(env[:0], row[:0], row[:0])) == 0
    wide = WriteBack(env[:9].astype(np.int64), row[:9].astype(np.int16), latents_of(env[:9], row[:9], row[:9]).latents)
    assert writer.client.write_back(wide) == 9
    memory = writer.client._writing.memory
    assert sorted(memory._free) == [0, 1, 2, 3] if shared_memory else memory is None


def test_windows_are_the_callers_own_whatever_comes_later(connect):
    """While a window is looked at its slot is not used; without a free slot windows come inline."""
    writer = Writer(connect(stream="w", num_envs=ENVS, slots=2, shared_memory=True))
    for _ in range(10):
        writer.episode()
    memory = lambda: sorted(writer.client._sampling.memory._free)
    kept = [writer.client.sample(20) for _ in range(5)]
    assert memory() == []
    copies = [(w.first_row.copy(), w.reward.copy()) for w in kept]
    for _ in range(20):
        writer.client.sample(20)
    for window, (first_row, reward) in zip(kept, copies, strict=True):
        writer.tracked.check(window)
        np.testing.assert_array_equal(window.first_row, first_row)
        np.testing.assert_array_equal(window.reward, reward)
        window.reward[:] = 0  # and may be written to
    del window
    part = kept[0].reward[3:]
    del kept
    assert len(memory()) == 1, "what was derived from a window keeps its slot"
    del part
    assert memory() == [0, 1]
    larger = writer.client.sample(100)  # than a slot
    writer.tracked.check(larger)
    assert len(memory()) == 1


def test_memory_is_shared_only_if_it_may_and_can_be(connect, monkeypatch, caplog):
    """What the server cannot map is never shared, with one line in the log, or raises if it must be."""
    writer = Writer(connect(stream="w", num_envs=ENVS, shared_memory=False))
    writer.episode(30)

    def refuse(*_):
        raise ValueError("it is on another host")

    for _ in range(3):
        writer.tracked.check(writer.client.sample(10))
    assert writer.client._sampling.memory is None
    monkeypatch.setattr(SharedSlots, "attach", refuse)
    client = connect()
    for _ in range(3):
        writer.tracked.check(client.sample(10))
    assert [message for message in caplog.messages if "memory_not_shared" in message] == [
        f"event=memory_not_shared address={client._connection.address} reason='it is on another host'"
    ]
    with pytest.raises(ValueError, match="it is on another host"):
        connect(shared_memory=True).sample(10)
    monkeypatch.setattr(SharedSlots, "create", refuse)
    writer.tracked.check(connect().sample(10))
    with pytest.raises(ValueError, match="it is on another host"):
        connect(shared_memory=True).sample(10)


def test_another_writer_supersedes(connect, site):
    old = Writer(connect(stream="w", num_envs=ENVS))
    old.episode()
    new = connect(stream="w", num_envs=ENVS)
    for _ in range(2):
        with pytest.raises(StreamSuperseded, match=r"epoch 1 .* is over"):
            old.client.append(rows_of(np.arange(ENVS), np.full(ENVS, 6), np.ones(ENVS, bool), np.zeros(ENVS, bool)))
    with pytest.raises(StreamSuperseded):
        old.client.flush()
    new.append(rows_of(np.arange(ENVS), np.full(ENVS, 6), np.ones(ENVS, bool), np.zeros(ENVS, bool)))
    assert site.table.stats().rows == 7 * ENVS
    assert old.client.stats().rows == 7 * ENVS  # it may still look


def test_two_writers_have_environments_of_their_own(connect):
    first, second = (connect(stream=name, num_envs=ENVS) for name in "ab")
    for row in range(8):
        flags = np.full(ENVS, row == 0), np.full(ENVS, row == 7)
        second.append(rows_of(np.arange(ENVS), np.full(ENVS, row), *flags))
    assert set(first.sample(50).env_id) == {2, 3}
    assert first.state().num_envs == 4


def test_a_restarted_server_has_everything_once(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=3))
    for _ in range(3):
        for _ in range(3):
            writer.episode()
        site.stop()
        site.start()
    writer.client.flush()
    writer.check(site.table)
    assert writer.client.lost_rows == 0


def test_a_killed_server_has_everything_once(tmp_path, connect):
    """SIGKILL at moments when ticks are under way: acknowledged, applied but not acknowledged, not applied."""
    address = f"unix:{tmp_path}/killed"
    options = tmp_path / "killed-tables", "--listen", address
    server = spawn(*options)
    spec = TableSpec(ROW, WINDOWS, capacity=100_000, max_envs=2)
    client = connect(server.endpoint, spec, stream="w", num_envs=ENVS, buffer_ticks=50)
    writer = Writer(client, WINDOWS)
    stop = threading.Event()

    def append() -> None:
        while not stop.is_set():
            writer.episode(10)

    with futures.ThreadPoolExecutor(1) as pool:
        appending = pool.submit(append)
        try:
            for _ in range(3):
                rows = client.stats().rows
                while client.stats().rows < rows + 200:
                    assert not appending.done()
                server.kill()
                server = spawn(*options)
        finally:
            stop.set()
        appending.result()
    client.flush()
    rows = len(writer.history[0])
    assert client.stats().rows == ENVS * rows
    every = client.sample(8 * rows)  # nearly every window
    writer.tracked.check(every)
    client.close()
    server.terminate()  # which gives back what the table has under /dev/shm


def test_everything_waits_for_the_server_and_no_longer_than_it_may(connect, site, monkeypatch):
    writer = Writer(connect(stream="w", num_envs=ENVS))
    for _ in range(5):
        writer.episode()
    client = writer.client
    window = client.sample(5)
    update = latents_of(window.env_id, window.first_row, window.first_row)
    site.stop()
    monkeypatch.setattr(client, "_timeout", MOMENT)
    calls = [
        lambda: client.sample(5),
        lambda: client.write_back(update),
        client.stats,
        client.can_sample,
        client.flush,
        lambda: client.mark("m"),
        client.marks,
        lambda: client.grant(-1),
        lambda: Client(site.endpoint, "t", SPEC, timeout=MOMENT),
    ]
    with pytest.raises(TimeoutError, match=rf"{site.address} did not acknowledge 1 ticks within {MOMENT} s; they are"):
        writer.tick(is_first=True)
    for call in calls:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=rf"{site.address} did not .* within {MOMENT} s"):
            call()
        assert MOMENT <= time.monotonic() - began < SECONDS
    monkeypatch.undo()
    site.start()
    client.flush()
    writer.tracked.check(client.sample(5))
    writer.check(site.table)
    assert client.write_back(update) == 5


@pytest.mark.parametrize("shared_memory", [False, True])
def test_an_answer_that_comes_too_late_is_nobodys(connect, site, monkeypatch, shared_memory):
    writer = Writer(connect(stream="w", num_envs=ENVS, shared_memory=shared_memory))
    for _ in range(5):
        writer.episode()
    window = writer.client.sample(5)
    update = latents_of(window.env_id, window.first_row, window.first_row)
    go_on = threading.Event()
    choose, write_back = site.table.choose, site.table.write_back
    monkeypatch.setattr(site.table, "choose", lambda *arguments: go_on.wait(SECONDS) and choose(*arguments))
    monkeypatch.setattr(site.table, "write_back", lambda *arguments: go_on.wait(SECONDS) and write_back(*arguments))
    for call in (lambda: writer.client.sample(7, timeout=MOMENT), lambda: writer.client.write_back(update, MOMENT)):
        with pytest.raises(TimeoutError):
            call()
    go_on.set()
    assert writer.client.sample(20).reward.shape == (20, 4)
    assert writer.client.write_back(latents_of(window.env_id[:3], window.first_row[:3], window.first_row[:3])) == 3


def test_two_samplers_of_one_client_wait_in_turn(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode()
    with futures.ThreadPoolExecutor(8) as pool:
        for window in pool.map(writer.client.sample, range(1, 41)):
            writer.tracked.check(window)
        site.stop()
        late = [pool.submit(writer.client.sample, 3, timeout=MOMENT) for _ in range(3)]
        for future in late:
            with pytest.raises(TimeoutError, match=f"within {MOMENT:g} s"):
                future.result(timeout=SECONDS)
    site.start()


def test_one_client_appends_and_samples_at_once(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=10), CONTEXT)
    writer.episode()
    writer.client.flush()
    flags = [list(f) for f in writer.history]
    for f in flags:
        f += [(i % 6 == 0, i % 6 == 5) for i in range(180)]
    future = Tracked(writer.client, CONTEXT, ENVS, SPEC.capacity)
    future.flags = flags
    with futures.ThreadPoolExecutor(2) as pool:
        appending = pool.submit(lambda: [writer.episode() for _ in range(30)])
        while not appending.done():
            window = writer.client.sample(10)
            update = latents_of(window.env_id, window.first_row, window.first_row)
            assert writer.client.write_back(update) == 10
            future.check(window)
        appending.result()
    writer.client.flush()
    writer.check(site.table)


def test_append_waits_while_the_buffer_is_full(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=3))
    writer.episode(10)
    writer.client.flush()
    writer.client.grant(0)
    for i in range(3):
        writer.tick(is_first=i == 0, timeout=MOMENT)
    with pytest.raises(TimeoutError, match=r"did not acknowledge 4 ticks .* they are kept"):
        writer.tick(timeout=MOMENT)
    with pytest.raises(TimeoutError, match="did not acknowledge 4 ticks"):
        writer.client.flush(timeout=MOMENT)
    assert site.table.stats().rows == 10 * ENVS
    writer.client.grant(-1)
    writer.client.flush()
    writer.check(site.table)


def test_rows_are_copied_when_append_returns(connect, site):
    client = connect(stream="w", num_envs=ENVS, buffer_ticks=50)
    writer = Writer(client)
    writer.episode(4)
    client.flush()
    client.grant(0)
    for row in range(4, 20):
        tick = rows_of(np.arange(ENVS), np.full(ENVS, row), np.full(ENVS, row == 4), np.zeros(ENVS, bool))
        client.append(tick)
        for array in (tick.env_id, tick.obs["where"], tick.obs["scalar"], tick.reward, tick.action, tick.is_first):
            array[...] = 1
        for flags in writer.history:
            flags.append((row == 4, False))
    client.grant(-1)
    client.flush()
    writer.check(site.table)


def mixed(first: list[bool], row: int) -> Rows:
    return rows_of(np.arange(ENVS), np.full(ENVS, row), np.array(first), np.zeros(ENVS, bool))


@pytest.mark.parametrize("shared_memory", [False, True])
def test_large_ticks_arrive_whichever_way_they_travel(connect, site, shared_memory, monkeypatch):
    """Also those of fewer environments, of which more fit into a slot, and those of a call that was cut off."""
    lend, lent = Loans.lend, []
    monkeypatch.setattr(Loans, "lend", lambda loans, nbytes: lent.append(loan := lend(loans, nbytes)) or loan)
    picture = ArraySpec((300, 301), "uint8")
    spec = TableSpec(RowSpec((("picture", picture), ("where", ArraySpec((), "int64"))), ArraySpec(())), WINDOWS, 40, 4)
    client = connect(spec=spec, stream="w", num_envs=4, buffer_ticks=30, shared_memory=shared_memory)

    def append(env: np.ndarray, row: int) -> None:
        flags = np.full(env.size, row == 0), np.zeros(env.size, bool)
        pictures = np.broadcast_to((env * 50 + row).astype(np.uint8)[:, None, None], (env.size, *picture.shape)).copy()
        reward = row + np.zeros(env.size, np.float32)
        client.append(Rows(env, {"picture": pictures, "where": env + 10 * row}, reward, *flags, flags[1], reward))

    for row in range(30):
        for env in (np.arange(4),) if row % 3 else (np.array([2]), np.array([0, 3]), np.array([1])):
            append(env, row)
        if row == 15:
            site.stop()
            site.start()
    client.flush()
    assert {loan is not None for loan in lent} == {shared_memory}
    window = client.sample(60)
    row = window.first_row[:, None] + np.arange(4)
    np.testing.assert_array_equal(window.obs["where"], window.env_id[:, None] + 10 * row)
    expected = (window.env_id[:, None] * 50 + row).astype(np.uint8)
    np.testing.assert_array_equal(window.obs["picture"], np.broadcast_to(expected[..., None, None], (60, 4, 300, 301)))
    assert client.stats().rows == 120


def bad_tick() -> Rows:
    """Rows that are not is_first, where an episode must begin."""
    return mixed([False, False], 77)


def test_a_refused_tick_raises_where_it_was_appended(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS))
    for _ in range(2):
        with pytest.raises(ValueError, match="episode must begin"):
            writer.client.append(bad_tick())
        writer.episode()
    writer.check(site.table)


def test_a_refused_tick_in_a_buffer_takes_no_other_with_it(connect, site):
    """Ticks that wait together travel together; the one that is refused is found among them."""
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=100))
    writer.episode()
    writer.client.flush()
    writer.client.grant(0)
    for _ in range(2):
        writer.episode()
        writer.client.append(bad_tick())
    writer.episode()
    writer.client.grant(-1)
    for _ in range(2):
        with pytest.raises(ValueError, match="episode must begin"):
            writer.client.flush()
    writer.client.flush()
    writer.check(site.table)
    writer.episode()
    writer.client.flush()
    writer.check(site.table)


@pytest.mark.parametrize("waiting", [True, False])
def test_rows_behind_a_refused_tick_are_not_spliced(connect, site, caplog, waiting):
    """Whether they wait when it is refused, or are appended before the caller has learnt of it."""
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=100))
    client = writer.client
    writer.episode()
    for i in range(3):
        writer.tick(is_first=i == 0)
    client.flush()
    append, refuse = site.table.append, 9

    def refuse_one(*arguments):
        if (arguments[-1]["obs/where"][..., 1] == refuse).any():
            raise ValueError("a bad tick")
        return append(*arguments)

    site.table.append = refuse_one
    if waiting:
        client.grant(0)
    client.append(mixed([False, False], refuse))
    if not waiting:
        while client._writer.waiting:
            time.sleep(0.001)
    learn = lambda: pytest.raises(ValueError, match="a bad tick")
    with nullcontext() if waiting else learn():
        client.append(mixed([False, False], 10))
    client.append(mixed([False, False], 11))
    client.append(mixed([False, True], 12))
    client.append(mixed([True, False], 13))
    client.grant(-1)
    with learn() if waiting else nullcontext():
        client.flush()
    client.flush()
    assert client.lost_rows == 2 + 2 + 1  # of both environments 10 and 11, of one 12
    assert site.table.stats().rows == 9 * ENVS + 1 + 2
    held = [site.table._store._content.ring.held("obs/where", env)[:, 1].tolist() for env in range(ENVS)]
    assert held == [[*range(9), 13], [*range(9), 12, 13]]
    assert len([message for message in caplog.messages if "rows_lost" in message]) == 1


def test_who_knows_of_a_refused_tick_goes_on_behind_it(connect, site):
    """As with a replay in the same process: an episode of which one tick was never made."""
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.tick(is_first=True)
    append = site.table.append

    def fail(*_):
        raise ValueError("a bad tick")

    site.table.append = fail
    with pytest.raises(ValueError, match="a bad tick"):
        writer.client.append(mixed([False, False], 77))
    site.table.append = append
    for _ in range(4):
        writer.tick()
    assert writer.client.lost_rows == 0
    writer.check(site.table)


@pytest.mark.parametrize("stored", [False, True])
def test_a_defect_of_the_server_neither_loses_nor_doubles_the_other_ticks(connect, site, monkeypatch, stored):
    """It may fail before or after it has stored the tick; the client cannot know."""
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode()
    append = site.table.append

    def fail(*arguments):
        if stored:
            append(*arguments)
        raise RuntimeError("secret")

    monkeypatch.setattr(site.table, "append", fail)
    with pytest.raises(RuntimeError, match="its log says how"):
        writer.tick(is_first=True)
    monkeypatch.undo()
    if not stored:
        for flags in writer.history:
            flags.pop()
    writer.episode()
    writer.check(site.table)


def test_rows_wait_for_space(connect, site, monkeypatch):
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode()

    def full(*_):
        raise OSError(28, "writing 9 bytes failed", "/disk")

    monkeypatch.setattr(site.table, "append", full)
    with pytest.raises(OSError, match="did not acknowledge 1 ticks"):
        writer.tick(is_first=True, timeout=MOMENT)
    until(lambda: writer.client._writer._trouble)
    with pytest.raises(OSError, match=r"did not acknowledge 1 ticks .*writing 9 bytes failed") as caught:
        writer.client.flush(timeout=MOMENT)
    assert type(caught.value) is OSError
    monkeypatch.undo()
    writer.client.flush()
    writer.check(site.table)


def test_ticks_that_the_server_has_lost_leave_no_spliced_episode(connect, site, caplog):
    """OUT_OF_RANGE: the server misses ticks that it had acknowledged."""
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode()
    streams = site.table._streams
    streams.set_next_ticks({"w": streams.next_ticks()["w"] - 2})
    for i in range(3):
        writer.client.append(
            rows_of(np.arange(ENVS), np.full(ENVS, 6 + i), np.full(ENVS, i == 2), np.zeros(ENVS, bool))
        )
    assert writer.client.lost_rows == 2 * ENVS
    for flags in writer.history:
        flags.append((True, False))
    assert site.table.stats().rows == 7 * ENVS
    assert len([message for message in caplog.messages if "rows_lost" in message]) == 1


@pytest.mark.parametrize("how", ["empty", "restored"])
def test_rows_made_for_a_table_that_is_no_more(connect, site, how):
    """The server came back empty, or somebody restored the table: episodes that are going on are not continued."""
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=50))
    other = connect()
    writer.episode(5)
    writer.client.mark("m")
    writer.tick(is_first=True)
    writer.client.flush()
    if how == "empty":
        site.stop()
        shutil.rmtree(site.directory)
        kept = 0
    else:
        writer.client.grant(0)
        kept = 5 * ENVS
    writer.client.append(mixed([False, False], 6))
    writer.client.append(mixed([True, False], 7))
    writer.client.append(mixed([False, False], 8))
    if how == "empty":
        site.start()
    else:
        other.restore("m")
        writer.client.grant(-1)
    writer.client.append(mixed([False, True], 9))
    writer.client.append(mixed([False, False], 10))
    writer.client.flush()
    assert writer.client.lost_rows == 4  # of environment 0: 6; of environment 1: 6, 7, 8
    assert site.table.stats().rows == kept + 4 + 2
    window = other.sample(100)
    appended = {e: set(window.obs["where"][window.env_id == e][..., 1].reshape(-1).tolist()) for e in range(ENVS)}
    assert appended[0] >= {7, 8, 9, 10}
    assert not appended[0] & {5, 6}
    assert not appended[1] & {5, 6, 7, 8}


def test_own_restore_continues_where_the_mark_was(connect, site):
    """Also in the middle of an episode; what waited in the buffer is undone like everything since the mark."""
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=50))
    writer.episode(8)
    for i in range(3):
        writer.tick(is_first=i == 0)
    writer.client.mark("m")
    held = [list(flags) for flags in writer.history]
    writer.client.grant(0)
    for _ in range(4):
        writer.tick()
    writer.client.restore("m")
    writer.client.grant(-1)
    writer.history[:] = held
    for _ in range(4):
        writer.tick()
    writer.client.flush()
    assert writer.client.lost_rows == 0
    writer.check(site.table)
    assert writer.client.marks() == ["m"]
    writer.client.forget("m")
    assert writer.client.marks() == []


def test_a_restore_that_fails_changes_nothing(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=50))
    writer.episode(8)
    for _ in range(3):
        with pytest.raises(FileNotFoundError, match=r"no mark .*x"):
            writer.client.restore("x")
        writer.episode(8)
    with pytest.raises(FileNotFoundError, match=r"no mark .*x"):
        writer.client.forget("x")
    writer.client.flush()
    writer.check(site.table)


def test_a_mark_and_a_restore_take_as_long_as_they_take(connect, site, monkeypatch):
    """Their work has a bound of its own, a server that is away the usual one, and what the caller says holds."""
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode()
    client = connect()
    go_on = threading.Event()

    def slowly(work, mark):
        time.sleep(2 * MOMENT)
        assert go_on.wait(SECONDS)
        work(mark)

    monkeypatch.setattr(client, "_timeout", MOMENT)
    for name in ("mark", "restore"):
        monkeypatch.setattr(site.table, name, partial(slowly, getattr(site.table, name)))
        with monkeypatch.context() as patch:  # that the server is there may take a busy machine longer
            patch.setattr(client, "state", partial(client.state, SECONDS))
            go_on.set()
            getattr(client, name)("m")
            go_on.clear()
            with pytest.raises(TimeoutError, match=f"within {MOMENT:g} s"):
                getattr(client, name)("m", timeout=MOMENT)
            patch.setattr("telamon.rpc.client.LONG_SECONDS", MOMENT)
            with pytest.raises(TimeoutError, match=f"within {MOMENT:g} s"):
                getattr(client, name)("m")
            go_on.set()
    site.stop()
    for call in (client.mark, client.restore):
        with pytest.raises(TimeoutError, match=f"within {MOMENT:g} s"):
            call("m")
    site.start()


@pytest.mark.parametrize("call", ["mark", "restore", "forget"])
def test_an_answer_that_is_lost_is_asked_for_again(connect, site, monkeypatch, call):
    """The server does it, and is gone before it can say so."""
    client = connect()
    client.mark("m")
    work, asked = getattr(site.table, call), []

    def do(name):
        asked.append(name)
        work(name)
        if len(asked) == 1:
            raise ConnectionError("the server stops")

    monkeypatch.setattr(site.table, call, do)
    getattr(client, call)("m")
    assert asked == ["m", "m"]
    assert client.marks() == ([] if call == "forget" else ["m"])


def test_a_write_back_for_a_restored_table_is_stale(connect):
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode(8)
    window = writer.client.sample(5)
    writer.client.mark("m")
    writer.client.restore("m")
    late = replace(latents_of(window.env_id, window.first_row, window.first_row), incarnation=window.incarnation)
    assert writer.client.write_back(late) == 0
    window = writer.client.sample(5)
    assert writer.client.write_back(late) == 0, "it is still of the other window"
    update = latents_of(window.env_id, window.first_row, window.first_row)
    assert writer.client.write_back(replace(update, incarnation=window.incarnation)) == 5
    assert writer.client.write_back(update) == 5
    assert writer.client.stats().stale == 10


def test_a_sampler_hears_of_what_others_restored(connect):
    """What is of no window in particular is of the present, whoever restored the table."""
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode(8)
    writer.client.mark("m")
    reader = connect()
    reader.sample(5)
    writer.client.restore("m")
    for hear in (lambda: reader.sample(5), reader.stats):
        writer.client.restore("m")
        assert reader.write_back(latents_of(np.zeros(1, int), np.arange(1), np.arange(1))) == 0
        hear()
        assert reader.write_back(latents_of(np.zeros(1, int), np.arange(1), np.arange(1))) == 1


def test_a_repeated_write_back_stays_what_it_was(connect, site, monkeypatch):
    """It waits for a server that comes back restored, and another thread of the client samples meanwhile."""
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode(8)
    writer.client.mark("m")
    client = connect()
    window = client.sample(5)
    update = latents_of(window.env_id, window.first_row, window.first_row)
    write_back = site.table.write_back

    def fail(*_):
        monkeypatch.setattr(site.table, "write_back", write_back)
        writer.client.restore("m")
        client.sample(5)
        raise ConnectionError("the server stops")

    for incarnation in (0, window.incarnation):
        monkeypatch.setattr(site.table, "write_back", fail)
        assert client.write_back(replace(update, incarnation=incarnation)) == 0


def test_a_sampler_of_a_table_that_is_no_more(connect, site):
    client = connect()
    site.stop()
    shutil.rmtree(site.directory)
    site.start()
    with pytest.raises(LookupError, match="append more"):
        client.sample(3)
    assert client.stats().rows == 0
    with pytest.raises(FileNotFoundError, match=r"no mark .*m"):
        client.restore("m")


def test_who_may_not_call(connect, site):
    with pytest.raises(PermissionError):
        connect(Endpoint(site.address, "another-token-than-that"))
    connect()
    with pytest.raises(LookupError, match="capacity"):
        connect(spec=TableSpec(ROW, CONTEXT, capacity=100, max_envs=8))
    with pytest.raises(OSError, match="raise max_envs"):
        connect(stream="w", num_envs=9)


def test_a_token_that_is_no_longer_right(connect, site, monkeypatch):
    """Rows are kept, and the writer learns of it at once."""
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode()
    site.stop()
    monkeypatch.setattr("telamon.rpc.security.authorised", lambda token, sent: False)
    site.start()
    with pytest.raises(PermissionError):
        writer.tick(is_first=True)
    with pytest.raises(PermissionError):
        writer.client.sample(1)
    monkeypatch.undo()
    until(lambda: not writer.client._writer.waiting)
    writer.check(site.table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.obs.pop("scalar"), r"columns \['obs/scalar'\] are missing"),
        (lambda r: r.obs.update(extra=r.reward), r"columns \['obs/extra'\] are unknown"),
        (lambda r: r.obs.update(scalar=r.reward.astype(float)), "column 'obs/scalar' is float64 .* says float32 .*2"),
        (lambda r: r.obs.update(scalar=r.reward[:1]), r"column 'obs/scalar' is float32 \[1\]"),
        (lambda r: r.env_id.fill(1), "repeats an environment"),
        (lambda r: r.env_id.__setitem__(0, 2), "leaves the writer's environments 0 to 1"),
        (lambda r: r.env_id.__setitem__(0, -1), r"\[-1, 1\] leaves the writer's environments"),
    ],
)
def test_rows_that_cannot_be_encoded_are_not_taken(connect, site, change, message):
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=5))
    rows = mixed([True, True], 0)
    change(rows)
    with pytest.raises(ValueError, match=message):
        writer.client.append(rows)
    writer.episode()
    writer.client.flush()
    writer.check(site.table)


def test_what_cannot_be_asked(connect):
    reader = connect()
    with pytest.raises(ValueError, match="made without a stream"):
        reader.append(mixed([True, True], 0))
    with pytest.raises(ValueError, match="batch of 0"):
        reader.sample(0)
    with pytest.raises(ValueError, match="num_envs=0"):
        connect(stream="w")
    large = TableSpec(RowSpec((("x", ArraySpec((2**20,), "int64")),), ArraySpec(())), WINDOWS, 10, 8)
    with pytest.raises(ValueError, match=r"a tick of 8 environments takes 671\d* bytes; .* lower num_envs"):
        Appender(
            reader._connection, reader._sharing, codec.append_layout(large), reader._configure,
            table="t", stream="w", num_envs=8, buffer_ticks=0,
        )  # fmt: skip
    update = latents_of(np.zeros(1), np.zeros(1), np.zeros(1))
    wrong = {
        "env_id is float32": replace(update, env_id=update.env_id.astype(np.float32)),
        "env_id goes from 4294967296 to": replace(update, env_id=update.env_id + np.int64(2**32)),
        r"row is int64 \[1, 1\]": replace(update, row=update.row[None]),
        "column 'env_id' is int32": replace(update, env_id=update.env_id[:0]),
        "latents/wide": replace(update, latents={"version": update.latents["version"]}),
    }
    for message, refused in wrong.items():
        with pytest.raises(ValueError, match=message):
            reader.write_back(refused)


def test_after_close_nothing_is_left(site):
    before = set(threading.enumerate())
    with Client(site.endpoint, "t", SPEC, stream="w", num_envs=ENVS, shared_memory=True) as client:
        writer = Writer(client)
        writer.episode(20)
        window = client.sample(5)
        client.write_back(latents_of(window.env_id, window.first_row, window.first_row))
        assert client._sampling.memory is not None
        assert not client._sampling.memory.path.exists()
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("telamon")]
    writer.tracked.check(window)  # which keeps its memory
    for call in (lambda: client.sample(1), client.stats, client.flush, lambda: client.append(mixed([True, True], 20))):
        with pytest.raises(RuntimeError, match="is closed"):
            call()
    client.close()


def test_a_close_says_what_it_leaves_behind(connect, site, caplog):
    writer = Writer(connect(stream="w", num_envs=ENVS, buffer_ticks=5))
    site.stop()
    writer.tick(is_first=True)
    with pytest.raises(TimeoutError, match="did not acknowledge 1 ticks"):
        writer.client.close(timeout=MOMENT)
    with pytest.raises(RuntimeError, match="is closed"):
        writer.client.stats()
    site.start()

    def fail(client: Client) -> None:
        with client:
            site.stop()
            Writer(client).tick(is_first=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(connect(stream="w", num_envs=ENVS, buffer_ticks=5))
    assert any("closed_in_error" in message and "ticks=1" in message for message in caplog.messages)
    site.start()


def test_closing_wakes_those_who_wait(connect, site):
    writer = Writer(connect(stream="w", num_envs=ENVS))
    writer.episode()
    site.stop()
    with futures.ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(call)
            for call in (lambda: writer.tick(is_first=True), lambda: writer.client.sample(1), writer.client.stats)
        ]
        time.sleep(0.1)
        writer.client._release()
        for future in waiting:
            with pytest.raises(RuntimeError, match="is closed"):
                future.result(timeout=SECONDS)
    site.start()


def test_another_process_needs_its_own_client(connect, monkeypatch):
    client = connect(stream="w", num_envs=ENVS)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (client.stats, lambda: client.sample(1), lambda: client.append(mixed([True, True], 0))):
        with pytest.raises(RuntimeError, match="make one in each process"):
            call()
    monkeypatch.undo()


class Generated(replay_pb2_grpc.ReplayServicer):
    """A server from the generated code alone, which knows frames only as protobuf messages."""

    def __init__(self) -> None:
        self.layout = codec.append_layout(SPEC)
        self.ticks: list[dict[str, np.ndarray]] = []
        self.updates: list[dict[str, np.ndarray]] = []

    def Configure(self, request, context):
        assert codec.spec_from_proto(request.spec) == SPEC
        return replay_pb2.ConfigureResponse(incarnation=5)

    def OpenStream(self, request, context):
        return replay_pb2.OpenStreamResponse(incarnation=5, epoch=1, next_tick=0, first_env_id=4)

    def Append(self, frames, context):
        for frame in frames:
            header = frame.header
            assert (header.table, header.append.stream, header.append.epoch, header.incarnation) == ("t", "w", 1, 5)
            assert list(header.append.env_id) == [4, 5]
            ticks = self.layout.ticks(frame.payload, header.count, header.append.ticks)
            self.ticks += [{name: array[k] for name, array in ticks.items()} for k in range(header.append.ticks)]
            yield replay_pb2.AppendAck(tick=len(self.ticks) - 1)

    def Sample(self, requests, context):
        layout = codec.sample_layout(SPEC)
        for request in requests:
            if request.HasField("shared"):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nothing is shared")
            for i in range(request.batch):
                header = layout.header(1)
                header.windows.last, header.windows.items = i == request.batch - 1, 9
                yield replay_pb2.Frame(header=header, payload=bytes([i]) * layout.nbytes(1))

    def WriteBack(self, frames, context):
        for frame in frames:
            self.updates.append(codec.write_back_layout(SPEC).views(frame.payload, frame.header.count))
            yield replay_pb2.WriteBackAck(written=frame.header.count)


def test_a_generated_server_speaks_our_frames(tmp_path, connect):
    servicer = Generated()
    server = grpc.server(futures.ThreadPoolExecutor(8))
    replay_pb2_grpc.add_ReplayServicer_to_server(servicer, server)
    endpoint = Endpoint(f"unix:{tmp_path}/generated", TOKEN)
    server.add_insecure_port(endpoint.address)
    server.start()
    client = connect(endpoint, stream="w", num_envs=ENVS)
    for row in range(3):
        client.append(mixed([True, False], row))
    assert [tick["reward"].tolist() for tick in servicer.ticks] == [[row, 1000 + row] for row in range(3)]
    for _ in range(2):
        window = client.sample(4)
        assert window.is_first.view(np.uint8).reshape(4, -1)[:, 0].tolist() == [0, 1, 2, 3]
        assert window.reward.shape == (4, 4)
        assert client.items == 9
    update = latents_of(np.arange(3), np.arange(3), np.arange(3))
    assert client.write_back(update) == 3
    np.testing.assert_array_equal(servicer.updates[0]["latents/wide"], update.latents["wide"])
    client.close()
    server.stop(None).wait()
