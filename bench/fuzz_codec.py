"""Random mutations of valid messages against the decoders of the wire, protobuf's own beside them. One JSON line.

    python bench/fuzz_codec.py [--seconds 120] [--seed 0]

Whatever bytes come, a decoder answers or raises ValueError; what it answers is what protobuf reads. Anything else ends
the run with the message that did it. The same checks are run, for a moment, by tests/telamon/rpc/test_codec.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from telamon.data import ArraySpec, RowSpec, WindowSpec
from telamon.replay import TableSpec
from telamon.rpc import codec
from telamon.rpc.v1 import replay_pb2

STRICTER = ("which proto3 does not have", f"more than {codec.MAX_FIELDS} fields", "are read")
"""What decode_frame refuses and protobuf does not: groups, too many fields, too large headers."""

LAYOUTS = (codec.append_layout, codec.sample_layout, codec.write_back_layout)
EDGES = (0, 1, 2, 127, 128, 2**14, 2**31 - 1, 2**31, 2**32 - 1)
NAMES = ("x", "image", "a/b", "..", "é", "", "\0", "n" * codec.MAX_NAME, "n" * (codec.MAX_NAME + 1))
EXAMPLE = TableSpec(
    row=RowSpec(
        obs=(("image", ArraySpec((4, 4, 3), "uint8")), ("x", ArraySpec((), "float64"))),
        action=ArraySpec((2,), "int32", 5),
        latents=(("deter", ArraySpec((8,), "bfloat16")),),
    ),
    window=WindowSpec(3, 1, True, False, "windows", latents="context"),
    capacity=100,
    max_envs=4,
)


def check_frame(message: bytes) -> str:
    """What became of a message that may be a Frame: refused, stricter, accepted, or read as arrays."""
    ours, refusal = _attempt(codec.decode_frame, message, ValueError)
    theirs, _ = _attempt(replay_pb2.Frame.FromString, message, DecodeError)
    if ours is None:
        assert theirs is None or any(reason in refusal for reason in STRICTER), f"protobuf reads it, but: {refusal}"
        return "refused" if theirs is None else "stricter"
    assert theirs is not None, "protobuf refuses it"
    assert ours.header == theirs.header, "another header than protobuf reads"
    assert ours.payload == theirs.payload, "another payload than protobuf reads"
    again = codec.decode_frame(codec.join_frame(ours.header, [ours.payload]))
    assert (again.header, again.payload) == (ours.header, ours.payload), "another frame after encoding it"
    outcome = "accepted"
    for layout_of in LAYOUTS:
        layout = layout_of(EXAMPLE)
        try:
            layout.check(ours.header.columns)
            views = layout.ticks(ours.payload, ours.header.count, max(1, ours.header.append.ticks))
            assert sum(view.nbytes for view in views.values()) <= len(ours.payload)
            outcome = "read"
        except ValueError:
            continue
    return outcome


def _attempt(decode: Callable[[bytes], Any], message: bytes, refusal: type[Exception]) -> tuple[Any | None, str]:
    """(what a decoder gives, ""), or (None, why it refuses)."""
    try:
        return decode(message), ""
    except refusal as error:
        return None, str(error)


def check_spec(message: bytes) -> str:
    """What became of a message that may be a TableSpec: none, refused or accepted."""
    try:
        proto = replay_pb2.TableSpec.FromString(message)
    except DecodeError:
        return "none"
    try:
        spec = codec.spec_from_proto(proto)
    except ValueError:
        return "refused"
    assert codec.spec_from_proto(codec.spec_to_proto(spec)) == spec, "another spec after encoding it"
    for layout_of in LAYOUTS:
        assert layout_of(spec).nbytes(1) % 8 == 0
    assert spec.nbytes < 2**63
    return "accepted"


def random_frame(rng: np.random.Generator) -> bytes:
    """A valid message, of one of the calls, now and then with an extreme entry."""
    layout = LAYOUTS[rng.integers(3)](EXAMPLE)
    count, ticks = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    header = layout.header(count if rng.random() < 0.9 else _edge(rng))
    header.table, header.incarnation = "t", int(rng.integers(2**63))
    kind = rng.integers(4)
    if kind == 0:
        header.append.stream, header.append.epoch, header.append.tick = "s", 1, int(rng.integers(2**40))
        header.append.ticks = ticks if rng.random() < 0.9 else _edge(rng)
        header.append.env_id.extend(range(count))
    elif kind == 1:
        header.windows.last, header.windows.items, ticks = True, _edge(rng), 1
    elif kind == 2:
        header.write_back.SetInParent()
        ticks = 1
    else:
        header.shared.path, header.shared.slots, header.shared.slot_bytes = "/dev/shm/x", _edge(rng), _edge(rng)
        header.slot, ticks = _edge(rng), 1
    payload = rng.bytes(ticks * layout.nbytes(count))
    if rng.random() < 0.5:
        return codec.join_frame(header, [payload])
    fields = [_field(1, header.SerializeToString()), _field(2, payload), *(_stray(rng) for _ in range(rng.integers(5)))]
    return b"".join(fields[k] for k in rng.permutation(len(fields)))


def _stray(rng: np.random.Generator) -> bytes:
    """A field that a frame may have besides: a part of a header, another payload, or an unknown one."""
    number = _edge(rng) % 2**29 or 15
    part = replay_pb2.Header(slot=_edge(rng), append=replay_pb2.AppendHeader(ticks=_edge(rng), env_id=[1, 2]))
    return (
        lambda: _field(1, part.SerializeToString()),
        lambda: _field(2, rng.bytes(9)),
        lambda: _field(number, rng.bytes(5)),
        lambda: _varint(number << 3) + _varint(2 ** int(rng.integers(64))),
        lambda: _varint(number << 3 | 1) + rng.bytes(8),
        lambda: _varint(number << 3 | 5) + rng.bytes(4),
        lambda: _varint(number << 3 | 3) + _varint(number << 3 | 4),  # a group
        lambda: _varint(1 << 3) + _varint(_edge(rng)),  # a header of another wire type, which makes it unknown
    )[rng.integers(8)]()


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + _varint(value >> 7) if value >= 0x80 else bytes([value])


def random_spec(rng: np.random.Generator) -> bytes:
    """A message that is a TableSpec, good or hostile."""
    column = lambda: replay_pb2.Column(name=_one_of(rng, NAMES, 5), array=_random_array(rng))
    columns = lambda most: [column() for _ in range(rng.integers(most))]
    return replay_pb2.TableSpec(
        row=replay_pb2.RowSpec(
            obs=columns(4), action=[column() for _ in range(1 + rng.integers(2))], latents=columns(3)
        ),
        window=replay_pb2.WindowSpec(
            length=int(rng.integers(1, 70)) if rng.random() < 0.8 else _edge(rng),
            context=int(rng.integers(2)),
            start=_one_of(rng, ("windows", "episodes", "", "x"), 1),
            latents=_one_of(rng, ("none", "context", "all"), 2),
            closed_only=bool(rng.integers(2)),
        ),
        capacity=int(rng.integers(1, 2**20)) if rng.random() < 0.8 else _edge(rng),
        max_envs=int(rng.integers(1, 99)) if rng.random() < 0.8 else _edge(rng),
    ).SerializeToString()


def _random_array(rng: np.random.Generator) -> replay_pb2.ArraySpec:
    shape = [int(rng.integers(1, 9)) if rng.random() < 0.9 else _edge(rng) for _ in range(rng.integers(4))]
    classes = _edge(rng) if rng.random() < 0.3 else None
    dtype = _one_of(rng, (*codec.DTYPES, "object", ">f4", "S5"), len(codec.DTYPES))
    return replay_pb2.ArraySpec(shape=shape, dtype=dtype, classes=classes)


def _edge(rng: np.random.Generator) -> int:
    return int(EDGES[rng.integers(len(EDGES))])


def _one_of(rng: np.random.Generator, values: Sequence[str], good: int) -> str:
    """Mostly one of the first `good` values."""
    return values[rng.integers(good if rng.random() < 0.9 else len(values))]


def mutate(rng: np.random.Generator, message: bytes, other: bytes) -> bytes:
    """`message` after one to three random edits."""
    out = bytearray(message)
    for _ in range(rng.integers(1, 4)):
        at, size = int(rng.integers(len(out) + 1)), int(rng.integers(1, 17))
        if rng.random() < 0.5:
            at = min(at, int(rng.integers(32)))  # where the lengths are
        edit = rng.integers(8)
        if edit == 0 and at < len(out):
            out[at] ^= 1 << int(rng.integers(8))
        elif edit == 1:
            out[at : at + size] = rng.bytes(size)
        elif edit == 2:
            out[at:at] = rng.bytes(size)
        elif edit == 3:
            del out[at : at + size]
        elif edit == 4:
            out[at:at] = out[at : at + size * 4]
        elif edit == 5:
            del out[at:]
        elif edit == 6:
            out[at:] = other[int(rng.integers(len(other) + 1)) :]
        else:
            out[at : at + 1] = (b"\xff" * 4 + b"\x0f", b"\xff" * 9 + b"\x01", b"\x80" * 4 + b"\x00")[rng.integers(3)]
    return bytes(out)


CASES: dict[str, tuple[Callable[[np.random.Generator], bytes], Callable[[bytes], str]]] = {
    "frame": (random_frame, check_frame),
    "spec": (random_spec, check_spec),
}


def fuzz(seed: int, wanted: Callable[[], bool]) -> Counter[str]:
    """Outcomes of random messages, while they are wanted. Raises RuntimeError naming the first that is none."""
    rng = np.random.default_rng(seed)
    outcomes: Counter[str] = Counter()
    while wanted():
        for name, (make, check) in CASES.items():
            message = make(rng)
            if rng.random() < 0.7:
                message = mutate(rng, message, make(rng))
            try:
                outcomes[f"{name} {check(message)}"] += 1
            except Exception as error:
                raise RuntimeError(f"seed {seed}, {name} {message.hex()}: {error!r}") from error
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    outcomes = fuzz(arguments.seed, lambda: time.monotonic() < end)
    print(
        json.dumps(
            {
                "case": "fuzz_codec", "seed": arguments.seed, "seconds": arguments.seconds,
                "messages": outcomes.total(), "outcomes": dict(sorted(outcomes.items())), "other_errors": 0,
                "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "python": platform.python_version(), "protobuf": version("protobuf"), "numpy": np.__version__,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
