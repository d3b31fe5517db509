"""The writing side of a client: a stream of numbered ticks that arrives exactly once.

Ticks wait in a buffer until the server has acknowledged them. Whatever ends the call, those that are left are sent
again; the server ignores the ones that it holds. One thread opens the call and reads its acknowledgements, the
iterator of requests runs in a thread of gRPC's, and both, like every caller of `append`, meet at one lock.

A ring must not splice rows that did not follow one another. So when the table turns out to be another one than the
rows in the buffer were made for (it was restored by somebody, or came back empty), the rows of each environment are
dropped until one that begins an episode, and counted. The same holds for rows that were appended behind a tick that the
server refused, before their writer could know of it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import numpy as np

from telamon.data import Rows, check_columns, to_columns
from telamon.replay import StreamSuperseded
from telamon.rpc.codec import FRAME_BYTES, MAX_PAYLOAD_BYTES, SLOT, Layout, join_frame
from telamon.rpc.connection import (
    AWAY,
    ENDED,
    Connection,
    Deadline,
    Failure,
    Loans,
    Sharing,
    delays,
    failure_of,
    is_refusal,
    offer,
)
from telamon.rpc.shared import SharedSlots
from telamon.rpc.v1 import replay_pb2

_log = logging.getLogger(__name__)

_ATTEMPT_SECONDS = 2.0
"""Of one control call of the thread, after which it looks whether it is still wanted."""

_IN_FLIGHT = 4
"""Frames that wait for their acknowledgements at once, and slots."""
_SHARED_TICK_BYTES = 2**16
"""Of a tick of all environments; writers of smaller ones share nothing: many of them are faster joined in a message."""

_AGAIN = (*AWAY, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Codes after which the same ticks are sent again: they say nothing about them, and may pass."""

_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
"""Codes after which the tick that caused them is dropped."""


@dataclass(frozen=True)
class _Tick:
    """One row of each of n environments."""

    env_id: np.ndarray
    """[n], the writer's own numbering."""
    payload: np.ndarray
    """uint8, as a frame carries it."""


