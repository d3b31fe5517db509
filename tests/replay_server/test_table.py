"""Tables over files: what a service finds again, what it refuses, and whom it lets write."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replay_server import durable, folders, streams, table
from replay_server.storage import Files
from replay_server.table import Tables
from telamon.data import ArraySpec, RowSpec, WindowSpec, WriteBack, to_columns
from telamon.replay import StreamSuperseded, TableSpec, TickGap
from tests.replay_server.model import ROW, latents_of, rows_of
from tests.waiting import SECONDS

WINDOW = WindowSpec(4, context=2, cross_episodes=True, closed_only=False, start="windows", latents="context")
SPEC = TableSpec(ROW, WINDOW, capacity=20, max_envs=8)


class Service:
    """A folder with tables, and what may happen to the process that serves them."""

    def __init__(self, root: Path) -> None:
        self.directory, self.shm = root / "replay", root / "shm"
        self.shm.mkdir()
        self._ids = np.random.default_rng(0)
        self.start()

    def start(self, **kwargs) -> Tables:
        self.tables = Tables(self.directory, rng=self._ids, latents_root=self.shm, **{"memory_limit": 10**9, **kwargs})
        return self.tables

    def kill(self) -> None:
        """All that SIGKILL does: locks are let go, and nobody writes any more."""
        os.close(self.tables._lock_file)
        for _, t in self.tables.items():
            t._files.release()

    def stop(self) -> None:
        self.tables.close()

    def table(self, spec: TableSpec = SPEC) -> table.Table:
        return self.tables.configure("t", spec, seed=0)


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path)


def tick(t: table.Table, opened: streams.Opened, number: int, envs: int = 2, stream: str = "w") -> int:
    """One tick of a stream whose environments have had one row per tick so far; episodes of five rows."""
    env = np.arange(opened.first_env_id, opened.first_env_id + envs, dtype=np.int32)
    row = np.full(envs, number)
    columns = {k: v[None] for k, v in to_columns(rows_of(env, row, row % 5 == 0, row % 5 == 4)).items()}
    return t.append(stream, opened.epoch, t.incarnation, number, env, columns)


def held(t: table.Table, env: int) -> list[list[int]]:
    """(environment, row) as the rows themselves say."""
    return t._store._content.ring.held("obs/where", env).tolist()


def expect(t: table.Table, ticks: int, envs: int = 2) -> None:
    for env in range(envs):
        assert held(t, env) == [[env, row] for row in range(max(0, ticks - 20), ticks)]


def latents(t: table.Table, env: int) -> list[int]:
    return t._store._content.ring.held("latents/version", env).tolist()


@pytest.mark.parametrize("ticks", [0, 3, 20, 33])
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_table_is_found_as_it_was_left(service, ticks, end):
    t = service.table()
    opened = t.open_stream("w", 2)
    for number in range(ticks):
        assert tick(t, opened, number) == number
    if ticks > 3:
        t.write_back(t.incarnation, latents_of(np.array([1]), np.array([ticks - 2]), np.array([7])))
    before, incarnation = t.stats(), t.incarnation
    getattr(service, end)()
    service.start()
    t = service.tables.get("t")
    assert t.stats() == before
    assert t.incarnation == incarnation
    expect(t, ticks)
    if ticks > 3:
        assert latents(t, 1)[-2:] == [7, 0]
    # an open stream goes on in its epoch, and a new opening where it was left
    assert tick(t, opened, ticks) == ticks
    assert t.open_stream("w", 2) == streams.Opened(2, ticks + 1, 0)


def test_windows_after_a_kill_are_not_those_before(service):
    t = service.table()
    opened = t.open_stream("w", 2)
    for number in range(20):
        tick(t, opened, number)
    first = t.choose(64).first_row.tolist()
    service.kill()
    service.start()
    assert service.tables.get("t").choose(64).first_row.tolist() != first


def test_after_a_clean_stop_no_memory_is_held(service):
    t = service.table()
    tick(t, t.open_stream("w", 2), 0)
    assert len(list(service.shm.iterdir())) == 1
    service.stop()
    assert list(service.shm.iterdir()) == []
    service.start()
    assert len(list(service.shm.iterdir())) == 1
    assert list(service.directory.glob("t/rows-*/latents*")) == []


def test_latents_for_which_the_disk_has_no_room_stay_where_they_are(service, monkeypatch):
    t = service.table()
    opened = t.open_stream("w", 2)
    for number in range(3):
        tick(t, opened, number)
    monkeypatch.setattr(os, "sendfile", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    service.stop()
    service.start()
    expect(service.tables.get("t"), 3)


# exactly once


def test_a_tick_is_taken_once_and_in_order(service):
    t = service.table()
    opened = t.open_stream("w", 2)
    assert opened == streams.Opened(1, 0, 0)
    assert [tick(t, opened, n) for n in (0, 0, 1, 0, 1, 2)] == [0, 0, 1, 1, 1, 2]
    with pytest.raises(TickGap, match="tick 4 of stream 'w' came, but 3 is the next one"):
        tick(t, opened, 4)
    with pytest.raises(ValueError, match="tick -1 of stream 'w' is negative"):
        tick(t, opened, -1)
    expect(t, 3)


def test_a_successor_shuts_its_predecessor_out(service):
    t = service.table()
    old = t.open_stream("w", 2)
    tick(t, old, 0)
    new = t.open_stream("w", 2)
    with pytest.raises(StreamSuperseded, match="epoch 1 of stream 'w' is over; the present one is 2"):
        tick(t, old, 1)
    assert tick(t, new, 1) == 1


def test_streams_have_environments_of_their_own(service):
    t = service.table()
    a, b = t.open_stream("a", 3), t.open_stream("b", 2)
    assert (a.first_env_id, b.first_env_id, t.num_envs) == (0, 3, 5)
    tick(t, b, 0, stream="b")
    with pytest.raises(ValueError, match=r"env_id \[3, 4\] leaves environments 0 to 2 of stream 'a'"):
        tick(t, replace(a, first_env_id=3), 0, stream="a")
    with pytest.raises(OSError, match=r"'c' needs 4 environments, but 5 of the table's 8 are taken; raise max_envs"):
        t.open_stream("c", 4)
    with pytest.raises(ValueError, match="'a' has 3 environments since it was first opened, not 2"):
        t.open_stream("a", 2)
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        t.open_stream("d", 0)
    with pytest.raises(ValueError, match=r"stream name '\.\./a' must be 1 to 64 letters"):
        t.open_stream("../a", 1)
    with pytest.raises(FileNotFoundError, match="there is no stream 'c'; open it first"):
        tick(t, a, 0, stream="c")
    service.kill()
    service.start()
    assert service.tables.get("t").open_stream("b", 2) == streams.Opened(2, 1, 3)


def test_a_stream_that_could_not_be_written_down_is_not_there(service, monkeypatch):
    t = service.table()

    def full(*args):
        raise OSError(errno.ENOSPC, "full", "table.json")

    monkeypatch.setattr(durable, "write_json", full)
    with pytest.raises(OSError, match="full"):
        t.open_stream("w", 2)
    assert t.num_envs == 0


@pytest.mark.parametrize("at", range(11))  # nine columns, the heads, the count of ticks
@pytest.mark.parametrize("ticks", [0, 7, 23])
def test_a_kill_in_the_middle_of_a_tick_takes_it_back(service, monkeypatch, at, ticks):
    """Killed before the at-th step of a tick: nothing of it is there, and sent again it is there once."""
    t = service.table()
    opened = t.open_stream("w", 2)
    for number in range(ticks):
        tick(t, opened, number)
    ring, steps = t._store._content.ring, iter(range(100))

    class Killed(BaseException):
        pass

    class Column:
        """A column that counts writes."""

        def __init__(self, array):
            self.array = array

        def __setitem__(self, key, value):
            if next(steps) == at:
                raise Killed
            self.array[key] = value

        def __getattr__(self, name):
            return getattr(self.array, name)

        def __getitem__(self, key):
            return self.array[key]

    for name, column in ring._columns.items():
        monkeypatch.setitem(ring._columns, name, Column(column))
    head = ring.head
    monkeypatch.setattr(ring, "head", Column(head))
    monkeypatch.setattr(t._streams, "_next_tick", Column(t._streams._next_tick))
    with pytest.raises(Killed):
        tick(t, opened, ticks)
    service.kill()
    service.start()
    t = service.tables.get("t")
    assert t.stats().rows == 2 * ticks
    ring = t._store._content.ring
    for env in range(2):  # a full ring has given up its oldest row for the one that did not come
        assert held(t, env) == [[env, row] for row in range(int(ring.tail[env]), ticks)]
        assert ring.tail[env] in (max(0, ticks - 20), max(0, ticks - 19))
    assert tick(t, opened, ticks) == ticks
    expect(t, ticks + 1)


# space


def test_a_full_disk_stores_nothing_and_says_so(service, monkeypatch):
    t = service.table()
    opened = t.open_stream("w", 2)
    real = os.posix_fallocate

    def full(fd, begin, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"no space for \d+ more bytes of a table \(No space left.*\).*obs%2Fwhere"):
        tick(t, opened, 0)
    assert t.stats().rows == 0
    monkeypatch.setattr(os, "posix_fallocate", real)
    assert tick(t, opened, 0) == 0
    expect(t, 1)


def test_files_are_sparse(service):
    t = service.table(replace(SPEC, capacity=100_000))
    tick(t, t.open_stream("w", 2), 0)
    files = list(service.directory.glob("t/rows-*/*.bin"))
    assert sum(f.stat().st_size for f in files) > 20_000_000
    assert sum(512 * f.stat().st_blocks for f in files) < 1_000_000


def test_tables_beyond_the_limits_are_refused_with_what_fits(service):
    row = ROW.nbytes
    big = replace(SPEC, capacity=10**9 // (8 * row) + 1)
    with pytest.raises(
        ValueError, match=rf"of the memory limit, which has 1000000000 left; capacity={big.capacity - 1} "
    ):
        service.table(big)
    service.kill()
    service.start(memory_limit=10**18)
    with pytest.raises(OSError, match=r"is the largest that fits, or enlarge that tmpfs.*shm"):
        service.table(replace(SPEC, capacity=10**14))
    assert service.tables.items() == []
    service.table(replace(SPEC, capacity=100))


def test_the_limit_is_for_all_tables_together(service):
    spec = replace(SPEC, capacity=6 * 10**8 // (8 * ROW.nbytes))
    service.table(spec)
    with pytest.raises(ValueError, match="the memory limit, which has 4000"):
        service.tables.configure("u", spec, seed=0)


# configure


def test_a_table_is_made_once(service):
    t = service.table()
    assert service.table() is t
    other = replace(SPEC, capacity=21, window=replace(WINDOW, length=5))
    with pytest.raises(
        LookupError, match=r"'t' exists with other specs: capacity is 20, not 21; window.length is 4, not 5"
    ):
        service.table(other)
    with pytest.raises(FileNotFoundError, match="there is no table 'u'; configure it first"):
        service.tables.get("u")
    for name in ("", "a/b", "..", "a" * 65):
        with pytest.raises(ValueError, match="table name"):
            service.tables.configure(name, SPEC, seed=0)
    with pytest.raises(ValueError, match="fewer than one window of 4"):
        service.tables.configure("u", replace(SPEC, capacity=3), seed=0)
    assert [name for name, _ in service.tables.items()] == ["t"]


def test_specs_come_back_equal(service):
    action = (("grip", ArraySpec((), "int32")), ("move", ArraySpec((2,))))
    row = RowSpec((("image", ArraySpec((4, 4, 3), "uint8")), ("kind", ArraySpec((), "int32", classes=3))), action)
    spec = TableSpec(row, WindowSpec(3), capacity=9, max_envs=2)
    service.table(spec)
    service.kill()
    service.start()
    assert service.table(spec).spec == spec


def test_an_interrupted_creation_is_no_table(service):
    (service.directory / "t" / "rows-0").mkdir(parents=True)
    service.kill()
    service.start()
    assert service.tables.items() == []
    tick(service.table(), service.table().open_stream("w", 2), 0)


def test_a_folder_is_served_by_one_process(service):
    with pytest.raises(OSError, match=rf"process {os.getpid()} already serves this folder.*--directory"):
        Tables(service.directory, memory_limit=None, rng=np.random.default_rng(0), latents_root=service.shm)


# marks, and what replaces damaged rows


def filled(service, ticks=30, mark_at=25):
    """A table with a mark `m` after `mark_at` ticks, and an opened stream."""
    t = service.table()
    opened = t.open_stream("w", 2)
    for number in range(ticks):
        if number == mark_at:
            t.mark("m")
        tick(t, opened, number)
    return t, opened


def test_restore_begins_a_new_incarnation(service):
    t, opened = filled(service)
    old = t.incarnation
    env, row = np.array([0], np.int32), np.array([24])
    assert t.write_back(old, latents_of(env, row, np.array([1]))) == 1
    t.restore("m")
    assert t.incarnation != old
    expect(t, 25)
    assert latents(t, 0)[-1] == 0
    # row 24 is another one now, for all that a writer of the time before knows
    assert t.write_back(old, latents_of(env, row, np.array([2]))) == 0
    assert latents(t, 0)[-1] == 0
    assert t.stats().stale == 1
    with pytest.raises(StreamSuperseded, match="was restored or lost since stream 'w' opened"):
        t.append("w", opened.epoch, old, 30, env, {})
    again = t.open_stream("w", 2)
    assert again.next_tick == 25
    assert tick(t, again, 25) == 25
    expect(t, 26)
    service.kill()
    service.start()
    expect(service.tables.get("t"), 26)
    assert len(list(service.directory.glob("t/rows-*"))) == len(list(service.shm.iterdir())) == 1


def test_a_stream_that_a_mark_does_not_know_begins_anew(service):
    t, _ = filled(service)
    late = t.open_stream("late", 1)
    tick(t, late, 0, envs=1, stream="late")
    t.restore("m")
    assert t.open_stream("late", 1).next_tick == 0
    assert t.stats().rows == 50


def test_a_refused_restore_changes_nothing(service):
    t, opened = filled(service)
    with pytest.raises(FileNotFoundError):
        t.restore("never")
    chunk = next(service.directory.glob("t/marks/chunk-rows-*"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        t.restore("m")
    expect(t, 30)
    assert tick(t, opened, 30) == 30
    assert len(list(service.directory.glob("t/rows-*"))) == len(list(service.shm.iterdir())) == 1


@pytest.mark.parametrize("end", ["kill", "stop", None])
def test_a_mark_writes_only_what_was_touched_since_the_last(service, end):
    spec = replace(SPEC, capacity=1000)
    t = service.table(spec)
    opened = t.open_stream("w", 2)
    for number in range(500):
        tick(t, opened, number)
    t.mark("a")
    if end:
        getattr(service, end)()
        service.start()
        t = service.tables.get("t")
    before = set(service.directory.glob("t/marks/chunk-*"))
    tick(t, opened, 500)
    t.mark("b")
    new = set(service.directory.glob("t/marks/chunk-*")) - before
    assert len(before) == 8  # 4 chunks of 128 slots, rows and latents
    assert len(new) == 2
    for number in range(501, 510):
        tick(t, opened, number)
    t.restore("b")
    assert held(t, 1) == [[1, row] for row in range(501)]


@pytest.mark.parametrize("interrupted", ["before", "after"])
def test_a_mark_that_was_interrupted_is_not_taken_for_the_last_one(service, monkeypatch, interrupted):
    t, opened = filled(service)
    real, calls = durable.write_json, iter(range(9))
    last = {"before": 1, "after": 2}[interrupted]  # the table, the mark, the table again

    def write_json(*args):
        if next(calls) == last:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(durable, "write_json", write_json)
    with pytest.raises(KeyboardInterrupt):
        t.mark("m")
    monkeypatch.undo()
    service.kill()
    service.start()
    t = service.tables.get("t")
    tick(t, opened, 30)
    t.mark("n")
    t.restore("n")
    expect(t, 31)
    t.restore("m")
    expect(t, 30 if interrupted == "after" else 25)


def reboot(service) -> None:
    path = service.directory / "t" / "state.json"
    state, _ = durable.read_json(path, "state file")
    durable.write_json(path, {**state, "boot": "another"})
    shutil.rmtree(service.shm)
    service.shm.mkdir()


def truncate(service) -> None:
    path = next(service.directory.glob("t/rows-*/reward.bin"))
    os.truncate(path, 5)


def lose_latents(service) -> None:
    shutil.rmtree(service.shm)
    service.shm.mkdir()


def shorten_head(service) -> None:
    os.truncate(next(service.directory.glob("t/rows-*/head.bin")), 8)


def spoil_head(service) -> None:
    path = next(service.directory.glob("t/rows-*/tail.bin"))
    path.write_bytes(np.full(8, 99, np.int64).tobytes())


DAMAGE = {
    reboot: "the machine was started anew",
    truncate: r"reward.bin has 5 bytes instead of 640",
    lose_latents: "latents%2Fversion.bin is missing",
    shorten_head: "head.bin has 8 bytes instead of 64",
    spoil_head: "tail.bin contradict each other",
}


@pytest.mark.parametrize("harm", DAMAGE, ids=lambda f: f.__name__)
def test_damaged_rows_are_set_aside_for_the_last_good_mark(service, harm, caplog):
    t, opened = filled(service)
    tick(t, opened, 30)
    t.mark("newer")
    old = t.incarnation
    chunk = max(service.directory.glob("t/marks/chunk-rows-*"), key=lambda path: path.stat().st_mtime_ns)
    chunk.write_bytes(b"x")  # the newest mark is damaged too
    service.kill()
    harm(service)
    service.start()
    t = service.tables.get("t")
    expect(t, 25)
    assert t.incarnation != old
    assert "event=mark_damaged table=t mark=newer" in caplog.text
    assert "event=fell_back table=t mark=m rows=50" in caplog.text
    assert len(list(service.directory.glob("t/damaged-*"))) == 1
    assert t.open_stream("w", 2).next_tick == 25
    service.kill()
    service.start()
    expect(service.tables.get("t"), 25)
    assert len(list(service.shm.iterdir())) == 1


@pytest.mark.parametrize("harm", DAMAGE, ids=lambda f: f.__name__)
def test_damaged_rows_without_a_mark_are_refused_and_left(service, harm):
    t = service.table()
    tick(t, t.open_stream("w", 2), 0)
    service.kill()
    harm(service)
    before = {path: path.read_bytes() for path in service.directory.glob("t/rows-*/*")}
    for _ in range(2):
        with pytest.raises(ValueError, match="table 't' is refused: ") as refused:
            service.start()
        text = str(refused.value)
        assert "it has no mark to fall back to; whole are the files of columns ['obs/where'" in text
        assert "to begin an empty table" in text
        assert re.search(DAMAGE[harm], text)
    assert {path: path.read_bytes() for path in service.directory.glob("t/rows-*/*")} == before


def test_after_a_clean_stop_the_machine_may_go(service):
    filled(service)
    service.stop()
    reboot(service)
    service.start()
    expect(service.tables.get("t"), 30)


def test_latents_of_tables_that_are_gone_are_removed(service, tmp_path):
    service.table()
    service.kill()
    shutil.rmtree(service.directory / "t")
    (service.shm / "telamon-table-ff").mkdir()  # of a process that is just making it: nobody's yet
    (tmp_path / "other").mkdir()
    other = Service(tmp_path / "other")
    other.shm = service.shm
    other.kill()
    other.start()
    assert [path.name for path in service.shm.iterdir()] == ["telamon-table-ff"]


def test_latents_of_a_running_service_stay(service, tmp_path):
    t = service.table()
    (tmp_path / "other").mkdir()
    Tables(tmp_path / "other" / "replay", memory_limit=1, rng=np.random.default_rng(1), latents_root=service.shm)
    tick(t, t.open_stream("w", 2), 0)
    (service.directory / "t" / "table.json").unlink()  # as if it were just being made
    Tables(tmp_path / "other" / "replay2", memory_limit=1, rng=np.random.default_rng(1), latents_root=service.shm)
    assert len(list(service.shm.iterdir())) == 1


# credit


def test_credit_bounds_what_is_appended_in_all(service):
    t = service.table()
    opened = t.open_stream("w", 2)
    assert t.credit == -1
    for number in range(10):
        tick(t, opened, number)
    assert t.wait_for_credit(0)
    t.grant(20)
    assert not t.wait_for_credit(0)
    t.grant(21)
    assert t.wait_for_credit(0)
    service.kill()
    service.start()
    assert service.tables.get("t").credit == 21
    service.tables.get("t").grant(-5)
    assert service.tables.get("t").credit == -1


def test_credit_rests_while_nothing_can_be_sampled(service):
    t = service.table(replace(SPEC, window=WindowSpec(4)))
    opened = t.open_stream("w", 2)
    t.grant(0)
    for number in range(4):  # the first episode closes with the fifth row
        assert t.wait_for_credit(0)
        tick(t, opened, number)
    tick(t, opened, 4)
    assert not t.wait_for_credit(0)


def test_the_json_of_a_table_is_plain(service):
    service.table()
    body = json.loads((service.directory / "t" / "table.json").read_text())["body"]
    assert body["spec"]["capacity"] == 20


def test_write_back_of_rows_that_never_were_is_refused(service):
    t, _ = filled(service)
    with pytest.raises(ValueError, match="row 30 of environment 0 was never appended"):
        t.write_back(
            t.incarnation,
            WriteBack(np.array([0], np.int32), np.array([30]), latents_of(*np.zeros((3, 1), int)).latents),
        )


# several ticks at once


def ticks(t: table.Table, opened: streams.Opened, first: int, count: int, **changed) -> int:
    """`count` ticks in one append, as `tick` makes them; changed: column -> (tick, environment, value)."""
    env = np.arange(opened.first_env_id, opened.first_env_id + 2, dtype=np.int32)
    made = []
    for number in range(first, first + count):
        row = np.full(2, number)
        made.append(to_columns(rows_of(env, row, row % 5 == 0, row % 5 == 4)))
    columns = {name: np.stack([one[name] for one in made]) for name in made[0]}
    for name, (k, e, value) in changed.items():
        columns[name][k, e] = value
    return t.append("w", opened.epoch, t.incarnation, first, env, columns)


@pytest.mark.parametrize("window", [WINDOW, WindowSpec(4), replace(WINDOW, online=True)], ids=["all", "ends", "online"])
@pytest.mark.parametrize("sizes", [[1] * 70, [3, 7, 50, 10], [70], [9, 1, 60]], ids=str)
def test_ticks_that_come_together_are_ticks_that_come_alone(service, window, sizes):
    spec = replace(SPEC, window=window, capacity=48)
    alone, together = (service.tables.configure(name, spec, seed=0) for name in ("alone", "together"))
    a, b = alone.open_stream("w", 2), together.open_stream("w", 2)
    done = 0
    for size in sizes:
        for number in range(done, done + size):
            tick(alone, a, number)
        assert ticks(together, b, done, size) == done + size - 1
        done += size
        assert together.stats() == alone.stats()
        assert held(together, 1) == held(alone, 1)
        if alone.stats().items:
            mine, others = alone.choose(64), together.choose(64)
            np.testing.assert_array_equal(mine.env_id, others.env_id)
            np.testing.assert_array_equal(mine.first_row, others.first_row)


def test_of_ticks_that_come_together_those_that_are_held_are_passed_over(service):
    t = service.table()
    opened = t.open_stream("w", 2)
    assert ticks(t, opened, 0, 6) == 5
    assert ticks(t, opened, 2, 3) == 5
    assert ticks(t, opened, 2, 9) == 10
    expect(t, 11)
    with pytest.raises(TickGap):
        ticks(t, opened, 12, 3)


def test_ticks_before_one_that_is_refused_stay(service):
    t = service.table(replace(SPEC, capacity=400))
    opened = t.open_stream("w", 2)
    with pytest.raises(ValueError, match="environment 1 gave a row without is_first where an episode must begin"):
        ticks(t, opened, 0, 30, is_first=(15, 1, False))
    assert [held(t, env) for env in range(2)] == [[[env, row] for row in range(15)] for env in range(2)]
    assert ticks(t, opened, 15, 5) == 19
    with pytest.raises(ValueError, match=r"columns have \[2, 3\] ticks"):
        t.append(
            "w", opened.epoch, t.incarnation, 20, np.array([0], np.int32),
            {"reward": np.zeros((2, 1), np.float32), "is_first": np.zeros((3, 1), bool)},
        )  # fmt: skip


def test_where_the_disk_is_full_as_many_ticks_are_taken_as_have_room(service, monkeypatch):
    t = service.table(replace(SPEC, capacity=20_000))
    opened = t.open_stream("w", 2)
    real = Files.reserve

    def full(files, name, begin, end):
        if end // ROW.columns[name].nbytes % 20_000 > 1024:  # slots of an environment
            raise OSError(errno.ENOSPC, "no space for rows")
        real(files, name, begin, end)

    monkeypatch.setattr(Files, "reserve", full)
    with pytest.raises(OSError, match="no space for"):
        ticks(t, opened, 0, 2000)
    assert t.stats().rows == 2 * 1024
    monkeypatch.undo()
    assert ticks(t, opened, 1024, 976) == 1999


# marks while others go on


def test_ticks_go_on_while_a_mark_is_written(service, monkeypatch):
    """Before every file of a mark there is another tick, and so there is one in every pass but the last."""
    t = service.table(replace(SPEC, capacity=400))
    opened = t.open_stream("w", 2)
    for number in range(300):
        tick(t, opened, number)
    real, ticked = durable.write_through, [300]

    def write_through(path, data, sync=True):
        if path.name.startswith("chunk") and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=tick, args=(t, opened, ticked[0]))
            thread.start()
            if t._lock._is_owned():  # the last pass holds it up
                waiting.append(thread)
            else:
                thread.join(SECONDS)
                ticked[0] += 1
        real(path, data, sync)

    waiting: list[threading.Thread] = []
    monkeypatch.setattr(durable, "write_through", write_through)
    t.mark("m")
    monkeypatch.undo()
    for thread in waiting:  # all of the same tick
        thread.join()
    assert ticked[0] > 303
    assert waiting
    count = ticked[0]
    t.restore("m")
    assert held(t, 1) == [[1, row] for row in range(count)]
    assert t.open_stream("w", 2).next_tick == count
    assert latents(t, 0) == [0] * count


def test_a_mark_that_failed_leaves_nothing_out_of_the_next(service, monkeypatch):
    t = service.table(replace(SPEC, capacity=400))
    opened = t.open_stream("w", 2)
    for number in range(300):
        tick(t, opened, number)
    real, calls = durable.write_through, iter(range(100))

    def write_through(path, data, sync=True):
        if path.name.startswith("chunk") and next(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data, sync)

    monkeypatch.setattr(durable, "write_through", write_through)
    with pytest.raises(OSError, match="No space left"):
        t.mark("m")
    monkeypatch.undo()
    assert t.marks() == []
    assert list(service.directory.glob("t/marks/*")) == []
    t.mark("n")
    t.restore("n")
    assert held(t, 1) == [[1, row] for row in range(300)]


def test_latents_that_an_interrupted_restore_left_are_removed(service, monkeypatch):
    t, _ = filled(service)
    monkeypatch.setattr(folders, "remove_files", lambda files: files.release())
    t.restore("m")
    assert len(list(service.shm.iterdir())) == 2
    monkeypatch.undo()
    service.kill()
    service.start()
    expect(service.tables.get("t"), 25)
    assert len(list(service.shm.iterdir())) == len(list(service.directory.glob("t/rows-*"))) == 1


def test_windows_that_were_chosen_before_a_restore_are_those_of_before(service):
    t = service.table(replace(SPEC, window=WindowSpec(4)))
    opened = t.open_stream("w", 2)
    for number in range(5):
        tick(t, opened, number)
    t.mark("m")
    for number in range(5, 20):
        tick(t, opened, number)
    chosen = t.choose(64)
    t.restore("m")
    out = {name: np.empty((64, *shape), dtype) for name, (shape, dtype) in t.served.items()}
    t.fill(chosen, out)
    np.testing.assert_array_equal(out["obs/where"][:, 0, 1], chosen.first_row)
    assert chosen.first_row.max() > 5
    assert not out["is_first"][:, 1:].any()


# whose latents are whose


def copied(service, tmp_path) -> Service:
    """A service on a copy of the folder, with the same memory."""
    (tmp_path / "other").mkdir()
    other = Service.__new__(Service)
    other.directory, other.shm, other._ids = tmp_path / "other" / "replay", service.shm, service._ids
    shutil.copytree(service.directory, other.directory)
    return other


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_copy_of_a_folder_is_not_served_beside_the_original(service, tmp_path, end):
    filled(service)
    getattr(service, end)()
    other = copied(service, tmp_path)
    service.start()
    with pytest.raises(ValueError, match=r"belongs to .*/replay/t, of which .*/other/replay/t is a copy; they cannot"):
        other.start()
    expect(service.tables.get("t"), 30)
    shutil.rmtree(service.directory)  # a folder that was moved away
    service.kill()
    if end == "kill":
        other.start()
        expect(other.tables.get("t"), 30)


def test_latents_of_another_mount_namespace_stay(service, tmp_path, monkeypatch):
    """Where paths mean something else nobody can say that a table is gone."""
    service.table()
    service.kill()
    monkeypatch.setattr(folders, "namespace", lambda: 7)
    shutil.rmtree(service.directory)
    folders.sweep_latents(service.shm)
    assert len(list(service.shm.iterdir())) == 1
    monkeypatch.undo()
    folders.sweep_latents(service.shm)
    assert list(service.shm.iterdir()) == []


def test_a_container_that_starts_again_has_its_latents(service, monkeypatch):
    filled(service)
    service.kill()
    monkeypatch.setattr(folders, "namespace", lambda: 7)
    service.start()
    expect(service.tables.get("t"), 30)


def test_latents_of_a_damaged_table_stay(service):
    service.table()
    service.kill()
    path = service.directory / "t" / "table.json"
    text = path.read_text()
    path.write_text(text[:-5])
    folders.sweep_latents(service.shm)
    path.write_text(text)
    service.start()
    assert service.tables.get("t").stats().rows == 0


# ends of a service


def test_a_closed_table_takes_nothing(service):
    t, opened = filled(service)
    window = latents_of(np.array([0]), np.array([29]), np.array([1]))
    service.stop()
    for ask in (
        lambda: tick(t, opened, 30),
        lambda: t.write_back(t.incarnation, window),
        lambda: t.open_stream("w", 2),
        lambda: t.grant(5),
        lambda: t.mark("x"),
        lambda: t.restore("m"),
    ):
        with pytest.raises(ConnectionError, match="the server is draining"):
            ask()
    service.start()
    expect(service.tables.get("t"), 30)


def test_a_start_that_one_table_refuses_leaves_the_others_stopped(service):
    for name in ("a", "b"):
        t = service.tables.configure(name, SPEC, seed=0)
        tick(t, t.open_stream("w", 2), 0)
    service.stop()
    os.truncate(next(service.directory.glob("b/rows-*/reward.bin")), 5)
    with pytest.raises(ValueError, match="table 'b' is refused"):
        service.start()
    assert list(service.shm.iterdir()) == []
    path = service.directory / "a" / "state.json"
    state, _ = durable.read_json(path, "state file")
    durable.write_json(path, {**state, "boot": "another"})
    shutil.rmtree(service.directory / "b")
    service.start()
    expect(service.tables.get("a"), 1)


def test_a_request_for_a_stream_that_nobody_waits_for_opens_nothing(service):
    t = service.table()
    opened = t.open_stream("w", 2)
    with pytest.raises(ConnectionError, match="nobody waits for stream 'w' any more"):
        t.open_stream("w", 2, wanted=lambda: False)
    assert tick(t, opened, 0) == 0


def test_a_bound_that_is_set_during_a_restore_holds(service, monkeypatch):
    t, _ = filled(service)
    load, threads = t._store.load, []

    def loading(*args):
        threads.append(threading.Thread(target=t.grant, args=(99,)))
        threads[0].start()
        threads[0].join(0.1)
        return load(*args)

    monkeypatch.setattr(t._store, "load", loading)
    t.restore("m")
    threads[0].join()
    assert t.credit == 99


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
import numpy as np
from replay_server.table import Tables
from tests.replay_server.model import rows_of, latents_of
from tests.replay_server.test_table import SPEC
from telamon.data import to_columns

root = Path(sys.argv[1])
make = lambda: Tables(root / "replay", memory_limit=10**9, rng=np.random.default_rng(0), latents_root=root)

def fill():
    with (root / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

tables = make()
t = tables.configure("t", SPEC, seed=0)
fill()  # before anything was read: on a tmpfs a read takes the space too
t.grant(100)
assert t.stats().rows == 0
(root / "ballast").unlink()
opened = t.open_stream("w", 2)
env = np.arange(2, dtype=np.int32)

def tick(number):
    row = np.full(2, number)
    columns = {k: v[None] for k, v in to_columns(rows_of(env, row, row == 0, row < 0)).items()}
    return t.append("w", opened.epoch, t.incarnation, number, env, columns)

for number in range(8):
    tick(number)
t.mark("m")
fill()
t.grant(100)
t.choose(16)
t.write_back(t.incarnation, latents_of(np.array([0]), np.array([7]), np.array([1])))
for number in range(8, 30):
    tick(number)
failed = 0
for ask in (lambda: t.mark("n"), lambda: t.restore("m"), lambda: t.open_stream("v", 1),
            lambda: tables.configure("u", SPEC, seed=0)):
    try:
        ask()
    except OSError as error:
        failed += 1
assert failed == 4, failed
assert t.stats().rows == 60
tables.close()
(root / "ballast").unlink()
t = make().get("t")
assert t.stats().rows == 60
print("fine")
"""


def test_a_disk_that_is_really_full_kills_nobody(tmp_path):
    """A write to a hole of a mapped file would end the process with SIGBUS."""
    small = tmp_path / "small"
    small.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", small]).returncode:
        pytest.skip("a small disk takes the right to mount one")
    try:
        run = subprocess.run(
            [sys.executable, "-c", ON_A_SMALL_DISK, small], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert (run.returncode, run.stdout) == (0, "fine\n"), run.stderr
    finally:
        subprocess.run(["umount", small], check=True)


def test_under_a_bound_ticks_are_taken_one_by_one(service):
    t = service.table()
    opened = t.open_stream("w", 2)
    t.grant(100)
    assert ticks(t, opened, 0, 5) == 0
    assert ticks(t, opened, 0, 5) == 1
    t.grant(-1)
    assert ticks(t, opened, 0, 5) == 4
