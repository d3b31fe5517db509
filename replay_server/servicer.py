"""Tables as a gRPC service: translates messages into calls of tables, counts them, and knows nothing of rows.

proto/telamon/rpc/v1/replay.proto is the contract. Array-carrying calls come as bytes and are read in place; every
message is decoded inside its handler, so that one that is malformed is the client's error and not the server's.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no stubs of its own
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]  # likewise

from replay_server.metrics import Metrics
from replay_server.store import Chosen
from replay_server.table import Table, Tables
from telamon.data import FLAGS, WriteBack
from telamon.replay import Purpose, StreamSuperseded
from telamon.rpc import codec, security
from telamon.rpc.shared import SharedSlots
from telamon.rpc.status import DataLoss, status_of
from telamon.rpc.v1 import replay_pb2

LOG = logging.getLogger(__name__)

SERVICE = replay_pb2.DESCRIPTOR.services_by_name["Replay"].full_name
HEALTH_CHECK = f"/{health.SERVICE_NAME}/Check"
"""The one method that needs no token."""
HEALTH_CALLS, HEALTH_BYTES = 8, 2**10
"""Of it, at once, and bytes of one: strangers must take neither every thread nor the memory."""

MAX_BATCH = 2**16
"""Windows of one request."""
MAX_CREDIT = 2**62
"""Rows: a table keeps its bound, and one more, in 63 bits."""
CREDIT_SLICE = 0.2
"""Seconds after which an append that waits for credit looks whether anybody waits for it."""
LAST_WORDS = 0.5
"""Seconds in which the answers and status codes of a server that ends leave it."""
PURPOSES: dict[int, Purpose] = {replay_pb2.PURPOSE_TRAIN: "train", replay_pb2.PURPOSE_REPORT: "report"}

Request = TypeVar("Request", bound=Message)


class Call(Protocol):
    """What is needed of a grpc.ServicerContext."""

    def is_active(self) -> bool: ...

    def peer(self) -> str: ...

    def abort(self, code: grpc.StatusCode, details: str) -> Any: ...


# Streams: each is a class whose objects live as long as one call


class _Stream:
    """One streaming call. `answer` takes one message and gives what answers it."""

    layout_of: Callable[..., codec.Layout]

    def __init__(self, service: ReplayService, call: Call) -> None:
        self.service = service
        self.call = call
        self.name = ""
        self.memory: SharedSlots | None = None
        self._table: Table | None = None
        self._began = False

    def answer(self, message: bytes) -> Iterator[bytes]:
        raise NotImplementedError

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()

    def table(self, name: str) -> Table:
        """The call's table, which its first frame names."""
        if self._table is None:
            if not name:
                raise ValueError("the first frame of a call must name its table")
            self.name, self._table = name, self.service.tables.get(name)
            self.layout = type(self).layout_of(self._table.spec)
        elif name not in ("", self.name):
            raise ValueError(f"this call is about table {self.name!r}, but a frame names {name!r}")
        return self._table

    def offered(self, message: replay_pb2.Header | replay_pb2.SampleRequest) -> bool:
        """Whether a message offers memory, which is then mapped."""
        first, self._began = not self._began, True
        if not message.HasField("shared"):
            return False
        if not first:
            raise ValueError("memory to share must be offered in the first frame of a call")
        offer = message.shared
        self.memory = SharedSlots.attach(offer.path, offer.slots, offer.slot_bytes)
        return True

    def slot(self, number: int) -> memoryview:
        if self.memory is None:
            raise ValueError(f"the frame names slot {number}, but this call was offered no shared memory")
        return self.memory.slot(number)

    def arrays(self, frame: codec.Frame) -> tuple[memoryview, int]:
        """(where the arrays of a frame lie, their alignment)."""
        if not frame.header.HasField("slot"):
            return frame.payload, codec.PACKED
        if frame.payload.nbytes:
            raise ValueError(f"the frame has slot {frame.header.slot} and a payload; it must have one of them")
        return self.slot(frame.header.slot), codec.SLOT


