"""The calls of a client on one replay server: with its token, with deadlines, and again while the server is away.

Control calls are repeated until they are answered. Array-carrying calls are long-lived and carry raw bytes: what they
mean is read and written by their users, outside of gRPC's own threads. Each may share memory with the server, which
lives as long as the call.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import grpc

from telamon.rpc.security import Endpoint, metadata, open_channel
from telamon.rpc.shared import SharedSlots
from telamon.rpc.status import error_of
from telamon.rpc.v1 import replay_pb2, replay_pb2_grpc

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Codes of a server that is starting, draining or gone; one that stops cancels the calls that last too long."""

_FIRST_DELAY, _LAST_DELAY = 0.02, 1.0


def delays() -> Iterator[float]:
    """Seconds between attempts: bounded, each twice the last one."""
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _LAST_DELAY)


class Deadline:
    """A moment that lies `seconds` ahead of its making."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self._end - time.monotonic())


class Failure(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str

    def error(self) -> Exception:
        """What a client raises for it."""
        return error_of(self.code, self.details)


ENDED = Failure(grpc.StatusCode.UNAVAILABLE, "the server ended the call")
"""Of a long-lived call that ended without an error, which no server does while it runs."""


def failure_of(error: grpc.RpcError) -> Failure:
    """Code and message of what gRPC raised, which is always a call."""
    call = cast("grpc.Call", error)
    return Failure(call.code(), call.details() or "")


class Connection:
    """One channel to one server. It connects when it is first used, and again whenever that is needed."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.address = endpoint.address
        self._metadata = metadata(endpoint.token)
        self._channel = open_channel(endpoint)
        self._stub = replay_pb2_grpc.ReplayStub(self._channel)
        self._closed = threading.Event()
        self._pid = os.getpid()

    def call(self, method: str, request: Any, deadline: Deadline) -> Any:
        """The answer to a control call, repeated while the server is away.

        Raises TimeoutError naming the address, and what `telamon.rpc.status` makes of any other code.
        """
        for delay in delays():
            try:
                return self.call_once(method, request, deadline, wait=True)
            except ConnectionError:
                self.pause(delay, deadline)
        raise AssertionError("delays never end")

    def call_once(self, method: str, request: Any, deadline: Deadline, wait: bool = False) -> Any:
        """As `call`, but raises ConnectionError when the server goes away, or, unless it is to `wait`, is away."""
        self._check_open()
        try:
            return getattr(self._stub, method)(
                request, timeout=max(deadline.left, 1e-3), metadata=self._metadata, wait_for_ready=wait
            )
        except grpc.RpcError as error:
            failure = failure_of(error)
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise self.late(deadline)
        raise ConnectionError(failure.details) if failure.code in AWAY else failure.error()

    def stream(self, method: str, requests: Iterator[bytes]) -> Any:
        """Opens a bidirectional call of serialised messages: an iterator over the answers, which can be cancelled."""
        self._check_open()
        # the channel's own thread would decode what a serialiser is given for
        callable_: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(f"/{_SERVICE}/{method}")
        return callable_(requests, metadata=self._metadata, wait_for_ready=True)

    def pause(self, delay: float, deadline: Deadline) -> None:
        """Waits before the next attempt. Raises TimeoutError if there is no time for one, RuntimeError once closed."""
        if delay >= deadline.left:
            self._closed.wait(deadline.left)
            self._check_open()
            raise self.late(deadline)
        self._closed.wait(delay)
        self._check_open()

    def late(self, deadline: Deadline) -> TimeoutError:
        """What is raised when a deadline is over."""
        return TimeoutError(f"the replay server at {self.address} did not answer within {deadline.seconds:g} s")

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Ends all calls."""
        self._closed.set()
        self._channel.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError(f"this client of the replay server at {self.address} is closed")
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this client of the replay server at {self.address} was made by process {self._pid}, and its "
                "connection and threads stayed there; make one in each process"
            )


_SERVICE = replay_pb2.DESCRIPTOR.services_by_name["Replay"].full_name


class Duplex:
    """One bidirectional call whose answers a thread reads, so that each wait for one can have its own deadline."""

    def __init__(self, connection: Connection, method: str) -> None:
        self._connection = connection
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes | Failure] = queue.SimpleQueue()
        self._call = connection.stream(method, iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name=f"telamon-{method.lower()}", daemon=True)
        self._reader.start()
        self.fresh = True
        """Whether nothing was sent yet."""

    def send(self, message: bytes) -> None:
        self._requests.put(message)
        self.fresh = False

    def receive(self, deadline: Deadline) -> bytes:
        """The next answer. Raises TimeoutError, and `Ended` when there will be none."""
        try:
            answer = self._answers.get(timeout=deadline.left)
        except queue.Empty:
            raise self._connection.late(deadline) from None
        if isinstance(answer, Failure):
            raise Ended(answer)
        return answer

    def close(self) -> None:
        """Ends the call and the threads of both directions."""
        self._call.cancel()
        self._requests.put(None)
        self._reader.join()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._answers.put(message)
            self._answers.put(ENDED)
        except grpc.RpcError as error:
            self._answers.put(failure_of(error))


class Ended(Exception):
    """A long-lived call is over."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.details)
        self.failure = failure


