import errno
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_server.store import Store
from telamon.data import ArraySpec, RowSpec, WindowSpec

# 64 environments: a chunk is 16 slots of each, so that rings of 200 rows have 13 chunks.
NUM_ENVS, CAPACITY = 64, 200
EPISODES = WindowSpec(4)
CONTEXT = WindowSpec(
    4, context=2, cross_episodes=True, closed_only=False, start="windows", latents="context", online=True, annotate=True
)


def advance(table, ticks, seed=0):
    """Ticks of random episode ends and abandonments, with write-backs; some environments fall behind."""
    rng = np.random.default_rng(seed)
    for _ in range(ticks):
        flags = {}
        for e in np.flatnonzero(rng.random(len(table.flags)) < 0.95).tolist():
            begin = not table.flags[e] or table.flags[e][-1][1] or rng.random() < 0.03
            flags[e] = (bool(begin), bool(rng.random() < 0.1))
        table.tick(flags)
        written = list(flags)[:3]
        rows = np.array([rng.integers(len(table.flags[e])) for e in written])
        table.store.write_back(table.latents(np.array(written), rows, rng.integers(100, size=rows.size)))


def same(a, b):
    """Whether two tables draw the same windows with the same contents, now and later, and count the same."""
    for step in range(3):
        assert a.store.stats() == b.store.stats()
        for purpose in ("train", "report"):
            one, two = a.store.sample(64, purpose), b.store.sample(64, purpose)
            for x, y in zip(vars(one).values(), vars(two).values(), strict=True):
                for key in x if isinstance(x, dict) else [None]:
                    ours, others = (z if key is None else z[key] for z in (x, y))
                    assert np.asarray(ours).tobytes() == np.asarray(others).tobytes()
            a.check(one)
        for table in (a, b):
            advance(table, 20, seed=step)
    return True


@pytest.fixture
def make(make_table, tmp_path):
    def make(window=CONTEXT, num_envs=NUM_ENVS, capacity=CAPACITY, seed=0, **rest):
        return make_table(window, num_envs, capacity, seed, rest.get("directory", tmp_path / "replay"))

    return make


def restored(make, name, flags, **changed):
    """A new table, with another seed, returned to a mark; `flags`: those of all rows at the mark."""
    table = make(**{"seed": 99, **changed})
    table.store.restore(name)
    table.flags = [list(f) for f in flags]
    return table


