"""A replay over the wire: `telamon.replay.Replay` on one server, which is waited for while it is away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from telamon.data import Rows, Window, WriteBack, check_columns, from_columns
from telamon.replay import Purpose, ReplayStats, TableSpec
from telamon.rpc import codec
from telamon.rpc.appender import Appender
from telamon.rpc.connection import Connection, Deadline, Lane, Loans, Sharing, delays
from telamon.rpc.security import Endpoint, is_local
from telamon.rpc.shared import sweep
from telamon.rpc.v1 import replay_pb2

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

PURPOSES: dict[Purpose, replay_pb2.Purpose] = {
    "train": replay_pb2.PURPOSE_TRAIN,
    "report": replay_pb2.PURPOSE_REPORT,
}
_IN_FLIGHT = 4
"""Frames of a write-back that wait for their answers at once."""

LONG_SECONDS = 3600.0
"""Of a mark or a restore: a table of 100 GB, written or read with checksums at 30 MB/s."""


@dataclass(frozen=True)
class TableState:
    """What a server tells of a table."""

    stats: ReplayStats
    incarnation: int
    """Changes when the table is made anew or restored."""
    num_envs: int
    """Environments that have joined."""
    credit: int
    """Rows that may have been appended in all; negative: no bound."""


class Client:
    """A table of one replay server, made there if it does not exist. Safe to use from several threads.

    stream: names the writer, across its restarts; older writers of that name are refused from now on. None for a client
    that only samples. num_envs: environments of the writer. They are 0 to num_envs - 1 in the rows that are appended;
    sampled windows have the table's numbers.
    timeout: seconds that every call waits for its answer, also while the server is away; then it raises TimeoutError.
    `mark` and `restore`, which take as long as the table is large, wait for LONG_SECONDS once the server is there.
    buffer_ticks: how many ticks may be unacknowledged when `append` returns; 0: none, so that what is sampled after it
    does not depend on time. An error of a buffered tick is raised by the next `append` or `flush` (`Appender.append`).
    shared_memory: whether windows come through memory that is shared with the server; None: if it is on this host and
    both can; True: or OSError or ValueError says why not. Such windows keep their slot while anybody looks at them;
    while all `slots` are looked at windows come over the wire.

    Everything raises TimeoutError, PermissionError for a wrong token, and RuntimeError after `close`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        table: str,
        spec: TableSpec,
        *,
        stream: str | None = None,
        num_envs: int = 0,
        seed: int = 0,
        timeout: float = 60.0,
        buffer_ticks: int = 0,
        shared_memory: bool | None = None,
        slots: int = 4,
    ) -> None:
        self._table = table
        self._timeout = timeout
        self._configured = replay_pb2.ConfigureRequest(table=table, spec=codec.spec_to_proto(spec), seed=seed)
        self._windows = codec.sample_layout(spec)
        self._names = [name for name in spec.row.columns if name in self._windows.columns]
        """Columns in the order of the row spec; frames have another one."""
        self._latents = codec.write_back_layout(spec)
        self._slots = slots
        self._has_sampled = False
        self.items: int | None = None
        """What the last `sample` chose among, or `stats` found; None before."""

        self._connection = Connection(endpoint)
        wanted = is_local(endpoint.address) if shared_memory is None else shared_memory
        self._sharing = Sharing(endpoint.address, wanted, required=shared_memory is True)
        self._sampling = Lane(self._connection, self._sharing, "Sample")
        self._writing = Lane(self._connection, self._sharing, "WriteBack")
        self._writer: Appender | None = None
        try:
            deadline = Deadline(timeout)
            self._incarnation = self._configure(deadline)
            if stream is not None:
                self._writer = Appender(
                    self._connection, self._sharing, codec.append_layout(spec), self._configure,
                    table=table, stream=stream, num_envs=num_envs, buffer_ticks=buffer_ticks,
                )  # fmt: skip
                self._writer.open(deadline)
        except BaseException:
            self._connection.close()
            raise
        if wanted:
            sweep()

    # Replay

    def append(self, rows: Rows, timeout: float | None = None) -> None:
        """Adds one tick, exactly once. Raises as `Appender.append`."""
        self._appender().append(rows, self._deadline(timeout))

    def can_sample(self) -> bool:
        return self.state().stats.items > 0

    def sample(self, batch: int, purpose: Purpose = "train", timeout: float | None = None) -> Window:
        """Serves `batch` windows in arrays of their own. Raises LookupError while no window can be drawn."""
        deadline = self._deadline(timeout)
        if not 1 <= batch < 2**32:
            raise ValueError(f"a batch of {batch} windows is none; batch must be 1 to {2**32 - 1}")
        columns, incarnation = self._with_table(
            lambda: self._sampling.exchange(lambda: self._draw(batch, purpose, deadline), deadline), deadline
        )
        fields = from_columns({name: columns[name] for name in self._names})
        env_id, first_row = columns["env_id"], columns["first_row"]
        return Window(env_id=env_id, first_row=first_row, incarnation=incarnation, **fields)  # type: ignore[arg-type]  # each field its array or dict

    def write_back(self, update: WriteBack, timeout: float | None = None) -> int:
        """Replaces latents of rows that are still held; returns how many were.

        `update.incarnation` 0 stands for the one that this client heard of last.
        """
        deadline = self._deadline(timeout)
        incarnation = update.incarnation or self._incarnation  # once: a repetition is about the same rows
        columns = {
            "env_id": _integers("env_id", update.env_id, np.int32),
            "row": _integers("row", update.row, np.int64),
            **{f"latents/{k}": v for k, v in update.latents.items()},
        }
        count = update.row.size
        check_columns(columns, self._latents.columns, count)
        if not count:
            return 0
        return self._with_table(
            lambda: self._writing.exchange(lambda: self._write(columns, count, incarnation, deadline), deadline),
            deadline,
        )

    def stats(self, timeout: float | None = None) -> ReplayStats:
        return self.state(timeout).stats

    def mark(self, name: str, timeout: float | None = None) -> None:
        """Makes the present state restorable under `name`, what was appended before included."""
        deadline = self._deadline(timeout)
        if self._writer is not None:
            self._writer.flush(deadline)
        given = None if timeout is None else deadline
        self._long_call("Mark", replay_pb2.MarkRequest(table=self._table, name=name), given)

    def restore(self, name: str, timeout: float | None = None) -> None:
        """Returns to a mark. What this client appended since is undone, and its next rows continue those of the mark.

        Raises FileNotFoundError or ValueError naming what is missing or damaged; then nothing has changed.
        """
        request = replay_pb2.RestoreRequest(table=self._table, name=name)
        given = None if timeout is None else Deadline(timeout)
        if self._writer is None:
            self._incarnation = self._long_call("Restore", request, given).incarnation
            return
        with self._writer.restoring() as restored:
            self._incarnation = self._long_call("Restore", request, given).incarnation
            restored()

    def marks(self, timeout: float | None = None) -> list[str]:
        request = replay_pb2.ListMarksRequest(table=self._table)
        return list(self._call("ListMarks", request, self._deadline(timeout)).names)

    def forget(self, name: str, timeout: float | None = None) -> None:
        deadline = self._deadline(timeout)
        known = name in self._call("ListMarks", replay_pb2.ListMarksRequest(table=self._table), deadline).names
        try:
            self._call("Forget", replay_pb2.ForgetRequest(table=self._table, name=name), deadline)
        except FileNotFoundError:
            if not known:
                raise
            # a call whose answer was lost had done it

    # What only a service has

    def state(self, timeout: float | None = None) -> TableState:
        """The table's counts and identity."""
        answer = self._call("Stats", replay_pb2.StatsRequest(table=self._table), self._deadline(timeout))
        stats = codec.stats_from_proto(answer)
        self.items, self._incarnation = stats.items, answer.incarnation
        return TableState(stats, answer.incarnation, answer.num_envs, answer.credit)

    def grant(self, rows: int, timeout: float | None = None) -> None:
        """Bounds how many rows may have been appended to the table in all; negative: no bound."""
        self._call("Grant", replay_pb2.GrantRequest(table=self._table, rows=rows), self._deadline(timeout))

    def flush(self, timeout: float | None = None) -> None:
        """Waits until everything that was appended is acknowledged. Raises as `Appender.append`."""
        if self._writer is not None:
            self._writer.flush(self._deadline(timeout))

    @property
    def lost_rows(self) -> int:
        """Rows of this client that were dropped because rows before them were lost with the table."""
        return 0 if self._writer is None else self._writer.lost_rows

    def close(self, timeout: float | None = None) -> None:
        """Flushes, and ends all calls and threads, in any case. Raises as `flush` if ticks are left."""
        if self._connection.closed:
            return
        try:
            self.flush(timeout)
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        if self._writer is not None and self._writer.waiting:
            _log.warning(
                "event=closed_in_error address=%s table=%s unacknowledged_ticks=%d",
                self._connection.address, self._table, self._writer.waiting,
            )  # fmt: skip
        self._release()

    # How

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _appender(self) -> Appender:
        if self._writer is None:
            raise ValueError("this client was made without a stream, so it appends nothing; give Client a stream")
        return self._writer

    def _configure(self, deadline: Deadline) -> int:
        """Makes the table if the server has none; its incarnation."""
        incarnation: int = self._connection.call("Configure", self._configured, deadline).incarnation
        self._incarnation = incarnation
        return incarnation

    def _call(self, method: str, request: object, deadline: Deadline) -> Any:
        return self._with_table(lambda: self._connection.call(method, request, deadline), deadline)

    def _long_call(self, method: str, request: object, given: Deadline | None) -> Any:
        """As `_call`; without a deadline the answer has LONG_SECONDS, and a server that is away the usual time-out."""
        if given is not None:
            return self._call(method, request, given)
        deadline = Deadline(LONG_SECONDS)
        for delay in delays():
            self.state()  # raises TimeoutError where nobody answers
            try:
                return self._with_table(lambda: self._connection.call_once(method, request, deadline), deadline)
            except ConnectionError:
                self._connection.pause(delay, deadline)
        raise AssertionError("delays never end")

    def _with_table(self, ask: Callable[[], Answer], deadline: Deadline) -> Answer:
        """What `ask` gives; once more if the server had lost the table."""
        known = self._incarnation
        try:
            return ask()
        except FileNotFoundError:
            if self._configure(deadline) == known:
                raise  # something else was not found
            return ask()

    def _release(self) -> None:
        self._connection.close()
        if self._writer is not None:
            self._writer.close()
        self._sampling.close()
        self._writing.close()

    # Inside of an exchange

    def _draw(self, batch: int, purpose: Purpose, deadline: Deadline) -> tuple[dict[str, np.ndarray], int]:
        """Columns of `batch` windows, [batch, ...] each, and their incarnation."""
        layout, lane = self._windows, self._sampling
        # A poll for the first window ends its call each time: it is not worth any memory yet.
        if self._has_sampled or self._sharing.required:
            ask = lambda memory: replay_pb2.SampleRequest(shared=memory).SerializeToString()
            lane.share(self._slots, layout.nbytes(batch, codec.SLOT), ask, deadline)
        request = replay_pb2.SampleRequest(table=self._table, batch=batch, purpose=PURPOSES[purpose])
        memory = lane.memory
        if memory is not None and (slot := memory.take()) is not None:
            request.slot = slot
        lane.send(request.SerializeToString())
        out: dict[str, np.ndarray] = {}
        filled = 0
        while filled < batch:
            frame = codec.decode_frame(lane.receive(deadline))
            header = frame.header
            layout.check(header.columns)
            if header.count > batch - filled or header.windows.last != (filled + header.count == batch):
                raise RuntimeError(f"the server sent {filled + header.count} windows where {batch} were asked for")
            if memory is not None and request.HasField("slot"):
                out = memory.views(request.slot, layout, batch)
            else:
                part = layout.views(frame.payload, header.count)
                if not filled:
                    out = {name: np.empty((batch, *v.shape[1:]), v.dtype) for name, v in part.items()}
                for name, value in part.items():
                    out[name][filled : filled + header.count] = value
            filled += header.count
        self._incarnation, self.items = header.incarnation, header.windows.items
        self._has_sampled = True
        return out, header.incarnation

    def _write(self, columns: Mapping[str, np.ndarray], count: int, incarnation: int, deadline: Deadline) -> int:
        """Sends all frames, some of them ahead of their answers; rows that were written."""
        layout, lane = self._latents, self._writing
        ask = lambda memory: codec.join_frame(replay_pb2.Header(shared=memory), ())
        most = max(1, codec.FRAME_BYTES // layout.nbytes(1))
        lane.share(_IN_FLIGHT, layout.nbytes(most, codec.SLOT), ask, deadline)
        loans = Loans(lane.memory)
        written = 0
        for begin, end in codec.frames_of(count, layout.nbytes(1)):
            if len(loans) == _IN_FLIGHT:
                written += self._written(loans, deadline)
            header = layout.header(end - begin)
            header.table, header.incarnation = self._table, incarnation
            header.write_back.SetInParent()
            part = {name: value[begin:end] for name, value in columns.items()}
            if (loan := loans.lend(layout.nbytes(end - begin, codec.SLOT))) is None:
                fill = partial(_fill, layout, part, codec.PACKED)
                lane.send(codec.encode_frame(header, layout.nbytes(end - begin), fill))
            else:
                header.slot, memory = loan
                _fill(layout, part, codec.SLOT, memory)
                lane.send(codec.join_frame(header, ()))
        while loans:
            written += self._written(loans, deadline)
        return written

    def _written(self, loans: Loans, deadline: Deadline) -> int:
        """The answer to the oldest frame."""
        ack = replay_pb2.WriteBackAck.FromString(self._writing.receive(deadline))
        loans.answered()
        return ack.written


def _fill(layout: codec.Layout, columns: Mapping[str, np.ndarray], align: int, buffer: memoryview) -> None:
    """Lays rows [n, ...] out in a payload or slot."""
    for name, view in layout.views(buffer, len(columns["row"]), align).items():
        view[...] = columns[name]


def _integers(name: str, value: np.ndarray, dtype: type[np.signedinteger[Any]]) -> np.ndarray:
    """A vector of signed integers of any width as `dtype`. Raises ValueError for what is none, or has no room there."""
    if value.dtype.kind != "i" or value.ndim != 1:
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, expected a vector of signed integers")
    if value.dtype != dtype and value.size and (value.min() < np.iinfo(dtype).min or value.max() > np.iinfo(dtype).max):
        raise ValueError(f"{name} goes from {value.min()} to {value.max()}, which {np.dtype(dtype)} cannot hold")
    return value.astype(dtype, copy=False)
