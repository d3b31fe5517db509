import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_server.ring import Ring
from telamon.data import ArraySpec

SPECS = {"value": ArraySpec((2,), "int64"), "latents/version": ArraySpec((), "int32")}


def gather(ring, env, first, rows, name="value"):
    """Windows of one column, and which of them were held."""
    out = np.empty((len(env), rows, *ring.specs[name].shape), ring.specs[name].dtype)
    held = ring.gather(np.array(env), np.array(first), {name: out})
    return out, held.tolist()


def ticks(columns):
    """One tick's columns [N, ...] as those of several, [1, N, ...]."""
    return {name: np.asarray(value)[None] for name, value in columns.items()}


def append(ring, env, columns):
    """One tick; the rows' numbers [N]."""
    ring.reserve(env, 1)
    return ring.append(env, ticks(columns))[0]


def tick(env, row, **changed):
    env, row = np.asarray(env), np.asarray(row)
    return {"value": np.stack([env, row], -1), "latents/version": np.zeros(env.size, np.int32), **changed}


def filled(rows, num_envs=2, capacity=5):
    ring = Ring(SPECS, num_envs, capacity)
    env = np.arange(num_envs, dtype=np.int32)
    for row in range(rows):
        np.testing.assert_array_equal(append(ring, env, tick(env, np.full(num_envs, row))), row)
    return ring


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6, 9, 10, 11, 23])
def test_a_ring_holds_its_newest_rows(rows):
    ring = filled(rows)
    np.testing.assert_array_equal(ring.head, rows)
    np.testing.assert_array_equal(ring.tail, max(0, rows - 5))
    want = [[1, row] for row in range(max(0, rows - 5), rows)]
    np.testing.assert_array_equal(ring.held("value", 1), np.array(want).reshape(-1, 2))


def test_environments_advance_on_their_own():
    ring = filled(3)
    append(ring, np.array([1]), tick([1], [3]))
    np.testing.assert_array_equal(ring.head, [3, 4])
    got, held = gather(ring, [1, 0], [2, 1], 2)
    assert held == [True, True]
    np.testing.assert_array_equal(got, [[[1, 2], [1, 3]], [[0, 1], [0, 2]]])


def test_gather_crosses_the_end_of_the_memory_and_copies():
    ring = filled(8)
    first, _ = gather(ring, [1], [3], 5)
    np.testing.assert_array_equal(first[0, :, 1], [3, 4, 5, 6, 7])
    first[:] = -1
    assert (gather(ring, [1], [3], 5)[0] >= 0).all()


@pytest.mark.parametrize("first", [2, 4, 8])
def test_gather_says_which_windows_were_not_held(first):
    got, held = gather(filled(8), [0, 1], [3, first], 5)
    assert held == [True, False]
    np.testing.assert_array_equal(got[0, :, 1], [3, 4, 5, 6, 7])


def test_gather_looks_at_the_tail_after_its_copy():
    ring = filled(8)

    class Appending(dict):
        """An array to fill that lets a row be appended after it was given."""

        def items(self):
            yield from super().items()
            append(ring, np.array([0]), tick([0], [8]))

    out = Appending(value=np.empty((2, 5, 2), np.int64))
    assert ring.gather(np.array([0, 1]), np.array([3, 3]), out).tolist() == [False, True]


def test_gather_wants_contiguous_arrays_and_no_alignment():
    ring = filled(8)
    out = np.zeros(2 * 5 * 16 + 3, np.uint8)[3:].view(np.int64).reshape(2, 5, 2)
    assert not out.flags.aligned
    ring.gather(np.array([0, 1]), np.array([3, 3]), {"value": out})
    np.testing.assert_array_equal(out[:, :, 1], [[3, 4, 5, 6, 7]] * 2)
    with pytest.raises(ValueError, match="the array for column 'value' is not C-contiguous"):
        ring.gather(np.array([0]), np.array([3]), {"value": np.zeros((1, 5, 4), np.int64)[..., ::2]})


def test_a_full_ring_gives_up_the_oldest_row_before_it_overwrites_it():
    ring = filled(5)
    seen = []

    class Probe(dict):
        def items(self):
            for item in super().items():
                seen.append((ring.tail[0], ring.head[0]))
                yield item

    env = np.arange(2)
    ring.append(env, Probe(ticks(tick(env, np.array([5, 5])))))
    assert seen == [(1, 5), (1, 5)]
    assert (ring.tail[0], ring.head[0]) == (1, 6)


@pytest.mark.parametrize(
    ("env", "columns", "message"),
    [
        (np.zeros(0, int), tick([], []), "a tick has no rows; it must have one of at least one environment"),
        ([0, 0], tick([0, 0], [3, 3]), r"env_id \[0, 0\] repeats an environment"),
        ([0, 2], tick([0, 2], [3, 3]), r"env_id \[0, 2\] leaves the table's environments 0 to 1"),
        ([-1], tick([-1], [3]), r"env_id \[-1\] leaves the table's environments 0 to 1"),
        ([[0]], tick([0], [3]), r"env_id is int64 \[1, 1\], expected a vector of signed integers"),
        ([0.0], tick([0], [3]), r"env_id is float64 \[1\], expected a vector of signed integers"),
        ([0], {"value": np.zeros((1, 2), np.int64)}, r"columns \['latents/version'\] are missing"),
        ([0], tick([0], [3], extra=np.zeros(1)), r"columns \['extra'\] are unknown"),
        ([0], tick([0], [3], value=np.zeros((1, 3), np.int64)), r"'value' is int64 \[1, 3\], .* says int64 \[1, 2\]"),
        ([0], tick([0], [3], value=np.zeros((1, 2))), r"'value' is float64 \[1, 2\], .* says int64 \[1, 2\]"),
        ([0, 1], tick([0], [3]), r"'value' is int64 \[1, 2\], .* says int64 \[2, 2\]"),
    ],
)
def test_a_bad_tick_is_named(env, columns, message):
    with pytest.raises(ValueError, match=message):
        filled(3).check(np.array(env), columns)