def files(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("window", [EPISODES, CONTEXT])
@pytest.mark.parametrize("ticks", [0, 1, 15, 130, 200, 330])
def test_a_restored_replay_goes_on_like_the_original(make, window, ticks):
    table = make(window)
    advance(table, ticks)
    if table.store.can_sample():
        table.store.sample(32)
    table.store.mark("now")
    other = restored(make, "now", table.flags, window=window)
    for t in (table, other):
        advance(t, 60, seed=7)
    assert same(table, other)


@settings(max_examples=25)
@given(st.data())
def test_any_table_comes_back(any_case, make_table, tmp_path_factory, data):
    table, ticks = data.draw(any_case)
    directory = tmp_path_factory.mktemp("replay")
    table = make_table(table.window, len(table.flags), table.capacity, directory=directory)
    cut = data.draw(st.integers(0, len(ticks)))
    for tick in ticks[:cut]:
        table.tick(tick)
    table.store.mark("now")
    other = make_table(table.window, len(table.flags), table.capacity, seed=99, directory=directory)
    other.store.restore("now")
    other.flags = [list(f) for f in table.flags]
    for tick in ticks[cut:]:
        for t in (table, other):
            t.tick(tick)
        assert table.store.stats() == other.store.stats()
        assert table.store.can_sample() == other.store.can_sample()
        if table.store.can_sample():
            one, two = table.store.sample(4), other.store.sample(4)
            np.testing.assert_array_equal(one.obs["where"], two.obs["where"])


def test_a_mark_writes_only_the_chunks_that_changed(make, tmp_path):
    table, directory = make(), tmp_path / "replay"
    for row in range(100):
        table.tick(dict.fromkeys(range(NUM_ENVS), (row == 0, False)))
    table.store.mark("one")
    assert len(files(directory)) == 1 + 2 * 7  # manifest, 100 of 16 slots of rows and of latents
    table.store.mark("two")
    assert len(files(directory)) == 2 + 2 * 7
    table.store.write_back(table.latents(np.array([5]), np.array([40]), np.array([3])))
    table.store.mark("three")
    assert files(directory) >= {"chunk-latents-000002-000002.npy"}
    assert len(files(directory)) == 3 + 2 * 7 + 1
    table.tick({0: (False, False)})
    table.store.mark("four")
    assert len(files(directory)) == 4 + 2 * 7 + 1 + 2
    assert same(table, restored(make, "four", table.flags))


def test_marks_do_not_disturb_each_other(make):
    table, flags = make(), {}
    for i in range(4):
        advance(table, 70, seed=i)
        table.store.mark(f"m{i}")
        flags[i] = [list(f) for f in table.flags]
    original = make()  # the same run, again, up to each mark
    for i in range(4):
        advance(original, 70, seed=i)
        again = restored(make, f"m{i}", flags[i])
        for env in range(NUM_ENVS):
            assert again.flags[env] == original.flags[env]
        assert again.store.stats() == original.store.stats()
        np.testing.assert_array_equal(
            again.store.sample(64).latents["version"], original.store.sample(64).latents["version"]
        )
        original.store.restore(f"m{i}")  # the draw above does not count


def test_a_mark_replaces_one_of_its_name(make, tmp_path):
    table = make()
    for i in range(3):
        advance(table, 70, seed=i)
        table.store.mark("latest")
    assert {f for f in files(tmp_path / "replay") if "mark" in f} == {"mark-latest.json"}
    listed = json.loads((tmp_path / "replay" / "mark-latest.json").read_text())["body"]["chunks"]
    assert files(tmp_path / "replay") == {"mark-latest.json", *(chunk["file"] for chunk in listed)}
    assert same(table, restored(make, "latest", table.flags))


def test_a_store_may_return_to_a_mark_and_mark_again(make):
    table = make()
    advance(table, 150)
    table.store.mark("one")
    flags = [list(f) for f in table.flags]
    advance(table, 90, seed=1)
    table.store.restore("one")
    table.flags = [list(f) for f in flags]
    advance(table, 3, seed=2)
    table.store.mark("two")
    assert same(table, restored(make, "two", table.flags))


def test_forget_removes_what_no_other_mark_needs(make, tmp_path):
    table, directory = make(), tmp_path / "replay"
    advance(table, 100)
    table.store.mark("one")
    of_one = files(directory)
    advance(table, 30, seed=1)
    table.store.mark("two")
    listed = {chunk["file"] for chunk in json.loads((directory / "mark-two.json").read_text())["body"]["chunks"]}
    assert listed & of_one  # some chunks are shared
    assert of_one - listed - {"mark-one.json"}  # and some are not
    table.store.forget("one")
    assert files(directory) == listed | {"mark-two.json"}
    two = restored(make, "two", table.flags)
    table.store.forget("two")
    assert files(directory) == set()
    table.store.mark("three")  # nothing changed since "two", whose files are gone
    assert same(two, restored(make, "three", table.flags))


def test_unknown_marks_are_named(make, tmp_path):
    table = make()
    with pytest.raises(FileNotFoundError, match="there is no mark 'x' in"):
        table.store.forget("x")
    with pytest.raises(FileNotFoundError, match=r"there is no mark file .*mark-x\.json"):
        table.store.restore("x")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.json", "a b"])
def test_a_name_that_is_no_file_name_is_refused(make, name):
    for verb in ("mark", "restore", "forget"):
        with pytest.raises(ValueError, match=f"mark name {re.escape(repr(name))} must be 1 to 64"):
            getattr(make().store, verb)(name)


def test_without_a_directory_there_are_no_marks(make):
    with pytest.raises(ValueError, match="made without a directory, so it keeps no marks"):
        make(directory=None).store.mark("now")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_envs": 32}, "num_envs was 64 and is 32"),
        (
            {"window": EPISODES, "num_envs": 32},
            "num_envs was 64 and is 32; window.annotate was True and is False; window.closed_only was False",
        ),
    ],
)
def test_a_mark_of_another_table_is_refused(make, changed, message):
    table = make()
    advance(table, 10)
    table.store.mark("now")
    with pytest.raises(ValueError, match=f"mark 'now' was made by another replay: {message}"):
        make(**changed).store.restore("now")


@pytest.mark.parametrize("window", [EPISODES, CONTEXT])
@pytest.mark.parametrize("ticks", [30, 130, 290])
def test_a_mark_of_smaller_rings_goes_on_in_larger_ones(make, window, ticks):
    table = make(window)
    advance(table, ticks)
    table.store.mark("small")
    larger = restored(make, "small", table.flags, window=window, capacity=333)
    assert larger.store.stats() == table.store.stats()
    one, two = table.store.sample(64), larger.store.sample(64)
    np.testing.assert_array_equal(one.obs["where"], two.obs["where"])
    np.testing.assert_array_equal(one.first_row, two.first_row)

    advance(larger, 40, seed=5)
    window_of_larger = larger.store.sample(64)
    larger.check(window_of_larger)
    held = larger.store.stats().rows_held
    lengths = [len(f) for f in larger.flags]
    # nothing that the small rings held is lost, and what came since found room
    assert held == sum(n - max(0, then - CAPACITY) for n, then in zip(lengths, map(len, table.flags), strict=True))
    larger.store.mark("large")
    assert same(larger, restored(make, "large", larger.flags, window=window, capacity=333))


