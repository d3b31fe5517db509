"""What bounds a replay service on this machine: numpy's copy, and gRPC that streams ready-made bytes and nothing else.

The bare stream has what the service has: two processes, messages of one megabyte, no (de)serialisers, the same channel
options, and memory that is kept when it is freed. Its receiver drops what it gets.

python bench/replay_limits.py ADDRESS    serves unix:/PATH or HOST:PORT, prints the port, ends with its standard input
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from telamon.allocator import keep_freed_memory
from telamon.rpc.security import CHANNEL_OPTIONS, SERVER_OPTIONS

MESSAGE = 1 << 20
BURST = 32
"""Messages for which the receiver asks, or that it acknowledges, at once."""
COPY = 64 << 20
MAX_STREAMS = 32


class Memcpy:
    """Copies of 64 MB from one array to another."""

    def __init__(self) -> None:
        self._source, self._target = np.ones(COPY, np.uint8), np.ones(COPY, np.uint8)

    def call(self) -> int:
        """Returns the bytes copied."""
        np.copyto(self._target, self._source)
        return COPY

    def close(self) -> None: ...


class BareStream:
    """A bidirectional call of raw bytes."""

    def __init__(self, address: str, method: str) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._answers = self._channel.stream_stream(f"/bare/{method}")(iter(self._requests.get, None))

    def close(self) -> None:
        self._requests.put(None)
        self._answers.cancel()
        self._channel.close()


class BareDown(BareStream):
    """The server sends `burst` messages of `size` bytes for every request."""

    def __init__(self, address: str, size: int = MESSAGE, burst: int = BURST) -> None:
        super().__init__(address, "down")
        self._size, self._burst = size, burst

    def call(self) -> int:
        """Moves one burst; returns its bytes."""
        self._requests.put(f"{self._size} {self._burst}".encode())
        for _ in range(self._burst):
            next(self._answers)
        return self._size * self._burst


class BareUp(BareStream):
    """The client sends messages of one megabyte, and the server acknowledges each burst."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "up")
        self._messages = ready_made(MESSAGE)

    def call(self) -> int:
        """Moves one burst; returns its bytes."""
        for i in range(BURST):
            self._requests.put(self._messages[i % len(self._messages)])
        next(self._answers)
        return BURST * MESSAGE


def ready_made(size: int) -> list[bytes]:
    return [bytes([i]) * size for i in range(4)]


def down(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    messages: list[bytes] = []
    for request in requests:
        size, burst = map(int, request.split())
        if not messages or len(messages[0]) != size:
            messages = ready_made(size)
        for i in range(burst):
            yield messages[i % len(messages)]


def up(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    for i, _request in enumerate(requests):
        if i % BURST == BURST - 1:
            yield b"got it"


class Bare(grpc.GenericRpcHandler):
    """/bare/down and /bare/up."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        behaviour = {"/bare/down": down, "/bare/up": up}.get(details.method)
        return behaviour and grpc.stream_stream_rpc_method_handler(behaviour)


def serve(address: str) -> None:
    """Serves the bare stream until standard input ends; prints the port once it listens."""
    keep_freed_memory()
    server = grpc.server(ThreadPoolExecutor(MAX_STREAMS), handlers=(Bare(),), options=SERVER_OPTIONS)
    port = server.add_insecure_port(address)
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    serve(sys.argv[1])
