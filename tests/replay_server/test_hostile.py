"""What no client of ours would send: each gets the right status, nothing is stored, and the server goes on."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import grpc
import ml_dtypes
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_server.__main__ import Served
from telamon.rpc import codec, security
from telamon.rpc.shared import DIRECTORY, SharedSlots
from telamon.rpc.v1 import replay_pb2
from tests.replay_server.plain import SPEC, Plain, check_windows, header, payload, rows
from tests.service import TOKEN, endpoint_of, serve_open
from tests.waiting import SECONDS, next_line, until

INVALID, NOT_FOUND, ABORTED = (
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED,
)  # fmt: skip
HELD = 40


class Case(NamedTuple):
    """A server with a table of HELD rows, its client, and a writer whose next tick is 20."""

    served: Served
    client: Plain
    opened: replay_pb2.OpenStreamResponse

    def frame(self, change: Callable[[replay_pb2.Frame], object] = lambda frame: None, **where) -> bytes:
        """The next tick, changed."""
        frame = self.client.tick_frame(self.opened, **{"tick": 20, **where})
        change(frame)
        return frame.SerializeToString()

    def value(self, name: str, **labels: str) -> float | None:
        return self.served.counts.registry.get_sample_value(f"telamon_replay_{name}", labels)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Case]:
    with (
        serve_open(tmp_path_factory.mktemp("hostile"), memory_limit=0.5) as served,
        Plain(endpoint_of(served.info)) as client,
    ):
        client.configure()
        opened = client.open()
        client.append(opened, 0, HELD // 2)
        client.open("other", 2)
        yield Case(served, client, opened)


@pytest.fixture
def case(server: Case) -> Iterator[Case]:
    """The server, which must be as it was afterwards."""
    before = server.client.call("Stats")
    yield server
    assert server.client.call("Stats") == before
    with security.open_channel(endpoint_of(server.served.info)) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert server.client.append(server.opened, 19) == 19
    for found in server.client.sample(3, replay_pb2.PURPOSE_REPORT):
        check_windows(found)


def refused(case: Case, code: grpc.StatusCode, match: str, method: str, *messages: bytes) -> None:
    with pytest.raises(grpc.RpcError, match=match) as refusal:
        case.client.raw(method, *messages)
    assert refusal.value.code() is code
    assert "Traceback" not in refusal.value.details()


def changed(**fields) -> Callable[[replay_pb2.Frame], None]:
    """Sets fields of the header; those of the append header begin with `append_`."""

    def change(frame: replay_pb2.Frame) -> None:
        for name, value in fields.items():
            target = frame.header.append if name.startswith("append_") else frame.header
            name = name.removeprefix("append_")
            if isinstance(value, list):
                del getattr(target, name)[:]
                getattr(target, name).extend(value)
            else:
                setattr(target, name, value)

    return change


def columns_changed(**arrays: np.ndarray | None) -> Callable[[replay_pb2.Frame], None]:
    """Replaces, adds or leaves out (None) columns, payload and all."""

    def change(frame: replay_pb2.Frame) -> None:
        merged = {k: v for k, v in (rows([0, 1], 20) | arrays).items() if v is not None}
        frame.header.ClearField("columns")
        frame.header.columns.extend(header(merged).columns)
        frame.payload = payload(merged)

    return change


def dropped_last(frame: replay_pb2.Frame) -> None:
    frame.payload = frame.payload[:-1]


def lengthened(frame: replay_pb2.Frame) -> None:
    frame.payload += bytes(8)


def unlike_its_kind(frame: replay_pb2.Frame) -> None:
    frame.header.write_back.SetInParent()


APPENDS: dict[str, tuple[Callable[[replay_pb2.Frame], None], grpc.StatusCode, str]] = {
    "no table": (changed(table=""), INVALID, "must name its table"),
    "unknown table": (changed(table="unknown"), NOT_FOUND, "unknown"),
    "table is a path": (changed(table="../main"), NOT_FOUND, "main"),
    "unknown stream": (changed(append_stream="unknown"), NOT_FOUND, "unknown"),
    "another call's header": (unlike_its_kind, INVALID, "header `append`"),
    "old epoch": (changed(append_epoch=0), ABORTED, "epoch"),
    "epoch to come": (changed(append_epoch=2**64 - 1), ABORTED, "epoch"),
    "wrong incarnation": (changed(incarnation=2**64 - 1), ABORTED, "main"),
    "tick ahead": (changed(append_tick=21), grpc.StatusCode.OUT_OF_RANGE, "20 is the next one"),
    "last tick there is": (changed(append_tick=2**63 - 1), grpc.StatusCode.OUT_OF_RANGE, "20 is the next one"),
    "negative tick": (changed(append_tick=-1), INVALID, "tick -1"),
    "no ticks": (changed(append_ticks=0), INVALID, "0 x 2 rows"),
    "more ticks than sent": (changed(append_ticks=2), INVALID, "2 x 2 rows take"),
    "endless ticks": (changed(append_ticks=2**32 - 1), INVALID, "rows take"),
    "no rows": (changed(count=0, append_env_id=[]), INVALID, "1 x 0 rows"),
    "more rows than sent": (changed(count=3, append_env_id=[0, 1, 2]), INVALID, "1 x 3 rows take"),
    "endless rows": (changed(count=2**32 - 1), INVALID, "4294967295 rows a tick, but 2 env_id"),
    "environments of nobody": (changed(append_env_id=[4, 5]), INVALID, "leaves environments"),
    "environments of another": (changed(append_env_id=[2, 3]), INVALID, "leaves environments"),
    "environment beyond the table": (changed(append_env_id=[0, 6]), INVALID, "below the table's max_envs 6"),
    "environment beyond int32": (changed(append_env_id=[0, 2**32 - 1]), INVALID, "below the table's max_envs 6"),
    "environment twice": (changed(append_env_id=[1, 1]), INVALID, "repeats"),
    "wrong dtype": (columns_changed(reward=np.zeros(2, np.float64)), INVALID, "reward"),
    "dtype of the same size": (columns_changed(reward=np.zeros(2, np.int32)), INVALID, "reward"),
    "no dtype": (changed(columns=[replay_pb2.Column(name="reward")]), INVALID, "column 0"),
    "wrong shape": (columns_changed(action=np.zeros((2, 3), np.float32)), INVALID, "action"),
    "scalar as a vector": (columns_changed(reward=np.zeros((2, 1), np.float32)), INVALID, "reward"),
    "column missing": (columns_changed(reward=None), INVALID, "reward"),
    "column unknown": (columns_changed(other=np.zeros(2, np.uint8)), INVALID, "columns"),
    "latents missing": (columns_changed(**{"latents/deter": None}), INVALID, "latents/deter"),
    "payload short": (dropped_last, INVALID, "rows take"),
    "payload long": (lengthened, INVALID, "rows take"),
    "no payload": (lambda frame: frame.ClearField("payload"), INVALID, "rows take"),
    "slot of no memory": (changed(slot=0), INVALID, "offered no shared memory|slot 0 and a payload"),
    "long name": (changed(table="x" * 100_000), NOT_FOUND, "there is no table"),
    "name of other letters": (changed(append_stream="☃" * 2000), NOT_FOUND, "there is no stream"),
}


def test_rows_of_frames_that_contradict_themselves_are_not_counted(case):
    change, code, match = APPENDS["endless ticks"]
    before = [case.value("refused_rows_total", table="main", reason=code.name) or 0 for code in (INVALID, ABORTED)]
    refused(case, code, match, "Append", case.frame(change))
    refused(case, ABORTED, "epoch", "Append", case.frame(changed(append_epoch=0)))
    after = [case.value("refused_rows_total", table="main", reason=code.name) or 0 for code in (INVALID, ABORTED)]
    assert after == [before[0], before[1] + 2]


@pytest.mark.parametrize("name", APPENDS)
def test_append(case, name):
    change, code, match = APPENDS[name]
    refused(case, code, match, "Append", case.frame(change))


@pytest.mark.parametrize("cut", [0, 1, 2, 10, 100, -100, -9, -1])
@pytest.mark.parametrize("method", ["Append", "WriteBack"])
def test_truncated_frames(case, method, cut):
    refused(case, INVALID, "truncated|rows take|must name its table", method, case.frame()[:cut])


ALL = [method.name for method in replay_pb2.DESCRIPTOR.services_by_name["Replay"].methods]
GARBAGE = {
    "half a tag": b"\xff",
    "endless field": b"\x0a\xff\xff\xff\xff\x0f",
    "half a field": b"\x0a\x05ab",
    "group": b"\x0b",
    "endless length": b"\x12" + b"\xff" * 9 + b"\x01",
    "no UTF-8": b"\x0a\x02\xc3\x28",
}


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("message", GARBAGE.values(), ids=GARBAGE)
def test_garbage(case, method, message):
    with pytest.raises(grpc.RpcError) as refusal:
        case.client.raw(method, message)
    assert refusal.value.code() is INVALID


def test_header_that_would_take_memory(case):
    frame = replay_pb2.Frame(header=replay_pb2.Header(table="main", columns=[replay_pb2.Column()] * 600_000))
    refused(case, INVALID, "at most 1048576 are read", "Append", frame.SerializeToString())


@pytest.mark.parametrize("method", sorted({*ALL} - {"Append", "WriteBack"}))
def test_request_that_would_take_memory(case, method):
    """It is refused before it is parsed: what it holds are columns of nothing, or fields that nobody knows."""
    message = replay_pb2.ConfigureRequest(spec={"row": {"obs": [{}] * 600_000}}).SerializeToString()
    refused(case, INVALID, f"a {method}Request of {len(message)} bytes is too large; at most 1048576", method, message)


def test_message_beyond_the_bound(case):
    message = replay_pb2.Frame(payload=bytes(security.MAX_MESSAGE_BYTES)).SerializeToString()
    # its own client would refuse to send it
    channel = grpc.insecure_channel(case.served.info["address"], options=[("grpc.max_send_message_length", -1)])
    with channel, pytest.raises(grpc.RpcError) as refusal:
        list(channel.stream_stream("/telamon.rpc.v1.Replay/Append")(iter([message]), **case.client.options))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_what_came_before_a_refusal_holds(server):
    """Acknowledged frames, and the ticks of the refused one before the one that was wrong."""
    client = server.client
    opened = client.open("partial", 1)
    good = client.tick_frame(opened, 0, 3, stream="partial", num_envs=1)
    gap = client.tick_frame(opened, 9, 1, stream="partial", num_envs=1)
    call = client.stub.Append(iter([good, gap]), **client.options)
    assert next(call).tick == 2
    with pytest.raises(grpc.RpcError):
        next(call)
    assert client.append(opened, 3, stream="partial", num_envs=1) == 3


def test_flags_are_stored_as_0_or_1(server):
    client = server.client
    opened = client.open("flags", 1)
    frame = client.tick_frame(opened, 0, 3, stream="flags", num_envs=1)
    data = bytearray(frame.payload)
    codec.append_layout(SPEC).ticks(data, 1, 3)["is_first"].view(np.uint8)[:] *= 254
    frame.payload = bytes(data)
    client.stream("Append", [frame])
    ring = server.served.tables.get("main")._store._content.ring
    assert ring.held("is_first", opened.first_env_id).view(np.uint8).tolist() == [1, 0, 0]


def test_duplicates_are_acknowledged_and_not_stored(case):
    answers = case.client.raw("Append", case.frame(tick=0), case.frame(tick=10, ticks=10), case.frame(tick=19))
    assert [replay_pb2.AppendAck.FromString(answer).tick for answer in answers] == [19, 19, 19]


def test_a_call_is_about_one_table(case):
    refused(
        case, INVALID, "this call is about table 'main'", "Append", case.frame(tick=0), case.frame(changed(table="b"))
    )


@pytest.mark.parametrize(
    ("fields", "code", "match"),
    [
        ({"batch": 0}, INVALID, "batch must be at least 1"),
        ({"batch": 2**32 - 1}, INVALID, "batch must be at most 65536"),
        ({"batch": 1, "purpose": 7}, INVALID, "purpose 7"),
        ({"batch": 1, "table": "unknown"}, NOT_FOUND, "unknown"),
        ({"batch": 1, "table": ""}, INVALID, "must name its table"),
        ({"batch": 1, "slot": 0}, INVALID, "offered no shared memory"),
    ],
)
def test_sample(case, fields, code, match):
    request = replay_pb2.SampleRequest(**{"table": "main", **fields})
    refused(case, code, match, "Sample", request.SerializeToString())


def test_sample_of_nothing(case):
    with Plain(endpoint_of(case.served.info), "empty") as client:
        client.configure()
        with pytest.raises(grpc.RpcError, match="append more first") as refusal:
            list(client.sample(1))
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def write_back(case: Case, env_id=(0, 1), row=(2, 3), shape=(5,), dtype=ml_dtypes.bfloat16, **fields) -> bytes:
    arrays = {
        "env_id": np.array(env_id, np.int32), "row": np.array(row, np.int64),
        "latents/deter": np.zeros((len(env_id), *shape), dtype),
    }  # fmt: skip
    fields = {"incarnation": case.opened.incarnation, "write_back": replay_pb2.WriteBackHeader(), **fields}
    return replay_pb2.Frame(header=header(arrays, **fields), payload=payload(arrays)).SerializeToString()


@pytest.mark.parametrize(
    ("fields", "code", "match"),
    [
        ({"shape": (4,)}, INVALID, "latents/deter"),
        ({"dtype": np.float16}, INVALID, "latents/deter"),
        ({"env_id": (0, 6)}, INVALID, "6"),
        ({"env_id": (0, -1)}, INVALID, "-1"),
        ({"row": (0, -1)}, INVALID, "-1"),
        ({"row": (0, 20)}, INVALID, "never appended"),
        ({"row": (0, 2**63 - 1)}, INVALID, "never appended"),
        ({"env_id": (), "row": ()}, INVALID, "x 0 rows"),
        ({"count": 2**32 - 1}, INVALID, "rows take"),
        ({"table": "unknown"}, NOT_FOUND, "unknown"),
        ({"slot": 3}, INVALID, "slot 3"),
    ],
)
def test_write_back(case, fields, code, match):
    refused(case, code, match, "WriteBack", write_back(case, **fields))


def test_stale_write_backs_are_counted_and_not_stored(server):
    before = server.client.call("Stats")
    (ack,) = server.client.raw("WriteBack", write_back(server, incarnation=1))
    assert replay_pb2.WriteBackAck.FromString(ack).written == 0
    after = server.client.call("Stats")
    assert (after.stale - before.stale, after.written_back) == (2, before.written_back)


# shared memory


@pytest.fixture
def slots() -> Iterator[SharedSlots]:
    slots = SharedSlots.create(2, 64)
    yield slots
    slots.unlink()
    slots.close()


def planted(kind: str, slots: SharedSlots) -> tuple[str, int, int]:
    """(path, slots, bytes of a slot) of an offer."""
    sizes = slots.slots, slots.slot_bytes
    path = DIRECTORY / f"telamon-slots-{secrets.token_hex(16)}"
    match kind:
        case "symlink":
            path.symlink_to(slots.path)
        case "symlink to a file of the system":
            path.symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "sparse":
            path.touch()
            os.truncate(path, 128)
        case "fewer slots than said":
            return str(slots.path), 3, slots.slot_bytes
        case "more slots than said":
            return str(slots.path), 1, slots.slot_bytes
        case "endless":
            return str(slots.path), 2**32 - 1, 2**63
        case "nothing":
            return str(slots.path), 0, 0
        case _:
            return kind.format(directory=DIRECTORY, name=slots.path.name), *sizes
    return str(path), *sizes


@pytest.mark.parametrize("method", ["Append", "Sample", "WriteBack"])
@pytest.mark.parametrize(
    "kind",
    [
        "/etc/passwd", "", "{name}", "{directory}/../etc/passwd", "{directory}/../shm/{name}", "{directory}/./{name}",
        "{directory}", "/proc/self/mem", "{directory}/telamon-slots-00000000000000000000000000000000", "symlink",
        "symlink to a file of the system", "pipe", "directory", "sparse", "fewer slots than said",
        "more slots than said", "endless", "nothing",
    ],
)  # fmt: skip
def test_offered_memory(case, slots, method, kind):
    path, count, slot_bytes = planted(kind, slots)
    offer = replay_pb2.SharedMemory(path=path, slots=count, slot_bytes=slot_bytes)
    message = (
        replay_pb2.SampleRequest(table="main", shared=offer)
        if method == "Sample"
        else replay_pb2.Frame(header=replay_pb2.Header(table="main", shared=offer))
    )
    try:
        expected = (
            "is no shared memory|cannot be opened|no regular file|not a regular file|cannot be shared|allocated; "
        )
        refused(case, INVALID, expected, method, message.SerializeToString())
    finally:
        if path.startswith(f"{DIRECTORY}/telamon-slots-") and path != str(slots.path):
            remove = os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink
            if os.path.lexists(path):
                remove(path)


def test_slots(case, slots):
    offer = replay_pb2.SharedMemory(path=str(slots.path), slots=slots.slots, slot_bytes=slots.slot_bytes)
    first = replay_pb2.Frame(header=replay_pb2.Header(shared=offer)).SerializeToString()
    no_payload = lambda frame: frame.ClearField("payload")

    def in_slot(number: int) -> bytes:
        return case.frame(lambda frame: (changed(slot=number)(frame), no_payload(frame)))

    refused(case, INVALID, "slot 2 is none of the 2", "Append", first, in_slot(2))
    refused(case, INVALID, "slot 4294967295 is none", "Append", first, in_slot(2**32 - 1))
    refused(case, INVALID, "but there are 64", "Append", first, in_slot(1))
    refused(case, INVALID, "slot 1 and a payload", "Append", first, case.frame(changed(slot=1)))
    refused(case, INVALID, "in the first frame of a call", "Append", first, first)
    refused(case, INVALID, "in the first frame of a call", "Append", case.frame(tick=0), first)
    asked = [replay_pb2.SampleRequest(shared=offer), replay_pb2.SampleRequest(table="main", batch=9, slot=1)]
    refused(case, INVALID, "but there are 64", "Sample", *(request.SerializeToString() for request in asked))


# control


def configure(change: Callable[[replay_pb2.ConfigureRequest], object], table: str = "new") -> bytes:
    request = replay_pb2.ConfigureRequest(table=table, spec=codec.spec_to_proto(SPEC))
    change(request)
    return request.SerializeToString()


CONTROL: dict[str, tuple[str, bytes, grpc.StatusCode, str]] = {
    **{
        f"table {name!r}": ("Configure", configure(lambda _: None, name), INVALID, "1 to 64 letters")
        for name in ("", ".", "../up", "a/b", "a b", "x" * 65, "new\0", "ü")
    },
    "no spec": ("Configure", replay_pb2.ConfigureRequest(table="new").SerializeToString(), INVALID, "window of 0 rows"),
    "no capacity": ("Configure", configure(lambda r: r.spec.ClearField("capacity")), INVALID, "capacity"),
    "capacity below a window": ("Configure", configure(lambda r: setattr(r.spec, "capacity", 3)), INVALID, "capacity"),
    "endless": ("Configure", configure(lambda r: setattr(r.spec, "capacity", 2**64 - 1)), INVALID, "capacity"),
    "beyond the memory": ("Configure", configure(lambda r: setattr(r.spec, "capacity", 2**30)), INVALID, "memory"),
    "dtype of objects": (
        "Configure", configure(lambda r: setattr(r.spec.row.obs[0].array, "dtype", "object")), INVALID, "object",
    ),
    "other specs": (
        "Configure", configure(lambda r: setattr(r.spec, "capacity", 51), "main"), grpc.StatusCode.FAILED_PRECONDITION,
        "capacity is 50, not 51",
    ),
    "endless credit": (
        "Grant", replay_pb2.GrantRequest(table="main", rows=2**63 - 1).SerializeToString(), INVALID, "at most 4611686",
    ),
    "no environments": (
        "OpenStream", replay_pb2.OpenStreamRequest(table="main", stream="s").SerializeToString(), INVALID, "at least 1",
    ),
    "too many environments": (
        "OpenStream", replay_pb2.OpenStreamRequest(table="main", stream="s", num_envs=2**32 - 1).SerializeToString(),
        grpc.StatusCode.RESOURCE_EXHAUSTED, "raise max_envs",
    ),
    "another number of environments": (
        "OpenStream", replay_pb2.OpenStreamRequest(table="main", stream="writer", num_envs=1).SerializeToString(),
        INVALID, "has 2 environments",
    ),
    "stream is a path": (
        "OpenStream", replay_pb2.OpenStreamRequest(table="main", stream="../s", num_envs=1).SerializeToString(),
        INVALID, "1 to 64 letters",
    ),
    "mark is a path": (
        "Mark", replay_pb2.MarkRequest(table="main", name="../../mark").SerializeToString(), INVALID, "letters",
    ),
    "mark without a name": ("Mark", replay_pb2.MarkRequest(table="main").SerializeToString(), INVALID, "letters"),
    "restore of nothing": (
        "Restore", replay_pb2.RestoreRequest(table="main", name="none").SerializeToString(), NOT_FOUND, "no mark",
    ),
    "restore of a path": (
        "Restore", replay_pb2.RestoreRequest(table="main", name="../x").SerializeToString(), INVALID, "letters",
    ),
    "forget nothing": (
        "Forget", replay_pb2.ForgetRequest(table="main", name="none").SerializeToString(), NOT_FOUND, "no mark",
    ),
    **{
        f"{method} of an unknown table": (
            method, getattr(replay_pb2, f"{method}Request")(table="unknown").SerializeToString(), NOT_FOUND, "unknown",
        )
        for method in ("OpenStream", "Stats", "Grant", "Mark", "Restore", "ListMarks", "Forget")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROL)
def test_control(case, name):
    method, message, code, match = CONTROL[name]
    refused(case, code, match, method, message)
    assert "new" not in dict(case.served.tables.items())


# bytes at random

REFUSALS = {
    INVALID, NOT_FOUND, ABORTED, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}  # fmt: skip
"""Neither INTERNAL nor UNKNOWN: each of them would be a defect."""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Case]:
    """A server whose table anything may happen to."""
    with (
        serve_open(tmp_path_factory.mktemp("target"), memory_limit=0.01) as served,
        Plain(endpoint_of(served.info)) as client,
    ):
        client.configure()
        opened = client.open()
        client.append(opened, 0, 20)
        client.call("Mark", name="mark")
        yield Case(served, client, opened)


def examples(case: Case) -> dict[str, list[bytes]]:
    """Sound messages, by method."""
    named = {"OpenStream": {"stream": "writer", "num_envs": 2}, "Grant": {"rows": -1}, "Configure": {}}
    named |= {method: {"name": "mark"} for method in ("Mark", "Restore", "Forget")}
    sound = {
        method: [getattr(replay_pb2, f"{method}Request")(table="main", **named.get(method, {})).SerializeToString()]
        for method in ALL
        if method not in ("Append", "Sample", "WriteBack")
    }
    offer = replay_pb2.SharedMemory(path=f"{DIRECTORY}/telamon-slots-{'0' * 32}", slots=2, slot_bytes=64)
    return sound | {
        "Configure": [configure(lambda _: None, name) for name in ("main", "fuzz")],
        "Append": [
            case.frame(),
            case.frame(ticks=3),
            replay_pb2.Frame(header=replay_pb2.Header(shared=offer)).SerializeToString(),
        ],
        "Sample": [
            request.SerializeToString()
            for request in (
                replay_pb2.SampleRequest(table="main", batch=3, purpose=replay_pb2.PURPOSE_REPORT, slot=1),
                replay_pb2.SampleRequest(shared=offer),
            )
        ],
        "WriteBack": [write_back(case)],
    }  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, message: bytes) -> bytes:
    """A message with some bytes changed, cut out, put in, or repeated."""
    data = bytearray(message)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), 400)))
        match draw(st.sampled_from(["change", "cut", "insert", "repeat", "end"])):
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del data[at : at + draw(st.integers(1, 8))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
            case "end":
                del data[at:]
    return bytes(data)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_never_a_defect(target, data):
    method = data.draw(st.sampled_from(ALL))
    sound = data.draw(st.sampled_from(examples(target)[method]))
    streams = method in ("Append", "Sample", "WriteBack")
    messages = [data.draw(mutated(sound)) for _ in range(data.draw(st.integers(1, 2)) if streams else 1)]
    call = target.client.channel.stream_stream(f"/telamon.rpc.v1.Replay/{method}")(
        iter(messages), **target.client.options
    )
    with suppress(grpc.RpcError):
        list(call)
    assert call.code() in {grpc.StatusCode.OK, *REFUSALS}, (method, messages, call.details())


# who may call

METHODS = [
    *(
        f"/telamon.rpc.v1.Replay/{name}"
        for name in ("Configure", "Append", "Sample", "WriteBack", "Restore", "Nothing")
    ),
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/nothing.Like/This",
]


TOKENS = {"another": "0123456789abcdefgh", "empty": "", "short": TOKEN[:-1], "long": f"{TOKEN}x"}


@pytest.mark.parametrize("sent", [(), *map(security.metadata, TOKENS.values())], ids=["none", *TOKENS])
@pytest.mark.parametrize("method", METHODS)
def test_wrong_token(case, method, sent):
    before = case.value("unauthenticated_calls_total")
    with security.open_channel(endpoint_of(case.served.info)) as channel:
        call = channel.stream_stream(method)(iter([b"anything"]), metadata=sent, timeout=SECONDS)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert (call.code(), call.details()) == (grpc.StatusCode.UNAUTHENTICATED, "a token is needed")
    assert case.value("unauthenticated_calls_total") == before + 1


# clients that vanish


def nothing_open(case: Case) -> bool:
    return all(case.value("open_calls", method=m) in (None, 0) for m in ("Append", "Sample", "WriteBack"))


def test_calls_cancelled_in_the_middle(server):
    client = server.client
    for asked in (1, 5):
        requests = (replay_pb2.SampleRequest(table="main", batch=65536) for _ in range(asked))
        call = client.stub.Sample(requests, **client.options)
        next(call)
        call.cancel()
    call = client.stub.Append(iter([client.tick_frame(server.opened, 0)] * 1000), **client.options)
    next(call)
    call.cancel()
    until(lambda: nothing_open(server))
    until(lambda: (server.value("calls_total", method="Sample", code="CANCELLED") or 0) >= 2)


CLIENT = """
    import sys, threading
    from telamon.rpc.security import Endpoint
    from telamon.rpc.v1 import replay_pb2
    from tests.replay_server.plain import Plain

    client = Plain(Endpoint(sys.argv[1], sys.argv[2]), "killed")
    client.configure()
    opened = client.open()
    client.append(opened, 0, 10)
    threading.Thread(target=lambda: [None for _ in client.stub.Sample(
        iter(lambda: replay_pb2.SampleRequest(table="killed", batch=64), None), **client.options)]).start()
    frames = (client.tick_frame(opened, tick, 5) for tick in range(10, 10**9, 5))
    for ack in client.stub.Append(frames, **client.options):
        if ack.tick == 49:
            print("going", flush=True)
"""


def test_client_killed_in_the_middle(case):
    """Its threads are free again, its rows are whole ticks, and a successor goes on behind them."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), case.served.info["address"], TOKEN],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert next_line(process) == "going\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: nothing_open(case))
    with Plain(endpoint_of(case.served.info), "killed") as client:
        opened = client.open()
        assert opened.next_tick >= 50
        assert client.call("Stats").rows == 2 * opened.next_tick
        client.append(opened, opened.next_tick)
        for found in client.sample(100):
            check_windows(found)
