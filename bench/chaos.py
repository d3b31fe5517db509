"""A replay server that is killed again and again while real processes write, sample and write back. One JSON line.

Every row says who wrote it: (writer, life of the writer, its environment, number of the row in that life), and latents
say whose they are and how new. So everything can be checked at any time, whatever was killed in between:

- rows of a life follow one another in the ring without a gap or a repeat (row - number is the same for all of them,
  wherever and by whomever they are seen), lives follow one another, and no acknowledged row is missing between them;
- every sampled window is consecutive, its rows whole, its latents those of its own rows;
- latents are as new as the last write-back that was acknowledged, and no newer than the last one that was sent;
- every call returns within its deadline, and nothing is left in /dev/shm.

Writers are killed too, and one is only stopped: it wakes up when its successor has long
taken over, and must be refused.

python bench/chaos.py [--minutes 5] [--seed 0]
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from replay_server.table import Tables
from telamon.data import ArraySpec, Rows, RowSpec, Window, WindowSpec, WriteBack, from_columns
from telamon.replay import StreamSuperseded, TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import TOKEN_VARIABLE, Endpoint

WRITERS, ENVS, SAMPLERS = 4, 3, 2
"""Writers, environments of each, and samplers; one more process writes back."""
LIVES = 64
"""Of one writer, at most."""
SPEC = TableSpec(
    row=RowSpec(
        obs=(("who", ArraySpec((4,), "int64")), ("noise", ArraySpec((500,), "uint8"))),
        action=ArraySpec((1,)),
        latents=(("whose", ArraySpec((5,), "int64")), ("wide", ArraySpec((64,)))),
    ),
    window=WindowSpec(
        8, context=4, cross_episodes=True, closed_only=False, start="windows", latents="context", online=True
    ),
    capacity=64,
    max_envs=WRITERS * ENVS,
)
"""Rings so small that they go round all the time."""
BATCH = 16
TABLE, TOKEN = "chaos", "a-token-of-the-chaos"
DEADLINE = 30.0
"""Seconds that a call may take, a restart of the server included."""
SLACK = 2.0
"""Seconds by which a busy machine may miss it."""
SUPERSEDED = 3
"""Exit code of a writer that was told so."""
SHARED_MEMORY = Path("/dev/shm")

Answer = TypeVar("Answer")


# What the processes share: memory that outlives each of them.


class Board:
    """Numbers in a file that every process maps; each is written by one process."""

    FIELDS: ClassVar[dict[str, tuple[int, ...]]] = {
        "stop": (),
        "calls": (WRITERS + SAMPLERS + 1,),  # that a process has made, by its place
        "sent": (WRITERS, LIVES, ENVS),  # rows handed to the client, counted before
        "acknowledged": (WRITERS, LIVES, ENVS),  # rows known to be held, counted after
    }

    def __init__(self, path: Path) -> None:
        sizes = {name: int(np.prod(shape)) for name, shape in self.FIELDS.items()}
        if not path.exists():
            path.write_bytes(bytes(8 * sum(sizes.values())))
        with path.open("r+b") as file:
            numbers = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
        parts = np.split(numbers, np.cumsum(list(sizes.values()))[:-1])
        fields = zip(self.FIELDS.items(), parts, strict=True)
        self.stop, self.calls, self.sent, self.acknowledged = (part.reshape(shape) for (_, shape), part in fields)


class Caller:
    """Makes calls of one process: counts them and remembers the longest."""

    def __init__(self, calls: np.ndarray) -> None:
        self._calls = calls
        self.longest = 0.0

    def __call__(self, call: Callable[..., Answer], *args: Any) -> Answer:
        begin = time.monotonic()
        try:
            return call(*args)
        finally:
            self.longest = max(self.longest, time.monotonic() - begin)
            self._calls[...] += 1


# Rows that say who they are.


def noise_of(who: np.ndarray) -> np.ndarray:
    """who: int64 [..., 4] -> uint8 [..., 500]: bytes that another row does not have."""
    return ((who @ np.array([3, 5, 7, 11]))[..., None] + np.arange(500)).astype(np.uint8)


def latents_of(who: np.ndarray, version: np.ndarray) -> dict[str, np.ndarray]:
    """who: [N, 4], version: [N]."""
    whose = np.concatenate([who, version[:, None]], -1)
    wide = np.broadcast_to((who[:, 3] + 1000 * version)[:, None], (len(who), 64)).astype(np.float32)
    return {"whose": whose, "wide": wide}


def check(held: bool | np.bool_, what: str, *details: object) -> None:
    if not held:
        raise AssertionError(f"{what}: {', '.join(map(str, details))}")


class Witness:
    """Looks at windows, and remembers where each life of each environment begins."""

    def __init__(self) -> None:
        self.begins: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
        """(writer, its environment, life) -> {(environment of the table, the row that is its first)}: one of them."""
        self.windows = 0

    def look(self, window: Window) -> None:
        """Raises AssertionError for a window that is not what was written."""
        who = window.obs["who"]
        writer, life, env, number = np.moveaxis(who, -1, 0)
        row = window.first_row[:, None] + np.arange(SPEC.window.length)
        at = window.env_id, window.first_row
        check((window.obs["noise"] == noise_of(who)).all(), "a torn row in windows", *at)
        check((window.reward == number).all(), "a torn row in windows", *at)
        check((window.action[..., 0] == -number).all(), "a torn row in windows", *at)
        check((writer == writer[:, :1]).all() and (env == env[:, :1]).all(), "mixed environments in windows", *at)
        check((np.diff(life, axis=1) >= 0).all(), "an older life after a newer one in windows", *at)
        check(window.is_first[number == 0].all(), "a life that begins without is_first in windows", *at)
        place = np.broadcast_to(window.env_id[:, None], row.shape)
        seen = np.unique(np.stack([writer, env, life, place, row - number], -1).reshape(-1, 5), axis=0)
        for w, e, k, table_env, begin in seen.tolist():
            begins = self.begins.setdefault((w, e, k), set())
            begins.add((table_env, begin))
            check(len(begins) == 1, "rows lost or doubled", f"writer {w} environment {e} life {k} begins at", begins)
        context = who[:, : SPEC.window.context].reshape(-1, 4)
        whose = window.latents["whose"].reshape(-1, 5)
        check((whose[:, :4] == context).all(), "latents of another row in windows", *at)
        wide = latents_of(context, whose[:, 4])["wide"]
        check((window.latents["wide"].reshape(-1, 64) == wide).all(), "torn latents in windows", *at)
        self.windows += len(window.env_id)


# The processes. Each gets its place on the board and runs until it is told to stop.


def client(endpoint: Endpoint, **options: Any) -> Client:
    return Client(endpoint, TABLE, SPEC, timeout=DEADLINE, **options)


def write(board: Board, endpoint: Endpoint, place: int, life: int, seed: int) -> dict[str, Any]:
    """Ticks of random environments with random episodes. Writers 0 and 1 wait for every tick, the others buffer."""
    rng = np.random.default_rng([seed, place, life])
    call = Caller(board.calls[place : place + 1])
    sent, acknowledged = board.sent[place, life], board.acknowledged[place, life]
    buffer_ticks = 0 if place < 2 else 32
    ended = np.ones(ENVS, bool)
    flush_in = 0
    with call(lambda: client(endpoint, stream=f"writer-{place}", num_envs=ENVS, buffer_ticks=buffer_ticks)) as replay:
        while not board.stop:
            env = np.flatnonzero(rng.random(ENVS) < 0.9).astype(np.int32)
            if not env.size:
                continue
            number = sent[env]
            who = np.stack([np.full(env.size, place), np.full(env.size, life), env, number], -1)
            is_first, is_last = ended[env] | (rng.random(env.size) < 0.02), rng.random(env.size) < 0.05
            rows = Rows(
                env_id=env, obs={"who": who, "noise": noise_of(who)}, reward=number.astype(np.float32),
                is_first=is_first, is_last=is_last, is_terminal=np.zeros(env.size, bool),
                action=-number[:, None].astype(np.float32), latents=latents_of(who, np.zeros(env.size, np.int64)),
            )  # fmt: skip
            ended[env] = is_last
            sent[env] += 1
            call(replay.append, rows)
            if not buffer_ticks:
                acknowledged[:] = sent
            elif flush_in == 0:
                call(replay.flush)
                acknowledged[:] = sent
                flush_in = int(rng.integers(1, 60))
            else:
                flush_in -= 1
            time.sleep(rng.choice([0, 0, 0.002]))
        call(replay.flush)
        acknowledged[:] = sent
        lost = replay.lost_rows
    check(lost == 0, "the client dropped rows", lost)
    return {"longest": call.longest}


def sample(board: Board, endpoint: Endpoint, place: int, shared_memory: bool) -> dict[str, Any]:
    call, witness = Caller(board.calls[place : place + 1]), Witness()
    with call(lambda: client(endpoint, shared_memory=shared_memory)) as replay:
        for purpose in itertools.cycle(("train", "report")):
            if board.stop:
                break
            try:
                witness.look(call(replay.sample, BATCH, purpose))
            except LookupError:  # nothing yet
                time.sleep(0.05)
    return {"longest": call.longest, "windows": witness.windows, "begins": as_list(witness)}


def write_back(board: Board, endpoint: Endpoint, place: int, seed: int) -> dict[str, Any]:
    """Newer latents for windows drawn some time ago, often so long that some of their rows are gone."""
    rng, call, witness = np.random.default_rng(seed), Caller(board.calls[place : place + 1]), Witness()
    newest: dict[tuple[int, int], tuple[int, int]] = {}  # (env_id, row) -> versions (acknowledged, sent)
    waiting: list[Window] = []
    version = written = stale = 0
    with call(lambda: client(endpoint)) as replay:
        while not board.stop:
            try:
                window = call(replay.sample, BATCH, "report" if rng.random() < 0.5 else "train")
            except LookupError:
                time.sleep(0.05)
                continue
            witness.look(window)
            env, row, _ = context_of(window)
            for e, r, v in zip(env.tolist(), row.tolist(), window.latents["whose"][..., 4].reshape(-1), strict=True):
                least, most = newest.get((e, r), (0, 0))
                check(least <= v <= most, "latents of an impossible age", f"environment {e} row {r}: {least, v, most}")
            waiting.append(window)
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.1))
            while waiting and rng.random() < 0.6:
                drawn = waiting.pop(int(rng.integers(len(waiting))))
                env, row, who = context_of(drawn)
                versions = version + 1 + np.arange(row.size)  # the later of two for one row wins
                version = int(versions[-1])
                keys = list(zip(env.tolist(), row.tolist(), strict=True))
                for key, v in zip(keys, versions.tolist(), strict=True):
                    newest[key] = newest.get(key, (0, 0))[0], v
                done = call(replay.write_back, WriteBack(env, row, latents_of(who, versions), drawn.incarnation))
                for key in keys:
                    newest[key] = newest[key][1], newest[key][1]
                written, stale = written + done, stale + row.size - done
            del waiting[:-20]
            if len(newest) > 50_000:
                heads = {e: max(r for e_, r in newest if e_ == e) for e in range(SPEC.max_envs)}
                newest = {k: v for k, v in newest.items() if k[1] > heads[k[0]] - 4 * SPEC.capacity}
    return {
        "longest": call.longest, "windows": witness.windows, "begins": as_list(witness), "written": written,
        "stale": stale, "newest": [[*key, *versions] for key, versions in newest.items()],
    }  # fmt: skip


def context_of(window: Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(env_id, row, who) of the rows whose latents a window has, [N] and [N, 4]."""
    rows = window.first_row[:, None] + np.arange(SPEC.window.context)
    env = np.broadcast_to(window.env_id[:, None], rows.shape)
    return env.reshape(-1).astype(np.int32), rows.reshape(-1), window.obs["who"][:, : rows.shape[1]].reshape(-1, 4)


