"""Frames against protobuf's own, layouts by hand, specs both ways, and what hostile bytes come to."""

import dataclasses
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import fuzz_codec
from telamon.data import ArraySpec, RowSpec, WindowSpec, as_dtype
from telamon.replay import ReplayStats, TableSpec
from telamon.rpc import codec
from telamon.rpc.codec import PACKED, SLOT, Layout
from telamon.rpc.v1 import replay_pb2

few = settings(max_examples=50)

dimensions = st.one_of(st.integers(0, 6), st.just(0))
arrays = st.builds(
    ArraySpec,
    shape=st.lists(dimensions, max_size=4).map(tuple),
    dtype=st.sampled_from(codec.DTYPES),
    classes=st.none() | st.sampled_from([0, 1, 7, 2**32 - 1]),
)
names = st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable())
parts = lambda least: st.lists(st.tuples(names, arrays), min_size=least, max_size=3, unique_by=lambda p: p[0]).map(
    tuple
)
rows = st.builds(RowSpec, obs=parts(0), action=arrays | parts(1), latents=parts(0))
windows = st.sampled_from(
    [
        WindowSpec(1),
        WindowSpec(4, last_start=False, annotate=True),
        WindowSpec(65, 1, True, False, "windows", latents="context", online=True, annotate=True),
        WindowSpec(2, 1, False, True, "windows"),
    ]
)
specs = st.builds(TableSpec, rows, windows, st.integers(1, 2**40), st.integers(1, 2**16))

headers = st.builds(
    replay_pb2.Header,
    table=st.text(max_size=5),
    incarnation=st.integers(0, 2**64 - 1),
    count=st.integers(0, 2**32 - 1),
    slot=st.none() | st.integers(0, 3),
    columns=st.lists(
        st.builds(
            replay_pb2.Column, name=st.text(max_size=3), array=st.builds(replay_pb2.ArraySpec, shape=st.just([3]))
        ),
        max_size=3,
    ),
    append=st.none()
    | st.builds(replay_pb2.AppendHeader, tick=st.integers(-1, 2**40), env_id=st.lists(st.integers(0, 2**32 - 1))),
)


F32 = ArraySpec((2,))


def spec_of(**changes: Any) -> TableSpec:
    return dataclasses.replace(fuzz_codec.EXAMPLE, **changes)


def with_obs(*obs: tuple[str, ArraySpec]) -> TableSpec:
    return spec_of(row=RowSpec(obs, ArraySpec((2,))))


# Frames


def fill_with(content: bytes) -> Any:
    def fill(memory: memoryview) -> None:
        memory[:] = content

    return fill


@few
@given(headers, st.binary(max_size=300))
def test_protobuf_reads_what_we_write(header: replay_pb2.Header, payload: bytes) -> None:
    half = len(payload) // 2
    joined = codec.join_frame(header, [payload[:half], memoryview(payload)[half:]])
    filled = codec.encode_frame(header, len(payload), fill_with(payload))
    assert joined == filled
    frame = replay_pb2.Frame.FromString(filled)
    assert frame.header == header
    assert frame.payload == payload
    assert (len(filled) - len(payload)) % 8 == 0
    assert filled.endswith(payload)


@few
@given(headers, st.binary(max_size=300))
def test_we_read_what_protobuf_writes(header: replay_pb2.Header, payload: bytes) -> None:
    frame = codec.decode_frame(replay_pb2.Frame(header=header, payload=payload).SerializeToString())
    assert frame.header == header
    assert frame.payload == payload
    assert frame.payload.readonly


