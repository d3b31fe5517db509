"""A replay over the wire: `telamon.replay.Replay` on one server, which is waited for while it is away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from telamon.data import Rows, Window, WriteBack, from_columns
from telamon.replay import Purpose, ReplayStats, TableSpec
from telamon.rpc import codec
from telamon.rpc.appender import Appender, check_columns
from telamon.rpc.connection import AWAY, Connection, Deadline, Duplex, Ended, Lane
from telamon.rpc.security import Endpoint, is_local
from telamon.rpc.shared import SharedSlots, sweep
from telamon.rpc.v1 import replay_pb2

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

PURPOSES: dict[Purpose, replay_pb2.Purpose] = {
    "train": replay_pb2.PURPOSE_TRAIN,
    "report": replay_pb2.PURPOSE_REPORT,
}
_IN_FLIGHT = 4
"""Frames of a write-back that are sent before the first one's answer is waited for."""


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
        self._latents = codec.write_back_layout(spec)
        self._share = is_local(endpoint.address) if shared_memory is None else shared_memory
        self._must_share = shared_memory is True
        self._slots = slots
        self._memory: SharedSlots | None = None
        self._has_sampled = False
        self.items: int | None = None
        """What the last `sample` chose among, or `stats` found; None before."""
        self._sampled_incarnation: int | None = None

        self._connection = Connection(endpoint)
        self._sampling = Lane(self._connection, "Sample")
        self._writing = Lane(self._connection, "WriteBack")
        self._writer: Appender | None = None
        try:
            deadline = Deadline(timeout)
            self._incarnation = self._configure(deadline)
            if stream is not None:
                self._writer = Appender(
                    self._connection, codec.append_layout(spec), self._configure,
                    table=table, stream=stream, num_envs=num_envs, buffer_ticks=buffer_ticks,
                )  # fmt: skip
                self._writer.open(deadline)
        except BaseException:
            self._connection.close()
            raise
        if self._share:
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
        columns = self._with_table(
            lambda: self._sampling.exchange(lambda duplex: self._draw(duplex, batch, purpose, deadline), deadline),
            deadline,
        )
        env_id, first_row = columns.pop("env_id"), columns.pop("first_row")
        return Window(env_id=env_id, first_row=first_row, **from_columns(columns))  # type: ignore[arg-type]  # from_columns gives each field its array or dict

    def write_back(self, update: WriteBack, timeout: float | None = None) -> int:
        """Replaces latents of rows as they were when this client sampled last; returns how many were still held."""
        deadline = self._deadline(timeout)
        count = update.row.size
        if not count:
            return 0
        columns = {"env_id": update.env_id, "row": update.row, **{f"latents/{k}": v for k, v in update.latents.items()}}
        check_columns(columns, self._latents, count)
        return self._with_table(
            lambda: self._writing.exchange(lambda duplex: self._write(duplex, columns, count, deadline), deadline),
            deadline,
        )

    def stats(self, timeout: float | None = None) -> ReplayStats:
        return self.state(timeout).stats

    def mark(self, name: str, timeout: float | None = None) -> None:
        """Makes the present state restorable under `name`, what was appended before included."""
        self.flush(timeout)
        self._call("Mark", replay_pb2.MarkRequest(table=self._table, name=name), self._deadline(timeout))

    def restore(self, name: str, timeout: float | None = None) -> None:
        """Returns to a mark. What this client appended since is undone, and its next rows continue those of the mark.

        Raises FileNotFoundError or ValueError naming what is missing or damaged; then nothing has changed.
        """
        request = replay_pb2.RestoreRequest(table=self._table, name=name)
        if self._writer is None:
            self._incarnation = self._call("Restore", request, self._deadline(timeout)).incarnation
            return
        with self._writer.restoring() as restored:
            self._incarnation = self._call("Restore", request, self._deadline(timeout)).incarnation
            restored()

    def marks(self, timeout: float | None = None) -> list[str]:
        request = replay_pb2.ListMarksRequest(table=self._table)
        return list(self._call("ListMarks", request, self._deadline(timeout)).names)

    def forget(self, name: str, timeout: float | None = None) -> None:
        self._call("Forget", replay_pb2.ForgetRequest(table=self._table, name=name), self._deadline(timeout))

    # What only a service has

    def state(self, timeout: float | None = None) -> TableState:
        """The table's counts and identity."""
        answer = self._call("Stats", replay_pb2.StatsRequest(table=self._table), self._deadline(timeout))
        stats = codec.stats_from_proto(answer)
        self.items = stats.items
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
        self._forget_memory()

    # Sampling; one exchange at a time

    def _draw(self, duplex: Duplex, batch: int, purpose: Purpose, deadline: Deadline) -> dict[str, np.ndarray]:
        """Columns of `batch` windows, [batch, ...] each."""
        request = replay_pb2.SampleRequest(table=self._table, batch=batch, purpose=PURPOSES[purpose])
        duplex = self._offer_memory(duplex, self._windows.nbytes(batch, codec.SLOT), deadline)
        memory = self._memory
        slot = memory.take() if memory is not None else None
        if slot is not None:
            request.slot = slot
        duplex.send(request.SerializeToString())
        out: dict[str, np.ndarray] = {}
        filled = 0
        while filled < batch:
            frame = codec.decode_frame(duplex.receive(deadline))
            header = frame.header
            self._windows.check(header.columns)
            if header.count > batch - filled or header.windows.last != (filled + header.count == batch):
                raise RuntimeError(f"the server sent {filled + header.count} windows where {batch} were asked for")
            if memory is not None and header.HasField("slot"):
                out = memory.views(header.slot, self._windows, batch)
            else:
                part = self._windows.views(frame.payload, header.count)
                if not filled:
                    out = {name: np.empty((batch, *v.shape[1:]), v.dtype) for name, v in part.items()}
                for name, value in part.items():
                    out[name][filled : filled + header.count] = value
            filled += header.count
        self._sampled_incarnation, self.items = header.incarnation, header.windows.items
        self._has_sampled = True
        return out

    def _offer_memory(self, duplex: Duplex, nbytes: int, deadline: Deadline) -> Duplex:
        """Sees to it that slots of `nbytes` are shared, if they can be; the call to go on with."""
        if duplex.fresh:
            self._forget_memory()  # the server of another call does not know it
        # A poll for the first window ends its call each time: it is not worth any memory yet.
        if not self._share or not (self._has_sampled or self._must_share):
            return duplex
        if self._memory is not None and nbytes <= self._memory.slot_bytes:
            return duplex
        if not duplex.fresh:
            duplex = self._sampling.reopen()
            self._forget_memory()
        try:
            memory = SharedSlots.create(self._slots, nbytes)
        except (OSError, ValueError) as error:
            if self._must_share:
                raise
            self._share_no_more(str(error))
            return duplex
        offer = replay_pb2.SharedMemory(path=str(memory.path), slot_bytes=memory.slot_bytes, slots=memory.slots)
        try:
            duplex.send(replay_pb2.SampleRequest(table=self._table, shared=offer).SerializeToString())
            duplex.receive(deadline)
        except Ended as error:
            memory.close()
            if self._must_share or error.failure.code in AWAY:
                raise
            self._share_no_more(error.failure.details)
            return self._sampling.reopen()
        finally:
            memory.unlink()
        self._memory = memory
        return duplex

    def _share_no_more(self, reason: str) -> None:
        self._share = False
        _log.warning(
            "event=memory_not_shared address=%s table=%s reason=%r", self._connection.address, self._table, reason
        )

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # Writing back; one exchange at a time

    def _write(self, duplex: Duplex, columns: Mapping[str, np.ndarray], count: int, deadline: Deadline) -> int:
        """Sends all frames, some of them ahead of their answers; rows that were written."""
        known = self._sampled_incarnation
        written = unanswered = 0
        for begin, end in codec.frames_of(count, self._latents.nbytes(1)):
            header = self._latents.header(end - begin)
            header.table, header.incarnation = self._table, self._incarnation if known is None else known
            header.write_back.SetInParent()
            part = {name: value[begin:end] for name, value in columns.items()}
            duplex.send(codec.encode_frame(header, self._latents.nbytes(end - begin), partial(self._fill, part)))
            unanswered += 1
            if unanswered > _IN_FLIGHT:
                written += self._written(duplex, deadline)
                unanswered -= 1
        return written + sum(self._written(duplex, deadline) for _ in range(unanswered))

    def _fill(self, columns: Mapping[str, np.ndarray], payload: memoryview) -> None:
        for name, view in self._latents.views(payload, len(columns["row"])).items():
            view[...] = columns[name]

    @staticmethod
    def _written(duplex: Duplex, deadline: Deadline) -> int:
        return replay_pb2.WriteBackAck.FromString(duplex.receive(deadline)).written
