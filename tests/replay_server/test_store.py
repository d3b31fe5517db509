import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from replay_server.store import Store, table_bytes
from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec, as_dtype
from telamon.replay import ReplayStats

EPISODES = WindowSpec(4)
WINDOWS = WindowSpec(4, cross_episodes=True, closed_only=False, start="windows")
FRESH = replace(WINDOWS, online=True, annotate=True)


def fill(table, *streams):
    for flags in zip_longest(*streams):
        table.tick({e: f for e, f in enumerate(flags) if f is not None})


@settings(max_examples=60)
@given(st.data())
def test_samples_are_what_the_list_model_allows_after_every_tick(any_case, data):
    table, ticks = data.draw(any_case)
    for tick in ticks:
        table.tick(tick)
        choices = table.choices()
        assert table.store.can_sample() == bool(choices)
        assert table.store.stats().items == len(choices)
        if choices:
            window = table.store.sample(4)
            table.check(window)
            starts = {start for choice in choices for start in choice}
            assert set(zip(window.env_id.tolist(), window.first_row.tolist(), strict=True)) <= starts
        else:
            with pytest.raises(LookupError, match="append more first"):
                table.store.sample(1)


@pytest.mark.parametrize("window", [EPISODES, FRESH])
@pytest.mark.parametrize("capacity", [4, 37, 64])
def test_not_one_of_many_windows_is_broken(make_table, window, capacity):
    """10^5 windows over all parameters, drawn while two environments go round their rings many times."""
    rng = np.random.default_rng(capacity)
    table = make_table(window, 2, capacity)
    open_, drawn = np.zeros(2, bool), 0
    while drawn < 20_000:
        is_first = ~open_ | (rng.random(2) < 0.03)  # where open, an abandoned episode
        is_last = rng.random(2) < 0.1
        table.tick({e: (bool(is_first[e]), bool(is_last[e])) for e in range(2)})
        open_ = ~is_last
        if table.store.can_sample():
            table.check(table.store.sample(64))
            drawn += 64
    assert len(table.flags[0]) > 3 * capacity


def frequencies(table, draws=60_000):
    """(expected, observed) counts of every start of the declared distribution; nothing else may be drawn."""
    choices = table.choices()
    share = {start: 1 / len(choices) / len(choice) for choice in choices for start in choice}
    table.store.sample(table.store.stats().online_queue + 1)  # what is not drawn
    window = table.store.sample(draws)
    counts = Counter(zip(window.env_id.tolist(), window.first_row.tolist(), strict=True))
    assert counts.keys() <= share.keys()
    return np.array(list(share.values())) * draws, np.array([counts[start] for start in share])


# Unequal lengths, an abandoned episode (18 rows), one too short (3), some overwritten, and an open one of each ring.
UNEVEN = ([(5, True), (30, True), (3, True), (18, False), (9, True), (20, False)], [(25, True), (4, True), (12, False)])


@pytest.mark.parametrize("window", [EPISODES, WindowSpec(4, last_start=False), WINDOWS, FRESH])
def test_draws_follow_the_declared_distribution(make_table, make_stream, window):
    table = make_table(window, 2, 84)
    fill(table, *map(make_stream, UNEVEN))
    expected, observed = frequencies(table)
    assert chisquare(observed, expected).pvalue > 1e-3


def test_the_distribution_test_can_tell(make_table, make_stream):
    """Uniform over all starts, rather than over episodes first, is another distribution: the draws reject it."""
    table = make_table(EPISODES, 2, 84)
    fill(table, *map(make_stream, UNEVEN))
    expected, observed = frequencies(table)
    assert chisquare(observed, np.full(observed.size, observed.sum() / observed.size)).pvalue < 1e-9
    assert len(set(expected.round(6))) > 3


def test_nothing_is_drawn_from_an_open_episode(make_table, make_stream):
    table = make_table(EPISODES, 1, 50)
    fill(table, make_stream([(10, True), (30, False)]))
    assert table.store.stats().episodes == 1
    assert table.store.sample(500).first_row.max() == 6
    table.tick({0: (True, False)})  # the open one is abandoned: its 30 rows are valid, the new row is not
    assert table.store.stats().episodes == 2
    first = table.store.sample(3000).first_row
    assert set(first[first >= 10]) == set(range(10, 37))