def test_bfloat16_columns_keep_their_bits():
    ring = Ring({"x": ArraySpec((3,), "bfloat16")}, 1, 2)
    value = np.array([[1.5, -0.0, np.inf]], ml_dtypes.bfloat16)
    append(ring, np.array([0]), {"x": value})
    assert ring.held("x", 0).tobytes() == value.tobytes()


def test_a_table_of_more_rows_than_int32_counts():
    # three environments of 2^30 rows; pages that nobody writes cost no memory
    ring = Ring({"x": ArraySpec((), "bool")}, 3, 2**30)
    env = np.array([1, 2], np.int32)  # 2 * 2^30, wrapped to a negative place, would be that of environment 1
    append(ring, env, {"x": np.array([False, True])})
    assert gather(ring, env, [0, 0], 1, "x")[0].tolist() == [[False], [True]]


@settings(max_examples=60)
@given(st.data())
def test_write_matches_a_dictionary(data):
    """Stale updates are dropped and counted, never applied to the row that took the slot; of two the later wins."""
    capacity = data.draw(st.integers(1, 20))
    ring, env = Ring(SPECS, 2, capacity), np.arange(2, dtype=np.int32)
    model: dict[tuple[int, int], int] = {}
    version = 0
    for row in range(data.draw(st.integers(1, 60))):
        append(ring, env, tick(env, [row, row]))
        model |= {(e, row): 0 for e in range(2)}
        model = {(e, r): v for (e, r), v in model.items() if r > row - capacity}
        updates = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(max(0, row - 25), row)), max_size=6))
        versions = np.arange(version + 1, version + 1 + len(updates), dtype=np.int32)
        where = np.array(updates, np.int64).reshape(-1, 2)
        written = ring.write(where[:, 0].astype(np.int32), where[:, 1], {"latents/version": versions})
        assert written == sum(u in model for u in updates)
        model |= {u: int(v) for u, v in zip(updates, versions, strict=True) if u in model}
        version += len(updates)
    for e in range(2):
        held = ring.held("latents/version", e)
        assert held.tolist() == [model[e, r] for r in range(ring.tail[e], ring.head[e])]


@pytest.mark.parametrize(
    ("env", "row", "versions"),
    [
        ([0, 0, 0], [5, 0, 6], [0, 0, 1, 3, 0]),  # stale between neighbours
        ([0, 0, 0], [5, 6, 5], [0, 0, 3, 2, 0]),
        ([0, 0, 0], [4, 5, 3], [3, 1, 2, 0, 0]),  # round the end of the memory, and back
        ([0, 1, 0], [5, 5, 6], [0, 0, 1, 3, 0]),
        ([0, 1, 1], [4, 5, 6], [0, 1, 0, 0, 0]),  # the last slot of one environment, the first one of the next
        ([0, 0, 0], [0, 1, 2], [0, 0, 0, 0, 0]),
    ],
)
def test_runs_of_a_write_keep_to_their_rows(env, row, versions):
    ring = filled(8)  # rows 3 to 7; row 5 is in slot 0
    ring.write(np.array(env, np.int32), np.array(row), {"latents/version": np.array([1, 2, 3], np.int32)})
    assert ring.held("latents/version", 0).tolist() == versions


@pytest.mark.parametrize("row", [8, -1])
def test_write_refuses_a_row_that_never_was(row):
    with pytest.raises(ValueError, match=f"row {row} of environment 1 was never appended; the next one is 8"):
        filled(8).write(np.array([0, 1]), np.array([7, row]), {"latents/version": np.ones(2, np.int32)})


def test_write_takes_latent_columns_only():
    with pytest.raises(
        ValueError, match=r"columns \['latents/version'\] are missing and columns \['value'\] are unknown"
    ):
        filled(8).write(np.array([0]), np.array([7]), {"value": np.zeros((1, 2), np.int64)})


def test_write_wants_one_row_number_per_environment():
    with pytest.raises(ValueError, match=r"row is int64 \[1\], but env_id has \[2\] integers"):
        filled(8).write(np.array([0, 1]), np.array([7]), {"latents/version": np.ones(2, np.int32)})


def test_chunks_together_are_the_memory():
    ring, copy = filled(700, num_envs=3, capacity=1000), Ring(SPECS, 3, 1000)
    touched = {(group, number) for group in ("rows", "latents") for number in (0, 1, 2)}  # 341 slots each
    assert ring.touched() == ring.chunks() == touched
    for chunk in touched:
        copy.load_chunk(chunk, ring.take_chunk(chunk))
    assert ring.touched() == set()
    copy.head[:], copy.tail[:] = ring.head, ring.tail
    for name in SPECS:
        np.testing.assert_array_equal(copy.held(name, 2), ring.held(name, 2))
    assert copy.touched() == set()


def test_only_what_was_written_is_touched():
    ring = filled(700, num_envs=3, capacity=1000)
    taken = ring.touched()
    for chunk in taken:
        ring.take_chunk(chunk)
    assert ring.touched() == set()
    ring.write(np.array([1]), np.array([400]), {"latents/version": np.ones(1, np.int32)})
    assert ring.touched() == {("latents", 1)}
    append(ring, np.array([0]), tick([0], [700]))
    assert ring.touched() == {("latents", 1), ("rows", 2), ("latents", 2)}
    ring.touch(taken)
    assert ring.touched() == taken