class Sharing:
    """Whether a client's calls share memory with the server.

    wanted: whether they try to. required: whether they fail where they cannot; otherwise they do without it.
    """

    def __init__(self, address: str, wanted: bool, required: bool) -> None:
        self.wanted = wanted
        self.required = required
        self._address = address

    def make(self, slots: int, slot_bytes: int) -> SharedSlots | None:
        """New memory, to be offered; None where there is none to be had. Raises OSError or ValueError if required."""
        try:
            return SharedSlots.create(slots, slot_bytes) if self.wanted else None
        except (OSError, ValueError) as error:
            self.refuse(error)
            return None

    def refuse(self, reason: Exception) -> None:
        """From now on nothing is shared. Raises the reason if it is required."""
        if self.required:
            raise reason
        if self.wanted:
            self.wanted = False
            _log.warning("event=memory_not_shared address=%s reason=%r", self._address, str(reason))


def offer(memory: SharedSlots) -> replay_pb2.SharedMemory:
    """What tells the server of it."""
    return replay_pb2.SharedMemory(path=str(memory.path), slot_bytes=memory.slot_bytes, slots=memory.slots)


def is_refusal(failure: Failure) -> bool:
    """Whether a call that ended before its offer of memory was answered ended because of it."""
    return failure.code not in (*AWAY, grpc.StatusCode.UNAUTHENTICATED)


class Loans:
    """The slots in which frames travel to a server that answers them in order. memory: None if none is shared."""

    def __init__(self, memory: SharedSlots | None) -> None:
        self._memory = memory
        self._frames: deque[int | None] = deque()

    def __len__(self) -> int:
        """Frames that were not answered."""
        return len(self._frames)

    def lend(self, nbytes: int) -> tuple[int, memoryview] | None:
        """A slot (number, memory) for the next frame; None if it has to carry its `nbytes` itself."""
        memory, slot = self._memory, None
        if memory is not None and nbytes <= memory.slot_bytes:
            slot = memory.take()
        self._frames.append(slot)
        return None if memory is None or slot is None else (slot, memory.slot(slot))

    def answered(self) -> None:
        """The oldest frame was."""
        slot = self._frames.popleft()
        if self._memory is not None and slot is not None:
            self._memory.give_back(slot)


class Lane:
    """A long-lived call that is opened when it is needed and again after an error; one exchange on it at a time."""

    memory: SharedSlots | None = None
    """What the present call shares."""

    def __init__(self, connection: Connection, sharing: Sharing, method: str) -> None:
        self._connection = connection
        self._sharing = sharing
        self._method = method
        self._lock = threading.Lock()
        self._duplex: Duplex | None = None

    def exchange(self, talk: Callable[[], Answer], deadline: Deadline) -> Answer:
        """Does `talk`, which sends and receives, and again over a new call while the server is away.

        Raises TimeoutError, and what `telamon.rpc.status` makes of the code of a call that was refused.
        """
        if not self._lock.acquire(timeout=deadline.left):
            raise self._connection.late(deadline)
        try:
            for delay in delays():
                try:
                    return talk()
                except Ended as error:
                    self._drop()
                    if error.failure.code not in AWAY:
                        raise error.failure.error() from None
                except BaseException:
                    # its answer may be under way, which the next exchange must not take for its own
                    self._drop()
                    raise
                self._connection.pause(delay, deadline)
            raise AssertionError("delays never end")
        finally:
            self._lock.release()

    def close(self) -> None:
        """After the connection was closed, which ends an exchange that is going on."""
        with self._lock:
            self._drop()

    # Inside of an exchange

    def send(self, message: bytes) -> None:
        self._open().send(message)

    def receive(self, deadline: Deadline) -> bytes:
        """See Duplex."""
        return self._open().receive(deadline)

    def share(
        self, slots: int, slot_bytes: int, message: Callable[[replay_pb2.SharedMemory], bytes], deadline: Deadline
    ) -> None:
        """Sees to it that `memory` has slots of `slot_bytes`, if it may and can; `message` is the call's first then."""
        if self.memory is not None and slot_bytes <= self.memory.slot_bytes:
            return
        if (memory := self._sharing.make(slots, slot_bytes)) is None:
            return
        try:
            if not self._open().fresh:
                self._drop()
            self.send(message(offer(memory)))
            self.receive(deadline)
        except Ended as error:
            memory.close()
            if not is_refusal(error.failure):
                raise
            self._sharing.refuse(error.failure.error())
            self._drop()
            return
        finally:
            memory.unlink()
        self.memory = memory

    def _open(self) -> Duplex:
        if self._duplex is None:
            self._duplex = Duplex(self._connection, self._method)
        return self._duplex

    def _drop(self) -> None:
        if self._duplex is not None:
            self._duplex.close()
            self._duplex = None
        if self.memory is not None:
            self.memory.close()
            self.memory = None