def test_an_episode_goes_as_a_whole_with_its_first_row(make_table, make_stream):
    table = make_table(EPISODES, 1, 20)
    fill(table, make_stream([(10, True), (10, True)]))  # exactly full
    assert table.store.stats().episodes == 2
    table.tick({0: (True, False)})
    assert table.store.stats().episodes == 1
    assert table.store.sample(500).first_row.min() == 10


def test_an_episode_longer_than_the_ring_is_never_drawn(make_table, make_stream):
    table = make_table(EPISODES, 1, 20)
    fill(table, make_stream([(21, True)]))
    assert not table.store.can_sample()
    fill(table, make_stream([(20, True)]))
    assert table.store.stats().episodes == 1


def test_samples_are_copies_and_repeat_with_the_generator(make_table, make_stream):
    one, two = (make_table(EPISODES, 1, 50, seed=3) for _ in range(2))
    for table in (one, two):
        fill(table, make_stream([(30, True)]))
    window = one.store.sample(16)
    np.testing.assert_array_equal(window.first_row, two.store.sample(16).first_row)
    assert all(
        a.flags.c_contiguous and a.flags.writeable for a in (*window.obs.values(), window.action, window.is_last)
    )
    window.reward[:] = np.nan
    one.check(one.store.sample(500))


def starts(window):
    return list(zip(window.env_id.tolist(), window.first_row.tolist(), strict=True))


def test_training_is_served_fresh_windows_first_and_drawn_ones_after(make_table, make_stream):
    fresh, plain = (make_table(spec, 2, 40, seed=3) for spec in (FRESH, WINDOWS))
    for table in (fresh, plain):
        fill(table, make_stream([(13, True)]), make_stream([(9, True)]))
    assert fresh.store.stats().online_queue == 5
    one = fresh.store.sample(2)
    assert starts(one) == [(0, 1), (1, 1)]
    two = fresh.store.sample(16)
    fresh.check(two)
    # no random number went into what was not drawn
    assert starts(two) == [(0, 5), (1, 5), (0, 9), *starts(plain.store.sample(13))]
    assert fresh.store.stats().online_queue == 0
    assert starts(fresh.store.sample(16)) == starts(plain.store.sample(16))
    assert fresh.store.stats().sampled_windows == 34


def test_fresh_windows_that_were_overwritten_are_not_served(make_table, make_stream):
    table = make_table(FRESH, 2, 9)
    fill(table, make_stream([(21, False)]), make_stream([(6, False)]))
    # Environment 0 holds rows 12 to 20, so 5 and 9 are gone. Six came where four may wait: the two oldest went, one of
    # them of an environment that fell behind and holds it still.
    assert table.store.stats().online_queue == 4
    assert starts(table.store.sample(2)) == [(0, 13), (0, 17)]
    assert table.store.stats().online_queue == 0


@settings(max_examples=40)
@given(st.data())
def test_reports_change_nothing(any_case, make_table, data):
    table, ticks = data.draw(any_case)
    other = make_table(table.window, len(table.flags), table.capacity, seed=5)
    table = make_table(table.window, len(table.flags), table.capacity, seed=5)
    for tick in ticks:
        for t in (table, other):
            t.tick(tick)
        if not table.store.can_sample():
            continue
        for _ in range(data.draw(st.integers(0, 2))):
            stats = table.store.stats()
            table.check(table.store.sample(3, "report"))
            assert table.store.stats() == stats
        assert starts(table.store.sample(2)) == starts(other.store.sample(2))


def test_reports_repeat_whatever_training_draws(make_table, make_stream):
    one, two = (make_table(FRESH, 1, 50, seed=3) for _ in range(2))
    for table in (one, two):
        fill(table, make_stream([(30, True)]))
    one.store.sample(100)
    assert starts(one.store.sample(16, "report")) == starts(two.store.sample(16, "report"))


def test_a_report_of_a_table_with_fresh_windows_is_drawn_uniformly(make_table, make_stream):
    table = make_table(FRESH, 2, 84)
    fill(table, *map(make_stream, UNEVEN))
    counts = Counter(starts(table.store.sample(60_000, "report")))
    (choices,) = zip(*table.choices(), strict=True)
    assert counts.keys() == set(choices)
    assert chisquare([counts[c] for c in choices]).pvalue > 1e-3


