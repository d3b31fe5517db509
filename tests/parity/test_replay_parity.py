"""The reference's replay trace and clocks pass; with one altered number they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parity import clock, replay
from tests.parity.fixture import Fixture, Refused, load

GOLDEN = Path(__file__).parents[1] / "golden" / "dreamerv3"


def arrays(name: str) -> dict[str, np.ndarray]:
    return {key: value.copy() for key, value in load(GOLDEN / name).items()}


def failures(contents: dict[str, np.ndarray], scheme) -> set[str]:
    return {line.name for line in scheme.check(Fixture(Path("altered.npz"), contents)) if not line.passed}


def altered(value: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    value = value.copy()
    value[index] = value[index] ^ 1 if value.dtype.kind in "bi" else value[index] + 1
    return value


@pytest.mark.parametrize(("scheme", "name", "lines"), [(replay, "replay_trace", 7), (clock, "clock", 5)])
def test_golden_files_agree_and_nothing_in_them_is_left_out(scheme, name, lines):
    fixture = load(GOLDEN / f"{name}.npz")
    checked = list(scheme.check(fixture))
    assert len(checked) == lines
    assert [str(line) for line in checked if not line.passed] == []
    assert fixture.unread == {}


@pytest.mark.parametrize(
    ("key", "index", "expected"),
    [
        ("sample/rowid", (7, 1, 2), "sample/rowid"),
        ("sample/is_first", (7, 1, 2), "sample/is_first"),
        ("sample/is_last", (7, 1, 2), "sample/is_last"),
        ("sample/is_terminal", (7, 1, 2), "sample/is_terminal"),
        ("sample/lat", (11, 1, 0), "sample/lat"),
        ("sample/lat", (15, 2, 3), "sample/lat"),
        ("items_after_row", (50,), "items_after_row"),
        ("rows", (14, 2), "sample/is_first"),
        ("rows", (32, 3), "sample/is_last"),
        ("rows", (18, 4), "sample/is_terminal"),
        ("sample/is_train", (2,), "sample/rowid"),
        ("sample/after_rows", (1,), "sample/rowid"),
        ("config/uniform_seed", (), "sample/rowid"),
    ],
)
def test_one_altered_number_of_the_trace_fails(key, index, expected):
    contents = arrays("replay_trace.npz")
    assert expected in failures(contents | {key: altered(contents[key], index)}, replay)


def test_one_altered_number_of_a_clock_fails_its_own_line():
    contents = arrays("clock.npz")
    for key in contents:
        name, kind = key.split("/")
        index = () if kind == "ratio" else (len(contents[key]) // 2,)
        wrong = altered(contents[key], index)
        if kind == "step":  # a row more or less is nothing to a slow clock
            wrong = contents[key] + 64 * (np.arange(wrong.size) >= wrong.size // 2)
        assert failures(contents | {key: wrong}, clock) == {f"{name}/updates"}, key


@pytest.mark.parametrize("changed", [{"config/capacity": np.int64(41)}, {"rows": None}])
def test_a_trace_whose_workers_do_not_take_turns_is_refused(changed):
    contents = arrays("replay_trace.npz")
    rows = contents["rows"][[1, 0, *range(2, 120)]]
    with pytest.raises(Refused, match=r"has 2 workers that do not take turns or do not divide 4[01] windows"):
        list(replay.check(Fixture(Path("f.npz"), contents | changed | ({"rows": rows} if "rows" in changed else {}))))
