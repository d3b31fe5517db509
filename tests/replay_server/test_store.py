import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
from scipy.stats import chisquare

from replay_server.store import table_bytes
from telamon.data import WindowSpec

EPISODES = WindowSpec(4)
WINDOWS = WindowSpec(4, cross_episodes=True, closed_only=False, start="windows")
FRESH = replace(WINDOWS, online=True, annotate=True)


def fill(table, *streams):
    for flags in zip_longest(*streams):
        table.tick({e: f for e, f in enumerate(flags) if f is not None})


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


def test_the_distribution_test_can_tell(make_table, make_stream):
    """Uniform over all starts, rather than over episodes first, is another distribution: the draws reject it."""
    table = make_table(EPISODES, 2, 84)
    fill(table, *map(make_stream, UNEVEN))
    expected, observed = frequencies(table)
    assert chisquare(observed, np.full(observed.size, observed.sum() / observed.size)).pvalue < 1e-9
    assert len(set(expected.round(6))) > 3


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


def test_the_predicted_size_is_that_of_a_full_table(make_table, make_stream, row_spec):
    # where 2 x 8, scalar 4, reward 4, flags 3 x 1, action 4, version 4, wide 2 x 3 x 2
    assert table_bytes(row_spec, 3, 20) == 3 * 20 * (16 + 4 + 4 + 3 + 4 + 4 + 12)
    table = make_table(EPISODES, 3, 20)
    fill(table, *[make_stream([(30, True)])] * 3)
    assert table.store.stats().bytes_held == table_bytes(row_spec, 3, 20)


def test_the_replay_loads_neither_jax_nor_ray():
    """In a fresh interpreter, for import-linter does not see what external packages import."""
    code = "import sys, replay_server.store; print(sorted({'jax', 'jaxlib', 'ray', 'grpc'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