def test_completed_flags_are_served_and_not_stored(make_table, make_stream):
    table = make_table(FRESH, 1, 8)
    fill(table, make_stream([(3, False), (5, False)]))
    for _ in range(2):
        window = table.store.sample(200, "report")
        at = window.first_row == 1
        np.testing.assert_array_equal(window.is_first[at], np.tile([True, False, True, False], (at.sum(), 1)))
        np.testing.assert_array_equal(window.is_last[at], np.tile([False, True, False, False], (at.sum(), 1)))


@settings(max_examples=60)
@given(st.data())
def test_write_backs_reach_the_rows_they_are_for(make_table, data):
    """Of windows drawn up to 12 ticks ago, round the rings, overlapping, between appends: against lists of all rows."""
    length, num_envs = 4, data.draw(st.integers(1, 2))
    spec = replace(FRESH, context=length - 1, latents="context")  # all but the last row's are seen
    table = make_table(spec, num_envs, data.draw(st.integers(length, 12)), seed=data.draw(st.integers(0, 9)))
    want = [[] for _ in range(num_envs)]
    late, version, stale = [], 0, 0
    for row in range(data.draw(st.integers(length, 50))):
        table.tick({e: (row == 0, False) for e in range(num_envs)})
        for lists in want:
            lists.append(0)
        if not table.store.can_sample():
            continue
        for _ in range(data.draw(st.integers(0, 2))):
            late.append(table.store.sample(3))
        while late and data.draw(st.booleans()):
            window = late.pop(0)
            env = np.repeat(window.env_id, length - 1)
            rows = (window.first_row[:, None] + np.arange(1, length)).reshape(-1)
            versions = version + 1 + np.arange(rows.size)
            version = int(versions[-1])
            held = [r >= table.tail(e) for e, r in zip(env, rows, strict=True)]
            assert table.store.write_back(table.latents(env, rows, versions)) == sum(held)
            stale += held.count(False)
            for e, r, v, there in zip(env, rows, versions, held, strict=True):
                want[e][r] = int(v) if there else want[e][r]
        window = table.store.sample(6, "report")
        rows = window.first_row[:, None] + np.arange(length - 1)
        expected = [[want[e][r] for r in rs] for e, rs in zip(window.env_id, rows, strict=True)]
        np.testing.assert_array_equal(window.latents["version"], expected)
    assert table.store.stats().stale == stale


@pytest.mark.parametrize("deter", ["float32", "bfloat16"])
@pytest.mark.parametrize("context", [0, 1, 3])
def test_latents_come_back_in_their_dtypes(deter, context):
    row = RowSpec(
        obs=(("x", ArraySpec(())),),
        action=(("move", ArraySpec((), "int32")), ("force", ArraySpec((2,)))),
        latents=(("deter", ArraySpec((5,), deter)), ("stoch", ArraySpec((3,), "uint8"))),
    )
    store = Store(row, replace(FRESH, context=context, latents="context"), 2, 20, np.random.default_rng(0))
    env, off = np.arange(2, dtype=np.int32), np.zeros(2, bool)
    deters, stochs = (
        np.arange(60).reshape(6, 2, 5).astype(as_dtype(deter)),
        np.arange(36, dtype=np.uint8).reshape(6, 2, 3),
    )
    for t in range(6):
        store.append(
            Rows(
                env, {"x": np.float32([t, t])}, np.zeros(2, np.float32), off | (t == 0), off, off,
                action={"move": np.int32([t, -t]), "force": np.full((2, 2), t, np.float32)},
                latents={"deter": deters[t], "stoch": stochs[t]},
            )
        )  # fmt: skip
    window = store.sample(8)
    rows = window.first_row[:, None] + np.arange(context)
    for name, values in (("deter", deters), ("stoch", stochs)):
        got = window.latents[name]
        assert (got.shape, got.dtype) == ((8, context, *values.shape[2:]), values.dtype)
        np.testing.assert_array_equal(got, values[rows, window.env_id[:, None]])
    at = window.first_row[:, None] + np.arange(4)
    np.testing.assert_array_equal(window.action["move"], np.where(window.env_id[:, None] == 0, at, -at))
    np.testing.assert_array_equal(window.action["force"], np.broadcast_to(at[..., None], (8, 4, 2)))


