"""What crosses the wire of a replay shard: frames of arrays, and specs (proto/telamon/rpc/v1/replay.proto).

A frame is a small header and one large payload. protobuf copies a bytes field when it parses and when it serialises,
so frames are read and written here, around the payload; the header is left to protobuf. Generated clients speak the
same bytes.

Everything that comes from the wire is hostile until it is checked: each function raises ValueError, in one sentence,
and allocates nothing that the message itself does not hold.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import cast

import numpy as np
from google.protobuf.message import DecodeError

from telamon.data import ArraySpec, RowSpec, WindowSpec, as_dtype
from telamon.replay import ReplayStats, TableSpec
from telamon.rpc.security import MAX_MESSAGE_BYTES
from telamon.rpc.v1 import replay_pb2

FRAME_BYTES = 2 * 2**20
"""Of the payload of a frame that carries several ticks, windows or rows, at most.

A frame costs each side about 130 us beside its bytes. With windows of 600 KB, frames of 2 MB (three of them) take a
third less CPU time per byte than those of 1 MB (one); 4 MB gain nothing more.
"""

MAX_HEADER_BYTES = 2**20
"""Parsed, a header takes up to thirty times its bytes."""

MAX_FIELDS = 64
"""Top-level fields of a frame; newer writers may add some, and repeat some."""

MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES - MAX_HEADER_BYTES - 64
"""A message must be able to carry a row, and a window."""

MAX_COLUMNS = 1024
MAX_DIMENSIONS = 16
MAX_NAME = 80
"""UTF-8 bytes of a key; a server names files after keys, in which a byte may become three characters of 255."""

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
)

Buffer = bytes | bytearray | memoryview | np.ndarray
"""Contiguous bytes; of arrays, those of dtype uint8."""


# Frames


@dataclass(frozen=True)
class Frame:
    """What array-carrying calls stream."""

    header: replay_pb2.Header
    payload: memoryview
    """Read-only bytes of the message that was received, not a copy."""


VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types; 3 and 4 are groups, which proto3 has not
HEADER, PAYLOAD, PADDING = (
    replay_pb2.Frame.DESCRIPTOR.fields_by_name[name].number << 3 | LENGTH for name in ("header", "payload", "padding")
)


def decode_frame(message: bytes) -> Frame:
    """Reads a serialised Frame. Raises ValueError for what is none.

    As protobuf does: fields in any order, unknown ones skipped, a repeated header merged, the last payload kept.
    Stricter than protobuf: at most MAX_FIELDS fields and MAX_HEADER_BYTES of headers, and no groups.
    """
    headers: list[bytes] = []
    payload = memoryview(message)[:0]
    at, end = 0, len(message)
    for _ in range(MAX_FIELDS):
        if at == end:
            break
        tag, at = _varint(message, at, 5)
        wire_type = tag & 7
        if tag >> 3 == 0 or tag >= 2**32:
            raise ValueError(
                f"the frame has a field numbered {tag >> 3} before byte {at}; numbers are 1 to {2**29 - 1}"
            )
        if wire_type == LENGTH:
            size, at = _varint(message, at, 5)
            if size > end - at:
                raise ValueError(
                    f"the frame is truncated: field {tag >> 3} has {size} bytes and {end - at} are left of the message"
                )
            if tag == PAYLOAD:
                payload = memoryview(message)[at : at + size]
            elif tag == HEADER:
                headers.append(message[at : at + size])
            at += size
        elif wire_type == VARINT:
            at = _varint(message, at, 10)[1]
        elif wire_type in (FIXED64, FIXED32):
            at += 8 if wire_type == FIXED64 else 4
            if at > end:
                raise ValueError(f"the frame is truncated: field {tag >> 3} ends {at - end} bytes after the message")
        else:
            raise ValueError(f"field {tag >> 3} of the frame has wire type {wire_type}, which proto3 does not have")
    if at != end:
        raise ValueError(f"the frame has more than {MAX_FIELDS} fields")
    size = sum(map(len, headers))
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {size} bytes; at most {MAX_HEADER_BYTES} are read")
    header = replay_pb2.Header()
    try:
        for part in headers:
            header.MergeFromString(part)
    except DecodeError:
        raise ValueError(f"the header of {size} bytes is not a telamon.rpc.v1.Header") from None
    return Frame(header, payload)


def _varint(message: bytes, at: int, limit: int) -> tuple[int, int]:
    """The varint at `at`, of at most `limit` bytes, and where it ends."""
    value = shift = 0
    for byte in message[at : at + limit]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at + shift // 7
    raise ValueError(f"the frame is truncated or malformed: no number ends within {limit} bytes of byte {at}")


# Documented for this use: an object from PyBytes_FromStringAndSize(NULL, n) may be filled before anybody else sees it.
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


class _Writable:
    """The memory of a bytes object that nobody else has seen, for numpy, whose arrays over it keep both alive."""

    __slots__ = ("__array_interface__", "__weakref__", "message")

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.__array_interface__ = {
            "data": (_address(message), False), "shape": (len(message),), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def encode_frame(header: replay_pb2.Header, payload_bytes: int, fill: Callable[[memoryview], None]) -> bytes:
    """A serialised Frame whose payload `fill` writes where it will be sent from.

    fill: gets the payload's memory, writable, aligned to 8 bytes, uninitialised but for its last 8 bytes, which are
    zero; it must write all of it and keep nothing of it: raises BufferError if an array over it is alive afterwards.
    """
    prefix = _prefix(header, payload_bytes)
    message: bytes = _new_bytes(None, len(prefix) + payload_bytes)
    writable = _Writable(message)
    alive = weakref.ref(writable)
    memory = np.asarray(writable)
    del writable
    payload = memory.data[len(prefix) :]
    memory[: len(prefix)] = np.frombuffer(prefix, np.uint8)
    payload[-8:] = bytes(min(8, payload_bytes))
    fill(payload)
    del memory, payload
    if alive() is not None:
        raise BufferError("an array over the payload of a frame outlives its filling; from here on it is constant")
    return message


def join_frame(header: replay_pb2.Header, parts: Sequence[Buffer]) -> bytes:
    """A serialised Frame whose payload is `parts`, which are bytes-like, one after the other."""
    # the stubs of numpy call an array a buffer from Python 3.12 on
    return b"".join((_prefix(header, sum(map(len, parts))), *cast("Sequence[bytes]", parts)))


def _prefix(header: replay_pb2.Header, payload_bytes: int) -> bytes:
    """What precedes the payload: header, padding, tag and length, in all a multiple of 8 bytes."""
    body = header.SerializeToString()
    if len(body) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a frame with a header of {len(body)} bytes and a payload of {payload_bytes} is too large; "
            f"a message carries at most {MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES}"
        )
    head = b"%c%b%b" % (HEADER, _to_varint(len(body)), body)
    tail = b"%c%b" % (PAYLOAD, _to_varint(payload_bytes))
    if short := -(len(head) + len(tail)) % 8:
        pad = (short - 2) % 8
        head += b"%c%c%b" % (PADDING, pad, bytes(pad))
    return head + tail


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frames_of(items: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the items of each frame: the fewest frames of at most FRAME_BYTES or one item, evenly filled."""
    frames = -(-items // max(1, FRAME_BYTES // max(1, item_bytes)))
    for k in range(frames):
        yield items * k // frames, items * (k + 1) // frames


# Layouts

PACKED = 1
"""Alignment of the arrays in a payload, which hold no gaps."""
SLOT = 64
"""Alignment of the arrays in a shared slot."""


class Layout:
    """Where the arrays of some columns lie in a payload (`align` PACKED) or in a shared slot (SLOT).

    columns: name -> (shape without the leading axis, dtype). They are laid out widest items first.
    """

    def __init__(self, columns: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        widest_first = sorted(columns.items(), key=lambda column: -column[1][1].itemsize)
        self.columns = {name: (shape, dtype) for name, (shape, dtype) in widest_first}
        self._sizes = [(name, shape, dtype, math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in widest_first]
        self._header = replay_pb2.Header(columns=self.to_proto())

    def __repr__(self) -> str:
        return f"Layout({self.columns})"

    def to_proto(self) -> list[replay_pb2.Column]:
        """As `Header.columns`."""
        return [_column(name, ArraySpec(shape, dtype.name)) for name, (shape, dtype) in self.columns.items()]

    def header(self, count: int) -> replay_pb2.Header:
        """A new header with these columns; the caller sets the rest."""
        header = replay_pb2.Header()
        header.CopyFrom(self._header)
        header.count = count
        return header

    def nbytes(self, count: int, align: int = PACKED) -> int:
        """Bytes of `count` rows of all columns, a multiple of 8 and of `align`."""
        at = 0
        for _, _, _, size in self._sizes:
            at += -at % align + count * size
        return at + -at % max(8, align)

    def views(self, buffer: Buffer, count: int, align: int = PACKED) -> dict[str, np.ndarray]:
        """Column name -> array [count, ...] over the buffer's memory, writable if it is.

        Raises ValueError for a payload of another size, or a slot that is too small.
        """
        return {name: ticks[0] for name, ticks in self.ticks(buffer, count, 1, align).items()}

    def ticks(self, buffer: Buffer, count: int, ticks: int, align: int = PACKED) -> dict[str, np.ndarray]:
        """Arrays [ticks, count, ...] of ticks that follow one another in a buffer. Raises ValueError at once."""
        if count < 1 or ticks < 1:
            raise ValueError(f"the frame has {ticks} x {count} rows; each must be at least 1")
        stride = self.nbytes(count, align)
        expected, found = ticks * stride, len(buffer)
        if found < expected or (found > expected and align == PACKED):
            raise ValueError(
                f"the arrays of {ticks} x {count} rows take {expected} bytes, but there are {found}; "
                f"the columns are {list(self.columns)}"
            )
        at, views = 0, {}
        for name, shape, dtype, size in self._sizes:
            at += -at % align
            inner = np.ndarray((count, *shape), dtype, buffer, at)
            views[name] = np.ndarray((ticks, count, *shape), dtype, buffer, at, (stride, *inner.strides))
            at += count * size
        return views

    def check(self, columns: Sequence[replay_pb2.Column]) -> None:
        """Raises ValueError naming the first of `Header.columns` that differs from this layout."""
        if columns == self._header.columns:
            return
        for i, (name, (shape, dtype)) in enumerate(self.columns.items()):
            found = columns[i] if i < len(columns) else replay_pb2.Column()
            if (found.name, found.array.dtype, list(found.array.shape)) != (name, dtype.name, list(shape)):
                dimensions = [*found.array.shape[:MAX_DIMENSIONS], *["..."] * (len(found.array.shape) > MAX_DIMENSIONS)]
                raise ValueError(
                    f"column {i} of the frame is {_short(found.name)}, {_short(found.array.dtype)} {dimensions}, "
                    f"but it must be {name!r}, {dtype.name!r} {list(shape)}"
                )
        if len(columns) > len(self.columns):
            raise ValueError(
                f"the frame has {len(columns)} columns, the first one too many is "
                f"{_short(columns[len(self.columns)].name)}; it must have {len(self.columns)}"
            )


def _short(name: str) -> str:
    return repr(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}...")


def _shapes(columns: Mapping[str, ArraySpec]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (array.shape, as_dtype(array.dtype)) for name, array in columns.items()}


ENV_ID = ((), np.dtype(np.int32))
ROW = ((), np.dtype(np.int64))


def append_layout(spec: TableSpec) -> Layout:
    """Of the rows of one tick."""
    return Layout(_shapes(spec.row.columns))


def sample_layout(spec: TableSpec) -> Layout:
    """Of windows: `env_id`, `first_row` and the columns, of latents as many rows as the window spec serves."""
    window = spec.window
    latents = {f"latents/{key}" for key, _ in spec.row.latents}
    rows = dict.fromkeys(spec.row.columns.keys() - latents, window.length)
    rows |= {"none": {}, "context": dict.fromkeys(latents, window.context)}[window.latents]
    parts = {
        name: ((rows[name], *shape), dtype)
        for name, (shape, dtype) in _shapes(spec.row.columns).items()
        if name in rows
    }
    return Layout({"env_id": ENV_ID, "first_row": ROW, **parts})


def write_back_layout(spec: TableSpec) -> Layout:
    """Of fresh latents: `env_id`, `row` and the latents."""
    return Layout({"env_id": ENV_ID, "row": ROW, **_shapes({f"latents/{key}": a for key, a in spec.row.latents})})


# Specs

CHOICES = {"start": ("episodes", "windows"), "latents": ("none", "context")}
"""Entries of a WindowSpec that are words."""


def check_spec(spec: TableSpec) -> None:
    """Raises ValueError naming the first entry of a spec that the wire does not carry."""
    action = (("", spec.row.action),) if isinstance(spec.row.action, ArraySpec) else spec.row.action
    groups = {"obs": spec.row.obs, "action": action, "latents": spec.row.latents}
    _check_columns(sum(map(len, groups.values())))
    if not action:
        raise ValueError("the row spec has no action; an array, or the parts of a dict action, must be given")
    for group, arrays in groups.items():
        seen: set[str] = set()
        for key, array in arrays:
            if key in seen or not (key or array is spec.row.action) or len(key.encode()) > MAX_NAME:
                raise ValueError(
                    f"{group} of the row spec has an array called {_short(key)}; "
                    f"a name has 1 to {MAX_NAME} bytes and appears once"
                )
            seen.add(key)
            _check_array(f"{group}/{_short(key)}", array)
    for name, choices in CHOICES.items():
        if (value := getattr(spec.window, name)) not in choices:
            raise ValueError(f"window.{name} is {_short(str(value))}; it must be one of {', '.join(choices)}")
    for name, value, low, limit in (
        ("window.length", spec.window.length, 1, 2**32),
        ("window.context", spec.window.context, 0, 2**32),
        ("capacity", spec.capacity, 1, 2**63),
        ("max_envs", spec.max_envs, 1, 2**31),
    ):
        _check_range(name, value, low, limit)
    if spec.nbytes >= 2**63:
        raise ValueError(f"the full table takes {spec.nbytes} bytes; lower capacity ({spec.capacity}) or max_envs")
    for what, layout in (("row", append_layout(spec)), ("window", sample_layout(spec))):
        if (size := layout.nbytes(1)) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"one {what} takes {size} bytes; a message carries at most {MAX_PAYLOAD_BYTES}")


def _check_array(name: str, array: ArraySpec) -> None:
    if array.dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {_short(array.dtype)}; known are {', '.join(DTYPES)}")
    if len(array.shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name} has {len(array.shape)} dimensions; at most {MAX_DIMENSIONS} are possible")
    for size in array.shape:
        _check_range(f"a dimension of {name}", size, 0, 2**32)
    if (size := math.prod(max(1, d) for d in array.shape) * as_dtype(array.dtype).itemsize) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"{name} of shape {list(array.shape)} takes {size} bytes; at most {MAX_PAYLOAD_BYTES} are possible"
        )
    if array.classes is not None:
        _check_range(f"classes of {name}", array.classes, 0, 2**32)


def _check_range(name: str, value: int, low: int, limit: int) -> None:
    if not low <= value < limit:
        raise ValueError(f"{name} is {value}; it must be {low} to {limit - 1}")


def _check_columns(count: int) -> None:
    if count > MAX_COLUMNS:
        raise ValueError(f"the row spec has {count} columns; at most {MAX_COLUMNS} are possible")


def spec_to_proto(spec: TableSpec) -> replay_pb2.TableSpec:
    """Raises ValueError as `check_spec`."""
    check_spec(spec)
    row, action = spec.row, spec.row.action
    return replay_pb2.TableSpec(
        row=replay_pb2.RowSpec(
            obs=[_column(key, array) for key, array in row.obs],
            action=[
                _column(key, array) for key, array in ((("", action),) if isinstance(action, ArraySpec) else action)
            ],
            latents=[_column(key, array) for key, array in row.latents],
        ),
        window=replay_pb2.WindowSpec(**asdict(spec.window)),
        capacity=spec.capacity,
        max_envs=spec.max_envs,
    )


def spec_from_proto(proto: replay_pb2.TableSpec) -> TableSpec:
    """The inverse of `spec_to_proto`. Raises ValueError as `check_spec` and `WindowSpec`."""
    row = proto.row
    _check_columns(len(row.obs) + len(row.action) + len(row.latents))
    obs, action, latents = (
        tuple((c.name, _array(c.array)) for c in group) for group in (row.obs, row.action, row.latents)
    )
    bare = len(action) == 1 and not action[0][0]
    spec = TableSpec(
        row=RowSpec(obs, action[0][1] if bare else action, latents),
        window=WindowSpec(**{f.name: getattr(proto.window, f.name) for f in fields(WindowSpec)}),
        capacity=proto.capacity,
        max_envs=proto.max_envs,
    )
    check_spec(spec)
    return spec


def _column(name: str, array: ArraySpec) -> replay_pb2.Column:
    return replay_pb2.Column(
        name=name, array=replay_pb2.ArraySpec(shape=array.shape, dtype=array.dtype, classes=array.classes)
    )


def _array(proto: replay_pb2.ArraySpec) -> ArraySpec:
    return ArraySpec(tuple(proto.shape), proto.dtype, proto.classes if proto.HasField("classes") else None)


def stats_to_proto(stats: ReplayStats, incarnation: int, num_envs: int, credit: int) -> replay_pb2.StatsResponse:
    """`stats` and the table's own state."""
    return replay_pb2.StatsResponse(**asdict(stats), incarnation=incarnation, num_envs=num_envs, credit=credit)


def stats_from_proto(proto: replay_pb2.StatsResponse) -> ReplayStats:
    """What a replay tells of itself; incarnation, environments and credit are read off `proto`."""
    return ReplayStats(**{f.name: getattr(proto, f.name) for f in fields(ReplayStats)})
