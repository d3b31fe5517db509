import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_server import windows
from telamon.data import WindowSpec


class Followed:
    """An `Episodes` that follows a table's ticks by itself, so that a test may look at every choice it offers."""

    def __init__(self, table):
        self.table = table
        self.num_envs = len(table.flags)
        self.episodes = windows.Episodes(self.num_envs, table.capacity, windows.min_rows(table.window))

    def tick(self, flags):
        """After the table's tick."""
        env = np.array(list(flags), np.int32)
        row = np.array([len(self.table.flags[e]) - 1 for e in flags])
        tail = np.array([self.table.tail(e) for e in flags])
        self.episodes.append(env, row[None], tail, *np.array(list(flags.values())).T[:, None])

    def rebuilt(self):
        episodes = windows.Episodes(self.num_envs, self.table.capacity, windows.min_rows(self.table.window))
        for e, flags in enumerate(self.table.flags):
            held = np.array(flags[self.table.tail(e) :], bool).reshape(-1, 2)
            episodes.rebuild(e, self.table.tail(e), held[:, 0], held[:, 1])
        return episodes


def contents(episodes, num_envs):
    """(environment, first row, rows) of every episode an index holds, oldest first."""
    out = []
    for e in range(num_envs):
        k = np.arange(episodes.count[e])
        first, rows = episodes.get(np.full(k.size, e), k)
        out += [(e, int(f), int(n)) for f, n in zip(first, rows, strict=True)]
    return out


@settings(max_examples=60)
@given(st.data())
def test_the_index_is_the_list_of_held_closed_episodes_after_every_tick(any_case, data):
    table, ticks = data.draw(any_case)
    followed = Followed(table)
    shortest = windows.min_rows(table.window)
    for tick in ticks:
        table.tick(tick)
        followed.tick(tick)
        want = [(e, rows.start, len(rows)) for e, rows in table.episodes() if len(rows) >= shortest]
        assert contents(followed.episodes, followed.num_envs) == want
        assert contents(followed.rebuilt(), followed.num_envs) == want


@settings(max_examples=60)
@given(st.data())
def test_a_rebuilt_index_goes_on_like_the_original(any_case, data):
    table, ticks = data.draw(any_case)
    followed, cut = Followed(table), data.draw(st.integers(0, len(ticks)))
    for tick in ticks[:cut]:
        table.tick(tick)
        followed.tick(tick)
    other = Followed(table)
    other.episodes = followed.rebuilt()
    for tick in ticks[cut:]:
        table.tick(tick)
        followed.tick(tick)
        other.tick(tick)
        assert contents(other.episodes, other.num_envs) == contents(followed.episodes, followed.num_envs)


@pytest.mark.parametrize(("last_start", "starts"), [(True, {0, 1, 2}), (False, {0, 1})])
def test_the_last_start_of_an_episode(last_start, starts):
    spec = WindowSpec(3, last_start=last_start)
    episodes = windows.Episodes(1, 10, windows.min_rows(spec))
    for row in range(5):
        episodes.append(np.array([0]), np.array([[row]]), np.array([0]), np.array([[row == 0]]), np.array([[row == 4]]))
    _, first = windows.draw(spec, episodes, np.array([0]), np.array([5]), 200, np.random.default_rng(0))
    assert set(first.tolist()) == starts


def test_one_uniform_number_chooses_among_all_environments():
    """Environments without a choice, at either end and between, are never drawn."""
    spec = WindowSpec(2, cross_episodes=True, closed_only=False, start="windows")
    tail, head = np.array([0, 5, 0, 3, 9]), np.array([1, 9, 0, 8, 10])
    env, first = windows.draw(spec, windows.Episodes(5, 10, 2), tail, head, 4000, np.random.default_rng(0))
    assert set(zip(env.tolist(), first.tolist(), strict=True)) == {
        (1, 5),
        (1, 6),
        (1, 7),
        (3, 3),
        (3, 4),
        (3, 5),
        (3, 6),
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (WindowSpec(4), "no closed episode holds the 4 rows"),
        (WindowSpec(4, last_start=False), "no closed episode holds the 5 rows"),
        (WindowSpec(4, cross_episodes=True, closed_only=False, start="windows"), "no environment holds the 4 rows"),
    ],
)
def test_drawing_from_nothing_is_refused(spec, message):
    held, episodes = (np.array([0]), np.array([3])), windows.Episodes(1, 10, 4)
    assert windows.choices(spec, episodes, *held) == 0
    with pytest.raises(LookupError, match=message):
        windows.draw(spec, episodes, *held, 1, np.random.default_rng(0))


@pytest.mark.parametrize(
    "spec",
    [
        WindowSpec(4, start="windows"),
        WindowSpec(4, start="windows", cross_episodes=True),
        WindowSpec(4, start="windows", closed_only=False),
        WindowSpec(4, start="windows", cross_episodes=True, closed_only=False, last_start=False),
    ],
)
def test_windows_that_nobody_serves_are_refused(spec):
    with pytest.raises(
        ValueError, match=r"it needs window\.cross_episodes=True, closed_only=False and last_start=True"
    ):
        windows.check_spec(spec, 10)


def test_a_queue_of_fresh_windows_inside_episodes_is_refused():
    with pytest.raises(ValueError, match=r"window\.online=True .* window\.start='episodes' never draws; it needs"):
        windows.check_spec(WindowSpec(4, online=True), 10)


@pytest.mark.parametrize(
    ("is_first", "is_last", "first", "last"),
    [
        ([0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]),  # an abandoned episode
        ([0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]),
        ([1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]),  # what comes before the window is no matter
        ([0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1]),  # the first row's forced flag ends nothing
        ([0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]),
        ([0], [1], [1], [1]),
    ],
)
def test_flags_are_completed(is_first, is_last, first, last):
    given = np.array([is_first], bool), np.array([is_last], bool)
    got = windows.annotate(*given)
    np.testing.assert_array_equal(got, np.array([[first], [last]], bool))
    np.testing.assert_array_equal(given, np.array([[is_first], [is_last]], bool))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            WindowSpec(5, context=1),
            r"each env holds 4 rows, fewer than one window of 5 \(context 1 \+ length 4\); raise",
        ),
        (WindowSpec(4, last_start=False), r"4 rows, fewer than one window of 5 .*never drawn\); raise replay.capacity"),
    ],
)
def test_a_capacity_below_one_window_is_refused(spec, message):
    windows.check_spec(spec, 5)
    with pytest.raises(ValueError, match=message):
        windows.check_spec(spec, 4)
