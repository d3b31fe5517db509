import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telamon.data import Clock, TrainRatio, WindowSpec, ratio_repeats

GOLDEN = Path(__file__).parents[1] / "golden" / "dreamerv3" / "clock.npz"


def clock(number):
    """(ratio, steps, updates at each) of one of the reference's clocks."""
    with np.load(GOLDEN) as file:
        ratio, step, updates = (file[f"clock{number}/{k}"] for k in ("ratio", "step", "updates"))
    return float(str(np.float32(ratio))), step.tolist(), updates.tolist()  # recorded as float32


def ticks(ratio, num_envs, count, clock=None):
    """The clock after each of `count` more ticks, and before them."""
    out = [Clock() if clock is None else clock]
    for _ in range(count):
        out.append(ratio.tick(out[-1], num_envs))
    return out


def row_by_row(ratio, num_envs, count):
    """(rows, prev, due) after each tick, as the reference does it: it adds one row and looks at once."""
    held, step, prev, due, after = [0] * num_envs, 0, None, 0, []
    for _ in range(count):
        for env in range(num_envs):
            held[env] += 1
            step += 1
            starts = [range(0, rows - ratio.window + 1) for rows in held]
            if sum(map(len, starts)) < ratio.start:
                continue
            if ratio.ratio < 0:
                repeats = 1
            elif ratio.ratio == 0:
                repeats = 0
            elif prev is None:
                repeats, prev = 1, step
            else:
                repeats = int((step - prev) * ratio.ratio)
                prev += repeats / ratio.ratio
            due += repeats
        after.append((step, prev, due))
    return after


@given(
    st.builds(
        TrainRatio,
        ratio=st.sampled_from([-1.0, 0.0, 1 / 32, 0.3, 0.5, 1.0, 8 / 3, 7.0]),
        start=st.integers(1, 60),
        window=st.integers(1, 9),
    ),
    st.sampled_from([1, 2, 3, 16]),
    st.integers(0, 60),
)
def test_a_tick_is_its_rows_one_after_the_other(ratio, num_envs, count):
    got = [(c.rows, c.prev, c.due) for c in ticks(ratio, num_envs, count)[1:]]
    assert got == row_by_row(ratio, num_envs, count)


@pytest.mark.parametrize(("number", "updates"), [(0, 11), (1, 26), (2, 55), (3, 230)])
def test_a_run_owes_what_the_references_clocks_owe(number, updates):
    """The first two begin at 2048 rows: 16 environments, and training from 16 * 64 windows of 65 rows on."""
    ratio, steps, owed = clock(number)
    num_envs, start, window = (16, 16 * 64, 65) if number < 2 else (1, 1, steps[0])
    assert sum(owed) == updates
    run = ticks(TrainRatio(ratio, start, window), num_envs, steps[-1] // num_envs)
    for before, after in pairwise(run):
        rows = range(before.rows + 1, after.rows + 1)
        assert after.due - before.due == sum(n for step, n in zip(steps, owed, strict=True) if step in rows)
    assert run[-1].due > 0.9 * updates


def test_all_of_the_references_clocks_row_by_row():
    for number in range(5):
        ratio, steps, owed = clock(number)
        prev, got = None, []
        for step in steps:
            repeats, prev = ratio_repeats(ratio, step, prev)
            got.append(repeats)
        assert got == owed


@pytest.mark.parametrize("ratio", [-1.0, 0.0, 0.3, 8 / 3])
@pytest.mark.parametrize("cut", [0, 3, 10, 31])
def test_a_clock_goes_on_from_json(ratio, cut):
    clocks = TrainRatio(ratio, start=5, window=4)
    whole = ticks(clocks, 3, 60)
    stored = Clock(**json.loads(json.dumps(asdict(whole[cut]))))
    assert ticks(clocks, 3, 60 - cut, stored) == whole[cut:]


def test_nothing_is_due_before_the_gate_and_the_fill_phase_is_not_caught_up():
    # 4 windows of 3 rows in each of 2 environments: 6 rows of one, 5 of the other give 7, one row more gives 8
    run = ticks(TrainRatio(1.0, start=8, window=3), 2, 8)
    assert [c.due for c in run] == [0, 0, 0, 0, 0, 0, 1, 3, 5]
    assert [c.prev for c in run] == [None] * 6 + [12.0, 14.0, 16.0]


def test_a_negative_ratio_is_one_update_per_row_and_none_is_none():
    assert [c.due for c in ticks(TrainRatio(-1.0, start=1, window=2), 3, 4)] == [0, 0, 3, 6, 9]
    assert [c.due for c in ticks(TrainRatio(0.0, start=1, window=2), 3, 4)] == [0] * 5


@pytest.mark.parametrize(("length", "context"), [(0, 0), (4, 4), (4, -1)])
def test_a_window_that_trains_on_nothing_is_refused(length, context):
    with pytest.raises(ValueError, match=rf"a window of {length} rows with {context} of context .* must exceed"):
        WindowSpec(length, context)


def test_an_episodes_start_needs_closed_episodes():
    with pytest.raises(ValueError, match=r"window\.start='episodes' needs cross_episodes=False and closed_only=True"):
        WindowSpec(4, closed_only=False)