class Appender:
    """Sends the ticks of one writer, which has environments 0 to `num_envs` - 1.

    buffer_ticks: how many ticks may be unacknowledged when `append` returns; 0: it returns when its own tick is.
    configure: makes the table if there is none, and returns its incarnation (raises like `Connection.call`).
    """

    def __init__(
        self,
        connection: Connection,
        sharing: Sharing,
        layout: Layout,
        configure: Callable[[Deadline], int],
        *,
        table: str,
        stream: str,
        num_envs: int,
        buffer_ticks: int,
    ) -> None:
        if num_envs < 1 or buffer_ticks < 0:
            raise ValueError(
                f"num_envs={num_envs} and buffer_ticks={buffer_ticks}: "
                "a writer has at least one environment and a buffer of at least 0 ticks"
            )
        if (size := layout.nbytes(num_envs)) > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a tick of {num_envs} environments takes {size} bytes; a message carries at most {MAX_PAYLOAD_BYTES}, "
                "so lower num_envs"
            )
        self._connection, self._sharing = connection, sharing
        self._layout, self._configure = layout, configure
        self._table, self._stream = table, stream
        self._num_envs, self._buffer_ticks = num_envs, buffer_ticks
        self._where = f"address={connection.address} table={table} stream={stream}"
        self.lost_rows = 0
        """Rows dropped because rows before them were lost with the table that they were made for, or refused."""

        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """For those who send: ticks, a new call, the end."""
        self._room = threading.Condition(self._lock)
        """For those who wait for acknowledgements."""

        self._unsent: deque[_Tick] = deque()
        self._sent: deque[_Tick] = deque()
        """Handed to the present call, not acknowledged; they precede the unsent ones."""
        self._next_tick = 0
        """Number of the first tick that is not acknowledged."""
        self._careful = 0
        """So many ticks go one by one: one of them was refused."""

        self._opened: replay_pb2.OpenStreamResponse | None = None
        self._broken = np.zeros(num_envs, bool)
        """Environments whose rows are dropped until one is_first."""
        self._refused = np.zeros(num_envs, bool)
        """Environments whose newest row was refused, which their writer does not know yet."""
        self._gap = False
        """Whether the next opening finds another table than the ticks were made for."""

        self._session: object | None = None
        """The present call, for the iterator of its requests: it ends with it."""
        self._call: grpc.Call | None = None
        self._loans = Loans(None)
        """The frames of the present call that were not acknowledged."""
        self._failed: deque[Exception] = deque()
        """Errors of refused ticks that no caller has seen yet."""
        self._trouble: Exception | None = None
        """Why nothing is acknowledged at the moment, as far as is known."""
        self._over: Exception | None = None
        """Why nothing will ever be sent again."""

        self._paused = False
        self._closing = False
        self._busy = threading.Lock()
        """Held by the thread while it talks to the server."""
        self._thread: threading.Thread | None = None

    # For callers

    def open(self, deadline: Deadline) -> replay_pb2.OpenStreamResponse:
        """Opens the stream, from which moment on older writers of it are refused."""
        request = replay_pb2.OpenStreamRequest(table=self._table, stream=self._stream, num_envs=self._num_envs)
        opened: replay_pb2.OpenStreamResponse = self._connection.call("OpenStream", request, deadline)
        with self._lock:
            self._opened, self._next_tick = opened, opened.next_tick
            self._rewind()
            if self._gap:
                self._break(slice(None), "the table is a new one")
                self._gap = False
                self._room.notify_all()
        return opened

    def append(self, rows: Rows, deadline: Deadline) -> None:
        """Takes one tick, and waits until at most `buffer_ticks` are unacknowledged.

        Raises ValueError for rows that the row spec or the writer's environments forbid; these are not taken. All other
        errors tell of ticks that are in the buffer: TimeoutError, OSError (no space) or PermissionError: everything is
        kept and will be sent, do not append it again; ValueError or RuntimeError: the server refused one tick, which
        is dropped, the others are kept; StreamSuperseded: nothing will be sent any more.
        """
        columns = to_columns(rows)
        self._check_env_id(rows.env_id)
        check_columns(columns, self._layout.columns, rows.env_id.size)
        tick = self._encode(rows.env_id, columns)
        with self._lock:
            self._start()
            if self._refused.any():
                self._break(self._refused, "the server refused a tick before them")
                self._refused[:] = False
            if (whole := self._whole_episodes(tick)) is not None:
                self._unsent.append(whole)
                self._notify_sender()
            self._wait(self._buffer_ticks, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Waits until every tick is acknowledged. Raises as `append` does of ticks in the buffer."""
        with self._lock:
            self._wait(0, deadline)

    @property
    def waiting(self) -> int:
        """Ticks that are not acknowledged."""
        return len(self._sent) + len(self._unsent)

    @contextmanager
    def restoring(self) -> Iterator[Callable[[], None]]:
        """Nothing is sent meanwhile. Calling what this gives says that the table was restored for this writer.

        Then what it appended before is undone, what waits in the buffer included, and its next rows continue those of
        the table.
        """

        def restored() -> None:
            with self._lock:
                self._unsent.clear()
                self._sent.clear()
                self._failed.clear()
                self._broken[:] = self._refused[:] = False
                self._opened, self._gap, self._careful = None, False, 0
                self._room.notify_all()

        with self._lock:
            self._paused = True
            self._end_call()
        try:
            with self._busy:
                yield restored
        finally:
            with self._lock:
                self._paused = False
                self._work.notify_all()

    def close(self) -> None:
        """Ends the thread, after the connection was closed. What was not acknowledged may or may not have arrived."""
        with self._lock:
            self._closing = True
            self._over = RuntimeError(f"this client of the replay server at {self._connection.address} is closed")
            self._end_call()
            self._room.notify_all()
        if self._thread is not None:
            self._thread.join()

    # Under the lock

    def _check_over(self) -> None:
        if self._over is not None:
            raise self._over.with_traceback(None)

    def _start(self) -> None:
        self._check_over()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"telamon-append-{self._stream}", daemon=True)
            self._thread.start()

    def _wait(self, limit: int, deadline: Deadline) -> None:
        """Until at most `limit` ticks are unacknowledged."""
        while True:
            if self._failed:
                error = self._failed.popleft()
                if not self._failed:
                    self._refused[:] = False  # the writer knows of all, and may go on as it likes
                raise error
            self._check_over()
            if self.waiting <= limit:
                return
            if isinstance(self._trouble, PermissionError):
                raise self._trouble.with_traceback(None)
            if not self._room.wait(deadline.left) and not deadline.left:
                raise self._late(deadline)

    def _late(self, deadline: Deadline) -> Exception:
        kind = OSError if type(self._trouble) is OSError else TimeoutError
        return kind(
            f"the replay server at {self._connection.address} did not acknowledge {self.waiting} ticks within "
            f"{deadline.seconds:g} s; they are kept and will be sent"
            + (f" (the last error was: {self._trouble})" if self._trouble is not None else "")
        )

    def _whole_episodes(self, tick: _Tick) -> _Tick | None:
        """A tick without the rows of environments that have lost rows before them; None if none are left."""
        if not self._broken.any():
            return tick
        columns = self._layout.views(tick.payload, tick.env_id.size)
        keep = ~self._broken[tick.env_id] | columns["is_first"]
        self._broken[tick.env_id[keep]] = False
        self.lost_rows += int((~keep).sum())
        if keep.all() or not keep.any():
            return tick if keep.all() else None
        return self._encode(tick.env_id[keep], {name: value[keep] for name, value in columns.items()})

    def _break(self, envs: np.ndarray | slice, reason: str) -> None:
        """Rows of these environments are lost: drops those behind them, now and later, until an episode begins."""
        self._broken[envs] = True
        lost = self.lost_rows
        whole = [self._whole_episodes(tick) for tick in self._unsent]
        self._unsent = deque(tick for tick in whole if tick is not None)
        _log.warning(
            "event=rows_lost %s waiting_rows=%d reason='%s; rows are dropped until each environment begins an episode'",
            self._where, self.lost_rows - lost, reason,
        )  # fmt: skip

    def _is_due(self) -> bool:
        """Whether a frame is to be sent: a full one, or any while none is under way. So frames fill under load."""
        if not self._unsent or len(self._loans) == _IN_FLIGHT or (self._sent and self._careful):
            return False
        return not self._sent or (len(self._unsent) + 1) * self._unsent[0].payload.nbytes > FRAME_BYTES

    def _notify_sender(self) -> None:
        if self._is_due() or self._call is None:
            self._work.notify_all()

    def _rewind(self) -> None:
        """Everything that is not acknowledged is to be sent again."""
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = self._session = None
        self._work.notify_all()

    def _take(self) -> list[_Tick]:
        """The next ticks of the same environments that fill a frame."""
        ticks = [self._unsent.popleft()]
        size = ticks[0].payload.nbytes
        while self._unsent and not self._careful:
            tick = self._unsent[0]
            size += tick.payload.nbytes
            if size > FRAME_BYTES or not np.array_equal(tick.env_id, ticks[0].env_id):
                break
            ticks.append(self._unsent.popleft())
        self._sent.extend(ticks)
        return ticks

    # Without the lock

    def _check_env_id(self, env_id: np.ndarray) -> None:
        if env_id.ndim != 1 or env_id.dtype.kind != "i":
            raise ValueError(f"env_id is {env_id.dtype} {list(env_id.shape)}, expected a vector of signed integers")
        if not env_id.size:
            raise ValueError("a tick has no rows; it must have one of at least one environment")
        if env_id.min() < 0 or env_id.max() >= self._num_envs:
            raise ValueError(f"env_id {env_id.tolist()} leaves the writer's environments 0 to {self._num_envs - 1}")
        if env_id.size > 1 and np.bincount(env_id).max() > 1:
            raise ValueError(f"env_id {env_id.tolist()} repeats an environment; a tick has one row of each")

    def _encode(self, env_id: np.ndarray, columns: Mapping[str, np.ndarray]) -> _Tick:
        payload = np.empty(self._layout.nbytes(env_id.size), np.uint8)
        payload[-8:] = 0  # what the columns leave of it
        for name, view in self._layout.views(payload, env_id.size).items():
            view[...] = columns[name]
        return _Tick(env_id.copy(), payload)

    def _run(self) -> None:
        """The thread: one call after the other, while there is something to send."""
        try:
            again = delays()
            while True:
                with self._work:
                    self._work.wait_for(
                        lambda: self._closing or (self.waiting and not self._paused and self._over is None)
                    )
                    if self._closing:
                        return
                    acknowledged = self._next_tick
                with self._busy:
                    failure = self._talk()
                if self._next_tick != acknowledged:
                    again = delays()
                if failure is not None:
                    self._pause(failure, next(again))
        except Exception as error:  # noqa: BLE001  # whatever it is, those who wait must learn of it
            if self._connection.closed:
                return
            with self._lock:
                self._over = error
                self._room.notify_all()
            _log.error("event=append_stopped %s error=%r", self._where, str(error))

    def _talk(self) -> Exception | None:
        """One call. Returns why to wait a little before the next one; raises what ends the stream for good."""
        try:
            if self._opened is None:
                self._configure(Deadline(_ATTEMPT_SECONDS))
                return self._send(self.open(Deadline(_ATTEMPT_SECONDS)))
            return self._send(self._opened)
        except OSError as error:
            return error

    def _send(self, opened: replay_pb2.OpenStreamResponse) -> Exception | None:
        memory = self._share()
        try:
            with self._lock:
                if self._paused or self._closing:
                    return None
                self._rewind()
                self._session, self._loans = object(), Loans(memory)
                frames = self._frames(self._session, opened, memory)
                call = self._call = self._connection.stream("Append", frames)
            failure = self._read(call, memory)
            with self._lock:
                wanted = self._call is call
                self._end_call()
            return self._handle(opened, failure) if wanted and failure is not None else None
        finally:
            if memory is not None:
                memory.unlink()
                memory.close()

    def _share(self) -> SharedSlots | None:
        """Memory for the next call, if there is to be any; a slot holds as many ticks as a frame."""
        tick = self._layout.nbytes(self._num_envs)
        if tick < _SHARED_TICK_BYTES:
            return None
        return self._sharing.make(_IN_FLIGHT, self._layout.nbytes(self._num_envs, SLOT) * max(1, FRAME_BYTES // tick))

    def _frames(
        self, session: object, opened: replay_pb2.OpenStreamResponse, memory: SharedSlots | None
    ) -> Iterator[bytes]:
        """The requests of one call; runs in a thread of gRPC's."""
        if memory is not None:
            yield join_frame(replay_pb2.Header(shared=offer(memory)), ())
        while True:
            with self._work:
                self._work.wait_for(lambda: self._session is not session or self._is_due())
                if self._session is not session:
                    return
                first = self._next_tick + len(self._sent)
                ticks = self._take()
                env_id = ticks[0].env_id
                loan = self._loans.lend(len(ticks) * self._layout.nbytes(env_id.size, SLOT))
            header = self._layout.header(env_id.size)
            header.table, header.incarnation = self._table, opened.incarnation
            header.append.stream, header.append.epoch = self._stream, opened.epoch
            header.append.tick, header.append.ticks = first, len(ticks)
            header.append.env_id.extend((env_id + opened.first_env_id).tolist())
            if loan is None:
                yield join_frame(header, [tick.payload for tick in ticks])
                continue
            header.slot, buffer = loan
            places = self._layout.ticks(buffer, env_id.size, len(ticks), SLOT)
            for k, tick in enumerate(ticks):
                for name, value in self._layout.views(tick.payload, env_id.size).items():
                    places[name][k] = value
            yield join_frame(header, ())

    def _read(self, call: Iterator[bytes], memory: SharedSlots | None) -> Failure | None:
        """Follows the acknowledgements of a call until it ends; None if that was because it offered memory."""
        unanswered = memory is not None
        try:
            for message in call:
                if unanswered and memory is not None:
                    memory.unlink()
                    unanswered = False
                    continue
                held = replay_pb2.AppendAck.FromString(message).tick
                with self._lock:
                    self._loans.answered()
                    for _ in range(min(held + 1 - self._next_tick, len(self._sent))):
                        self._sent.popleft()
                        self._next_tick += 1
                        self._careful = max(0, self._careful - 1)
                    if self._trouble is not None:
                        _log.info("event=append_goes_on %s", self._where)
                        self._trouble = None
                    self._room.notify_all()
                    self._notify_sender()
            failure = ENDED
        except grpc.RpcError as error:
            failure = failure_of(error)
        if unanswered and is_refusal(failure):
            self._sharing.refuse(failure.error())
            return None
        return failure

    def _handle(self, opened: replay_pb2.OpenStreamResponse, failure: Failure) -> Exception | None:
        """What follows from the end of a call; returns and raises as `_talk`."""
        code, error = failure.code, failure.error()
        if code in _AGAIN:
            return error
        if code in _REFUSED:
            return self._refuse(code, error)
        if code not in (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE):
            raise error
        incarnation = self._configure(Deadline(_ATTEMPT_SECONDS))
        if code is grpc.StatusCode.ABORTED and incarnation == opened.incarnation:
            raise StreamSuperseded(failure.details)
        with self._lock:
            self._opened, self._gap = None, True
        return None

    def _refuse(self, code: grpc.StatusCode, error: Exception) -> Exception | None:
        """Drops the tick that the server refused, once it is known which one it is."""
        with self._lock:
            if not self._sent:
                return error
            if len(self._sent) > 1:
                self._careful = len(self._sent)
                return None
            env_id = self._sent.popleft().env_id
            self._careful = max(0, self._careful - 1)
            self._failed.append(error)
            if self._unsent:
                self._break(env_id, "the server refused a tick before them")
            else:
                self._refused[env_id] = True
            if code is grpc.StatusCode.INTERNAL:
                self._opened = None  # whether the server holds it is what the next opening says
            self._room.notify_all()
            return None

    def _pause(self, failure: Exception, delay: float) -> None:
        with self._work:
            if self._connection.closed or not self.waiting:
                return
            if self._trouble is None:
                _log.warning("event=append_waits %s ticks=%d error=%r", self._where, self.waiting, str(failure))
            self._trouble = failure
            self._room.notify_all()
            self._work.wait_for(lambda: self._closing or self._paused, delay)
