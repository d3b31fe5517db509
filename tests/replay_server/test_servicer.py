"""The replay service as any client sees it: generated stubs against a server in this process."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from replay_server.ring import Ring
from replay_server.servicer import CREDIT_SLICE, HEALTH_CALLS, LAST_WORDS, SERVICE
from telamon.data import FLAGS, ArraySpec, RowSpec, WindowSpec
from telamon.replay import TableSpec
from telamon.rpc import codec, security
from telamon.rpc.security import Endpoint
from telamon.rpc.shared import SharedSlots
from telamon.rpc.v1 import replay_pb2
from tests.replay_server.plain import SPEC, Plain, arrays_of, check_windows, header, payload, rows
from tests.service import endpoint_of, serve_open
from tests.waiting import SECONDS, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def served(tmp_path):
    with serve_open(tmp_path / "server") as served:
        yield served


@pytest.fixture
def client(served):
    with Plain(endpoint_of(served.info)) as client:
        client.configure()
        yield client


def value(served, name, **labels):
    return served.counts.registry.get_sample_value(f"telamon_replay_{name}", labels)


def fails(code, match, call, *arguments, **keywords):
    with pytest.raises(grpc.RpcError, match=match) as refusal:
        call(*arguments, **keywords)
    assert refusal.value.code() is code


def latents(client, incarnation, env_id, row, level):
    """The answer to a write-back of `level` to rows."""
    env_id, row = np.array(env_id, np.int32), np.array(row, np.int64)
    arrays = {"env_id": env_id, "row": row, "latents/deter": np.full((env_id.size, 5), level, ml_dtypes.bfloat16)}
    frame = replay_pb2.Frame(
        header=header(arrays, incarnation=incarnation, write_back=replay_pb2.WriteBackHeader()), payload=payload(arrays)
    )
    (ack,) = client.stream("WriteBack", [frame])
    return ack.written


def test_generated_stubs_speak_everything(client):
    configured = client.configure()
    assert configured.bytes == SPEC.nbytes
    opened = client.open()
    assert (opened.incarnation, opened.epoch, opened.next_tick, opened.first_env_id) == (
        configured.incarnation,
        1,
        0,
        0,
    )
    other = client.open("other", 3)
    assert other.first_env_id == 2
    frames = [client.tick_frame(opened, tick, ticks) for tick, ticks in ((0, 1), (1, 4), (5, 2))]
    assert [ack.tick for ack in client.stream("Append", frames)] == [0, 4, 6]
    assert client.append(opened, 3, 2) == 6  # repeats
    assert client.append(other, 0, 10, stream="other", num_envs=3) == 9

    stats = client.call("Stats")
    assert (stats.rows, stats.rows_held, stats.num_envs, stats.credit) == (44, 44, 5, -1)
    assert (stats.incarnation, stats.sampled_windows) == (configured.incarnation, 0)
    assert stats.items == 2 * 4 + 3 * 7

    for found in client.sample(300):
        check_windows(found)
        assert found["latents/deter"].shape == (300, 1, 5)
        assert set(found["env_id"]) == set(range(5))
    for found in client.sample(7, replay_pb2.PURPOSE_REPORT):
        check_windows(found)
    assert client.call("Stats").sampled_windows == 300

    assert latents(client, opened.incarnation, [0, 1, 1], [2, 3, 3], 8) == 3
    fails(grpc.StatusCode.INVALID_ARGUMENT, "never appended", latents, client, opened.incarnation, [0], [100], 9)
    assert latents(client, opened.incarnation + 1, [0], [2], 9) == 0
    (found,) = client.sample(300)
    written = ((found["env_id"] == 0) & (found["first_row"] == 2)) | (
        (found["env_id"] == 1) & (found["first_row"] == 3)
    )
    assert written.any()
    np.testing.assert_array_equal(found["latents/deter"][:, 0, 0], np.where(written, 8, -1))

    client.call("Mark", name="before")
    client.append(opened, 7)
    assert client.call("Stats").rows == 46
    restored = client.call("Restore", name="before")
    assert restored.incarnation not in (0, opened.incarnation)
    assert client.call("Stats").rows == 44
    fails(grpc.StatusCode.ABORTED, "writer", client.append, opened, 7)
    assert latents(client, opened.incarnation, [0], [2], 9) == 0
    again = client.open()
    assert (again.next_tick, again.epoch > 0, again.incarnation) == (7, True, restored.incarnation)
    assert client.append(again, 7) == 7

    client.call("Mark", name="later")
    assert list(client.call("ListMarks").names) == ["before", "later"]
    client.call("Forget", name="before")
    assert list(client.call("ListMarks").names) == ["later"]


@pytest.mark.parametrize(
    ("harm", "text"),
    [(lambda chunk: chunk.write_bytes(chunk.read_bytes()[:-1]), "damaged"), (Path.unlink, "is missing")],
    ids=["shortened", "missing"],
)
def test_a_mark_that_is_damaged_is_data_loss(served, client, harm, text):
    client.append(client.open(), 0, 10)
    client.call("Mark", name="mine")
    for chunk in Path(served.tables.get("main").directory).glob("marks/chunk-*"):
        harm(chunk)
    fails(grpc.StatusCode.DATA_LOSS, text, client.call, "Restore", name="mine")
    fails(grpc.StatusCode.NOT_FOUND, "no mark", client.call, "Restore", name="yours")
    fails(grpc.StatusCode.INVALID_ARGUMENT, "must be 1 to 64 letters", client.call, "Restore", name="../mine")
    assert client.rows_held() == 20


LARGE = TableSpec(
    RowSpec((("image", ArraySpec((100, 100, 3), "uint8")),), ArraySpec((1,))),
    WindowSpec(10, cross_episodes=True, closed_only=False, start="windows"), capacity=40, max_envs=1,
)  # fmt: skip


def test_a_large_batch_comes_in_frames(served):
    with Plain(endpoint_of(served.info), "large") as client:
        client.configure(LARGE)
        opened = client.open(num_envs=1)
        for tick in range(20):
            arrays = {
                **{"obs/image": np.full((1, 100, 100, 3), tick, np.uint8)},
                **{name: values for name, values in rows([0], tick).items() if name in ("reward", *FLAGS)},
                **{"action": np.zeros((1, 1), np.float32)},
            }
            append = replay_pb2.AppendHeader(stream="writer", epoch=opened.epoch, tick=tick, ticks=1, env_id=[0])
            frame = replay_pb2.Frame(
                header=header(arrays, table="large", incarnation=opened.incarnation, append=append),
                payload=payload(arrays),
            )
            client.stream("Append", [frame])
        requests = [replay_pb2.SampleRequest(table="large", batch=8), replay_pb2.SampleRequest(batch=1)]
        frames = client.stream("Sample", requests)
        counts = [frame.header.count for frame in frames]
        assert sum(counts[:-1]) == 8
        assert counts[-1] == 1
        assert [frame.header.windows.last for frame in frames] == [False] * (len(frames) - 2) + [True, True]
        assert all(codec.FRAME_BYTES // 2 <= len(frame.payload) <= codec.FRAME_BYTES for frame in frames[:-1])
        assert {frame.header.windows.items for frame in frames} == {11}
        for frame in frames:
            found = arrays_of(frame)
            expected = found["first_row"][:, None] + np.arange(10)
            np.testing.assert_array_equal(found["obs/image"][..., 99, 99, 2], expected)


def mapped_slots():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "telamon-slots" in line]


def test_shared_memory(client):
    """All three streams through slots; nothing stays mapped, and the file is gone before."""
    opened = client.open()
    append_layout, sample_layout, write_layout = (
        layout(SPEC) for layout in (codec.append_layout, codec.sample_layout, codec.write_back_layout)
    )
    slots = SharedSlots.create(2, 8192)
    offer = replay_pb2.SharedMemory(path=str(slots.path), slots=2, slot_bytes=8192)

    def append():
        yield replay_pb2.Frame(header=replay_pb2.Header(shared=offer))
        frame = client.tick_frame(opened, 0, 10)
        columns = append_layout.ticks(slots.slot(1), 2, 10, codec.SLOT)
        for i in range(10):
            for name, values in rows([0, 1], i).items():
                columns[name][i] = values
        frame.payload = b""
        frame.header.slot = 1
        yield frame

    assert [ack.tick for ack in client.stream("Append", append())] == [-1, 9]

    requests = [
        replay_pb2.SampleRequest(shared=offer),
        replay_pb2.SampleRequest(table="main", batch=9, slot=0),
        replay_pb2.SampleRequest(batch=3),
        replay_pb2.SampleRequest(batch=5, slot=1),
    ]
    empty, first, inline, second = client.stream("Sample", requests)
    assert (empty.header.count, empty.payload) == (0, b"")
    assert (first.header.slot, first.header.count, first.header.windows.last, first.payload) == (0, 9, True, b"")
    assert (second.header.slot, second.header.count) == (1, 5)
    assert not inline.header.HasField("slot")
    check_windows(arrays_of(inline))
    for slot, count in ((0, 9), (1, 5)):
        check_windows(sample_layout.views(slots.slot(slot), count, codec.SLOT))

    def write_back():
        yield replay_pb2.Frame(header=replay_pb2.Header(shared=offer))
        columns = write_layout.views(slots.slot(0), 3, codec.SLOT)
        columns["env_id"][:], columns["row"][:], columns["latents/deter"][:] = [0, 0, 1], [1, 1, 2], 6
        write_header = write_layout.header(3)
        write_header.table, write_header.incarnation, write_header.slot = "main", opened.incarnation, 0
        yield replay_pb2.Frame(header=write_header)

    assert [ack.written for ack in client.stream("WriteBack", write_back())] == [0, 3]
    slots.unlink()
    slots.close()
    gc.collect()
    until(lambda: not mapped_slots())


def test_appends_wait_for_credit(served, client, monkeypatch):
    table = served.tables.get("main")
    look, looks = table.wait_for_credit, []
    monkeypatch.setattr(table, "wait_for_credit", lambda timeout: looks.append(timeout) or look(timeout))
    opened = client.open()
    client.append(opened, 0, 10)
    client.call("Grant", rows=20)
    assert client.call("Stats").credit == 20
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(client.append(opened, 10)))
    waiting.start()
    until(lambda: looks.count(CREDIT_SLICE) >= 3)
    assert value(served, "busy_requests", method="Append") == 1
    assert answers == []
    assert client.rows_held() == 20  # others are served meanwhile
    client.call("Grant", rows=-1)
    waiting.join(SECONDS)
    assert answers == [10]
    assert value(served, "credit_wait_seconds_total", table="main") > 1.9 * CREDIT_SLICE


def test_repeats_wait_for_no_credit(served, client):
    opened = client.open()
    client.append(opened, 0, 10)
    client.call("Grant", rows=20)
    assert client.append(opened, 5, 5) == 9
    client.options["timeout"] = 0.5
    fails(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline", client.append, opened, 8, 3)
    until(lambda: value(served, "open_calls", method="Append") == 0)
    client.options["timeout"] = SECONDS
    assert client.rows_held() == 20
    client.open()
    fails(grpc.StatusCode.ABORTED, "epoch", client.append, opened, 5, 5)


def test_a_grant_in_the_middle_of_a_frame_bounds_the_rest(served, client, monkeypatch):
    opened = client.open()
    client.append(opened, 0, 10)
    table = served.tables.get("main")
    look, bounds = table.wait_for_credit, [23]

    def grant_after_a_look(timeout):
        found = look(timeout)
        if bounds:
            table.grant(bounds.pop())
        return found

    monkeypatch.setattr(table, "wait_for_credit", grant_after_a_look)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(client.append(opened, 10, 10)))
    waiting.start()
    until(lambda: table.credit == 23 and not look(0.0))
    assert client.call("Stats").rows == 24  # the last tick began below the bound
    client.call("Grant", rows=-1)
    waiting.join(SECONDS)
    assert answers == [19]


def test_a_stream_is_not_opened_for_a_client_that_has_gone(served, client):
    opened = client.open()
    request = replay_pb2.OpenStreamRequest(table="main", stream="writer", num_envs=2)
    with served.tables.get("main")._lock:
        call = client.stub.OpenStream.future(request, **client.options)
        until(lambda: value(served, "busy_requests", method="OpenStream") == 1)
        call.cancel()
        assert client.rows_held() == 0  # asked after the goodbye, on the same connection
    until(lambda: value(served, "open_calls", method="OpenStream") == 0)
    assert client.append(opened, 0) == 0


def test_a_request_after_the_end_of_its_table_is_to_be_repeated(tmp_path):
    with serve_open(tmp_path) as served, Plain(endpoint_of(served.info)) as client:
        client.configure()
        opened = client.open()
        client.append(opened, 0, 10)
        served.tables.get("main").close()
        for call in (lambda: client.append(opened, 10), client.open, lambda: client.call("Mark", name="late")):
            fails(grpc.StatusCode.UNAVAILABLE, "draining", call)
    with serve_open(tmp_path) as served:
        assert served.tables.get("main").stats().rows == 20


def test_connections_are_counted_while_they_have_calls(served, client, monkeypatch):
    end = threading.Event()
    asking = lambda client: client.stub.Sample(iter(end.wait, True), **client.options)
    calls = [asking(client), asking(client)]
    options = (*security.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # or one process would share one
    monkeypatch.setattr(security, "CHANNEL_OPTIONS", options)
    with Plain(endpoint_of(served.info)) as other:
        calls.append(asking(other))
        until(lambda: value(served, "open_calls", method="Sample") == 3)
        assert value(served, "connections") == 2
        for call in calls:
            call.cancel()
        until(lambda: value(served, "connections") == 0)
        end.set()


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_an_append_that_nobody_waits_for_ends(served, client, how):
    opened = client.open()
    client.append(opened, 0, 10)
    client.call("Grant", rows=20)
    client.options["timeout"] = SECONDS if how == "cancelled" else 0.2
    call = client.stub.Append(iter([client.tick_frame(opened, 10)]), **client.options)
    if how == "cancelled":
        until(lambda: value(served, "busy_requests", method="Append") == 1)
        call.cancel()
    with pytest.raises(grpc.RpcError):
        next(call)
    until(lambda: value(served, "open_calls", method="Append") == 0)
    client.options["timeout"] = SECONDS
    assert client.rows_held() == 20


def test_no_credit_holds_nothing_back_while_nothing_can_be_sampled(client):
    opened = client.open()
    client.call("Grant", rows=0)
    assert client.append(opened, 0, 3) == 2  # a window needs 4


def test_what_is_counted(served, client):
    opened = client.open()
    client.append(opened, 0, 60)
    (found,) = client.sample(20)
    list(client.sample(5, replay_pb2.PURPOSE_REPORT))
    latents(client, opened.incarnation, [0, 0], [20, 2], 1)
    fails(grpc.StatusCode.OUT_OF_RANGE, "70", client.append, opened, 70, 2)
    fails(grpc.StatusCode.NOT_FOUND, "nothing", Plain.call, Nothing(client), "Stats")
    expected = {
        ("appended_rows_total", "main"): 120, ("held_rows", "main"): 100, ("environments", "main"): 2,
        ("appended_bytes_total", "main"): 120 * SPEC.row.nbytes, ("full_bytes", "main"): SPEC.nbytes,
        ("written_back_rows_total", "main"): 1, ("stale_rows_total", "main"): 1,
        ("sampled_age_rows_count", "main"): 25,
    }  # fmt: skip
    assert {key: value(served, key[0], table=key[1]) for key in expected} == expected
    assert value(served, "sampled_windows_total", table="main", purpose="train") == 20
    assert value(served, "sampled_windows_total", table="main", purpose="report") == 5
    assert value(served, "sampled_bytes_total", table="main") == sum(
        codec.sample_layout(SPEC).nbytes(count) for count in (20, 5)
    )
    assert value(served, "sampled_age_rows_sum", table="main") >= (60 - found["first_row"]).sum()
    assert value(served, "refused_rows_total", table="main", reason="OUT_OF_RANGE") == 4
    until(lambda: value(served, "calls_total", method="Append", code="OUT_OF_RANGE") == 1)
    until(lambda: value(served, "calls_total", method="Stats", code="NOT_FOUND") == 1)
    until(lambda: value(served, "calls_total", method="Append", code="OK") == 1)
    assert value(served, "request_seconds_count", method="Sample") == 2


def test_a_full_disk_stores_nothing_and_may_have_space_again(served, client, monkeypatch):
    opened = client.open()
    client.append(opened, 0, 10)

    def full(self, env_id, ticks):
        raise OSError(errno.ENOSPC, "no space for 4096 more bytes of rows", "/somewhere/reward.bin")

    with monkeypatch.context() as patch:
        patch.setattr(Ring, "reserve", full)
        text = "no space for 4096 more bytes of rows: '/somewhere/reward.bin'"
        fails(grpc.StatusCode.RESOURCE_EXHAUSTED, text, client.append, opened, 10, 5)
    assert client.rows_held() == 20
    assert value(served, "refused_rows_total", table="main", reason="RESOURCE_EXHAUSTED") == 10
    assert client.append(opened, 10, 5) == 14


class Nothing:
    """A client of a table that does not exist."""

    def __init__(self, client):
        self.table, self.stub, self.options = "nothing", client.stub, client.options


def test_a_defect_shows_no_traceback(served, client, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("secret detail")

    client.append(client.open(), 0, 10)
    table = served.tables.get("main")
    for name, call in (("stats", lambda: client.call("Stats")), ("fill", lambda: list(client.sample(3)))):
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(table, name, broken)
            with pytest.raises(grpc.RpcError) as failure:
                call()
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in failure.value.details()
        number = failure.value.details().split("(id ")[1].rstrip(")")
        (record,) = [r for r in caplog.records if number in r.getMessage()]
        assert "secret detail" in str(record.exc_info)
    assert client.rows_held() == 20
    until(lambda: value(served, "calls_total", method="Sample", code="INTERNAL") == 1)


@pytest.fixture
def stranger(served):
    with security.open_channel(Endpoint(served.info["address"], "")) as channel:
        yield channel


def test_health_needs_no_token(stranger):
    health = health_pb2_grpc.HealthStub(stranger)
    for service in ("", SERVICE):
        assert health.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS).status == SERVING
    other = health_pb2.HealthCheckRequest(service="other")
    fails(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", health.Check, other, timeout=SECONDS)


@pytest.mark.parametrize(
    ("message", "text"),
    [(b"\x0a\x80\x08" + bytes(1024), "1027 bytes is too large; at most 1024"), (b"\x0a", "1 bytes are")],
)
def test_health_reads_little_of_strangers(stranger, message, text):
    check = stranger.unary_unary("/grpc.health.v1.Health/Check")
    fails(grpc.StatusCode.INVALID_ARGUMENT, text, check, message, timeout=SECONDS)


def test_strangers_hold_few_threads(served, stranger, client):
    never = threading.Event()
    check = stranger.stream_unary("/grpc.health.v1.Health/Check")

    def nothing():
        never.wait(SECONDS)
        yield b""

    calls = [check.future(nothing(), timeout=SECONDS) for _ in range(HEALTH_CALLS + 5)]
    try:
        until(lambda: sum(call.done() for call in calls) == 5)
        assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert client.rows_held() == 0
    finally:
        never.set()
    assert sum(call.exception(timeout=SECONDS) is None for call in calls) == HEALTH_CALLS


def test_reflection_needs_the_token(served, stranger):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    for token, expected in ((None, grpc.StatusCode.UNAUTHENTICATED), ("right", grpc.StatusCode.OK)):
        metadata = () if token is None else security.metadata(endpoint_of(served.info).token)
        call = reflection_pb2_grpc.ServerReflectionStub(stranger).ServerReflectionInfo(
            iter([request]), metadata=metadata, timeout=SECONDS
        )
        if token is None:
            with pytest.raises(grpc.RpcError):
                next(call)
        else:
            (answer,) = list(call)
            assert SERVICE in [service.name for service in answer.list_services_response.service]
        assert call.code() is expected


def test_calls_in_progress_are_bounded(tmp_path):
    with serve_open(tmp_path, max_calls=3) as served, Plain(endpoint_of(served.info)) as client:
        client.configure()
        end = threading.Event()
        idle = [client.stub.Sample(iter(end.wait, True), **client.options) for _ in range(3)]
        until(lambda: value(served, "open_calls", method="Sample") == 3)
        fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "exceeded", client.call, "Stats")
        for call in idle:
            call.cancel()
        end.set()
        until(lambda: value(served, "open_calls", method="Sample") == 0)
        assert client.rows_held() == 0


def test_drain_answers_what_was_asked_and_ends_the_rest(tmp_path, monkeypatch):
    """An idle stream, an append that waits for credit, and a stream that goes on asking."""
    with (
        serve_open(tmp_path) as served,
        Plain(endpoint_of(served.info)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.configure()
        opened = client.open()
        client.append(opened, 0, 10)
        client.call("Grant", rows=20)
        end = threading.Event()
        idle = client.stub.WriteBack(iter(end.wait, True), **client.options)
        waiting = client.stub.Append(iter([client.tick_frame(opened, 10)]), **client.options)
        requests = (replay_pb2.SampleRequest(table="main", batch=batch) for batch in itertools.count(1))
        asking = client.stub.Sample(requests, **client.options)
        next(asking)
        read = pool.submit(list, asking)  # or its answers would soon fill the connection
        until(lambda: value(served, "busy_requests", method="Append") == 1)
        stop = served.server.grpc.stop

        def stop_after_goodbyes(seconds):
            if seconds == LAST_WORDS:  # long enough for them, but on a busy machine
                until(lambda: waiting.done() and asking.done())
            return stop(seconds)

        monkeypatch.setattr(served.server.grpc, "stop", stop_after_goodbyes)
        began = time.monotonic()
        drained = served.server.drain(10 * SECONDS)
        assert drained
        assert time.monotonic() - began < SECONDS
        assert served.server.health.Check(health_pb2.HealthCheckRequest(), None).status == NOT_SERVING
        for answers in (lambda: list(idle), lambda: list(waiting), read.result):
            with pytest.raises(grpc.RpcError):
                answers()
        assert idle.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        for call in (waiting, asking):
            assert call.code() is grpc.StatusCode.UNAVAILABLE
            assert call.details() == "the server is draining; connect again"
        end.set()
        with pytest.raises(grpc.RpcError):
            client.rows_held()