@pytest.mark.parametrize("payload_bytes", [0, 1, 7, 8, 127, 128, 2**14 - 1, 2**14, 2**21])
def test_lengths_of_every_size_of_varint(payload_bytes: int) -> None:
    payload = bytes(range(256)) * (payload_bytes // 256 + 1)
    payload = payload[:payload_bytes]
    for table in ("", "t", "t" * 100, "t" * 200):
        message = codec.encode_frame(replay_pb2.Header(table=table), payload_bytes, fill_with(payload))
        assert replay_pb2.Frame.FromString(message).payload == payload
        assert codec.decode_frame(message).payload == payload


def test_the_payload_is_not_copied() -> None:
    message = codec.join_frame(replay_pb2.Header(), [bytes(1000)])
    payload = codec.decode_frame(message).payload
    assert payload.obj is message


def test_fields_in_any_order_repeated_and_unknown() -> None:
    first, second = replay_pb2.Header(table="a", count=1), replay_pb2.Header(count=2, slot=3)
    stray = b"\x7a\x03abc" + b"\x78\x05" + b"\x79" + bytes(8) + b"\x7d" + bytes(4)  # fields 15 of every wire type
    field = lambda number, content: bytes([number << 3 | 2, len(content)]) + content
    pieces = [
        field(2, b"lost"), stray, field(1, first.SerializeToString()), field(1, second.SerializeToString()),
        field(2, b"kept"), b"\x10\x00",  # a payload of another wire type is an unknown field
    ]  # fmt: skip
    message = b"".join(pieces)
    frame = codec.decode_frame(message)
    assert frame.header == replay_pb2.Header(table="a", count=2, slot=3)
    assert frame.payload == b"kept"
    assert frame.header == replay_pb2.Frame.FromString(message).header


def test_an_empty_message_is_an_empty_frame() -> None:
    frame = codec.decode_frame(b"")
    assert frame.header == replay_pb2.Header()
    assert len(frame.payload) == 0


GOOD = codec.join_frame(replay_pb2.Header(table="t" * 20, count=3), [b"0123456789"])


def test_every_truncation_is_refused_or_a_whole_number_of_fields() -> None:
    ends = {0, len(GOOD)}
    for size in range(len(GOOD) + 1):
        try:
            replay_pb2.Frame.FromString(GOOD[:size])
            ends.add(size)
        except DecodeError:
            with pytest.raises(ValueError, match=r"^the frame is truncated[^.]*$"):
                codec.decode_frame(GOOD[:size])
    for size in ends:
        codec.decode_frame(GOOD[:size])
    assert len(ends) < 5


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"\x12\xff\xff\xff\xff\x0f", f"field 2 has {2**32 - 1} bytes and 0 are left"),
        (b"\x12\xff\xff\xff\xff\x7f", "bytes and 0 are left"),
        (b"\x0a\x05abc", "field 1 has 5 bytes and 3 are left"),
        (b"\x12\x80\x80\x80\x80\x80\x00", "no number ends within 5 bytes"),
        (b"\x78" + b"\x80" * 10 + b"\x00", "no number ends within 10 bytes"),
        (b"\x79" + bytes(7), "field 15 ends 1 bytes after the message"),
        (b"\x7d" + bytes(3), "field 15 ends 1 bytes after the message"),
        (b"\x02\x00", "a field numbered 0"),
        (b"\xff\xff\xff\xff\x7f", "a field numbered"),
        (b"\x0b\x0c", "wire type 3, which proto3 does not have"),
        (b"\x0e", "wire type 6, which proto3 does not have"),
        (b"\x7a\x00" * 65, "more than 64 fields"),
        (b"\x0a\x02\x0a\x05", "is not a telamon.rpc.v1.Header"),
        (b"\x0a\x03\x0a\x01\xff", "is not a telamon.rpc.v1.Header"),  # no UTF-8
        (b"\x0a\x02\x0a\x05" + b"\x0a\x05aaaaa", "is not a telamon.rpc.v1.Header"),  # whole only together
        (b"\x0a\x81\x80\x40" + bytes(2**20 + 1), f"at most {2**20} are read"),
    ],
)
def test_hostile_frames_are_refused_before_anything_is_allocated(message: bytes, text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=text):
            codec.decode_frame(message)
        assert tracemalloc.get_traced_memory()[1] < 50_000 + 3 * len(message)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_are_read_as_protobuf_does_or_refused(seed: int) -> None:
    messages = itertools.count()
    outcomes = fuzz_codec.fuzz(seed, lambda: next(messages) < 400)
    assert outcomes.keys() >= {"frame read", "frame accepted", "frame refused", "frame stricter"}
    assert outcomes.keys() >= {"spec accepted", "spec refused", "spec none"}