def test_latents_are_sent_of_the_context_rows(make_table, make_stream):
    spec = WindowSpec(5, context=2, cross_episodes=True, closed_only=False, start="windows", latents="context")
    table = make_table(spec, 1, 50)
    fill(table, make_stream([(30, True)]))
    table.store.write_back(table.latents(np.zeros(30), np.arange(30), np.arange(100, 130)))
    window = table.store.sample(64)
    version = 100 + window.first_row[:, None] + np.arange(2)
    np.testing.assert_array_equal(window.latents["version"], version)
    np.testing.assert_array_equal(window.latents["wide"].astype(np.int64)[:, :, 1, 2], version)
    assert table.store.sample(64).reward.shape == (64, 5)


def test_no_latents_are_sent_where_none_are_declared(make_table, make_stream):
    table = make_table(EPISODES, 1, 50)
    fill(table, make_stream([(30, True)]))
    assert table.store.sample(2).latents == {}


def test_stale_write_backs_are_dropped_and_counted(make_table, make_stream):
    table = make_table(EPISODES, 1, 20)
    fill(table, make_stream([(30, True)]))
    written = table.store.write_back(table.latents(np.zeros(4), np.array([9, 10, 29, 0]), np.ones(4)))
    assert written == 2
    assert (table.store.stats().written_back, table.store.stats().stale) == (2, 2)


def test_stats_count(make_table, make_stream, row_spec):
    table = make_table(EPISODES, 2, 20)
    assert table.store.stats() == ReplayStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
    fill(table, make_stream([(30, True)]), make_stream([(8, True)]))
    table.store.sample(5)
    table.store.sample(7, purpose="report")  # does not count for the train ratio
    table.store.write_back(table.latents(np.zeros(2), np.array([9, 10]), np.ones(2)))
    assert table.store.stats() == ReplayStats(
        rows=38, rows_held=28, bytes_held=28 * row_spec.nbytes, episodes=1, items=1, online_queue=0, sampled_windows=5,
        written_back=1, stale=1,
    )  # fmt: skip


def test_the_predicted_size_is_that_of_a_full_table(make_table, make_stream, row_spec):
    # where 2 x 8, scalar 4, reward 4, flags 3 x 1, action 4, version 4, wide 2 x 3 x 2
    assert table_bytes(row_spec, 3, 20) == 3 * 20 * (16 + 4 + 4 + 3 + 4 + 4 + 12)
    table = make_table(EPISODES, 3, 20)
    fill(table, *[make_stream([(30, True)])] * 3)
    assert table.store.stats().bytes_held == table_bytes(row_spec, 3, 20)


@pytest.mark.parametrize("batch", [0, -1])
def test_an_empty_batch_is_refused(make_table, batch):
    with pytest.raises(ValueError, match=f"a batch of {batch} windows is empty; batch must be at least 1"):
        make_table(EPISODES, 1, 20).store.sample(batch)


def test_a_capacity_below_one_window_is_refused(make_table):
    with pytest.raises(
        ValueError, match=r"each env holds 3 rows, fewer than one window of 4 .*; raise replay.capacity"
    ):
        make_table(EPISODES, 1, 3)


@pytest.mark.parametrize("before", [[], [(5, True)]])
def test_a_row_that_must_begin_an_episode_says_so(make_table, make_stream, before):
    table = make_table(EPISODES, 2, 20)
    fill(table, make_stream([(5, False)]), make_stream(before))
    with pytest.raises(ValueError, match="environment 1 gave a row without is_first where an episode must begin"):
        table.tick({0: (False, False), 1: (False, False)})


def test_a_refused_tick_leaves_no_trace(make_table, make_stream):
    table = make_table(EPISODES, 2, 20)
    fill(table, make_stream([(10, True)]), make_stream([(10, True)]))
    stats = table.store.stats()
    env, row, flag = np.arange(2, dtype=np.int32), np.array([10, 10]), np.ones(2, bool)
    good = table.rows(env, row, flag, ~flag)
    for obs in ({"where": good.obs["where"]}, {**good.obs, "scalar": np.zeros((2, 1), np.float32)}):
        bad = type(good)(**{**vars(good), "obs": obs})
        with pytest.raises(ValueError, match="obs/scalar"):
            table.store.append(bad)
    assert table.store.stats() == stats
    table.store.append(good)
    assert table.store.stats().rows == stats.rows + 2


def test_the_replay_loads_neither_jax_nor_ray():
    """In a fresh interpreter, for import-linter does not see what external packages import."""
    code = "import sys, replay_server.store; print(sorted({'jax', 'jaxlib', 'ray', 'grpc'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
