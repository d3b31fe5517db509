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
READY_MADE = [bytes([i]) * MESSAGE for i in range(4)]
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
    """A client of the bare stream. direction: "down" from the server to the client, or "up"."""

    def __init__(self, address: str, direction: str) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._down = direction == "down"
        self._bursts: SimpleQueue[bytes | None] = SimpleQueue()
        requests = iter(self._bursts.get, None) if self._down else self._messages()
        self._answers = self._channel.stream_stream(f"/bare/{direction}")(requests)

    def call(self) -> int:
        """Moves one burst; returns its bytes."""
        self._bursts.put(b"more")
        for _ in range(BURST if self._down else 1):
            next(self._answers)
        return BURST * MESSAGE

    def close(self) -> None:
        self._bursts.put(None)
        self._answers.cancel()
        self._channel.close()

    def _messages(self) -> Iterator[bytes]:
        while self._bursts.get() is not None:
            for i in range(BURST):
                yield READY_MADE[i % len(READY_MADE)]


def down(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    for _request in requests:
        for i in range(BURST):
            yield READY_MADE[i % len(READY_MADE)]


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