class _Append(_Stream):
    layout_of = staticmethod(codec.append_layout)

    def answer(self, message: bytes) -> Iterator[bytes]:
        frame = codec.decode_frame(message)
        header, append = frame.header, frame.header.append
        if self.offered(header):
            yield replay_pb2.AppendAck(tick=-1).SerializeToString()
            return
        table = self.table(header.table)
        if not header.HasField("append"):
            raise ValueError("a frame of Append must have the header `append`")
        self.layout.check(header.columns)
        if len(append.env_id) != header.count:
            raise ValueError(f"the frame has {header.count} rows a tick, but {len(append.env_id)} env_id")
        if append.env_id and max(append.env_id) >= table.spec.max_envs:
            raise ValueError(f"env_id {max(append.env_id)} must be below the table's max_envs {table.spec.max_envs}")
        env_id = np.array(append.env_id, np.int32)
        buffer, align = self.arrays(frame)
        columns = self.layout.ticks(buffer, header.count, append.ticks, align)
        # copies that are 0 or 1: what is checked must not change in a slot afterwards
        columns |= {name: columns[name].view(np.uint8) != 0 for name in FLAGS}
        held, done = -1, 0
        try:
            while done < append.ticks:
                end = min(table.held(append.stream) + 1 - append.tick, append.ticks)
                if end <= done:  # none is held already, for which no credit is needed
                    self._wait_for_credit(table)
                    end = append.ticks
                part = {name: value[done:end] for name, value in columns.items()}
                held = table.append(append.stream, append.epoch, header.incarnation, append.tick + done, env_id, part)
                done = held + 1 - append.tick
        except Exception as error:  # whatever it is, its rows are counted, and it goes on to `_call`
            stored = 0 if isinstance(error, StreamSuperseded) else table.held(append.stream) + 1 - append.tick
            refused = append.ticks - min(max(done, stored), append.ticks)
            self.service.metrics.refused(self.name, status_of(error)[0].name, header.count * refused)
            raise
        yield replay_pb2.AppendAck(tick=held).SerializeToString()

    def _wait_for_credit(self, table: Table) -> None:
        if table.wait_for_credit(0.0):
            return
        began = self.service.clock()
        try:
            while not table.wait_for_credit(CREDIT_SLICE):
                self.service.check_draining()
                if not self.call.is_active():
                    raise ConnectionError("the client has gone")
        finally:
            self.service.metrics.waited_for_credit(self.name, self.service.clock() - began)


class _Sample(_Stream):
    layout_of = staticmethod(codec.sample_layout)

    def answer(self, message: bytes) -> Iterator[bytes]:
        request = _parse(replay_pb2.SampleRequest, message)
        if self.offered(request):
            yield codec.join_frame(replay_pb2.Header(), ())
            return
        table = self.table(request.table)
        purpose = PURPOSES.get(request.purpose)
        if purpose is None:
            raise ValueError(f"purpose {request.purpose} is none of {sorted(PURPOSES)}")
        if request.batch > MAX_BATCH:
            raise ValueError(f"a batch of {request.batch} windows is too large; batch must be at most {MAX_BATCH}")
        slot = self.slot(request.slot) if request.HasField("slot") else None
        if slot is not None:  # one that is too small must not cost fresh windows
            self.layout.views(slot, request.batch, codec.SLOT)
        # Of a restore in the middle the older incarnation is sent: a write-back for its windows is then stale.
        incarnation = table.incarnation
        chosen = table.choose(request.batch, purpose)
        items = table.items()
        count, nbytes = request.batch, 0
        for begin, end in codec.frames_of(count, self.layout.nbytes(1)) if slot is None else [(0, count)]:
            header = self.layout.header(end - begin)
            header.incarnation = incarnation
            header.windows.items = items
            header.windows.last = end == count
            fill = partial(self._fill, table, chosen[begin:end])
            if slot is None:
                size = self.layout.nbytes(end - begin)
                yield codec.encode_frame(header, size, partial(fill, codec.PACKED))
            else:
                size = self.layout.nbytes(count, codec.SLOT)
                header.slot = request.slot
                fill(codec.SLOT, slot)
                yield codec.join_frame(header, ())
            nbytes += size
        self.service.metrics.sampled(self.name, purpose, nbytes, table.ages(chosen))

    def _fill(self, table: Table, chosen: Chosen, align: int, buffer: memoryview) -> None:
        """Gathers windows [b] into their arrays; those overwritten meanwhile are drawn again, in the arguments too."""
        out = self.layout.views(buffer, chosen.env_id.size, align)
        sent = out.pop("env_id"), out.pop("first_row")
        table.fill(chosen, out)
        sent[0][:], sent[1][:] = chosen.env_id, chosen.first_row


class _WriteBack(_Stream):
    layout_of = staticmethod(codec.write_back_layout)

    def answer(self, message: bytes) -> Iterator[bytes]:
        frame = codec.decode_frame(message)
        header = frame.header
        if self.offered(header):
            yield replay_pb2.WriteBackAck().SerializeToString()
            return
        table = self.table(header.table)
        self.layout.check(header.columns)
        buffer, align = self.arrays(frame)
        columns = self.layout.views(buffer, header.count, align)
        # copies: what is checked must not change in a slot afterwards
        env_id, row = columns.pop("env_id").copy(), columns.pop("row").copy()
        latents = {name.removeprefix("latents/"): values for name, values in columns.items()}
        written = table.write_back(header.incarnation, WriteBack(env_id, row, latents))
        yield replay_pb2.WriteBackAck(written=written).SerializeToString()


# The service


