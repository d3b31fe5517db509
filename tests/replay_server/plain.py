"""A client of generated stubs and numpy: it speaks to a replay server as a program in any language would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np

from telamon.data import ArraySpec, RowSpec, WindowSpec
from telamon.replay import TableSpec
from telamon.rpc import codec
from telamon.rpc.security import Endpoint, metadata, open_channel
from telamon.rpc.v1 import replay_pb2, replay_pb2_grpc
from tests.waiting import SECONDS

SPEC = TableSpec(
    RowSpec(
        obs=(("vector", ArraySpec((3,))), ("pixels", ArraySpec((2, 2), "uint8"))),
        action=ArraySpec((2,)),
        latents=(("deter", ArraySpec((5,), "bfloat16")),),
    ),
    WindowSpec(4, context=1, cross_episodes=True, closed_only=False, start="windows", latents="context"),
    capacity=50,
    max_envs=6,
)


def rows(env_id: Iterable[int], row: int) -> dict[str, np.ndarray]:
    """Row number `row` of each environment; its values say so."""
    env = np.array(list(env_id))
    flags = np.zeros(env.size, bool)
    return {
        "obs/vector": np.stack([env, np.full_like(env, row), env + row], -1).astype(np.float32),
        "obs/pixels": np.broadcast_to((env + row)[:, None, None] % 256, (env.size, 2, 2)).astype(np.uint8),
        "reward": (100 * env + row).astype(np.float32),
        "is_first": flags if row else ~flags,
        "is_last": flags,
        "is_terminal": flags,
        "action": np.full((env.size, 2), row, np.float32),
        "latents/deter": np.full((env.size, 5), -1, ml_dtypes.bfloat16),
    }


def ordered(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Widest items first."""
    return dict(sorted(arrays.items(), key=lambda entry: -entry[1].itemsize))


def column(name: str, array: np.ndarray) -> replay_pb2.Column:
    return replay_pb2.Column(name=name, array=replay_pb2.ArraySpec(shape=array.shape[1:], dtype=array.dtype.name))


def payload(arrays: Mapping[str, np.ndarray]) -> bytes:
    data = b"".join(array.tobytes() for array in ordered(arrays).values())
    return data + bytes(-len(data) % 8)


def header(arrays: Mapping[str, np.ndarray], **fields) -> replay_pb2.Header:
    count = len(next(iter(arrays.values())))
    columns = [column(name, array) for name, array in ordered(arrays).items()]
    return replay_pb2.Header(**{"table": "main", "columns": columns, "count": count, **fields})


def arrays_of(frame: replay_pb2.Frame) -> dict[str, np.ndarray]:
    """The arrays of a frame, by its own header."""
    at, found = 0, {}
    for entry in frame.header.columns:
        dtype = np.dtype(ml_dtypes.bfloat16 if entry.array.dtype == "bfloat16" else entry.array.dtype)
        shape = (frame.header.count, *entry.array.shape)
        size = int(np.prod(shape)) * dtype.itemsize
        found[entry.name] = np.frombuffer(frame.payload[at : at + size], dtype).reshape(shape)
        at += size
    assert len(frame.payload) == at + -at % 8
    return found


class Plain:
    """One client with a channel of its own. Methods are those of the stub, with token and deadline."""

    def __init__(self, endpoint: Endpoint, table: str = "main") -> None:
        self.channel = open_channel(endpoint)
        self.stub = replay_pb2_grpc.ReplayStub(self.channel)
        self.table = table
        self.options = {"metadata": metadata(endpoint.token), "timeout": SECONDS}

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(self, method: str, **fields):
        """An unary call about the table."""
        request = getattr(replay_pb2, f"{method}Request")(table=self.table, **fields)
        return getattr(self.stub, method)(request, **self.options)

    def stream(self, method: str, requests: Iterable) -> list:
        """All answers of a streaming call."""
        return list(getattr(self.stub, method)(iter(requests), **self.options))

    def raw(self, method: str, *messages: bytes) -> list[bytes]:
        """All answers, as bytes, to messages that need not be any; unary calls are the same on the wire."""
        send = self.channel.stream_stream(f"/telamon.rpc.v1.Replay/{method}")
        return list(send(iter(messages), **self.options))

    def configure(self, spec: TableSpec = SPEC, seed: int = 0) -> replay_pb2.ConfigureResponse:
        return self.call("Configure", spec=codec.spec_to_proto(spec), seed=seed)

    def open(self, stream: str = "writer", num_envs: int = 2) -> replay_pb2.OpenStreamResponse:
        return self.call("OpenStream", stream=stream, num_envs=num_envs)

    def tick_frame(
        self,
        opened: replay_pb2.OpenStreamResponse,
        tick: int,
        ticks: int = 1,
        stream: str = "writer",
        num_envs: int = 2,
    ) -> replay_pb2.Frame:
        """`ticks` ticks from `tick` on, whose rows have the numbers of their ticks."""
        env_id = range(opened.first_env_id, opened.first_env_id + num_envs)
        parts = [rows(env_id, row) for row in range(tick, tick + ticks)]
        append = replay_pb2.AppendHeader(stream=stream, epoch=opened.epoch, tick=tick, ticks=ticks, env_id=env_id)
        return replay_pb2.Frame(
            header=header(parts[0], table=self.table, incarnation=opened.incarnation, append=append),
            payload=b"".join(map(payload, parts)),
        )

    def append(self, opened: replay_pb2.OpenStreamResponse, tick: int, ticks: int = 1, **where) -> int:
        (ack,) = self.stream("Append", [self.tick_frame(opened, tick, ticks, **where)])
        return ack.tick

    def sample(self, batch: int, purpose: int = replay_pb2.PURPOSE_TRAIN) -> Iterator[dict[str, np.ndarray]]:
        """The arrays of each frame of the answer."""
        frames = self.stream("Sample", [replay_pb2.SampleRequest(table=self.table, batch=batch, purpose=purpose)])
        assert [frame.header.windows.last for frame in frames] == [False] * (len(frames) - 1) + [True]
        return map(arrays_of, frames)

    def rows_held(self) -> int:
        return self.call("Stats").rows_held


def check_windows(found: Mapping[str, np.ndarray], length: int = SPEC.window.length) -> None:
    """Every value is that of consecutive rows of one environment (see `rows`)."""
    env, row = found["env_id"][:, None], found["first_row"][:, None] + np.arange(length)
    np.testing.assert_array_equal(found["reward"], 100 * env + row)
    np.testing.assert_array_equal(found["obs/vector"], np.stack(np.broadcast_arrays(env, row, env + row), -1))
    np.testing.assert_array_equal(found["obs/pixels"][..., 1, 0], (env + row) % 256)
    np.testing.assert_array_equal(found["action"][..., 0], row)
    np.testing.assert_array_equal(found["is_first"], row == 0)