def test_a_mark_of_larger_rings_keeps_them(make):
    table = make(capacity=300)
    advance(table, 290)
    table.store.mark("large")
    smaller = restored(make, "large", table.flags, capacity=200)
    smaller.capacity = 300
    assert same(table, smaller)


@pytest.mark.parametrize("capacity", [CAPACITY, 333])
def test_a_queue_of_fresh_windows_comes_back_as_it_was(make, capacity):
    """In the middle: some were served, some were overwritten, some wait; also in larger rings."""
    table = make()
    advance(table, 230)
    assert len(table.store.sample(500).env_id) == 500
    advance(table, 20, seed=1)
    table.store.sample(7)
    table.store.sample(5, "report")
    table.store.mark("now")
    waiting = table.store.stats().online_queue
    assert 100 < waiting < NUM_ENVS * (CAPACITY // 4)
    other = restored(make, "now", table.flags, capacity=capacity)
    assert other.store.stats() == table.store.stats()
    one, two = (t.store.sample(waiting + 20) for t in (table, other))
    np.testing.assert_array_equal(one.env_id, two.env_id)
    np.testing.assert_array_equal(one.first_row, two.first_row)
    assert other.store.stats().online_queue == 0


def test_marks_are_listed(make, tmp_path):
    table = make()
    assert table.store.marks() == []
    for name in ("b", "a"):
        table.store.mark(name)
    truncate(tmp_path / "replay" / "mark-a.json")
    assert table.store.marks() == ["a", "b"]
    table.store.forget("a")
    assert table.store.marks() == ["b"]


def test_a_mark_of_other_rows_is_refused(make, row_spec, tmp_path):
    table = make()
    advance(table, 10)
    table.store.mark("now")
    other = RowSpec(row_spec.obs, ArraySpec((2,)), row_spec.latents)
    store = Store(other, CONTEXT, NUM_ENVS, CAPACITY, np.random.default_rng(0), tmp_path / "replay")
    with pytest.raises(ValueError, match=r"row.action was {.*'shape': \[1\]} and is {.*\[2\]}"):
        store.restore("now")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("pattern", "damage", "error", "message"),
    [
        (
            "chunk-rows-000003-*",
            truncate,
            ValueError,
            "chunk-rows-000003-000002.npy, which mark 'new' needs, is damaged",
        ),
        ("chunk-latents-000003-*2.npy", flip, ValueError, "chunk-latents-000003-000002.npy, which .* CRC32"),
        (
            "chunk-rows-000003-*",
            os.remove,
            FileNotFoundError,
            "chunk-rows-000003-000002.npy, .*'new' needs, is missing",
        ),
        ("mark-new.json", truncate, ValueError, r"mark file .*mark-new\.json is damaged: "),
        ("mark-new.json", flip, ValueError, r"mark file .*mark-new\.json is damaged: "),
        ("mark-new.json", lambda path: path.write_text("[]"), ValueError, r"mark file .*mark-new\.json is damaged: "),
    ],
)
def test_damage_is_named_and_an_older_mark_still_serves(make, tmp_path, pattern, damage, error, message):
    table, directory = make(), tmp_path / "replay"
    advance(table, 40)
    table.store.mark("old")
    flags = [list(f) for f in table.flags]
    advance(table, 30, seed=1)
    table.store.mark("new")
    for path in sorted(directory.glob(pattern)):
        if path.name not in {"chunk-rows-000003-000001.npy", "chunk-latents-000003-000001.npy"}:
            damage(path)

    other = make()
    advance(other, 20)
    with pytest.raises(error, match=message):
        other.store.restore("new")
    untouched = make()
    advance(untouched, 20)
    assert same(other, untouched)

    table = restored(make, "old", flags)
    advance(table, 30, seed=1)
    table.store.mark("newer")
    assert same(table, restored(make, "newer", table.flags))


def test_a_lost_chunk_file_is_written_again(make, tmp_path):
    table = make()
    advance(table, 40)
    table.store.mark("one")
    (tmp_path / "replay" / "chunk-rows-000001-000001.npy").unlink()
    table.store.mark("two")
    assert same(table, restored(make, "two", table.flags))


