"""What `telamon.replay.Replay` promises, asked of everything that implements it."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec, WriteBack, as_dtype
from telamon.replay import ReplayStats, StreamSuperseded, TableSpec
from tests.replay_server.backends import Embedded, Remote
from tests.replay_server.model import (
    CONTEXT,
    EPISODES,
    FRESH,
    ROW,
    WINDOWS,
    History,
    Tracked,
    cases,
    latents_of,
    rows_of,
    stream,
)
from tests.service import serve, spawn


@pytest.fixture(scope="module")
def folder():
    """Where fsync costs nothing."""
    with TemporaryDirectory(prefix="telamon-compliance-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def embedded(folder):
    return Embedded(folder / "embedded")


@pytest.fixture(scope="module")
def in_process(folder):
    with serve(folder / "in-process") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def process(folder):
    with spawn(folder / "process", "--listen", f"unix:{folder}/socket") as server:
        yield server.endpoint
        server.terminate()  # so that it leaves nothing in memory


REMOTES = {
    "in-process": ("in_process", False),
    "process": ("process", True),
    "in-process, shared memory": ("in_process", True),
    "process, inline": ("process", False),
}
"""Name -> (the server's fixture, whether windows come through shared memory)."""


def choose_backend(request):
    if request.param == "store":
        return request.getfixturevalue("embedded")
    server, shared_memory = REMOTES[request.param]
    return Remote(request.getfixturevalue(server), shared_memory)


backend = pytest.fixture(scope="module", params=["store", "in-process", "process"])(choose_backend)
wire = pytest.fixture(scope="module", params=["store", *REMOTES])(choose_backend)
remote = pytest.fixture(scope="module", params=["in-process", "process"])(choose_backend)


@pytest.fixture
def opened():
    """What a test opens is closed after it."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def make(backend, opened):
    """A new table beside its history."""

    def make(window, num_envs, capacity, seed=0):
        return Tracked(opened(backend.table(window, num_envs, capacity, seed)), window, num_envs, capacity)

    return make


def starts(window):
    return list(zip(window.env_id.tolist(), window.first_row.tolist(), strict=True))


def same(one, two):
    """Whether two windows are equal, bit for bit."""
    for x, y in zip(arrays_of(one), arrays_of(two), strict=True):
        if (x.dtype, x.shape, x.tobytes()) != (y.dtype, y.shape, y.tobytes()):
            return False
    return True


def arrays_of(window):
    parts = [part.values() if isinstance(part, dict) else [part] for part in vars(window).values()]
    return [array for part in parts for array in part if isinstance(array, np.ndarray)]


# What is served.


@settings(max_examples=6)
@given(case=cases(rows=40))
def test_samples_are_what_the_list_model_allows_after_every_tick(backend, case):
    with backend.table(case.window, case.num_envs, case.capacity, case.seed) as replay:
        table = Tracked(replay, case.window, case.num_envs, case.capacity)
        for tick in case.ticks:
            table.tick(tick)
            choices = table.choices()
            assert replay.can_sample() == bool(choices)
            assert replay.stats().items == len(choices)
            if choices:
                window = replay.sample(4)
                table.check(window)
                assert set(starts(window)) <= {start for choice in choices for start in choice}
            else:
                with pytest.raises(LookupError, match="append more first"):
                    replay.sample(1)


@pytest.mark.parametrize("window", [EPISODES, FRESH])
@pytest.mark.parametrize("capacity", [4, 37, 64])
def test_not_one_of_many_windows_is_broken(make, window, capacity):
    """While two environments go round their rings many times, mostly not in step."""
    rng = np.random.default_rng(capacity)
    table = make(window, 2, capacity)
    open_ = np.zeros(2, bool)
    while len(table.flags[0]) < 4 * capacity:
        is_first = ~open_ | (rng.random(2) < 0.03)  # where open, an abandoned episode
        is_last = rng.random(2) < 0.1
        moves = np.flatnonzero(rng.random(2) < 0.9) if rng.random() < 0.2 else np.arange(2)
        if not moves.size:
            continue
        table.tick({int(e): (bool(is_first[e]), bool(is_last[e])) for e in moves})
        open_[moves] = ~is_last[moves]
        if table.choices():
            table.check(table.replay.sample(64))


# Unequal lengths, an abandoned episode (18 rows), one too short (3), some overwritten, and an open one of each ring.
UNEVEN = (
    stream([(5, True), (30, True), (3, True), (18, False), (9, True), (20, False)]),
    stream([(25, True), (4, True), (12, False)]),
)


@pytest.mark.parametrize("purpose", ["train", "report"])
@pytest.mark.parametrize("window", [EPISODES, WindowSpec(4, last_start=False), WINDOWS, FRESH])
def test_draws_follow_the_declared_distribution(make, window, purpose):
    table = make(window, 2, 84)
    table.fill(*UNEVEN)
    choices = table.choices()
    share = {start: 1 / len(choices) / len(choice) for choice in choices for start in choice}
    table.replay.sample(table.replay.stats().online_queue + 1)  # what is not drawn
    draws = 30_000
    counts = Counter(starts(table.replay.sample(draws, purpose)))
    assert counts.keys() <= share.keys()
    assert chisquare([counts[s] for s in share], np.array(list(share.values())) * draws).pvalue > 1e-4


def test_nothing_is_drawn_from_an_open_episode(make):
    table = make(EPISODES, 1, 50)
    table.fill(stream([(10, True), (30, False)]))
    assert table.replay.stats().episodes == 1
    assert table.replay.sample(500).first_row.max() == 6
    table.tick({0: (True, False)})  # the open one is abandoned: its 30 rows are valid, the new row is not
    assert table.replay.stats().episodes == 2
    first = table.replay.sample(3000).first_row
    assert set(first[first >= 10]) == set(range(10, 37))


def test_an_episode_goes_as_a_whole_with_its_first_row(make):
    table = make(EPISODES, 1, 20)
    table.fill(stream([(10, True), (10, True)]))  # exactly full
    assert table.replay.stats().episodes == 2
    table.tick({0: (True, False)})
    assert table.replay.stats().episodes == 1
    assert table.replay.sample(500).first_row.min() == 10


def test_an_episode_longer_than_the_ring_is_never_drawn(make):
    table = make(EPISODES, 1, 20)
    table.fill(stream([(21, True)]))
    assert not table.replay.can_sample()
    table.fill(stream([(20, True)]))
    assert table.replay.stats().episodes == 1


def test_completed_flags_are_served_and_not_stored(make):
    table = make(FRESH, 1, 8)
    table.fill(stream([(3, False), (5, False)]))
    for _ in range(2):
        window = table.replay.sample(200, "report")
        at = window.first_row == 1
        np.testing.assert_array_equal(window.is_first[at], np.tile([True, False, True, False], (at.sum(), 1)))
        np.testing.assert_array_equal(window.is_last[at], np.tile([False, True, False, False], (at.sum(), 1)))


def test_what_is_served_is_the_callers_own(wire, opened):
    table = Tracked(opened(wire.table(CONTEXT, 1, 50)), CONTEXT, 1, 50)
    table.fill(stream([(30, True)]))
    window = table.replay.sample(16)
    for array in (*window.obs.values(), *window.latents.values(), window.action, window.is_last, window.first_row):
        assert array.flags.c_contiguous
        assert array.flags.writeable
        array[...] = 1
    for _ in range(20):  # whatever memory is used again
        table.check(table.replay.sample(50))
    assert window.reward.max() > 1
    assert all((array == 1).all() for array in (*window.obs.values(), window.action, window.is_last))


def test_what_was_appended_is_the_callers_own_again(make):
    table = make(WINDOWS, 1, 50)
    rows = rows_of(np.zeros(1, np.int32), np.zeros(1, np.int64), *np.array([[True], [False]]))
    for row in range(30):
        rows.obs["where"][0], rows.obs["scalar"][0], rows.reward[0], rows.action[0] = (0, row), 7 * row, row, -row
        rows.is_first[0] = row == 0
        table.replay.append(rows)
        table.flags[0].append((row == 0, False))
        rows.obs["where"][:] = rows.reward[:] = rows.action[:] = -1
    table.check(table.replay.sample(300))


# Fresh windows, and reports.


def test_training_is_served_fresh_windows_first_and_drawn_ones_after(make):
    fresh, plain = (make(spec, 2, 40, seed=3) for spec in (FRESH, WINDOWS))
    for table in (fresh, plain):
        table.fill(stream([(13, True)]), stream([(9, True)]))
    assert fresh.replay.stats().online_queue == 5
    assert starts(fresh.replay.sample(2)) == [(0, 1), (1, 1)]
    window = fresh.replay.sample(16)
    fresh.check(window)
    # no random number went into what was not drawn
    assert starts(window) == [(0, 5), (1, 5), (0, 9), *starts(plain.replay.sample(13))]
    assert fresh.replay.stats().online_queue == 0
    assert starts(fresh.replay.sample(16)) == starts(plain.replay.sample(16))
    assert fresh.replay.stats().sampled_windows == 34


def test_fresh_windows_that_were_overwritten_are_not_served(make):
    table = make(FRESH, 2, 9)
    table.fill(stream([(21, False)]), stream([(6, False)]))
    # Environment 0 holds rows 12 to 20, so 5 and 9 are gone. Six came where four may wait: the two oldest went, one of
    # them of an environment that fell behind and holds it still.
    assert table.replay.stats().online_queue == 4
    assert starts(table.replay.sample(2)) == [(0, 13), (0, 17)]
    assert table.replay.stats().online_queue == 0


@settings(max_examples=4)
@given(case=cases(rows=30), data=st.data())
def test_reports_change_nothing(backend, case, data):
    with ExitStack() as stack:
        table, other = (
            Tracked(
                stack.enter_context(backend.table(case.window, case.num_envs, case.capacity, case.seed)),
                case.window, case.num_envs, case.capacity,
            )
            for _ in range(2)
        )  # fmt: skip
        for tick in case.ticks:
            table.tick(tick)
            other.tick(tick)
            if not table.choices():
                continue
            for _ in range(data.draw(st.integers(0, 2))):
                stats = table.replay.stats()
                table.check(table.replay.sample(3, "report"))
                assert table.replay.stats() == stats
            assert same(table.replay.sample(2), other.replay.sample(2))


def test_reports_repeat_whatever_training_draws(make):
    one, two = (make(FRESH, 1, 50, seed=3) for _ in range(2))
    for table in (one, two):
        table.fill(stream([(30, True)]))
    one.replay.sample(100)
    assert same(one.replay.sample(16, "report"), two.replay.sample(16, "report"))


def test_another_seed_draws_other_windows(make):
    one, two = (make(WINDOWS, 1, 50, seed=seed) for seed in (3, 4))
    for table in (one, two):
        table.fill(stream([(30, True)]))
    assert starts(one.replay.sample(16)) != starts(two.replay.sample(16))


# Latents.


@settings(max_examples=6)
@given(num_envs=st.integers(1, 2), capacity=st.integers(4, 12), data=st.data())
def test_write_backs_reach_the_rows_they_are_for(backend, num_envs, capacity, data):
    """Of windows drawn up to 12 ticks ago, round the rings, overlapping, between appends: against lists of all rows."""
    with backend.table(CONTEXT, num_envs, capacity) as replay:
        table = Tracked(replay, CONTEXT, num_envs, capacity)
        want = [[] for _ in range(num_envs)]
        late, version, written, stale = [], 0, 0, 0
        for row in range(data.draw(st.integers(4, 30))):
            table.tick({e: (row == 0, False) for e in range(num_envs)})
            for lists in want:
                lists.append(0)
            if not table.choices():
                continue
            for _ in range(data.draw(st.integers(0, 2))):
                late.append(replay.sample(3))
            while late and data.draw(st.booleans()):
                window = late.pop(0)
                env = np.repeat(window.env_id, CONTEXT.context)
                rows = (window.first_row[:, None] + np.arange(1, CONTEXT.length)).reshape(-1)
                versions = version + 1 + np.arange(rows.size)
                version = int(versions[-1])
                held = [r >= table.tail(e) for e, r in zip(env, rows, strict=True)]
                assert replay.write_back(latents_of(env, rows, versions)) == sum(held)
                written += held.count(True)
                stale += held.count(False)
                for e, r, v, there in zip(env, rows, versions, held, strict=True):
                    want[e][r] = int(v) if there else want[e][r]
            window = replay.sample(6, "report")
            rows = window.first_row[:, None] + np.arange(CONTEXT.context)
            expected = [[want[e][r] for r in rs] for e, rs in zip(window.env_id, rows, strict=True)]
            np.testing.assert_array_equal(window.latents["version"], expected)
        assert (replay.stats().written_back, replay.stats().stale) == (written, stale)


def test_of_two_updates_of_one_row_the_later_wins(make):
    table = make(CONTEXT, 1, 50)
    table.fill(stream([(10, False)]))
    rows = np.array([2, 5, 3, 5, 2, 2])
    assert table.replay.write_back(latents_of(np.zeros(6), rows, np.arange(6))) == 6
    window = table.replay.sample(100)
    want = np.array([0, 0, 5, 2, 0, 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(window.latents["version"], want[window.first_row[:, None] + np.arange(3)])


def test_latents_are_sent_of_the_context_rows(make):
    table = make(replace(CONTEXT, length=5, context=2), 1, 50)
    table.fill(stream([(30, True)]))
    table.replay.write_back(latents_of(np.zeros(30), np.arange(30), np.arange(100, 130)))
    window = table.replay.sample(64)
    version = 100 + window.first_row[:, None] + np.arange(2)
    np.testing.assert_array_equal(window.latents["version"], version)
    np.testing.assert_array_equal(window.latents["wide"].astype(np.int64)[:, :, 1, 2], version)
    assert window.reward.shape == (64, 5)


def test_no_latents_are_sent_where_none_are_declared(make):
    table = make(EPISODES, 1, 50)
    table.fill(stream([(30, True)]))
    assert table.replay.sample(2).latents == {}


def test_stale_write_backs_are_dropped_and_counted(make):
    table = make(CONTEXT, 1, 20)
    table.fill(stream([(30, True)]))
    assert table.replay.write_back(latents_of(np.zeros(4), np.array([9, 10, 29, 0]), np.ones(4))) == 2
    assert (table.replay.stats().written_back, table.replay.stats().stale) == (2, 2)
    assert table.replay.write_back(latents_of(np.zeros(0), np.zeros(0), np.ones(0))) == 0
    window = table.replay.sample(300)
    rows = window.first_row[:, None] + np.arange(3)
    np.testing.assert_array_equal(window.latents["version"], rows == 10)


# Every kind of column.

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def random_rows(spec, num_envs, rng, is_first):
    """One tick of random bits."""

    def draw(array):
        if array.dtype == "bool":
            return rng.integers(2, size=(num_envs, *array.shape)).astype(bool)
        dtype = as_dtype(array.dtype)
        if dtype.kind in "iu":
            bounds = np.iinfo(dtype)
            return rng.integers(bounds.min, bounds.max, (num_envs, *array.shape), dtype, endpoint=True)
        return rng.standard_normal((num_envs, *array.shape)).astype(dtype)

    return Rows(
        env_id=np.arange(num_envs, dtype=np.int32),
        obs={key: draw(array) for key, array in spec.obs},
        reward=draw(ArraySpec(())),
        is_first=np.full(num_envs, is_first),
        is_last=np.zeros(num_envs, bool),
        is_terminal=np.zeros(num_envs, bool),
        action={key: draw(array) for key, array in spec.action}
        if isinstance(spec.action, tuple)
        else draw(spec.action),
        latents={key: draw(array) for key, array in spec.latents},
    )


def assert_served(window, rows, spec, num_latents):
    """The windows hold exactly what the ticks `rows` [T] were."""
    at = window.first_row[:, None] + np.arange(window.reward.shape[1])

    def stored(get):
        return np.stack([get(tick) for tick in rows])

    def equal(got, get, count=None):
        want = stored(get)[at[:, :count], window.env_id[:, None]]
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()

    assert list(window.obs) == [key for key, _ in spec.obs]
    for key, _ in spec.obs:
        equal(window.obs[key], lambda tick, key=key: tick.obs[key])
    equal(window.reward, lambda tick: tick.reward)
    if isinstance(spec.action, tuple):
        assert list(window.action) == [key for key, _ in spec.action]
        for key, _ in spec.action:
            equal(window.action[key], lambda tick, key=key: tick.action[key])
    else:
        equal(window.action, lambda tick: tick.action)
    for key, _ in spec.latents:
        equal(window.latents[key], lambda tick, key=key: tick.latents[key], num_latents)


SPECS = {
    "every dtype": (
        RowSpec(
            obs=tuple((dtype, ArraySpec((2, 3), dtype)) for dtype in (*FLOATS, *INTEGERS)),
            action=ArraySpec((1,)),
            latents=tuple((dtype, ArraySpec((3,), dtype)) for dtype in (*FLOATS, *INTEGERS)),
        ),
        3,
    ),
    "dict action": (
        RowSpec(
            obs=(("z", ArraySpec(())), ("a", ArraySpec((0,))), ("m", ArraySpec((1, 1, 1)))),
            action=(("move", ArraySpec((), "int32", 5)), ("force", ArraySpec((2,)))),
            latents=(("deter", ArraySpec((5,), "bfloat16")), ("stoch", ArraySpec((3,), "uint8"))),
        ),
        1,
    ),
    "no latents": (RowSpec(obs=(("x", ArraySpec((4,))),), action=ArraySpec((), "int32", 3)), 0),
    "images": (
        RowSpec(
            obs=(("image", ArraySpec((64, 64, 3), "uint8")),),
            action=ArraySpec((6,)),
            latents=(("deter", ArraySpec((512,))), ("stoch", ArraySpec((32,), "uint8"))),
        ),
        1,
    ),
}


@pytest.mark.parametrize("kind", SPECS)
def test_every_column_comes_back_bit_for_bit(wire, opened, kind):
    """From a batch of images of several megabytes as well."""
    spec, context = SPECS[kind]
    window = replace(WINDOWS, length=10, context=context, latents="context" if context else "none")
    replay = opened(wire.table(window, 2, 20, row=spec))
    rng = np.random.default_rng(0)
    rows = [random_rows(spec, 2, rng, is_first=tick == 0) for tick in range(30)]
    for tick in rows:
        replay.append(tick)
    served = replay.sample(40)
    assert len(set(starts(served))) > 10
    assert_served(served, rows, spec, context)
    if spec.latents:
        env_id, row = np.repeat(np.arange(2, dtype=np.int32), 20), np.tile(np.arange(10, 30), 2)
        for tick in rows:
            tick.latents.update(random_rows(spec, 2, rng, False).latents)
        latents = {
            key: np.stack([rows[r].latents[key][e] for e, r in zip(env_id, row, strict=True)])
            for key, _ in spec.latents
        }
        assert replay.write_back(WriteBack(env_id, row, latents)) == 40
        assert_served(replay.sample(40), rows, spec, context)


# Counts.


def test_stats_count(make):
    table = make(EPISODES, 2, 20)
    assert table.replay.stats() == ReplayStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
    table.fill(stream([(30, True)]), stream([(8, True)]))
    table.replay.sample(5)
    table.replay.sample(7, purpose="report")  # does not count for the train ratio
    table.replay.write_back(latents_of(np.zeros(2), np.array([9, 10]), np.ones(2)))
    assert table.replay.stats() == ReplayStats(
        rows=38, rows_held=28, bytes_held=28 * ROW.nbytes, episodes=1, items=1, online_queue=0, sampled_windows=5,
        written_back=1, stale=1,
    )  # fmt: skip


# What is refused, in one sentence, and leaves no trace.

GOOD = rows_of(np.arange(2, dtype=np.int32), np.array([10, 10]), np.ones(2, bool), np.zeros(2, bool))
BAD_ROWS = {
    "a column too few": (
        replace(GOOD, obs={"where": GOOD.obs["where"]}),
        r"columns \['obs/scalar'\] are missing and columns \[\] are unknown; the row spec of this table has \['obs/",
    ),
    "a column too many": (
        replace(GOOD, latents={**GOOD.latents, "extra": np.zeros(2)}),
        r"columns \[\] are missing and columns \['latents/extra'\] are unknown; the row spec of this table has \[",
    ),
    "a dict action": (
        replace(GOOD, action={"move": GOOD.action}),
        r"columns \['action'\] are missing and columns \['action/move'\] are unknown; the row spec of this table has",
    ),
    "a shape": (
        replace(GOOD, obs={**GOOD.obs, "scalar": np.zeros((2, 1), np.float32)}),
        r"column 'obs/scalar' is float32 \[2, 1\], but the row spec of this table says float32 \[2\]",
    ),
    "a dtype": (
        replace(GOOD, reward=np.zeros(2)),
        r"column 'reward' is float64 \[2\], but the row spec of this table says float32 \[2\]",
    ),
    "a count": (
        replace(GOOD, is_last=np.zeros(3, bool)),
        r"column 'is_last' is bool \[3\], but the row spec of this table says bool \[2\]",
    ),
    "no rows": (
        rows_of(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, bool)),
        "a tick has no rows; it must have one of at least one environment",
    ),
    "an environment twice": (
        replace(GOOD, env_id=np.int32([1, 1])),
        r"env_id \[1, 1\] repeats an environment; a tick has one row of each",
    ),
    "an unknown environment": (
        replace(GOOD, env_id=np.int32([0, 2])),
        r"env_id \[0, 2\] leaves the .*environments 0 to 1",
    ),
    "a negative environment": (
        replace(GOOD, env_id=np.int32([-1, 1])),
        r"env_id \[-1, 1\] leaves the .*environments 0 to 1",
    ),
    "environments that are no integers": (
        replace(GOOD, env_id=np.float32([0, 1])),
        r"env_id is float32 \[2\], expected a vector of signed integers",
    ),
    "an episode without a beginning": (
        replace(GOOD, is_first=np.array([True, False])),
        "environment 1 gave a row without is_first where an episode must begin; "
        "the tick after an is_last row is a reset tick",
    ),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_refused_tick_leaves_no_trace(make, kind):
    table = make(CONTEXT, 2, 20)
    table.fill(stream([(10, True)]), stream([(10, True)]))
    stats = table.replay.stats()
    bad, message = BAD_ROWS[kind]
    with pytest.raises(ValueError, match=message) as error:
        table.replay.append(bad)
    assert "\n" not in str(error.value)
    assert table.replay.stats() == stats
    table.tick({0: (True, False), 1: (True, True)})  # and the next one goes in
    assert table.replay.stats().rows == stats.rows + 2
    table.check(table.replay.sample(200))


UPDATE = latents_of(np.array([0, 1]), np.array([3, 4]), np.array([5, 6]))
BAD_UPDATES = {
    "a row that never was": (
        replace(UPDATE, row=np.array([3, 30])),
        "row 30 of environment 1 was never appended; the next one is 30",
    ),
    "a negative row": (replace(UPDATE, row=np.array([-1, 4])), "row -1 of environment 0 was never appended"),
    "an unknown environment": (
        replace(UPDATE, env_id=np.int32([0, 2])),
        r"env_id \[0, 2\] leaves the table's environments 0 to 1",
    ),
    "latents that are missing": (
        replace(UPDATE, latents={"version": UPDATE.latents["version"]}),
        r"columns \['latents/wide'\] are missing and columns \[\] are unknown",
    ),
    "latents that are unknown": (
        replace(UPDATE, latents={**UPDATE.latents, "x": np.zeros(2)}),
        r"columns \[\] are missing and columns \['latents/x'\] are unknown",
    ),
    "a shape": (
        replace(UPDATE, latents={**UPDATE.latents, "wide": UPDATE.latents["wide"][:, :1]}),
        r"column 'latents/wide' is bfloat16 \[2, 1, 3\], but the row spec of this table says bfloat16 \[2, 2, 3\]",
    ),
    "a dtype": (
        replace(UPDATE, latents={**UPDATE.latents, "version": np.zeros(2)}),
        r"column 'latents/version' is float64 \[2\], but the row spec of this table says int32 \[2\]",
    ),
    "rows that are fewer": (replace(UPDATE, row=np.array([3])), "env_id"),
}


@pytest.mark.parametrize("kind", BAD_UPDATES)
def test_a_refused_write_back_leaves_no_trace(make, kind):
    table = make(CONTEXT, 2, 40)
    table.fill(stream([(30, False)]), stream([(30, False)]))
    stats = table.replay.stats()
    bad, message = BAD_UPDATES[kind]
    with pytest.raises(ValueError, match=message) as error:
        table.replay.write_back(bad)
    assert "\n" not in str(error.value)
    assert table.replay.stats() == stats
    assert (table.replay.sample(300).latents["version"] == 0).all()
    assert table.replay.write_back(UPDATE) == 2


@pytest.mark.parametrize("purpose", ["train", "report"])
@pytest.mark.parametrize("batch", [0, -1])
def test_an_empty_batch_is_refused(make, batch, purpose):
    table = make(EPISODES, 1, 20)
    with pytest.raises(ValueError, match=f"a batch of {batch} windows is"):
        table.replay.sample(batch, purpose)
    table.fill(stream([(10, True)]))
    with pytest.raises(ValueError, match=f"a batch of {batch} windows is"):
        table.replay.sample(batch, purpose)
    table.check(table.replay.sample(1, purpose))


@pytest.mark.parametrize(
    ("window", "rows"), [(EPISODES, "no closed episode holds the 4 rows"), (FRESH, "no environment holds the 4 rows")]
)
def test_a_draw_from_nothing_is_refused_and_may_be_repeated(make, window, rows):
    table = make(window, 2, 20)
    for tick in range(4):
        assert not table.replay.can_sample()
        for purpose in ("train", "report"):
            with pytest.raises(LookupError, match=f"{rows} that a window needs; append more first"):
                table.replay.sample(3, purpose)
        table.tick({0: (tick == 0, tick == 3)})
    assert table.replay.can_sample()
    assert starts(table.replay.sample(3)) == [(0, 0)] * 3
    assert table.replay.stats().sampled_windows == 3


@pytest.mark.parametrize(
    ("window", "capacity", "message"),
    [
        (EPISODES, 3, r"each env holds 3 rows, fewer than one window of 4 .*; raise replay.capacity"),
        (WindowSpec(4, last_start=False), 4, r"each env holds 4 rows, fewer than one window of 5 .*never drawn"),
        (WindowSpec(4, start="windows"), 20, "it needs window.cross_episodes=True, closed_only=False and last_start"),
        (WindowSpec(4, online=True), 20, "it needs window.start='windows'"),
    ],
)
def test_windows_that_a_table_cannot_serve_are_refused(make, window, capacity, message):
    with pytest.raises(ValueError, match=message):
        make(window, 1, capacity)


# Marks.


def advance(table, ticks, seed):
    """Ticks of random episode ends and abandonments, with write-backs; some environments fall behind."""
    rng = np.random.default_rng(seed)
    for _ in range(ticks):
        flags = {}
        moves = np.flatnonzero(rng.random(len(table.flags)) < 0.9)
        for e in moves.tolist() or [0]:
            begin = not table.flags[e] or table.flags[e][-1][1] or rng.random() < 0.03
            flags[e] = (bool(begin), bool(rng.random() < 0.1))
        table.tick(flags)
        env = np.array(list(flags), np.int64)[:2]
        rows = np.array([rng.integers(len(table.flags[e])) for e in env], np.int64)
        table.replay.write_back(latents_of(env, rows, rng.integers(100, size=rows.size)))


def served(table, ticks=12):
    """What a table serves and counts from now on, between ticks; both purposes."""
    out = []
    for step in range(3):
        out.append(SimpleNamespace(stats=table.replay.stats(), windows=[]))
        for purpose in ("train", "report"):
            window = table.replay.sample(32, purpose)
            table.check(window)
            out[-1].windows.append(window)
        advance(table, ticks, seed=step)
    return out


def assert_as_served(now, then):
    for one, two in zip(now, then, strict=True):
        assert one.stats == two.stats
        assert all(same(x, y) for x, y in zip(one.windows, two.windows, strict=True))


def returned(table, name, flags):
    """The table, back at a mark; `flags`: those of all rows then."""
    table.replay.restore(name)
    table.flags = [list(f) for f in flags]
    return table


@pytest.mark.parametrize("window", [EPISODES, CONTEXT])
@pytest.mark.parametrize("ticks", [30, 110])
def test_a_restored_replay_goes_on_like_the_original(make, window, ticks):
    table = make(window, 3, 40)
    table.fill(*[stream([(9, True)])] * 3)
    advance(table, ticks, seed=ticks)
    table.replay.sample(5)
    table.replay.mark("now")
    flags = [list(f) for f in table.flags]
    then = served(table)
    assert_as_served(served(returned(table, "now", flags)), then)
    advance(table, 60, seed=5)  # round the rings
    assert_as_served(served(returned(table, "now", flags)), then)


def test_marks_do_not_disturb_each_other(make):
    table = make(CONTEXT, 2, 25)
    past, then = {}, {}
    for i, name in enumerate(("a-0", "B_1", "2")):
        advance(table, 20, seed=i)
        table.replay.mark(name)
        past[name] = [list(f) for f in table.flags]
        then[name] = served(table)
    assert sorted(table.replay.marks()) == ["2", "B_1", "a-0"]
    for name in ("B_1", "2", "a-0", "2"):
        assert_as_served(served(returned(table, name, past[name])), then[name])
    table.replay.forget("B_1")
    assert sorted(table.replay.marks()) == ["2", "a-0"]
    for name in ("a-0", "2"):
        assert_as_served(served(returned(table, name, past[name])), then[name])


def test_a_mark_replaces_one_of_its_name(make):
    table = make(CONTEXT, 2, 25)
    advance(table, 20, seed=0)
    table.replay.mark("it")
    advance(table, 20, seed=1)
    table.replay.mark("it")
    flags = [list(f) for f in table.flags]
    then = served(table)
    assert table.replay.marks() == ["it"]
    assert_as_served(served(returned(table, "it", flags)), then)


def test_a_mark_of_an_empty_table(make):
    table = make(CONTEXT, 2, 25)
    table.replay.mark("empty")
    then = table.replay.stats()
    advance(table, 20, seed=0)
    returned(table, "empty", [[], []])
    assert table.replay.stats() == then
    assert not table.replay.can_sample()
    table.fill(stream([(6, False)]), stream([(5, True)]))
    table.check(table.replay.sample(50))


def test_unknown_marks_are_named(make):
    table = make(EPISODES, 1, 20)
    table.fill(stream([(10, True)]))
    table.replay.mark("one")
    stats = table.replay.stats()
    for call in (table.replay.restore, table.replay.forget):
        with pytest.raises(FileNotFoundError, match=r"there is no mark .*two"):
            call("two")
    assert (table.replay.stats(), table.replay.marks()) == (stats, ["one"])
    table.replay.forget("one")
    assert table.replay.marks() == []
    with pytest.raises(FileNotFoundError, match=r"there is no mark .*one"):
        table.replay.restore("one")
    table.check(table.replay.sample(20))


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.json", "a b", "ä"])
def test_a_name_that_is_no_file_name_is_refused(make, name):
    table = make(EPISODES, 1, 20)
    for call in (table.replay.mark, table.replay.restore, table.replay.forget):
        with pytest.raises(ValueError, match="must be 1 to 64 letters, digits, '_' and '-'"):
            call(name)


# What only a service has: several writers, their epochs, and tables that change under a client.


def table_of(num_envs, window=CONTEXT, capacity=20):
    return TableSpec(ROW, window, capacity, num_envs)


@pytest.fixture
def connect(remote, opened):
    """A client, closed after the test."""
    return lambda *args, **options: opened(remote.client(*args, **options))


def next_rows(history, first, flags):
    """One tick, recorded, of a writer whose environments begin at `first` in the table: flags by its own numbers."""
    own = np.array(list(flags), np.int32)
    row = np.array([len(history.flags[first + e]) for e in flags], np.int64)
    for e, f in flags.items():
        history.flags[first + e].append(f)
    return replace(rows_of(own + np.int32(first), row, *np.array(list(flags.values()), bool).T), env_id=own)


def ticks(count, num_envs, begin=True):
    """Ticks of environments that do not end an episode."""
    return [{e: (begin and t == 0, False) for e in range(num_envs)} for t in range(count)]


def test_a_table_is_found_as_it_is(remote, connect):
    name, history = remote.name(), History(CONTEXT, 2, 20)
    writer = connect(name, table_of(2), seed=3)
    for flags in ticks(10, 2):
        writer.append(next_rows(history, 0, flags))
    other = connect(name, table_of(2), stream=None, seed=4)
    assert other.stats() == writer.stats()
    assert other.state().incarnation == writer.state().incarnation
    history.check(other.sample(30))
    with pytest.raises(ValueError, match="without a stream"):
        other.append(GOOD)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"capacity": 21}, "capacity is 20, not 21$"),
        ({"max_envs": 3}, "max_envs is 2, not 3$"),
        ({"window": replace(CONTEXT, context=2)}, "window.context is 3, not 2$"),
        ({"row": replace(ROW, action=ArraySpec((2,)))}, "row.action is .*, not "),
        ({"row": replace(ROW, obs=ROW.obs[::-1])}, "row.obs is .*, not "),
    ],
)
def test_a_table_with_other_specs_is_refused(remote, connect, changed, message):
    name = remote.name()
    connect(name, table_of(2))
    with pytest.raises(LookupError, match=rf"table '{name}' exists with other specs: {message}"):
        connect(name, replace(table_of(2), **changed), stream=None)


def test_writers_have_environments_of_their_own_and_join_while_it_runs(remote, connect):
    name, history = remote.name(), History(CONTEXT, 4, 20)
    one = connect(name, table_of(4), stream="one", num_envs=2)
    for flags in ticks(10, 2):
        one.append(next_rows(history, 0, flags))
    assert one.state().num_envs == 2
    two = connect(name, table_of(4), stream="two", num_envs=1)
    for flags, more in zip(ticks(30, 1), ticks(30, 2, begin=False), strict=True):
        two.append(next_rows(history, 2, flags))
        one.append(next_rows(history, 0, more))
    assert two.state().num_envs == 3
    with pytest.raises(OSError, match=r"stream 'three' needs 2 environments, but 3 of the table's 4 .*raise max_envs"):
        connect(name, table_of(4), stream="three", num_envs=2)
    with pytest.raises(ValueError, match=r"stream 'two' has 1 environments since it was first opened, not 2"):
        connect(name, table_of(4), stream="two", num_envs=2)
    three = connect(name, table_of(4), stream="three", num_envs=1)
    for flags in ticks(6, 1):
        three.append(next_rows(history, 3, flags))
    for client in (one, two, three):
        window = client.sample(200)
        history.check(window)
        assert set(window.env_id) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match=r"env_id \[1\] leaves the writer's environments 0 to 0"):
        two.append(next_rows(history, 2, {1: (True, False)}))


def test_a_writer_that_comes_again_goes_on(remote, connect):
    name, history = remote.name(), History(CONTEXT, 3, 20)
    for writer, first in (("a", 0), ("b", 1), ("a", 0), ("b", 1), ("a", 0)):
        with remote.client(name, table_of(3), stream=writer, num_envs=first + 1) as client:
            for flags in ticks(7, first + 1):
                client.append(next_rows(history, first, flags))
    client = connect(name, table_of(3), stream=None)
    assert client.stats().rows == 3 * 7 + 2 * 14
    history.check(client.sample(200))


def test_an_older_writer_of_a_stream_is_refused_for_good(remote, connect):
    name, history = remote.name(), History(CONTEXT, 2, 20)
    old = connect(name, table_of(2))
    for flags in ticks(5, 2):
        old.append(next_rows(history, 0, flags))
    new = connect(name, table_of(2))
    for _ in range(2):
        with pytest.raises(StreamSuperseded, match="epoch 1 of stream 'writer' is over; the present one is 2"):
            old.append(GOOD)
    for flags in ticks(6, 2):
        new.append(next_rows(history, 0, flags))
    history.check(old.sample(100))  # it may still look
    with pytest.raises(StreamSuperseded):
        old.close()
    assert new.stats().rows == 22


def test_buffered_ticks_arrive_once_and_in_order(remote, connect):
    name, history = remote.name(), History(CONTEXT, 2, 300)
    client = connect(name, table_of(2, capacity=300), buffer_ticks=16)
    for t in range(200):
        client.append(next_rows(history, 0, {e: (t == 0, False) for e in range(2) if t == 0 or (t + e) % 5}))
    client.flush()
    assert client.stats().rows == sum(map(len, history.flags))
    history.check(client.sample(500))


def test_buffered_rows_are_the_callers_own_again(remote, connect):
    name, history = remote.name(), History(CONTEXT, 2, 300)
    client = connect(name, table_of(2, capacity=300), buffer_ticks=16)
    rows = next_rows(History(CONTEXT, 1, 300), 0, {0: (True, False)})
    arrays = [rows.env_id, rows.reward, rows.is_first, rows.is_last, rows.is_terminal, rows.action]
    arrays += [*rows.obs.values(), *rows.latents.values()]
    for t in range(100):
        e, row = t % 2, t // 2
        fresh = replace(next_rows(history, e, {0: (row == 0, False)}), env_id=np.int32([e]))
        new = [fresh.env_id, fresh.reward, fresh.is_first, fresh.is_last, fresh.is_terminal, fresh.action]
        for array, value in zip(arrays, [*new, *fresh.obs.values(), *fresh.latents.values()], strict=True):
            array[...] = value
        client.append(rows)
    client.flush()
    history.check(client.sample(300))


def test_a_bad_tick_among_buffered_ones_is_dropped_alone(remote, connect):
    name, history = remote.name(), History(CONTEXT, 2, 300)
    client = connect(name, table_of(2, capacity=300), buffer_ticks=16)
    refused = []

    def act(call, *args):
        """Errors are of ticks that came before, so that those that meet them are taken."""
        try:
            call(*args)
        except ValueError as error:
            refused.append(str(error))

    for t in range(30):
        act(client.append, next_rows(history, 0, {e: (t in (0, 12), t == 11) for e in range(2)}))
        if t == 11:  # both episodes have ended, and the next rows begin none
            act(client.append, replace(GOOD, is_first=np.zeros(2, bool)))
    act(client.flush)
    client.flush()
    assert len(refused) == 1
    assert "environment 0 gave a row without is_first" in refused[0]
    assert client.stats().rows == 60
    history.check(client.sample(500))


def test_a_table_restored_by_another_goes_on_with_whole_episodes(remote, connect):
    name, history = remote.name(), History(CONTEXT, 2, 20)
    writer, other = connect(name, table_of(2)), connect(name, table_of(2), stream=None)
    for flags in ticks(8, 2):
        writer.append(next_rows(history, 0, flags))
    other.mark("then")
    past = [list(flags) for flags in history.flags]
    before = other.state().incarnation
    for flags in ticks(8, 2, begin=False):
        writer.append(next_rows(history, 0, flags))
    window = writer.sample(4)
    other.restore("then")
    history.flags = past
    assert other.state().incarnation != before
    assert other.stats().rows == 16
    # its rows would follow rows that are gone
    row = np.array([99, 99])
    writer.append(rows_of(np.arange(2, dtype=np.int32), row, np.zeros(2, bool), np.zeros(2, bool)))
    assert (writer.lost_rows, writer.stats().rows) == (2, 16)
    # and latents for windows of that past are stale, though such rows are held
    update = replace(latents_of(window.env_id, window.first_row, np.ones(4)), incarnation=window.incarnation)
    assert writer.write_back(update) == 0
    assert writer.stats().stale == 4
    for flags in ticks(5, 2):
        writer.append(next_rows(history, 0, flags))
    window = writer.sample(200)
    history.check(window)
    assert (window.latents["version"] == 0).all()
    assert writer.write_back(latents_of(window.env_id, window.first_row, np.ones(200))) == 200


def test_inserts_wait_for_credit_only_while_windows_can_be_drawn(remote, connect):
    name, history = remote.name(), History(EPISODES, 1, 40)
    client = connect(name, table_of(1, EPISODES, 40), buffer_ticks=4)
    client.grant(3)
    for t in range(12):  # an open episode cannot be sampled, so nothing waits
        client.append(next_rows(history, 0, {0: (t == 0, t == 11)}))
    client.flush()
    assert (client.stats().rows, client.state().credit) == (12, 3)
    client.append(next_rows(history, 0, {0: (True, False)}))
    with pytest.raises(TimeoutError, match=r"did not acknowledge 1 ticks within 0.3 s; they are kept"):
        client.flush(timeout=0.3)
    assert client.stats().rows == 12
    client.grant(13)
    client.flush()
    client.append(next_rows(history, 0, {0: (False, False)}))
    with pytest.raises(TimeoutError):
        client.flush(timeout=0.3)
    client.grant(-1)
    client.flush()
    assert client.stats().rows == 14
    history.check(client.sample(50))