def as_list(witness: Witness) -> list[list[int]]:
    return [[*key, *place] for key, places in witness.begins.items() for place in places]


ROLES: dict[str, Callable[..., dict[str, Any]]] = {"write": write, "sample": sample, "write_back": write_back}


def work(role: str, directory: Path, options: dict[str, Any]) -> int:
    """One process."""
    faulthandler.register(signal.SIGUSR1)
    endpoint = Endpoint(f"unix:{directory}/socket", TOKEN)
    try:
        print(json.dumps(ROLES[role](Board(directory / "board"), endpoint, **options)))
    except StreamSuperseded:
        return SUPERSEDED
    return 0


# The one that kills.


class Process:
    """A process of ours; what it says goes to files."""

    def __init__(self, stack: ExitStack, directory: Path, name: str, command: list[str]) -> None:
        self.name = name
        self.out, self.err = directory / f"{name}.out", directory / f"{name}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self._popen = subprocess.Popen(
                [sys.executable, *command], stdout=out, stderr=err, env={**os.environ, TOKEN_VARIABLE: TOKEN}
            )
        stack.callback(self._end)

    def _end(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def send(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def finish(self, code: int, seconds: float) -> str:
        """What it printed, once it has ended with that code."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.hangs()
        check(self._popen.returncode == code, self.name, "ended with", self._popen.returncode, self.err.read_text())
        return self.out.read_text()

    def hangs(self) -> None:
        self.send(signal.SIGUSR1)
        time.sleep(0.5)
        raise AssertionError(f"{self.name} hangs: {self.err.read_text()}")


@dataclass(frozen=True)
class Report:
    seed: int
    seconds: float
    kills: int
    """Of a server in use."""
    kills_at_start: int
    """Of a server that had not said yet that it serves."""
    writer_kills: int
    ticks_taken_back: int
    """How often the server found a tick half done when it came back."""
    rows: int
    acknowledged: int
    windows: int
    written_back: int
    stale: int
    longest_call: float
    """Seconds."""
    longest_restart: float
    """Seconds from the start of a server to its first answer to anybody."""


class Chaos:
    """One run; see the module."""

    def __init__(self, stack: ExitStack, directory: Path, seed: int) -> None:
        self._stack, self._directory, self._seed = stack, directory, seed
        self._random = random.Random(seed)
        self._board = Board(directory / "board")
        self._numbers = itertools.count()
        self._writers: list[Process] = []
        self._others: list[Process] = []
        self._ended: list[tuple[Process, int]] = []
        """Writers that are on their way out, and the exit code that they must have."""
        self._lives = [0] * WRITERS
        self._moved = time.monotonic(), self._board.calls.copy()
        self.kills = self.kills_at_start = self.writer_kills = 0
        self.longest_restart = 0.0
        self._server: Process

    def start(self) -> None:
        self._serve()
        self._writers = [self._writer(place) for place in range(WRITERS)]
        for i in range(SAMPLERS):
            self._others.append(self._worker("sample", place=WRITERS + i, shared_memory=i == 0))
        self._others.append(self._worker("write_back", place=WRITERS + SAMPLERS, seed=self._seed))

    def strike(self) -> None:
        """Kills the server once there is traffic, and now and then something else."""
        self._wait_for_traffic(4 if self._random.random() < 0.7 else len(self._board.calls))
        chance = self._random.random()
        time.sleep(self._random.uniform(0, 0.05 if chance < 0.6 else 0.8))
        if chance < 0.1 or 0.6 < chance < 0.7:
            self._replace_writer()
        self._server.kill()
        self.kills += 1
        while self._random.random() < 0.15:
            self._spawn()
            time.sleep(self._random.uniform(0, 1.2))
            self._server.kill()
            self.kills_at_start += 1
        self._serve()

    def stop(self) -> list[dict[str, Any]]:
        """Everybody ends in order; what they say."""
        self._wait_for_traffic(len(self._board.calls))
        self._board.stop[...] = 1
        said = [json.loads(p.finish(0, DEADLINE + SLACK)) for p in (*self._writers, *self._others)]
        for process, code in self._ended:
            process.finish(code, DEADLINE + SLACK)
        self._server.send(signal.SIGTERM)
        self._server.finish(0, DEADLINE)
        return said

    def _replace_writer(self) -> None:
        """Kills a writer, or lets it sleep until its successor has written."""
        place = self._random.randrange(WRITERS)
        if self._lives[place] == LIVES - 1 or any(
            p.name.startswith(f"write-{place}") and not p.ended for p, _ in self._ended
        ):
            return
        old = self._writers[place]
        if self._random.random() < 0.5:
            old.kill()
        else:
            old.send(signal.SIGSTOP)
            self._ended.append((old, SUPERSEDED))
        self._lives[place] += 1
        self._writers[place] = self._writer(place)
        self.writer_kills += 1

    def _wake_sleepers(self) -> None:
        for process, _ in self._ended:
            place = int(process.name.split("-")[1])
            if self._board.acknowledged[place, self._lives[place]].all():
                process.send(signal.SIGCONT)

    def _writer(self, place: int) -> Process:
        return self._worker("write", place=place, life=self._lives[place], seed=self._seed)

    def _worker(self, role: str, place: int, **options: Any) -> Process:
        name = f"{role}-{place}-{next(self._numbers)}"
        command = [__file__, "--work", role, "--directory", str(self._directory)]
        return Process(
            self._stack, self._directory, name, [*command, "--options", json.dumps({"place": place, **options})]
        )

    def _spawn(self) -> None:
        command = ["-m", "replay_server", "--directory", str(self._directory / "tables")]
        # with marks all the time, so that kills come in the middle of them too
        options = ["--listen", f"unix:{self._directory}/socket", "--flush-every", "0.3"]
        self._server = Process(self._stack, self._directory, f"server-{next(self._numbers)}", [*command, *options])

    def _serve(self) -> None:
        """Starts a server, and waits until it says that it serves."""
        begin = time.monotonic()
        self._spawn()
        while not self._server.out.read_text().endswith("\n"):
            check(not self._server.ended, "the server ended at its start", self._server.err.read_text())
            check(time.monotonic() - begin < DEADLINE, "the server does not start", self._server.err.read_text())
            time.sleep(0.005)
        self.longest_restart = max(self.longest_restart, time.monotonic() - begin)

    def _wait_for_traffic(self, processes_that_call: int) -> None:
        """Until so many processes have made a call, a writer among them. AssertionError if one has ended or hangs."""
        before, begin = self._board.calls.copy(), time.monotonic()
        processes = [*self._writers, *self._others]
        while True:
            self._wake_sleepers()
            moved = self._board.calls != before
            if moved[:WRITERS].any() and moved.sum() >= processes_that_call:
                break
            for process in processes:
                check(not process.ended, process.name, "ended:", process.err.read_text())
            time.sleep(0.002)
            if time.monotonic() - begin > DEADLINE + SLACK:
                processes[int((~moved).argmax())].hangs()
        now, calls = time.monotonic(), self._board.calls.copy()
        since, then = self._moved
        if now - since > DEADLINE + SLACK:
            for process, stuck in zip(processes, calls == then, strict=True):
                if stuck:
                    process.hangs()
            self._moved = now, calls


def run(directory: Path, kills: int, seconds: float, seed: int) -> Report:
    """Chaos until the server was killed so often, and at least once in the middle of a tick, or for so long.

    Raises AssertionError for anything that went wrong.

    directory: empty; its path must be short enough for a socket's.
    """
    begin = time.monotonic()
    memory = slots()
    with ExitStack() as stack:
        chaos = Chaos(stack, directory, seed)
        chaos.start()
        while time.monotonic() - begin < seconds and (chaos.kills < kills or not ticks_taken_back(directory)):
            chaos.strike()
        said = chaos.stop()
    board = Board(directory / "board")
    longest = max(each["longest"] for each in said)
    check(longest <= DEADLINE + SLACK, "a call took", longest, "seconds")
    check_memory(memory, directory)

    witness = Witness()
    newest = read_back(directory / "tables", witness)
    for each in said:
        for w, e, k, *place in each.get("begins", []):
            begins = witness.begins.setdefault((w, e, k), set())
            begins.add(tuple(place))
            check(len(begins) == 1, "rows lost or doubled", f"writer {w} environment {e} life {k} begins at", begins)
    rows = count_rows(witness, board, newest)
    backs = said[-1]
    check_versions(backs["newest"], newest)
    check_memory(memory, directory)
    return Report(
        seed=seed,
        seconds=round(time.monotonic() - begin, 1),
        kills=chaos.kills,
        kills_at_start=chaos.kills_at_start,
        writer_kills=chaos.writer_kills,
        ticks_taken_back=ticks_taken_back(directory),
        rows=rows,
        acknowledged=int(board.acknowledged.sum()),
        windows=sum(each.get("windows", 0) for each in said),
        written_back=backs["written"],
        stale=backs["stale"],
        longest_call=round(longest, 2),
        longest_restart=round(chaos.longest_restart, 2),
    )


Newest = dict[int, dict[int, tuple[int, int, int, int, int]]]
"""Environment -> row -> (writer, life, its environment, number, version of its latents; -1 where they are not sent)."""


def read_back(directory: Path, witness: Witness) -> Newest:
    """Every row that the table holds, by sampling so much that none is missed."""
    tables = Tables(directory, memory_limit=1 << 30, rng=np.random.default_rng(0))
    try:
        table = tables.get(TABLE)
        found: Newest = {e: {} for e in range(SPEC.max_envs)}
        for _ in range(20):
            chosen = table.choose(4096, "report")
            out = {name: np.empty((4096, *shape), dtype) for name, (shape, dtype) in table.served.items()}
            table.fill(chosen, out)
            env_id, first_row = chosen.env_id, chosen.first_row
            window = Window(env_id=env_id.astype(np.int32), first_row=first_row, **from_columns(out))  # type: ignore[arg-type]  # each field is given its array or dict
            witness.look(window)
            version = np.full(window.reward.shape, -1)
            version[:, : SPEC.window.context] = window.latents["whose"][..., 4]
            for e, first, who, versions in zip(
                env_id.tolist(), first_row.tolist(), window.obs["who"], version, strict=True
            ):
                for i, (w, v) in enumerate(zip(who.tolist(), versions.tolist(), strict=True)):
                    old = found[e].get(first + i, (0, 0, 0, 0, -1))
                    found[e][first + i] = (*w, max(v, old[4]))
        stats = table.stats()
        check(sum(map(len, found.values())) == stats.rows_held, "rows that cannot be read:", stats)
        for e, rows in found.items():
            check(max(rows) - min(rows) + 1 == len(rows), "a hole in environment", e)
        check(sum(max(rows) + 1 for rows in found.values()) == stats.rows, "rows that are not counted:", stats)
        return found
    finally:
        tables.close()


def count_rows(witness: Witness, board: Board, newest: Newest) -> int:
    """Rows ever held; raises AssertionError where rows between the lives that were seen are missing or double."""
    total = 0
    for place, env in itertools.product(range(WRITERS), range(ENVS)):
        seen = sorted((k, *next(iter(at))) for (w, e, k), at in witness.begins.items() if (w, e) == (place, env))
        check(len({table_env for _, table_env, _ in seen}) == 1, "an environment at two places", place, env, seen)
        head = max(newest[seen[0][1]]) + 1
        # before the first life that was seen, and after the last one, there may be lives that left nothing to see
        points = [(0, 0), *((k, begin) for k, _, begin in seen), (LIVES, head)]
        for (k, begin), (after, end) in itertools.pairwise(points):
            least = int(board.acknowledged[place, k:after, env].sum())
            most = int(board.sent[place, k:after, env].sum())
            check(
                least <= end - begin <= most,
                f"writer {place} environment {env} lives {k} to {after - 1} have {end - begin} rows;",
                f"acknowledged {least}, sent {most}",
            )
        total += head
    return total


def check_versions(versions: list[list[int]], newest: Newest) -> None:
    """The rows' latents are those of the last write-back that was acknowledged, or of one that came after it."""
    for e, r, least, most in versions:
        if r in newest[e] and newest[e][r][4] >= 0:
            version = newest[e][r][4]
            check(least <= version <= most, "latents of an impossible age", f"environment {e} row {r}", version)


def ticks_taken_back(directory: Path) -> int:
    """As the servers said when they came back."""
    return sum(path.read_text().count("event=tick_taken_back") for path in directory.glob("server-*.err"))


def check_memory(before: set[Path], directory: Path) -> None:
    """Nothing of this run is left in shared memory. Others may be using it too."""
    deadline = time.monotonic() + SLACK
    while new := slots() - before:  # somebody else's are named for a moment only
        check(time.monotonic() < deadline, "left in shared memory:", *new)
        time.sleep(0.1)
    for owner in SHARED_MEMORY.glob("telamon-table-*/owner"):
        check(str(directory) not in owner.read_text(), "left in shared memory:", owner)


def slots() -> set[Path]:
    return set(SHARED_MEMORY.glob("telamon-slots-*"))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=5.0)
    p.add_argument("--kills", type=int, default=sys.maxsize, help="stop after so many, if that is earlier")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--work", choices=ROLES, help=argparse.SUPPRESS)
    p.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    return p


def main() -> int:
    args = parser().parse_args()
    if args.work:
        return work(args.work, args.directory, args.options)
    directory = Path(tempfile.mkdtemp(prefix="telamon-chaos-"))
    try:
        report = run(directory, args.kills, 60 * args.minutes, args.seed)
    except AssertionError:
        print(f"what the processes said is in {directory}", file=sys.stderr)
        raise
    print(json.dumps(asdict(report)))
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