@few
@given(st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_a_value_error(message: bytes) -> None:
    fuzz_codec.check_frame(message)
    fuzz_codec.check_spec(message)


def test_a_fill_that_keeps_its_memory_is_an_error() -> None:
    kept: list[Any] = []
    for keep in (np.frombuffer, memoryview, lambda memory: memory[2:4], lambda memory: HAND.views(memory, 3)["flag"]):
        with pytest.raises(BufferError, match="outlives its filling"):
            codec.encode_frame(replay_pb2.Header(), 72, lambda memory, keep=keep: kept.append(keep(memory)))
    for view in kept:
        memoryview(view).cast("B")[:] = bytes(memoryview(view).nbytes)  # which keeps its memory


def test_what_a_fill_raises_comes_through() -> None:
    def fill(memory: memoryview) -> None:
        array = np.frombuffer(memory, np.uint8)
        raise LookupError(f"nothing to gather into {array.size} bytes")

    with pytest.raises(LookupError, match="into 24 bytes"):
        codec.encode_frame(replay_pb2.Header(), 24, fill)


def test_no_byte_of_our_memory_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_new_bytes", lambda _, size: b"\xaa" * size)  # what a new object may find
    layout = Layout({"flag": ((), np.dtype(bool))})
    message = codec.encode_frame(layout.header(3), layout.nbytes(3), lambda memory: fill_flags(layout, memory))
    assert bytes(codec.decode_frame(message).payload) == b"\1\1\1" + bytes(5)


def fill_flags(layout: Layout, memory: memoryview) -> None:
    layout.views(memory, 3)["flag"][:] = True


def test_what_no_message_carries_is_not_encoded() -> None:
    with pytest.raises(ValueError, match=f"a payload of {2**26} is too large"):
        codec.encode_frame(replay_pb2.Header(), 2**26, lambda memory: None)
    with pytest.raises(ValueError, match="a header of"):
        codec.join_frame(replay_pb2.Header(table="t" * 2**20), [])
    assert codec.MAX_PAYLOAD_BYTES + codec.MAX_HEADER_BYTES < 2**26


# Splitting


@given(st.integers(0, 3000), st.integers(1, 2 * codec.FRAME_BYTES))
def test_frames_are_few_even_and_bounded(items: int, item_bytes: int) -> None:
    frames = list(codec.frames_of(items, item_bytes))
    assert [k for begin, end in frames for k in range(begin, end)] == list(range(items))
    sizes = [end - begin for begin, end in frames]
    if frames:
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) == 1 or max(sizes) * item_bytes <= codec.FRAME_BYTES
    fitting = max(1, codec.FRAME_BYTES // item_bytes)
    assert len(frames) == -(-items // fitting)


def test_frames_by_hand() -> None:
    assert list(codec.frames_of(0, 1)) == []
    assert list(codec.frames_of(16, 600_000)) == [(0, 2), (2, 5), (5, 8), (8, 10), (10, 13), (13, 16)]
    assert list(codec.frames_of(5, 2**19)) == [(0, 2), (2, 5)]
    assert list(codec.frames_of(2, 2**30)) == [(0, 1), (1, 2)]


# Layouts

HAND = Layout(
    {
        "flag": ((), np.dtype(bool)),
        "half": ((3,), as_dtype("bfloat16")),
        "env_id": ((), np.dtype(np.int32)),
        "row": ((), np.dtype(np.int64)),
        "image": ((2, 2), np.dtype(np.uint8)),
    }
)


def offsets(views: dict[str, np.ndarray], memory: np.ndarray) -> dict[str, int]:
    return {name: view.ctypes.data - memory.ctypes.data for name, view in views.items()}


def test_a_layout_by_hand() -> None:
    # widest first: 3 rows of 8, 4, 2 * 3, 1, 4 bytes = 24 + 12 + 18 + 3 + 12 = 69, up to a multiple of 8: 72
    memory = np.zeros(72, np.uint8)
    assert HAND.nbytes(3) == 72
    found = offsets(HAND.views(memory, 3), memory)
    assert found == {"row": 0, "env_id": 24, "half": 36, "flag": 54, "image": 57}
    # in a slot: 24 -> 64, 76 -> 128, 146 -> 192, 195 -> 256, 268 -> 320
    memory = np.zeros(1000, np.uint8)
    assert HAND.nbytes(3, SLOT) == 320
    found = offsets(HAND.views(memory, 3, SLOT), memory)
    assert found == {"row": 0, "env_id": 64, "half": 128, "flag": 192, "image": 256}
    views = HAND.views(memory, 3, SLOT)
    assert {name: (view.shape, view.dtype.name) for name, view in views.items()} == {
        "row": ((3,), "int64"), "env_id": ((3,), "int32"), "half": ((3, 3), "bfloat16"), "flag": ((3,), "bool"),
        "image": ((3, 2, 2), "uint8"),
    }  # fmt: skip


@pytest.mark.parametrize("align", [PACKED, SLOT])
def test_ticks_follow_one_another_each_as_if_alone(align: int) -> None:
    size = HAND.nbytes(3, align)
    memory = np.zeros(4 * size, np.uint8)
    ticks = HAND.ticks(memory, 3, 4, align)
    alone = offsets(HAND.views(memory[:size], 3, align), memory)
    views = [{name: array[t] for name, array in ticks.items()} for t in range(4)]
    assert [offsets(tick, memory) for tick in views] == [{k: v + t * size for k, v in alone.items()} for t in range(4)]
    assert all(view.flags.aligned for tick in views for view in tick.values())


def test_arrays_of_a_received_message_are_aligned_and_read_only() -> None:
    for count in range(1, 9):
        message = codec.encode_frame(HAND.header(count), HAND.nbytes(count), lambda memory: None)
        for view in HAND.views(codec.decode_frame(message).payload, count).values():
            assert view.flags.aligned
            assert not view.flags.writeable


@few
@given(specs, st.integers(1, 5), st.randoms(use_true_random=False))
def test_what_is_written_through_views_is_read_through_views(spec: TableSpec, count: int, random: Any) -> None:
    for layout_of in (codec.append_layout, codec.sample_layout, codec.write_back_layout):
        layout = layout_of(spec)
        rng = np.random.default_rng(random.randrange(2**32))
        sent = {
            name: rng.integers(0, 2, (count, *shape), np.uint8).astype(dtype)
            for name, (shape, dtype) in layout.columns.items()
        }

        def fill(memory: memoryview, layout: Layout = layout, sent: dict[str, np.ndarray] = sent) -> None:
            for name, view in layout.views(memory, count).items():
                view[...] = sent[name]

        frame = codec.decode_frame(codec.encode_frame(layout.header(count), layout.nbytes(count), fill))
        layout.check(frame.header.columns)
        received = layout.views(frame.payload, frame.header.count)
        assert received.keys() == sent.keys()
        for name, array in received.items():
            np.testing.assert_array_equal(array, sent[name])


def test_the_layouts_of_the_calls() -> None:
    spec = fuzz_codec.EXAMPLE  # windows of 3 rows, the context's latents sent
    named = lambda layout: {name: shape for name, (shape, _) in layout.columns.items()}
    flags = ("is_first", "is_last", "is_terminal")
    assert named(codec.append_layout(spec)) == {
        "obs/x": (), "reward": (), "action": (2,), "latents/deter": (8,), "obs/image": (4, 4, 3),
        **dict.fromkeys(flags, ()),
    }  # fmt: skip
    assert named(codec.sample_layout(spec)) == {
        "first_row": (), "obs/x": (3,), "env_id": (), "reward": (3,), "action": (3, 2), "latents/deter": (1, 8),
        "obs/image": (3, 4, 4, 3), **dict.fromkeys(flags, (3,)),
    }  # fmt: skip
    assert named(codec.write_back_layout(spec)) == {"row": (), "env_id": (), "latents/deter": (8,)}
    without = spec_of(window=WindowSpec(3))
    assert "latents/deter" not in codec.sample_layout(without).columns
    assert list(codec.append_layout(spec).columns) == [c.name for c in codec.append_layout(spec).to_proto()]


@pytest.mark.parametrize(
    ("count", "ticks", "size", "text"),
    [
        (0, 1, 8, "1 x 0 rows; each must be at least 1"),
        (1, 0, 8, "0 x 1 rows; each must be at least 1"),
        (3, 1, 71, "take 72 bytes, but there are 71"),
        (3, 1, 73, "take 72 bytes, but there are 73"),
        (3, 2, 72, "take 144 bytes, but there are 72"),
        (2**32 - 1, 2**32 - 1, 72, "but there are 72"),
    ],
)
def test_payloads_of_another_size_are_refused(count: int, ticks: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HAND.ticks(bytes(size), count, ticks)
    if size < HAND.nbytes(max(1, count)):
        with pytest.raises(ValueError, match="rows"):
            HAND.ticks(bytes(size), count, ticks, SLOT)


def test_columns_that_differ_are_named() -> None:
    def found(*edits: Any) -> list[replay_pb2.Column]:
        columns = HAND.to_proto()
        for edit in edits:
            edit(columns)
        return columns

    def rename(columns: list[replay_pb2.Column]) -> None:
        columns[2].name = "other"

    def retype(columns: list[replay_pb2.Column]) -> None:
        columns[0].array.dtype = "int32"

    def reshape(columns: list[replay_pb2.Column]) -> None:
        columns[4].array.shape.append(7)

    def grow(columns: list[replay_pb2.Column]) -> None:
        columns[4].array.shape.extend(range(10**5))
        columns[4].name = "n" * 10**5

    HAND.check(HAND.header(1).columns)
    for edit, text in (
        (rename, r"column 2 of the frame is 'other', 'bfloat16' \[3\], but it must be 'half', 'bfloat16' \[3\]"),
        (retype, r"column 0 of the frame is 'row', 'int32' \[\], but it must be 'row', 'int64' \[\]"),
        (reshape, r"column 4 of the frame is 'image', 'uint8' \[2, 2, 7\], but it must be 'image', 'uint8' \[2, 2\]"),
        (grow, r"column 4 of the frame is 'nnn"),
        (lambda columns: columns.pop(), r"column 4 of the frame is '', '' \[\], but"),
        (lambda columns: columns.append(columns[0]), "6 columns, the first one too many is 'row'; it must have 5"),
        (list.reverse, "column 0 of the frame is 'image'"),
        (list.clear, "column 0 of the frame is ''"),
    ):
        with pytest.raises(ValueError, match=text) as error:
            HAND.check(replay_pb2.Header(columns=found(edit)).columns)
        assert len(str(error.value)) < 1000


def test_classes_may_be_told_with_a_frame() -> None:
    columns = HAND.to_proto()
    columns[3].array.classes = 256
    HAND.check(replay_pb2.Header(columns=columns).columns)


# Specs


@few
@given(specs)
def test_specs_come_back_exactly(spec: TableSpec) -> None:
    message = codec.spec_to_proto(spec).SerializeToString()
    assert codec.spec_from_proto(replay_pb2.TableSpec.FromString(message)) == spec


@given(st.lists(st.integers(0, 2**63 - 1), min_size=9, max_size=9))
def test_stats_come_back_exactly(counts: list[int]) -> None:
    stats = ReplayStats(*counts)
    proto = codec.stats_to_proto(stats, incarnation=2**64 - 1, num_envs=3, credit=-1)
    proto = replay_pb2.StatsResponse.FromString(proto.SerializeToString())
    assert codec.stats_from_proto(proto) == stats
    assert (proto.incarnation, proto.num_envs, proto.credit) == (2**64 - 1, 3, -1)


def test_keys_may_be_long_and_strange() -> None:
    spec = with_obs(("n" * codec.MAX_NAME, F32), ("é" * (codec.MAX_NAME // 2), F32), ("../a b/\0", F32))
    assert codec.spec_from_proto(codec.spec_to_proto(spec)) == spec


def test_a_bare_action_and_a_dict_of_one_are_not_the_same() -> None:
    bare = spec_of(row=RowSpec((), ArraySpec((2,))))
    of_one = spec_of(row=RowSpec((), (("action", ArraySpec((2,))),)))
    assert codec.spec_from_proto(codec.spec_to_proto(bare)) == bare
    assert codec.spec_from_proto(codec.spec_to_proto(of_one)) == of_one


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (with_obs(("x", ArraySpec((), "object"))), "obs/'x' has the unknown dtype 'object'; known are bool, int8"),
        (with_obs(("x", ArraySpec((), ">f4"))), "unknown dtype '>f4'"),
        (with_obs(("x", ArraySpec((-1,)))), f"a dimension of obs/'x' is -1; it must be 0 to {2**32 - 1}"),
        (with_obs(("x", ArraySpec((1,) * 17))), "obs/'x' has 17 dimensions; at most 16"),
        (with_obs(("x", ArraySpec((2**31, 2**31, 2**31)))), f"takes {2**95} bytes"),
        (
            with_obs(("x", ArraySpec((0, 2**32 - 1, 2**32 - 1)))),
            r"obs/'x' of shape \[0, 4294967295, 4294967295\] takes",
        ),
        (with_obs(("x", ArraySpec((), "int32", -1))), "classes of obs/'x' is -1"),
        (with_obs(("x", ArraySpec((), "int32", 2**32))), f"classes of obs/'x' is {2**32}"),
        (with_obs(("x", F32), ("x", F32)), "obs of the row spec has an array called 'x'; .* appears once"),
        (with_obs(("", F32)), "obs of the row spec has an array called ''; a name has 1 to 80 bytes"),
        (with_obs(("n" * 81, F32)), "obs of the row spec has an array called 'nnn"),
        (with_obs(("é" * 41, F32)), "obs of the row spec has an array called 'ééé"),
        (with_obs(*((f"x{k}", F32) for k in range(1024))), "the row spec has 1025 columns; at most 1024"),
        (with_obs(*((f"x{k}", ArraySpec((2**22,))) for k in range(4))), "one row takes 67108880 bytes"),
        (with_obs(("x", ArraySpec((2**23,)))), "one window takes"),
        (spec_of(row=RowSpec((), ())), "the row spec has no action"),
        (spec_of(row=RowSpec((), (("", F32), ("b", F32)))), "action of the row spec has an array called ''"),
        (spec_of(capacity=0), f"capacity is 0; it must be 1 to {2**63 - 1}"),
        (spec_of(capacity=-5), "capacity is -5"),
        (spec_of(max_envs=0), "max_envs is 0"),
        (spec_of(max_envs=2**31), "max_envs is"),
        (spec_of(capacity=2**62), "the full table takes"),
        (spec_of(window=WindowSpec(2**32)), "window.length is"),
    ],
)
def test_specs_that_the_wire_does_not_carry_are_refused_on_both_sides(spec: TableSpec, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        codec.spec_to_proto(spec)
    assert len(str(error.value)) < 1000


def edited(**entries: Any) -> replay_pb2.TableSpec:
    """The example's message with entries of its row spec or window spec changed."""
    proto = codec.spec_to_proto(fuzz_codec.EXAMPLE)
    for name, value in entries.items():
        if name in ("obs", "action", "latents"):
            proto.row.ClearField(name)
            getattr(proto.row, name).extend(value)
        elif name.startswith("window_"):
            setattr(proto.window, name.removeprefix("window_"), value)
        else:
            setattr(proto, name, value)
    return proto


def column(name: str = "x", **array: Any) -> replay_pb2.Column:
    return replay_pb2.Column(name=name, array=replay_pb2.ArraySpec(**{"dtype": "float32", **array}))


@pytest.mark.parametrize(
    ("proto", "text"),
    [
        (replay_pb2.TableSpec(), "window of 0 rows"),
        (edited(window_start="anywhere"), "window.start is 'anywhere'; it must be one of episodes, windows"),
        (edited(window_start=""), "window.start is ''"),
        (edited(window_latents="all"), "window.latents is 'all'; it must be one of none, context"),
        (edited(window_length=0), "a window of 0 rows"),
        (edited(window_context=3), "a window of 3 rows with 3 of context"),
        (edited(window_length=2**32 - 1), "one window takes"),
        (edited(capacity=2**64 - 1), "capacity is"),
        (edited(max_envs=2**32 - 1), "max_envs is"),
        (edited(obs=[column(shape=[2**32 - 1] * 16)]), r"obs/'x' of shape \[4294967295, .* takes"),
        (edited(obs=[column(shape=[1] * 10**5)]), "obs/'x' has 100000 dimensions"),
        (edited(obs=[column(dtype="f" * 10**5)]), "unknown dtype 'fff"),
        (edited(obs=[column(name="n" * 10**5)]), "an array called 'nnn"),
        (edited(obs=[column()] * 10**5), "the row spec has 100002 columns"),
        (edited(obs=[column(), column()]), "an array called 'x'"),
        (edited(obs=[column(name="")]), "an array called ''"),
        (edited(action=[]), "the row spec has no action"),
    ],
)
def test_hostile_specs_are_refused(proto: replay_pb2.TableSpec, text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=text) as error:
            codec.spec_from_proto(proto)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 1000