def test_leftovers_of_a_killed_mark_go_at_the_next_one(make, tmp_path, monkeypatch):
    table, directory = make(), tmp_path / "replay"
    advance(table, 40)
    table.store.mark("one")
    flags = [list(f) for f in table.flags]
    (directory / "chunk-rows-000000-000002.npy").write_bytes(b"half a chu")
    (directory / "mark-two.tmp").write_bytes(b'{"crc32": 12')
    (directory / "README").write_text("not ours")
    assert same(restored(make, "one", flags), table)
    sync, seen = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append(files(directory)), sync(descriptor)))
    table.store.mark("two")
    assert "mark-two.tmp" not in seen[0]  # before anything needs its room
    assert "README" in files(directory)
    listed = {
        chunk["file"]
        for name in ("one", "two")
        for chunk in json.loads((directory / f"mark-{name}.json").read_text())["body"]["chunks"]
    }
    assert files(directory) == listed | {"mark-one.json", "mark-two.json", "README"}
    assert same(table, restored(make, "two", table.flags))


def test_a_full_disk_is_named_and_harms_no_mark(make, tmp_path, monkeypatch):
    table, directory = make(), tmp_path / "replay"
    advance(table, 40)
    table.store.mark("one")
    before, flags = files(directory), [list(f) for f in table.flags]
    advance(table, 30, seed=1)
    sync, calls = os.fsync, iter(range(100))

    def full(descriptor):
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"writing \d+ bytes failed \(No space left on device\): .*chunk-") as caught:
        table.store.mark("two")
    assert caught.value.errno == errno.ENOSPC
    assert files(directory) == before  # what was half written gave its room back
    monkeypatch.undo()
    assert restored(make, "one", flags).store.stats().rows == sum(map(len, flags))
    table.store.mark("two")
    assert same(table, restored(make, "two", table.flags))


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from replay_server.store import Store
from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec

directory, calls = Path(sys.argv[1]), 0
spec = RowSpec((("where", ArraySpec((2,), "int64")),), ArraySpec((1,)))
env, off = np.arange(64, dtype=np.int32), np.zeros(64, bool)

def make(directory):
    return Store(spec, WindowSpec(4), 64, 100, np.random.default_rng(0), directory)

def append(store, ticks):
    for row in ticks:
        where = np.stack([env, np.full(64, row)], -1)
        store.append(Rows(env, {"where": where}, off.astype(np.float32), off | (row % 10 == 0), off, off,
                          np.zeros((64, 1), np.float32)))

def killer(function, last):  # dies before the last-th of the calls that make something permanent
    def run(*args):
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return run

died, last, renamed = True, 0, 0
while died:
    last += 1
    folder = directory / str(last)
    store = make(folder)
    append(store, range(60))
    store.mark("old")
    append(store, range(60, 75))
    child = os.fork()
    if not child:
        os.fsync = killer(os.fsync, last)
        Path.rename = killer(Path.rename, last)
        Path.unlink = killer(Path.unlink, last)
        store.forget("old") if len(sys.argv) > 2 and store.mark("new") is None else store.mark("new")
        os._exit(0)
    died = os.waitpid(child, 0)[1] == signal.SIGKILL
    rows = {}
    for name in ("old", "new"):
        back = make(folder)
        try:
            back.restore(name)
        except FileNotFoundError as error:
            assert "there is no mark file" in str(error), error
            continue
        rows[name] = back.stats().rows // 64
        window = back.sample(300)
        assert (window.obs["where"][..., 1] == window.first_row[:, None] + np.arange(4)).all()
        append(back, range(rows[name], 80))
        back.mark("newest")
        again = make(folder)
        again.restore("newest")
        assert (again.sample(300).obs["where"] == back.sample(300).obs["where"]).all()
    assert rows.get("old", 60) == 60 and rows.get("new", 75) == 75 and rows, rows
    renamed += "new" in rows
    if not died:
        assert rows.keys() == ({"new"} if len(sys.argv) > 2 else {"old", "new"}), rows
print(last - 1, renamed)
"""


# Two chunks, folder, manifest, rename, folder; then the old manifest, folder, the old chunk that only it needed.
@pytest.mark.parametrize(("then", "steps"), [([], 6), (["forget"], 9)])
def test_sigkill_before_any_step_leaves_whole_marks(tmp_path, then, steps):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *then], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kills, renamed = map(int, done.stdout.split())
    assert kills == steps
    assert renamed == steps - 4  # killed after the rename, or not at all
