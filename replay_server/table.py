"""Tables of a replay service: stores over files that outlive the process, with exactly-once appends.

A table's folder:

    table.json      what the table is, its incarnation, its streams; replaced atomically
    state.json      which boot of the machine it was opened in, and whether it was closed
    rows-ID/        one file per column and a few counts, mapped; ID is the incarnation
    marks/          see persist.py
    damaged-ID/     rows that were refused and replaced by a mark; for the operator to look at and delete

The latents lie in /dev/shm/telamon-table-ID while the table is open, and beside the rows after a clean stop, so that
a service that is not running holds no memory.

What survives what: SIGKILL takes nothing that was acknowledged. The death of the machine takes what came after the
last mark, because the kernel writes mapped pages back in any order: such rows are refused, and the newest mark that is
whole takes their place.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from replay_server import durable, folders, persist, windows
from replay_server.storage import Files
from replay_server.store import Chosen, Content, Store
from replay_server.streams import Opened, Stream, Streams
from telamon.data import ArraySpec, RowSpec, WindowSpec, WriteBack
from telamon.replay import Purpose, ReplayStats, StreamSuperseded, TableSpec

log = logging.getLogger(__name__)

CREDIT_POLL = 0.05
"""Seconds between looks at whether a table out of credit can still be sampled."""

DrawId = Callable[[], int]
"""Gives a new incarnation: an integer of 63 bits that no other table has."""


class Table:
    """One table of a service, open. Thread-safe. `create_table` and `open_table` make it.

    directory: the table's folder. latents_root: where memory that survives the process lies.
    files: the rows of incarnation `incarnation`. known: the streams so far.
    opened: how often the table was opened, so that each time other windows are drawn.
    """

    def __init__(
        self,
        directory: Path,
        latents_root: Path,
        spec: TableSpec,
        seed: int,
        incarnation: int,
        files: Files,
        known: Mapping[str, Stream],
        opened: int,
        draw_id: DrawId,
    ) -> None:
        self.spec = spec
        self.directory = directory
        self._latents_root = latents_root
        self._seed, self._draw_id = seed, draw_id
        # A tick that was in progress is taken back before anything looks at the rows.
        streams = Streams(files, spec.max_envs, known)
        if streams.recover(files.array("head", (spec.max_envs,), np.dtype(np.int64))):
            log.warning("event=tick_taken_back table=%s", directory.name)
        head, tail = (files.array(name, (spec.max_envs,), np.dtype(np.int64)) for name in ("head", "tail"))
        if not ((tail >= 0) & (tail <= head) & (head - tail <= spec.capacity)).all():
            raise ValueError(f"{files.path('head')} and {files.path('tail')} contradict each other")
        rng = np.random.default_rng([seed, opened] if opened else [seed])
        self._store = Store(spec.row, spec.window, spec.max_envs, spec.capacity, rng, directory / "marks", files)
        # Ticks that are taken together: what they replace in a full ring is gone if they are taken back.
        self._block = max(1, spec.capacity // 8)
        self._base: tuple[str, int] | None = None
        self._use(incarnation, files, streams)
        # One tick or restore at a time; a store's own lock only guards what must be seen together. Taken in the order
        # marking, lock, that of the store.
        self._marking = threading.Lock()
        self._lock = threading.RLock()
        self._closed = False
        self._granted = threading.Condition()

    def _use(self, incarnation: int, files: Files, streams: Streams) -> None:
        self.incarnation, self._files, self._streams = incarnation, files, streams
        self._credit = files.array("credit", (1,), np.dtype(np.int64))  # one more than the bound; 0: none

    @property
    def num_envs(self) -> int:
        """Environments that have joined."""
        return self._streams.num_envs

    @property
    def served(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Column -> (shape, dtype) of its part of one window."""
        return self._store.served

    # writers

    def open_stream(self, name: str, num_envs: int, wanted: Callable[[], bool] = lambda: True) -> Opened:
        """Begins a stream's next epoch; a new stream is given environments of its own, for good.

        wanted: whether anybody still waits for it, when its turn has come: a writer that asked again must not be shut
        out by its first request. Raises ConnectionError where nobody does, ValueError for a bad name or another number
        of environments than before, OSError where there is no room.
        """
        folders.check_name(name, "stream")
        with self._lock:
            self._check_open()
            if not wanted():
                raise ConnectionError(f"nobody waits for stream {name!r} any more")
            if self._streams.join(name, num_envs):
                try:
                    self._save(self.incarnation, self._streams.by_name, self._base)
                except OSError:
                    self._streams.leave(name)
                    raise
            return self._streams.open(name)

    def append(
        self,
        stream: str,
        epoch: int,
        incarnation: int,
        tick: int,
        env_id: np.ndarray,
        columns: Mapping[str, np.ndarray],
    ) -> int:
        """Adds ticks of a stream, from number `tick` on: a row each of environments `env_id` int32 [N].

        columns: [K, N, ...] for K ticks; those that are held are not looked at again. One after another: when one is
        refused, those before it stay. While a bound is set by `grant` it takes the first new one alone, because the
        next must look at the bound again. Returns the highest tick held; what is returned survives SIGKILL.
        Raises FileNotFoundError for an unknown stream, StreamSuperseded, TickGap, ValueError for rows that contradict
        the specs, and OSError where there is no space; nothing of that tick is stored then.
        """
        with self._lock:
            self._check_open()
            if incarnation != self.incarnation:
                raise StreamSuperseded(
                    f"table {self.directory.name!r} was restored or lost since stream {stream!r} opened; open it again"
                )
            writer, held = self._streams.check(stream, epoch, tick, env_id)
            if len(lengths := {value.shape[0] for value in columns.values()}) != 1:
                raise ValueError(f"columns have {sorted(lengths)} ticks; each must have all of the same ticks")
            (ticks,) = lengths
            if self.credit >= 0:
                ticks = min(ticks, held + 1)
            begin, size = held, self._block
            while begin < ticks:
                end = min(begin + size, ticks)
                block = {name: value[begin:end] for name, value in columns.items()}
                try:
                    self._store.prepare(env_id, block)
                except (OSError, ValueError):
                    if size == 1:
                        raise
                    size = 1  # up to the one that must be refused
                    continue
                self._streams.begin(writer, env_id, self._store.head)
                self._store.commit(env_id, block)
                self._streams.end(writer, end - begin)
                begin = end
            return self._streams.held(stream)

    def held(self, stream: str) -> int:
        """The highest tick held of a stream; -1 before the first, and of an unknown stream."""
        return self._streams.held(stream)

    def grant(self, rows: int) -> None:
        """Bounds the rows that may have been appended in all; negative: no bound."""
        # the lock: when this returns no tick is under way that did not see the bound
        with self._lock, self._granted:
            self._check_open()
            self._credit[0] = max(rows + 1, 0)
            self._granted.notify_all()

    @property
    def credit(self) -> int:
        """The bound of `grant`; -1: none."""
        return int(self._credit[0]) - 1

    def wait_for_credit(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until a row may be appended; returns whether it may.

        It may while no bound is reached, and while nothing can be sampled: an open episode may need more rows than
        the bound allows before it is closed.
        """
        deadline = time.monotonic() + timeout
        with self._granted:
            while not (self.credit < 0 or int(self._store.head.sum()) < self.credit or not self._store.can_sample()):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._granted.wait(min(remaining, CREDIT_POLL))
        return True

    # readers

    def choose(self, batch: int, purpose: Purpose = "train") -> Chosen:
        """See Store.choose."""
        return self._store.choose(batch, purpose)

    def fill(self, chosen: Chosen, out: Mapping[str, np.ndarray]) -> None:
        """See Store.fill."""
        self._store.fill(chosen, out)

    def items(self) -> int:
        """See Store.items."""
        return self._store.items()

    def ages(self, chosen: Chosen) -> np.ndarray:
        """Rows appended since the first row of each window [B], int64 [B]."""
        ages: np.ndarray = chosen.content.ring.head[chosen.env_id] - chosen.first_row
        return ages

    def write_back(self, incarnation: int, update: WriteBack) -> int:
        """Replaces latents; returns of how many rows. Rows that are gone, or of another incarnation, count as stale."""
        with self._lock:  # a restore may not come between
            self._check_open()
            if incarnation == self.incarnation:
                return self._store.write_back(update)
            self._store.drop(update)
            return 0

    def stats(self) -> ReplayStats:
        return self._store.stats()

    # marks

    def continue_from(self, base: tuple[str, int] | None) -> None:
        """After an opening: name and fingerprint of the mark since which touched chunks were counted, if any."""
        self._store.continue_from(*(base or (None, 0)))
        self._base = base

    def mark(self, name: str) -> None:
        """See Store.mark; the streams are part of it. Appends wait only while the last of it is written."""
        with self._marking:
            self._check_open()
            # Until the new mark is known as the base, a process that finds this table writes its next mark whole.
            self._set_base(None)
            self._store.mark(name, lambda: {"next_ticks": self._streams.next_ticks()}, self._lock)
            self._set_base((name, persist.fingerprint(self.directory / "marks", name)))

    def restore(self, name: str) -> None:
        """Returns to a mark, as a new incarnation. Raises as Store.restore; the table then stays as it is."""
        with self._marking, self._lock:
            self._check_open()
            incarnation = self._draw_id()
            files = folders.files_of(self.directory, self._latents_root, incarnation, create=True)
            try:
                folders.make_folders(files, self.spec)
                content, state = self._store.load(name, files)
                streams = Streams(files, self.spec.max_envs, self._streams.by_name)
                streams.set_next_ticks(state["extra"]["next_ticks"])
                files.array("credit", self._credit.shape, self._credit.dtype)[:] = self._credit
                base = (name, persist.fingerprint(self.directory / "marks", name))
                self._save(incarnation, streams.by_name, base)
            except (OSError, ValueError):
                folders.remove_files(files)
                raise
            self._replace(incarnation, files, streams, content, state, base)

    def marks(self) -> list[str]:
        """See Store.marks."""
        return self._store.marks()

    def forget(self, name: str) -> None:
        """See Store.forget."""
        with self._marking:
            self._store.forget(name)

    def close(self) -> None:
        """Brings everything to the disk and gives the memory under /dev/shm back. The table is not to be used after."""
        with self._marking, self._lock:
            self._closed = True
            self._files.flush()
            self._files.release()
            try:
                for name in folders.latents_of(self.spec):
                    path = self._files.path(name)
                    durable.copy_sparse(path, self._files.rows / path.name)
            except OSError as error:
                # They stay where SIGKILL leaves them too.
                log.warning("event=latents_not_saved table=%s error=%s", self.directory.name, error)
                return
            durable.sync_directory(self._files.rows)
            state, _ = durable.read_json(self.directory / "state.json", "state file")
            durable.write_json(self.directory / "state.json", {**state, "clean": True})
            shutil.rmtree(self._files.latents, ignore_errors=True)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the server is draining; connect again")

    def _replace(
        self, incarnation: int, files: Files, streams: Streams, content: Content, state: Mapping[str, Any],
        base: tuple[str, int],
    ) -> None:  # fmt: skip
        old = self._files
        self._store.adopt(content, state)
        self._use(incarnation, files, streams)
        self._base = base
        folders.remove_files(old)
        with self._granted:
            self._granted.notify_all()

    def _set_base(self, base: tuple[str, int] | None) -> None:
        with self._lock:
            self._save(self.incarnation, self._streams.by_name, base)
            self._base = base

    def _save(self, incarnation: int, streams: Mapping[str, Stream], base: tuple[str, int] | None) -> None:
        folders.save_table(self.directory, self.spec, self._seed, incarnation, streams, base)


def create_table(directory: Path, latents_root: Path, spec: TableSpec, seed: int, draw_id: DrawId) -> Table:
    """Makes an empty table in a folder that is not there, or that an interrupted creation left.

    Raises ValueError for windows that it could not serve, OSError where a file cannot be made.
    """
    windows.check_spec(spec.window, spec.capacity)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    incarnation = draw_id()
    files = folders.files_of(directory, latents_root, incarnation, create=True)
    try:
        folders.make_folders(files, spec)
        table = Table(directory, latents_root, spec, seed, incarnation, files, {}, 0, draw_id)
        durable.write_json(directory / "state.json", {"boot": folders.boot_id(), "clean": False, "opened": 0})
        # The commit point: a folder without this file is no table.
        folders.save_table(directory, spec, seed, incarnation, {}, None)
    except OSError:
        folders.remove_files(files)
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return table


def open_table(directory: Path, latents_root: Path, draw_id: DrawId) -> Table:
    """Opens a table as it was left: after a clean stop, or after SIGKILL.

    Rows that cannot be trusted are set aside with a line in the log, and the newest mark that is whole takes their
    place. Raises ValueError naming what is damaged, and what is whole, where there is none.
    """
    body, _ = durable.read_json(directory / "table.json", "table file")
    state, _ = durable.read_json(directory / "state.json", "state file")
    spec, incarnation = spec_from_json(body["spec"]), int(body["incarnation"], 16)
    known = {name: Stream(i, first, envs) for i, (name, first, envs) in enumerate(body["streams"])}
    opened = state["opened"] + 1
    files = folders.files_of(directory, latents_root, incarnation, create=False)
    folders.sweep_rows(directory, keep=files.rows)
    make: Callable[[int, Files, Mapping[str, Stream]], Table] = lambda incarnation, files, known: Table(
        directory, latents_root, spec, body["seed"], incarnation, files, known, opened, draw_id
    )
    if files.latents.exists():
        folders.claim_latents(files)
    wrong = folders.damage(files, spec, state)
    if not wrong:
        try:
            if state["clean"]:
                folders.bring_latents(files, spec)
            table = make(incarnation, files, known)
        except ValueError as error:
            wrong = [str(error)]
    if not wrong:
        table.continue_from(None if body["base"] is None else tuple(body["base"]))
    else:
        table = fall_back(directory, latents_root, spec, files, "; ".join(wrong), make, known, draw_id)
    durable.write_json(directory / "state.json", {"boot": folders.boot_id(), "clean": False, "opened": opened})
    for name in folders.latents_of(spec):
        (files.rows / files.path(name).name).unlink(missing_ok=True)  # the copies of a clean stop
    return table


def fall_back(
    directory: Path,
    latents_root: Path,
    spec: TableSpec,
    damaged: Files,
    wrong: str,
    make: Callable[[int, Files, Mapping[str, Stream]], Table],
    known: Mapping[str, Stream],
    draw_id: DrawId,
) -> Table:
    """The table as its newest whole mark has it, in place of damaged rows, which are set aside. Raises ValueError."""
    marks = persist.newest_first(directory / "marks")
    for name in marks:
        incarnation = draw_id()
        files = folders.files_of(directory, latents_root, incarnation, create=True)
        try:
            folders.make_folders(files, spec)
            table = make(incarnation, files, known)
            table.restore(name)
        except (OSError, ValueError) as error:
            log.warning("event=mark_damaged table=%s mark=%s error=%s", directory.name, name, error)
            folders.remove_files(files)
            continue
        if damaged.rows.exists():
            damaged.rows.rename(directory / damaged.rows.name.replace("rows-", "damaged-"))
        damaged.release()
        shutil.rmtree(damaged.latents, ignore_errors=True)
        log.warning(
            "event=fell_back table=%s mark=%s rows=%d reason=%r",
            directory.name, name, table.stats().rows, wrong,
        )  # fmt: skip
        return table
    whole = [name for name in spec.row.columns if not damaged.damage(folders.sizes_of(spec, [name]))]
    tried = f"none of its marks {marks} is whole" if marks else "it has no mark to fall back to"
    raise ValueError(
        f"table {directory.name!r} is refused: {wrong}; {tried}; whole are the files of columns {whole} under "
        f"{damaged.rows}; move {directory} away to begin an empty table"
    )


class Tables:
    """All tables of one service, in the sub-folders of `directory`, which it locks. Thread-safe.

    memory_limit: bytes that all full tables may take together, rows and latents; None: 0.8 of the memory there is.
    latents_root: a tmpfs, where latents live beyond the process.
    rng: draws incarnations.
    Raises OSError where another process serves this folder, ValueError for a table that is damaged beyond its marks.
    """

    def __init__(
        self,
        directory: Path,
        *,
        memory_limit: int | None,
        rng: np.random.Generator,
        latents_root: Path = Path("/dev/shm"),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory.resolve()
        self._memory_limit = int(0.8 * folders.machine_memory()) if memory_limit is None else memory_limit
        self._latents_root = latents_root
        self._draw_id: DrawId = lambda: int(rng.integers(1, 2**63))
        self._lock = threading.Lock()
        self._lock_file = folders.lock_directory(self._directory)
        self._tables: dict[str, Table] = {}
        try:
            for path in sorted(self._directory.glob("*/table.json")):
                self._tables[path.parent.name] = open_table(path.parent, latents_root, self._draw_id)
        except (OSError, ValueError):
            self.close()  # those that were opened are left as properly as they were found
            raise
        folders.sweep_latents(latents_root)

    def configure(self, name: str, spec: TableSpec, seed: int) -> Table:
        """Makes a table, or finds it as it is.

        Raises LookupError naming what differs from the table that is there, ValueError for a bad name, for windows it
        could not serve and for a table beyond the memory limit, OSError where the disk or /dev/shm has no room for it.
        """
        folders.check_name(name, "table")
        with self._lock:
            table = self._tables.get(name)
            if table is None:
                self._check_room(spec)
                table = create_table(self._directory / name, self._latents_root, spec, seed, self._draw_id)
                self._tables[name] = table
            elif differing := differing_entries(table.spec, spec):
                raise LookupError(f"table {name!r} exists with other specs: {'; '.join(differing)}")
            return table

    def get(self, name: str) -> Table:
        """Raises FileNotFoundError for an unknown table."""
        table = self._tables.get(name)
        if table is None:
            raise FileNotFoundError(f"there is no table {name!r}; configure it first")
        return table

    def items(self) -> list[tuple[str, Table]]:
        """All tables by name."""
        return sorted(self._tables.items())

    def close(self) -> None:
        """A clean stop. Every table is closed, also when one of them raises OSError."""
        with self._lock, ExitStack() as stack:
            stack.callback(os.close, self._lock_file)
            for table in self._tables.values():
                stack.callback(table.close)

    def _check_room(self, spec: TableSpec) -> None:
        free = self._memory_limit - sum(table.spec.nbytes for table in self._tables.values())
        latents = sum(array.nbytes for _, array in spec.row.latents)
        rooms = (
            ("the memory limit", free, spec.row.nbytes, "or raise --memory-limit", None),
            (f"{self._latents_root}", shutil.disk_usage(self._latents_root).free, latents,
             "or enlarge that tmpfs", self._latents_root),
            (f"{self._directory}", shutil.disk_usage(self._directory).free, spec.row.nbytes - latents,
             "or free the disk", self._directory),
        )  # fmt: skip
        for where, room, per_row, way_out, path in rooms:
            needed = per_row * spec.capacity * spec.max_envs
            if needed > room:
                fits = max(room, 0) // (per_row * spec.max_envs)
                text = (
                    f"a full table of {spec.max_envs} environments with {spec.capacity} rows each needs {needed} bytes "
                    f"of {where}, which has {max(room, 0)} left; capacity={fits} is the largest that fits, {way_out}"
                )
                raise ValueError(text) if path is None else OSError(errno.ENOSPC, text, str(path))


# specs


def differing_entries(ours: TableSpec, theirs: TableSpec) -> list[str]:
    """What differs, a clause each."""
    flat = lambda spec: {
        "capacity": spec.capacity,
        "max_envs": spec.max_envs,
        **{f"row.{k}": v for k, v in asdict(spec.row).items()},
        **{f"window.{k}": v for k, v in asdict(spec.window).items()},
    }
    a, b = flat(ours), flat(theirs)
    return [f"{key} is {a[key]}, not {b[key]}" for key in a if a[key] != b[key]]


def spec_from_json(values: Mapping[str, Any]) -> TableSpec:
    """A TableSpec from `dataclasses.asdict`, after JSON has made lists of its tuples."""
    array = lambda v: ArraySpec(tuple(v["shape"]), v["dtype"], v["classes"])
    arrays = lambda pairs: tuple((key, array(v)) for key, v in pairs)
    row, action = values["row"], values["row"]["action"]
    return TableSpec(
        row=RowSpec(
            obs=arrays(row["obs"]),
            action=array(action) if isinstance(action, Mapping) else arrays(action),
            latents=arrays(row["latents"]),
        ),
        window=WindowSpec(**values["window"]),
        capacity=values["capacity"],
        max_envs=values["max_envs"],
    )