class ReplayService:
    """All methods of telamon.rpc.v1.Replay over `tables`.

    clock: seconds, monotonic.
    """

    def __init__(
        self,
        tables: Tables,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tables = tables
        self.metrics = metrics
        self.clock = clock
        self._draining = threading.Event()
        self._busy = 0
        self._busy_changed = threading.Condition()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Method name -> handler, as `grpc.method_handlers_generic_handler` takes them."""
        streams = {"Append": _Append, "Sample": _Sample, "WriteBack": _WriteBack}
        calls: dict[str, tuple[type[Message], Callable[[Any, Call], Message]]] = {
            "Configure": (replay_pb2.ConfigureRequest, self._configure),
            "OpenStream": (replay_pb2.OpenStreamRequest, self._open_stream),
            "Stats": (replay_pb2.StatsRequest, self._stats),
            "Grant": (replay_pb2.GrantRequest, self._grant),
            "Mark": (replay_pb2.MarkRequest, self._mark),
            "Restore": (replay_pb2.RestoreRequest, self._restore),
            "ListMarks": (replay_pb2.ListMarksRequest, self._list_marks),
            "Forget": (replay_pb2.ForgetRequest, self._forget),
        }
        return {
            **{
                name: grpc.stream_stream_rpc_method_handler(partial(self._stream, name, stream))
                for name, stream in streams.items()
            },
            **{
                name: grpc.unary_unary_rpc_method_handler(partial(self._unary, name, request, answer))
                for name, (request, answer) in calls.items()
            },
        }

    def drain(self) -> None:
        """Ends every stream after the request that it is answering."""
        self._draining.set()

    def check_draining(self) -> None:
        """Raises ConnectionError once the server is draining."""
        if self._draining.is_set():
            raise ConnectionError("the server is draining; connect again")

    def wait_idle(self, timeout: float) -> bool:
        """Waits until no request is being answered; False after `timeout` seconds."""
        with self._busy_changed:
            return self._busy_changed.wait_for(lambda: self._busy == 0, timeout)

    # how calls are answered

    def _stream(
        self, method: str, kind: type[_Stream], messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        with self._call(method, context):
            stream = kind(self, context)
            try:
                for message in messages:
                    with self._request(method):
                        yield from stream.answer(message)
                    self.check_draining()
            finally:
                stream.close()

    def _unary(
        self,
        method: str,
        request: type[Message],
        answer: Callable[[Any, Call], Message],
        message: bytes,
        context: grpc.ServicerContext,
    ) -> bytes:
        with self._call(method, context), self._request(method):
            return answer(_parse(request, message), context).SerializeToString()
        raise AssertionError("abort raises")

    @contextmanager
    def _call(self, method: str, context: Call) -> Iterator[None]:
        """Counts a call; whatever it raises becomes a status, and never a traceback for the client."""
        code = grpc.StatusCode.CANCELLED  # the client has gone, unless the call ends otherwise
        with self.metrics.call(method, context.peer(), lambda: code.name):
            try:
                yield
                code = grpc.StatusCode.OK
            except grpc.RpcError:  # what the messages of a client that has gone raise
                raise
            except Exception as error:  # the boundary: a client gets a status, the log gets what is nobody's intent
                code, text = status_of(error)
                if code is grpc.StatusCode.INTERNAL:
                    number = secrets.token_hex(4)
                    LOG.exception("event=defect method=%s id=%s", method, number)
                    text = f"{text} (id {number})"
                context.abort(code, text)

    @contextmanager
    def _request(self, method: str) -> Iterator[None]:
        with self._busy_changed:
            self._busy += 1
        try:
            with self.metrics.request(method):
                yield
        finally:
            with self._busy_changed:
                self._busy -= 1
                self._busy_changed.notify_all()

    # control

    def _configure(self, request: replay_pb2.ConfigureRequest, call: Call) -> Message:
        spec = codec.spec_from_proto(request.spec)
        table = self.tables.configure(request.table, spec, request.seed)
        LOG.info("event=configure table=%s incarnation=%016x bytes=%d", request.table, table.incarnation, spec.nbytes)
        return replay_pb2.ConfigureResponse(incarnation=table.incarnation, bytes=spec.nbytes)

    def _open_stream(self, request: replay_pb2.OpenStreamRequest, call: Call) -> Message:
        table = self.tables.get(request.table)
        incarnation = table.incarnation
        opened = table.open_stream(request.stream, request.num_envs, call.is_active)
        LOG.info(
            "event=open-stream table=%s stream=%s epoch=%d envs=%d next_tick=%d",
            request.table, request.stream, opened.epoch, request.num_envs, opened.next_tick,
        )  # fmt: skip
        return replay_pb2.OpenStreamResponse(
            incarnation=incarnation, epoch=opened.epoch, next_tick=opened.next_tick, first_env_id=opened.first_env_id
        )

    def _stats(self, request: replay_pb2.StatsRequest, call: Call) -> Message:
        table = self.tables.get(request.table)
        return codec.stats_to_proto(table.stats(), table.incarnation, table.num_envs, table.credit)

    def _grant(self, request: replay_pb2.GrantRequest, call: Call) -> Message:
        if request.rows > MAX_CREDIT:
            raise ValueError(f"a grant of {request.rows} rows is too large; rows must be at most {MAX_CREDIT}")
        self.tables.get(request.table).grant(request.rows)
        return replay_pb2.GrantResponse()

    def _mark(self, request: replay_pb2.MarkRequest, call: Call) -> Message:
        self.tables.get(request.table).mark(request.name)
        return replay_pb2.MarkResponse()

    def _restore(self, request: replay_pb2.RestoreRequest, call: Call) -> Message:
        table = self.tables.get(request.table)
        try:
            table.restore(request.name)
        except (ValueError, FileNotFoundError) as error:
            if request.name in table.marks():
                raise DataLoss(str(error)) from error
            raise
        LOG.info("event=restore table=%s mark=%s incarnation=%016x", request.table, request.name, table.incarnation)
        return replay_pb2.RestoreResponse(incarnation=table.incarnation)

    def _list_marks(self, request: replay_pb2.ListMarksRequest, call: Call) -> Message:
        return replay_pb2.ListMarksResponse(names=self.tables.get(request.table).marks())

    def _forget(self, request: replay_pb2.ForgetRequest, call: Call) -> Message:
        self.tables.get(request.table).forget(request.name)
        return replay_pb2.ForgetResponse()


def _parse(kind: type[Request], message: bytes, limit: int = codec.MAX_HEADER_BYTES) -> Request:
    """Raises ValueError; of more than `limit` bytes without a look, since protobuf may need thirty times as many."""
    if len(message) > limit:
        raise ValueError(f"a {kind.DESCRIPTOR.name} of {len(message)} bytes is too large; at most {limit} are read")
    try:
        return kind.FromString(message)
    except DecodeError:
        raise ValueError(f"{len(message)} bytes are not a {kind.DESCRIPTOR.full_name}") from None


# Who may call


class TokenInterceptor(grpc.ServerInterceptor):
    """Lets calls with the token pass, whatever they are, and health checks; tells all others nothing."""

    def __init__(self, token: str, metrics: Metrics) -> None:
        self._token = token
        self._metrics = metrics
        self._checks = threading.BoundedSemaphore(HEALTH_CALLS)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if security.authorised(self._token, handler_call_details.invocation_metadata):
            return continuation(handler_call_details)
        # Both take a stream of requests, which is the same on the wire: a handler of one request would hold a thread
        # until it comes.
        if handler_call_details.method == HEALTH_CHECK and (check := continuation(handler_call_details)) is not None:
            return grpc.stream_unary_rpc_method_handler(
                partial(self._check, check.unary_unary), response_serializer=check.response_serializer
            )
        self._metrics.unauthenticated()
        return grpc.stream_unary_rpc_method_handler(_refuse)

    def _check(
        self, answer: Callable[[Any, Any], Any], requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Any:
        if not self._checks.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{HEALTH_CALLS} health checks are in progress")
        try:
            return answer(_parse(health_pb2.HealthCheckRequest, next(requests, b""), HEALTH_BYTES), context)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._checks.release()


def _refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is needed")
    raise AssertionError("abort raises")


class Server:
    """A gRPC server of tables. Give `grpc` its ports, `start` it, and `drain` it in the end.

    max_calls: calls in progress at once, each with a thread; further ones get RESOURCE_EXHAUSTED.
    """

    def __init__(self, tables: Tables, token: str, metrics: Metrics, max_calls: int) -> None:
        self.service = ReplayService(tables, metrics)
        self.health = health.HealthServicer()
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.grpc = grpc.server(
            ThreadPoolExecutor(max_calls, thread_name_prefix="replay"),
            interceptors=[TokenInterceptor(token, metrics)],
            options=security.SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_calls,
        )
        self.grpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, self.service.handlers())])
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    def start(self) -> None:
        self.grpc.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def drain(self, seconds: float) -> bool:
        """Takes no new calls, and gives the requests in progress `seconds`; whether all were answered by then."""
        self.health.enter_graceful_shutdown()
        self.service.drain()
        stopped = self.grpc.stop(seconds)
        self.service.wait_idle(seconds)
        self.grpc.stop(LAST_WORDS)  # ends the streams on which nothing is asked
        stopped.wait()
        # a request that was cut off ends at its next look at the call
        return self.service.wait_idle(CREDIT_SLICE + LAST_WORDS)

    def _set_health(self, status: int) -> None:
        for name in ("", SERVICE):
            self.health.set(name, status)
