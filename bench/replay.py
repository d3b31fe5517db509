"""Speed of the replay: rows inserted, windows sampled, latents written back, embedded and over every path. JSON lines.

Rows: `dreamerv3` is size12m (deter of 2048 float32, 32 classes, 24 numbers seen; windows of 65, 16 at a time) and
sends the latents of the context row alone; `dreamerv3-all` are the same rows with every latent sent, as columns that
are seen; `pixels` are 64 x 64 x 3 bytes; `items` are the peer's: 65 steps of 9.2 KB; `tdmpc2` is walker-walk with
horizon 3, 256 windows at a time.

Paths: `embedded` is the store in the caller's own process; `shared` hands over slots of shared memory and `unix` sends
bytes through the same socket; `tcp` is loopback. Clients are processes, of which each appends ticks of its own
environments; "sample while inserting" has as many that insert beside those that sample, its bytes are both.

Every case takes turns with its limit in the same processes: numpy's copy (embedded, shared) or the bare gRPC stream
(bench/replay_limits.py). A case's bytes are those that must be moved once: rows in, windows out, latents back;
`share` is their rate over that of the limit, `share_of_exchange` over that of a bare gRPC call which answers each
request with as many messages of the same size. `cpu_s_per_gb` has CPU seconds per 10^9 of those bytes. p50 and p99 are
of one call: append of a tick (acknowledged later, and at the end of each turn), append that waits for its
acknowledgement, sample of a batch, write-back of its rows.

python bench/replay.py [--rows dreamerv3 ...] [--paths shared ...] [--clients 1 4] [--seconds 0.15]  (all: four minutes)
python bench/replay.py --ring 5000000   a table of so many small rows, made, filled, killed, opened again: half a minute
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]  # it has no type information

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.replay_limits import BareDown, BareUp, Memcpy
from replay_server.store import Store
from telamon.allocator import keep_freed_memory
from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec, WriteBack, as_dtype
from telamon.replay import Replay, TableSpec
from telamon.rpc.client import Client
from telamon.rpc.codec import frames_of
from telamon.rpc.security import TOKEN_VARIABLE, Endpoint

ROOT = Path(__file__).parent.parent
TOKEN = "the-token-of-a-benchmark"
TABLE = "bench"
EPISODE = 500
TIMEOUT = 60.0
BUFFER_BYTES = 16 << 20
"""Of unacknowledged rows that a client keeps."""
ROUNDS = 4
"""Turns of a case and its limit, the first of which is dropped."""
PATHS = ("embedded", "shared", "unix", "tcp")
GOALS = {"shared": 0.5, "unix": 0.9, "tcp": 0.9}
"""Shares of the limit that a path was meant to reach."""
GOAL_INSERT = 50_000
"""Rows of 9 KB per second."""
PEER = {
    ("insert", False): ("rows_per_second", 12_800),
    ("sample", False): ("gb_per_second", 0.65),
    ("sample", True): ("gb_per_second", 1.8),
}
"""(case, whether embedded) -> dm-reverb 0.14 on two cores of this kind, with items of 65 steps x 9.2 KB."""


@dataclass(frozen=True)
class Kind:
    """Rows and windows of one sort of agent."""

    row: RowSpec
    window: WindowSpec
    batch: int
    """Windows per sample."""
    held: int
    """Rows that the table holds over all environments."""

    @property
    def latent_bytes(self) -> int:
        """Of one row."""
        return sum(array.nbytes for _, array in self.row.latents)

    @property
    def window_bytes(self) -> int:
        """Of one window as it is served."""
        sent = self.window.context if self.window.latents == "context" else 0
        return self.window.length * (self.row.nbytes - self.latent_bytes) + sent * self.latent_bytes


LATENTS = (("deter", ArraySpec((2048,))), ("stoch", ArraySpec((32,), "uint8")))
VECTOR, ACTION = ("obs", ArraySpec((24,))), ArraySpec((6,))
SEQUENCES = WindowSpec(
    65, 1, cross_episodes=True, closed_only=False, start="windows", latents="context", online=True, annotate=True
)
KINDS = {
    "dreamerv3": Kind(RowSpec((VECTOR,), ACTION, LATENTS), SEQUENCES, 16, 40_000),
    "dreamerv3-all": Kind(RowSpec((VECTOR, *LATENTS), ACTION), SEQUENCES, 16, 40_000),
    "pixels": Kind(RowSpec((("image", ArraySpec((64, 64, 3), "uint8")),), ACTION), SEQUENCES, 16, 24_000),
    "items": Kind(RowSpec((("step", ArraySpec((9216,), "uint8")),), ArraySpec(())), SEQUENCES, 16, 32_000),
    "tdmpc2": Kind(RowSpec((VECTOR,), ACTION), WindowSpec(4), 256, 200_000),
}


class Source:
    """Ticks of `num_envs` environments whose episodes all end together."""

    def __init__(self, row: RowSpec, num_envs: int) -> None:
        self.num_envs, self._ticks = num_envs, 0
        values = {name: np.ones((num_envs, *array.shape), as_dtype(array.dtype)) for name, array in row.columns.items()}
        group = lambda prefix: {
            name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)
        }
        self._values: dict[str, Any] = {
            "env_id": np.arange(num_envs, dtype=np.int32),
            "obs": group("obs/"),
            "latents": group("latents/"),
            "reward": values["reward"],
            "action": values["action"],
            "is_terminal": np.zeros(num_envs, bool),
        }

    def next(self) -> Rows:
        flag = lambda at: np.full(self.num_envs, self._ticks % EPISODE == at)
        rows = Rows(**self._values, is_first=flag(0), is_last=flag(EPISODE - 1))
        self._ticks += 1
        return rows


@dataclass(frozen=True)
class Work:
    """What one task did in one turn."""

    units: int
    nbytes: int
    seconds: float
    calls: list[float]
    """Seconds of each."""


Step = Callable[[], tuple[int, int]]
"""One call; returns (units, bytes)."""


def nothing() -> None: ...


class Worker:
    """One client: its replay, the limits of its path, and what it is asked to do with them."""

    def __init__(self, kind: Kind, num_envs: int, replay: Replay, flush: Callable[[], None], bare: str) -> None:
        """flush: waits until everything appended is acknowledged. bare: address of the bare stream."""
        self._kind, self._replay, self._flush, self._bare = kind, replay, flush, bare
        self._source = Source(kind.row, num_envs)
        self._limits: dict[tuple[int, str], Memcpy | BareDown | BareUp] = {}

    def fill(self, ticks: int) -> None:
        for _ in range(ticks):
            self._insert()
        self._flush()

    def turn(self, tasks: Sequence[str], seconds: float) -> tuple[list[Work], float]:
        """Repeats each task for that long, each in a thread of its own; returns also this process's CPU seconds."""
        steps = [self._step(i, task) for i, task in enumerate(tasks)]
        cpu = time.process_time()
        with ThreadPoolExecutor(len(steps)) as threads:
            works = list(threads.map(lambda step: repeat(step[0], step[1], seconds), steps))
        return works, time.process_time() - cpu

    def close(self) -> None:
        for limit in self._limits.values():
            limit.close()

    def _step(self, index: int, task: str) -> tuple[Step, Callable[[], None]]:
        """(what is repeated, what comes after)."""
        if task == "insert":
            return self._insert, self._flush
        if task == "insert-acknowledged":
            return self._insert_acknowledged, nothing
        if task == "sample":
            return self._sample, nothing
        if task == "write-back":
            return self._write_back(), nothing
        if (index, task) not in self._limits:
            self._limits[index, task] = self._limit(task)
        limit = self._limits[index, task]
        return lambda: (1, limit.call()), nothing

    def _limit(self, task: str) -> Memcpy | BareDown | BareUp:
        if task == "memcpy":
            return Memcpy()
        if task == "up":
            return BareUp(self._bare)
        if task == "down":
            return BareDown(self._bare)
        window, frames = self._kind.window_bytes, list(frames_of(self._kind.batch, self._kind.window_bytes))
        return BareDown(self._bare, window * self._kind.batch // len(frames), len(frames))

    def _insert(self) -> tuple[int, int]:
        self._replay.append(self._source.next())
        return self._source.num_envs, self._source.num_envs * self._kind.row.nbytes

    def _insert_acknowledged(self) -> tuple[int, int]:
        done = self._insert()
        self._flush()
        return done

    def _sample(self) -> tuple[int, int]:
        self._replay.sample(self._kind.batch)
        return self._kind.batch, self._kind.batch * self._kind.window_bytes

    def _write_back(self) -> Step:
        """Of all rows but the context of one batch, drawn now."""
        drawn, window = self._replay.sample(self._kind.batch), self._kind.window
        row = drawn.first_row[:, None] + np.arange(window.context, window.length)
        ones = {name: np.ones((row.size, *v.shape), as_dtype(v.dtype)) for name, v in self._kind.row.latents}
        update = WriteBack(np.repeat(drawn.env_id, row.shape[1]), row.reshape(-1), ones, drawn.incarnation)

        def step() -> tuple[int, int]:
            self._replay.write_back(update)
            return row.size, row.size * self._kind.latent_bytes

        return step


def repeat(step: Step, after: Callable[[], None], seconds: float) -> Work:
    calls: list[float] = []
    units = nbytes = 0
    begin = before = time.perf_counter()
    while not calls or before - begin < seconds:
        done, moved = step()
        units, nbytes, now = units + done, nbytes + moved, time.perf_counter()
        calls.append(now - before)
        before = now
    after()
    return Work(units, nbytes, time.perf_counter() - begin, calls)


@dataclass(frozen=True)
class Job:
    """What a client process is started with."""

    kind: Kind
    index: int
    num_envs: int
    """Of this client."""
    table: TableSpec
    path: str
    address: str
    """Of the server; of none where the path is embedded."""
    bare: str

    def open(self, stack: ExitStack) -> tuple[Replay, Callable[[], None]]:
        """(replay, its flush)."""
        if self.path == "embedded":
            spec = self.table
            return Store(spec.row, spec.window, spec.max_envs, spec.capacity, np.random.default_rng(0)), nothing
        client = Client(
            Endpoint(self.address, TOKEN), TABLE, self.table, stream=f"client{self.index}", num_envs=self.num_envs,
            seed=self.index, timeout=TIMEOUT, shared_memory=self.path == "shared",
            buffer_ticks=max(1, min(256, BUFFER_BYTES // (self.num_envs * self.kind.row.nbytes))),
        )  # fmt: skip
        stack.callback(client.close)
        return client, lambda: client.flush(TIMEOUT)


def employ(job: Job, orders: Connection) -> None:
    """A client process: does what it is told, answers, and ends when the orders do."""
    keep_freed_memory()
    with ExitStack() as stack:
        worker = Worker(job.kind, job.num_envs, *job.open(stack), job.bare)
        stack.callback(worker.close)
        with suppress(EOFError):
            while True:
                method, *arguments = orders.recv()
                orders.send(getattr(worker, method)(*arguments))


class Crew:
    """Client processes."""

    def __init__(self, jobs: Sequence[Job], stack: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders: list[Any] = []
        self.pids: list[int] = []
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=employ, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(ours.close)
            self._orders.append(ours)
            self.pids.append(process.pid or 0)

    def fill(self, ticks: int) -> None:
        self._all("fill", [(ticks,)] * len(self._orders))

    def turn(self, tasks: Sequence[Sequence[str]], seconds: float) -> tuple[list[tuple[str, Work]], float]:
        """Entry i of `tasks` goes to client i; returns (task, its work) of all, and the CPU seconds of all clients."""
        answers = self._all("turn", [(task, seconds) for task in tasks])
        works = (zip(task, found, strict=True) for task, (found, _) in zip(tasks, answers, strict=True))
        return list(chain.from_iterable(works)), sum(cpu for _, cpu in answers)

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        engaged = self._orders[: len(arguments)]
        for orders, each in zip(engaged, arguments, strict=True):
            orders.send((method, *each))
        return [orders.recv() for orders in engaged]


@contextmanager
def bare_server(address: str) -> Iterator[tuple[psutil.Process, str]]:
    """Gives a process that serves the bare stream, and its address."""
    command = [sys.executable, str(ROOT / "bench" / "replay_limits.py"), address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = process.stdout.readline().strip()
        try:
            yield psutil.Process(process.pid), address if address.startswith("unix:") else f"127.0.0.1:{port}"
        finally:
            process.stdin.close()


@contextmanager
def replay_server(directory: Path, listen: str) -> Iterator[tuple[psutil.Process, str]]:
    """Gives a server's process, already serving, and its address; stops it."""
    command = [sys.executable, "-m", "replay_server", "--directory", str(directory), "--listen", listen]
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {process.wait()} before it served; its errors are above")
        try:
            yield psutil.Process(process.pid), json.loads(line)["address"]
        finally:
            process.terminate()


@dataclass(frozen=True)
class Case:
    name: str
    tasks: tuple[tuple[str, ...], ...]
    """Of each client."""


DIRECTION = {"insert": "up", "insert-acknowledged": "up", "write-back": "up", "sample": "down"}
"""Task -> which bare stream is its limit over the wire."""
UNIT = {"insert": "rows", "insert-acknowledged": "rows", "write-back": "rows", "sample": "windows"}


def cases(kind: Kind, path: str, clients: Sequence[int]) -> Iterator[Case]:
    names = ["insert", "sample", *(["write-back"] if kind.latent_bytes else [])]
    for name, count in product(names, [1] if path == "embedded" else clients):
        yield Case(name, ((name,),) * count)
    if path == "embedded":
        yield Case("sample while inserting", (("insert", "sample"),))
        return
    yield Case("insert-acknowledged", (("insert-acknowledged",),))
    for count in clients:
        half = max(1, count // 2)
        yield Case("sample while inserting", (("insert",),) * half + (("sample",),) * half)


def digits(value: float) -> float:
    """`value` with four of its digits."""
    return float(f"{value:.4g}")


class Turns:
    """Turns of the same tasks, by clients of one server. server: None where there is none."""

    def __init__(self, tasks: Sequence[Sequence[str]], server: psutil.Process | None) -> None:
        self._tasks, self._server = tasks, server
        self.works: list[list[tuple[str, Work]]] = []
        self._client_cpu = self._server_cpu = 0.0

    def run(self, crew: Crew, seconds: float, counts: bool) -> None:
        before = self._served()
        works, cpu = crew.turn(self._tasks, seconds)
        if counts:
            self.works.append(works)
            self._client_cpu += cpu
            self._server_cpu += self._served() - before

    @property
    def gb_per_second(self) -> np.ndarray:
        """Of each turn, all clients together."""
        return np.array([sum(work.nbytes / work.seconds for _, work in works) / 1e9 for works in self.works])

    @property
    def cpu_s_per_gb(self) -> tuple[float, float]:
        """Of the server and of the clients."""
        gigabytes = sum(work.nbytes for works in self.works for _, work in works) / 1e9
        return digits(self._server_cpu / gigabytes), digits(self._client_cpu / gigabytes)

    def of(self, task: str) -> dict[str, float]:
        own = [[work for name, work in works if name == task] for works in self.works]
        milliseconds = np.array([1e3 * call for works in own for work in works for call in work.calls])
        return {
            f"{UNIT[task]}_per_second": round(statistics.median(sum(w.units / w.seconds for w in ws) for ws in own)),
            f"{task}_p50_ms": digits(float(np.percentile(milliseconds, 50))),
            f"{task}_p99_ms": digits(float(np.percentile(milliseconds, 99))),
        }

    def _served(self) -> float:
        return sum(self._server.cpu_times()[:2]) if self._server else 0.0


def measure(
    case: Case, path: str, crew: Crew, server: psutil.Process | None, bare: psutil.Process, seconds: float
) -> dict[str, Any]:
    """A line of results: the case and its limits in turns."""
    local = path in ("embedded", "shared")
    limits = [["memcpy" if local else DIRECTION[task] for task in tasks] for tasks in case.tasks]
    found, limit = Turns(case.tasks, server), Turns(limits, None if local else bare)
    exchange = None if local or case.name != "sample" else Turns([["exchange"]] * len(case.tasks), bare)
    for i in range(ROUNDS):
        for turns in (limit, exchange, found):
            if turns is not None:
                turns.run(crew, seconds, counts=i > 0)  # the first ones warm up
    median = lambda values: digits(float(np.median(values)))
    line: dict[str, Any] = {"clients": len(case.tasks)}
    for task in dict.fromkeys(chain.from_iterable(case.tasks)):
        line |= found.of(task)
    line |= {
        "gb_per_second": median(found.gb_per_second),
        "limit": "memcpy" if local else f"bare gRPC stream {' and '.join(dict.fromkeys(chain.from_iterable(limits)))}",
        "limit_gb_per_second": median(limit.gb_per_second),
        "share": median(found.gb_per_second / limit.gb_per_second),
    }
    if exchange is not None:
        line["exchange_gb_per_second"] = median(exchange.gb_per_second)
        line["share_of_exchange"] = median(found.gb_per_second / exchange.gb_per_second)
    for name, turns in (("", found), ("limit_", limit)):
        line[f"{name}server_cpu_s_per_gb"], line[f"{name}client_cpu_s_per_gb"] = turns.cpu_s_per_gb
    return line


def memory(process: psutil.Process, directory: Path) -> dict[str, float]:
    """Megabytes that a server's process and files take."""
    found = process.memory_info()
    shared = sum(each.rss for each in process.memory_maps() if each.path.startswith("/dev/shm/"))
    files = sum(512 * file.stat().st_blocks for file in directory.rglob("*") if file.is_file())
    sizes = {"rss": found.rss, "rss_without_files": found.rss - found.shared, "dev_shm": shared, "files": files}
    return {f"{name}_mb": round(size / 1e6, 1) for name, size in sizes.items()}


def compared(line: Mapping[str, Any]) -> dict[str, float]:
    """What a case was meant to reach, and what the peer reaches in it."""
    found: dict[str, float] = {}
    if (goal := GOALS.get(line["path"])) is not None:
        found["goal_share"] = goal
    if line["rows"] == "items":
        if line["case"] == "insert":
            found["goal_rows_per_second"] = GOAL_INSERT
        unit, rate = PEER.get((line["case"], line["path"] == "embedded"), ("", 0.0))
        if unit:
            found |= {f"peer_{unit}": rate, "times_peer": round(line[unit] / rate, 2)}
    return found


def session(rows: str, path: str, clients: Sequence[int], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Lines of one kind of rows over one path."""
    kind, processes = KINDS[rows], 1 if path == "embedded" else max(2, *clients)
    num_envs = options.envs * processes
    table = TableSpec(kind.row, kind.window, max(2 * EPISODE, (options.held or kind.held) // num_envs), num_envs)
    common = {
        "rows": rows, "path": path, "envs_per_client": options.envs,
        "bytes_per_row": kind.row.nbytes, "bytes_per_window": kind.window_bytes,
    }  # fmt: skip
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="telamon-bench-")))
        listen = lambda name: "127.0.0.1:0" if path == "tcp" else f"unix:{scratch / name}.sock"
        server, address = None, ""
        if path != "embedded":
            server, address = stack.enter_context(replay_server(scratch / "tables", listen("server")))
        bare, bare_address = stack.enter_context(bare_server(listen("bare")))
        crew = Crew([Job(kind, i, options.envs, table, path, address, bare_address) for i in range(processes)], stack)
        crew.fill(table.capacity)  # every page is touched before anything is timed
        for case in cases(kind, path, clients):
            line = {"case": case.name, **common, **measure(case, path, crew, server, bare, options.seconds)}
            yield line | compared(line)
        if server is not None:
            predicted = round(table.nbytes / 1e6, 1)
            yield {"case": "memory", **common, "predicted_mb": predicted, **memory(server, scratch / "tables")}


def ring(rows: int, envs: int) -> Iterator[dict[str, Any]]:
    """A full table of `rows` small rows: seconds to make, fill, and open it again after SIGKILL, and what it takes."""
    kind = KINDS["tdmpc2"]
    table = TableSpec(kind.row, kind.window, rows // envs, envs)
    common = {"rows": "tdmpc2", "rows_held": table.capacity * envs, "predicted_mb": round(table.nbytes / 1e6, 1)}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="telamon-bench-")))
        listen, directory = f"unix:{scratch}/server.sock", scratch / "tables"
        job = lambda address: Job(kind, 0, envs, table, "shared", address, "")
        begin = time.perf_counter()
        lap = lambda: round(time.perf_counter() - begin, 2)

        with ExitStack() as first:
            server, address = first.enter_context(replay_server(directory, listen))
            started = lap()
            replay, flush = job(address).open(first)
            yield {"case": "ring made", **common, "seconds": round(lap() - started, 2), **memory(server, directory)}
            begin = time.perf_counter()
            worker = Worker(kind, envs, replay, flush, "")
            worker.fill(table.capacity)
            seconds = lap()
            yield {
                "case": "ring filled", **common, "seconds": seconds, "rows_per_second": round(rows / seconds),
                **memory(server, directory),
            }  # fmt: skip
            server.kill()
            server.wait()

        begin = time.perf_counter()
        with ExitStack() as second:
            server, address = second.enter_context(replay_server(directory, listen))
            serves = lap()
            replay, _ = job(address).open(second)
            replay.sample(kind.batch)
            held = replay.stats().rows_held
            yield {
                "case": "ring opened after SIGKILL", **common, "rows_found": held, "seconds": serves,
                "seconds_to_first_sample": lap(), **memory(server, directory),
            }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", choices=tuple(KINDS), nargs="+", default=list(KINDS))
    p.add_argument("--paths", choices=PATHS, nargs="+", default=list(PATHS))
    p.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    p.add_argument("--envs", type=int, default=16, help="environments per client, one row of each per tick")
    p.add_argument("--held", type=int, help="rows that a table holds; by default what each kind says")
    p.add_argument("--seconds", type=float, default=0.15, help="of one turn; a case has three that count")
    p.add_argument("--ring", type=int, help="fill and open again a table of so many small rows, and nothing else")
    return p


def main() -> None:
    from bench.timing import commit  # loads JAX, which no client process needs

    options = parser().parse_args()
    keep_freed_memory()
    versions = {"python": platform.python_version(), "grpc": version("grpcio"), "numpy": np.__version__}
    if options.ring is not None:
        lines = ring(options.ring, options.envs)
    else:
        lines = chain.from_iterable(
            session(rows, path, options.clients, options) for rows, path in product(options.rows, options.paths)
        )
    for line in lines:
        print(json.dumps(line | versions | {"commit": commit()}), flush=True)


if __name__ == "__main__":
    main()
