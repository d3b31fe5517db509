"""Several servers as one replay: real ones for what they serve, and stand-ins for how shards come and go."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import fields, replace

import numpy as np
import pytest

from telamon.data import Window, WriteBack
from telamon.replay import ReplayStats, TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from telamon.rpc.sharded import ShardedReplay
from tests.replay_server.model import ROW, WINDOWS, latents_of, rows_of
from tests.service import TOKEN, serve, serve_open
from tests.waiting import SECONDS, until

MAX_ENVS = 4
SPEC = TableSpec(ROW, WINDOWS, capacity=500, max_envs=MAX_ENVS)
MOMENT = 0.15
"""Seconds; a time-out that is meant to pass."""


def episode(client: Client, rows: int, num_envs: int) -> None:
    for row in range(rows):
        flags = np.full(num_envs, row == 0), np.full(num_envs, row == rows - 1)
        client.append(rows_of(np.arange(num_envs), np.full(num_envs, row), *flags))


@pytest.fixture
def shards(tmp_path):
    """Three servers that offer 30, 0 and 90 windows, and the clients that filled them."""
    with ExitStack() as stack:
        clients = []
        for name, num_envs, rows in (("a", 1, 33), ("b", 2, 2), ("c", 3, 33)):
            endpoint = stack.enter_context(serve(tmp_path / name, listen=f"unix:{tmp_path}/{name}.socket"))
            client = Client(endpoint, "t", SPEC, stream="w", num_envs=num_envs, timeout=SECONDS)
            episode(client, rows, num_envs)
            clients.append(client)
        yield clients
        for client in clients:
            client._release()


def sharded(clients, home=None, **options) -> ShardedReplay:
    options = {"timeout": SECONDS, "patience": SECONDS, **options}
    return ShardedReplay(clients, home=home, rng=np.random.default_rng(0), max_envs=MAX_ENVS, **options)


def test_windows_are_drawn_as_from_one_table(shards):
    """Uniform over all windows of all shards, by chi-square; and each is that of its shard."""
    replay = sharded(shards)
    count, drawn = Counter(), 0
    for _ in range(40):
        window = replay.sample(150)
        drawn += 150
        shard, env = window.env_id // MAX_ENVS, window.env_id % MAX_ENVS
        assert (np.diff(shard) >= 0).all(), "the first shard's come first"
        np.testing.assert_array_equal(window.obs["where"][..., 0], np.repeat(env[:, None], 4, 1))
        np.testing.assert_array_equal(window.obs["where"][..., 1], window.first_row[:, None] + np.arange(4))
        count.update(zip(window.env_id.tolist(), window.first_row.tolist(), strict=True))
    assert set(count) == {(e, r) for e in (0, 8, 9, 10) for r in range(30)}
    expected = drawn / 120
    chi_square = sum((n - expected) ** 2 / expected for n in count.values())
    assert chi_square < 119 + 5 * (2 * 119) ** 0.5
    assert sum(client.stats().sampled_windows for client in shards) == drawn
    replay.close()


def test_write_backs_find_their_shards(shards):
    replay = sharded(shards)
    window = replay.sample(60)
    update = latents_of(window.env_id, window.first_row, 100 * window.env_id + window.first_row)
    assert replay.write_back(update) == 60
    assert [client.stats().written_back for client in shards] == [
        int((window.env_id // MAX_ENVS == i).sum()) for i in range(3)
    ]
    assert replay.dropped_rows == 0
    assert replay.write_back(latents_of(window.env_id[:0], window.first_row[:0], window.first_row[:0])) == 0
    for wrong in (-1, 3 * MAX_ENVS):
        with pytest.raises(ValueError, match="environments 0 to 11"):
            replay.write_back(latents_of(np.array([0, wrong]), np.array([0, 0]), np.array([0, 0])))
    replay.close()


def test_what_was_drawn_before_a_restore_is_stale_there_alone(shards):
    replay = sharded(shards)
    shards[2].mark("m")
    old = replay.sample(60)
    update = replace(latents_of(old.env_id, old.first_row, old.first_row), incarnation=old.incarnation)
    assert replay.write_back(update) == 60
    restored = int((old.env_id // MAX_ENVS == 2).sum())
    assert 0 < restored < 60
    for _ in range(2):
        shards[2].restore("m")
        new = replay.sample(60)
        assert new.incarnation != old.incarnation
        assert replay.write_back(update) == 60 - restored
        fresh = latents_of(new.env_id, new.first_row, new.first_row)
        for incarnation in (0, new.incarnation):
            assert replay.write_back(replace(fresh, incarnation=incarnation)) == 60
    assert [client.stats().stale for client in shards] == [0, 0, restored]  # since the mark, which counts too
    assert replay.sample(60).incarnation == new.incarnation, "it changes with the shards alone"
    for unknown in (-1, 4):
        with pytest.raises(ValueError, match=f"of incarnation {unknown}"):
            replay.write_back(replace(update, incarnation=unknown))
    replay.close()


def test_counts_are_summed_and_appends_go_home(shards):
    replay = sharded(shards, home=1)
    each = [client.stats() for client in shards]
    assert replay.stats() == ReplayStats(
        **{f.name: sum(getattr(stats, f.name) for stats in each) for f in fields(ReplayStats)}
    )
    assert replay.shard_stats() == each
    assert replay.can_sample()
    replay.append(rows_of(np.arange(2), np.full(2, 2), np.ones(2, bool), np.zeros(2, bool)))
    replay.flush()
    assert [client.stats().rows for client in shards] == [33, 6, 99]
    with pytest.raises(ValueError, match="without a home shard"):
        sharded(shards).append(rows_of(np.arange(2), np.full(2, 3), np.zeros(2, bool), np.zeros(2, bool)))
    replay.close()


def test_marks_are_those_that_all_have(shards):
    replay = sharded(shards, home=1)
    replay.mark("all")
    shards[0].mark("one")
    assert replay.marks() == ["all"]
    before = replay.stats().rows
    replay.append(rows_of(np.arange(2), np.full(2, 2), np.ones(2, bool), np.zeros(2, bool)))
    with pytest.raises(FileNotFoundError, match=r"no mark 'one' on shards \[1, 2\]"):
        replay.restore("one")
    assert replay.stats().rows == before + 2
    replay.restore("all")
    assert replay.stats().rows == before
    replay.forget("one")
    replay.forget("all")
    assert [client.marks() for client in shards] == [[], [], []]
    with pytest.raises(FileNotFoundError, match="no mark 'all'"):
        replay.forget("all")
    replay.close()


def test_nothing_is_left_after_close(shards):
    before = {t for t in threading.enumerate() if t.name.startswith("telamon-shards")}
    with sharded(shards) as replay:
        replay.sample(10)
    assert {t for t in threading.enumerate() if t.name.startswith("telamon-shards")} <= before
    with pytest.raises(RuntimeError, match="is closed"):
        shards[0].stats()


class Hurried(Client):
    """A client whose next calls take the time-outs `bounds` instead of those that they are given."""

    bounds: list[float]

    def stats(self, timeout=None):
        return super().stats(self._bound(timeout))

    def sample(self, batch, purpose="train", timeout=None):
        return super().sample(batch, purpose, self._bound(timeout))

    def _bound(self, timeout):
        return self.bounds.pop(0) if self.bounds else timeout


def test_a_shard_that_goes_and_comes_back(tmp_path, caplog):
    """The others go on, what is for it is dropped and counted, and it takes part again."""
    with ExitStack() as stack, ExitStack() as going:
        address = f"unix:{tmp_path}/going.socket"
        start = lambda: going.enter_context(serve_open(tmp_path / "b", listen=address, drain_seconds=0.0))
        endpoints = [stack.enter_context(serve(tmp_path / "a")), Endpoint(address, TOKEN)]
        start()
        make = lambda kind, endpoint: kind(endpoint, "t", SPEC, stream="w", num_envs=1, timeout=SECONDS)
        clients = [make(Client, endpoints[0]), make(Hurried, endpoints[1])]
        clients[1].bounds = []
        replay = stack.enter_context(sharded(clients))
        for client in clients:
            episode(client, 33, 1)
        window = replay.sample(50)
        assert set(window.env_id) == {0, MAX_ENVS}
        going.close()
        clients[1].bounds = [MOMENT, 10 * SECONDS]
        began = time.monotonic()
        for _ in range(20):
            assert set(replay.sample(50).env_id) == {0}
        assert MOMENT <= time.monotonic() - began < SECONDS, "it is waited for once"
        until(lambda: not clients[1].bounds)
        update = latents_of(window.env_id, window.first_row, window.first_row)
        there = int((window.env_id == 0).sum())
        assert replay.write_back(update) == there
        assert replay.dropped_rows == 50 - there
        assert replay.stats().rows == 33
        assert replay.shard_stats()[1] is None
        impatient = sharded(clients, timeout=MOMENT)
        with pytest.raises(TimeoutError):
            impatient.mark("m")  # which all must have
        impatient._pool.shutdown()
        start()
        until(lambda: set(replay.sample(50).env_id) != {0})
        assert replay.write_back(update) == 50
        assert replay.stats().rows == 66
    gone, back = ([m for m in caplog.messages if f"event=shard_{what} shard=1" in m] for what in ("away", "back"))
    assert (len(gone), len(back)) == (1, 1)


class Fake:
    """A shard that offers `items` windows and may be away."""

    def __init__(self, items: int) -> None:
        self.items: int | None = None
        self.offers = items
        self.away = threading.Event()
        self.asked = 0
        self.pasts = [0]
        """Incarnations of the next windows; the last one stays."""
        self.written: list[WriteBack] = []
        self.bounds: list[float | None] = []
        """What marks and restores were given as time-out."""

    def _answer(self, timeout: float) -> None:
        self.asked += 1
        if self.away.is_set():
            time.sleep(timeout)  # as a client does, whose server is away
            raise TimeoutError("away")
        self.items = self.offers

    def stats(self, timeout=None):
        self._answer(timeout)
        return ReplayStats(**{f.name: self.offers for f in fields(ReplayStats)})

    def sample(self, batch, purpose="train", timeout=None):
        self._answer(timeout)
        if not self.offers:
            raise LookupError("nothing")
        env = np.zeros(batch, np.int32)
        rows = rows_of(env, np.zeros(batch, np.int64), env == 0, env == 1)
        return Window(
            env,
            np.zeros(batch, np.int64),
            rows.obs,
            rows.reward,
            rows.is_first,
            rows.is_last,
            rows.is_terminal,
            rows.action,
            incarnation=self.pasts.pop(0) if len(self.pasts) > 1 else self.pasts[0],
        )

    def write_back(self, update, timeout=None):
        self._answer(timeout)
        self.written.append(update)
        return update.row.size

    def marks(self, timeout=None):
        self._answer(timeout)
        return ["m"]

    def mark(self, name, timeout=None):
        self.bounds.append(timeout)

    restore = mark

    def __exit__(self, *_):
        pass


def test_all_shards_away():
    """Every call waits until one answers, and no longer than it may."""
    shards = [Fake(3), Fake(5)]
    replay = sharded(shards, timeout=2 * MOMENT, patience=MOMENT)
    for shard in shards:
        shard.away.set()
    update = WriteBack(np.array([0, MAX_ENVS], np.int32), np.zeros(2, np.int64), {})
    for call in (lambda: replay.sample(4), replay.stats, replay.can_sample, replay.shard_stats):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="2 replay servers did not answer within"):
            call()
        assert 2 * MOMENT <= time.monotonic() - began < SECONDS
    assert replay.write_back(update) == 0
    assert replay.dropped_rows == 2
    shards[1].away.clear()
    replay._timeout = SECONDS
    assert set(replay.sample(4).env_id) == {MAX_ENVS}
    assert replay.stats().rows == 5
    replay.close()


def test_marks_take_as_long_as_they_take():
    """But a shard that is away is waited for no longer than by other calls, and then none is marked or restored."""
    shards = [Fake(3), Fake(5)]
    replay = sharded(shards, timeout=MOMENT)
    for call in (replay.mark, replay.restore):
        call("m")
        shards[1].away.set()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            call("m")
        assert MOMENT <= time.monotonic() - began < SECONDS
        shards[1].away.clear()
    assert [shard.bounds for shard in shards] == [[None, None]] * 2
    replay.close()


def test_what_a_shard_offers_is_believed_for_a_while():
    now = [0.0]
    shards = [Fake(10), Fake(0)]
    replay = sharded(shards, refresh=1.0, clock=lambda: now[0])
    for _ in range(3):
        assert set(replay.sample(5).env_id) == {0}
    assert [shard.asked for shard in shards] == [4, 1]  # one question each; the answer to `sample` says it, too
    shards[1].offers = 1000
    assert set(replay.sample(5).env_id) == {0}
    now[0] += 1.5
    assert MAX_ENVS in replay.sample(50).env_id
    assert shards[1].asked == 3
    replay.close()


def test_a_shard_that_has_run_dry_leaves_its_part_to_the_others():
    shards = [Fake(10), Fake(10)]
    replay = sharded(shards, clock=lambda: 0.0)
    assert replay.sample(20).env_id.size == 20
    shards[0].offers, shards[0].asked = 0, 0
    assert set(replay.sample(40).env_id) == {MAX_ENVS}
    assert shards[0].asked == 1
    shards[1].offers = 0
    with pytest.raises(LookupError, match="append more"):
        replay.sample(20)
    assert not replay.can_sample()
    with pytest.raises(ValueError, match="batch of 0"):
        replay.sample(0)
    replay.close()


def test_a_shard_that_is_restored_within_a_batch():
    """Its windows count as those of the older past: none of them reaches rows that it was not made from."""
    shards = [Fake(10), Fake(10)]
    replay = sharded(shards, clock=lambda: 0.0)
    assert replay.can_sample()
    shards[0].offers = 0  # so that its part is drawn from the other one, later
    shards[1].pasts = [3, 4]
    window = replay.sample(40)
    assert len(shards[1].pasts) == 1
    replay.write_back(WriteBack(window.env_id, window.first_row, {}, window.incarnation))
    replay.write_back(WriteBack(window.env_id, window.first_row, {}, replay.sample(1).incarnation))
    assert [update.incarnation for update in shards[1].written] == [3, 4]
    replay.close()


def test_a_mistake_is_not_an_absence():
    shards = [Fake(10), Fake(10)]
    replay = sharded(shards)
    replay.sample(20)

    def refuse(*_, **__):
        raise PermissionError("wrong token")

    shards[1].sample = refuse
    with pytest.raises(PermissionError):
        replay.sample(200)
    replay.close()


@pytest.mark.parametrize(("count", "home", "max_envs"), [(0, None, 4), (2, 2, 4), (2, -1, 4), (2, 0, 0), (2, 0, 2**30)])
def test_shards_that_cannot_be(count, home, max_envs):
    with pytest.raises(ValueError, match="shards"):
        ShardedReplay([Fake(1)] * count, home=home, rng=np.random.default_rng(0), max_envs=max_envs)
