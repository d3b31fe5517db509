"""What a replay server counts, as Prometheus reads it (docs/metrics.md lists every name).

Rows are counted by their tables, and read when somebody looks; the rest is counted here once per request, never per
row. Requests are the messages of a streaming call, and unary calls.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replay_server.store import Store
from telamon.replay import Purpose, ReplayStats, TableSpec

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the latency histogram."""
AGES = 4 ** np.arange(13)
"""Upper bounds, in rows, of the histogram of ages: 1 to 16.8 million."""
SERVED = "Windows served; those for reports count for nothing else."
SERVED_BYTES = "Bytes of the windows served."


class Table(Protocol):
    """What a table tells of itself."""

    @property
    def spec(self) -> TableSpec: ...

    @property
    def credit(self) -> int: ...

    @property
    def num_envs(self) -> int: ...

    def stats(self) -> ReplayStats: ...


class Metrics:
    """Metrics of one server in `registry`.

    tables: (name, table) of every table, asked for at each look.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        tables: Callable[[], Iterable[tuple[str, Table]]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.registry = registry
        self._clock = clock
        self._calls = Counter(
            "telamon_replay_calls_total",
            "Calls that have ended, by status code; CANCELLED: the client of a stream went away.",
            ["method", "code"],
            registry=registry,
        )
        self._open = Gauge(
            "telamon_replay_open_calls", "Calls in progress: streams that are open.", ["method"], registry=registry
        )
        self._connections = Gauge(
            "telamon_replay_connections",
            "Connections with calls in progress; those over a unix socket count as one.",
            registry=registry,
        )
        self._peers: Counts[str] = Counts()
        self._peers_lock = threading.Lock()
        self._busy = Gauge(
            "telamon_replay_busy_requests",
            "Requests that are being answered: the queue. A request is a frame of a stream, or an unary call.",
            ["method"],
            registry=registry,
        )
        self._seconds = Histogram(
            "telamon_replay_request_seconds", "From the arrival of a request to its answer.", ["method"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._credit_wait = Counter(
            "telamon_replay_credit_wait_seconds_total", "Spent by appends on waiting for insert credit.", ["table"],
            registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "telamon_replay_refused_rows_total", "Rows that were sent and not stored, by status code.",
            ["table", "reason"], registry=registry,
        )  # fmt: skip
        self._windows = Counter("telamon_replay_sampled_windows_total", SERVED, ["table", "purpose"], registry=registry)
        self._sampled_bytes = Counter("telamon_replay_sampled_bytes_total", SERVED_BYTES, ["table"], registry=registry)
        self._unauthenticated = Counter(
            "telamon_replay_unauthenticated_calls_total", "Calls refused for want of the token.", registry=registry
        )
        self._ages = _Ages()
        registry.register(self._ages)
        TableMetrics(tables, registry)

    @contextmanager
    def call(self, method: str, peer: str, code: Callable[[], str]) -> Iterator[None]:
        """Counts a call of `peer` while its block runs; code: its status code, asked for at its end."""
        self._open.labels(method).inc()
        self._connected(peer, 1)
        try:
            yield
        finally:
            self._connected(peer, -1)
            self._open.labels(method).dec()
            self._calls.labels(method, code()).inc()

    def _connected(self, peer: str, calls: int) -> None:
        with self._peers_lock:
            self._peers[peer] += calls
            if not self._peers[peer]:  # so that no more are known than there are calls
                del self._peers[peer]
            self._connections.set(len(self._peers))

    @contextmanager
    def request(self, method: str) -> Iterator[None]:
        """Times a request while its block runs."""
        self._busy.labels(method).inc()
        began = self._clock()
        try:
            yield
        finally:
            self._seconds.labels(method).observe(self._clock() - began)
            self._busy.labels(method).dec()

    def waited_for_credit(self, table: str, seconds: float) -> None:
        self._credit_wait.labels(table).inc(seconds)

    def refused(self, table: str, reason: str, rows: int) -> None:
        self._refused.labels(table, reason).inc(rows)

    def sampled(self, table: str, purpose: Purpose, nbytes: int, ages: np.ndarray) -> None:
        """Counts a batch of windows. ages: int64 [B], rows appended to the environment since each first row."""
        self._windows.labels(table, purpose).inc(ages.size)
        self._sampled_bytes.labels(table).inc(nbytes)
        self._ages.observe(table, ages)

    def unauthenticated(self) -> None:
        self._unauthenticated.inc()


class _Ages(Collector):
    """Counts of ages in buckets, by table: a histogram that takes a whole batch at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, np.ndarray] = {}
        self._sums: dict[str, int] = {}

    def observe(self, table: str, ages: np.ndarray) -> None:
        counts = np.bincount(AGES.searchsorted(ages), minlength=AGES.size + 1)
        total = int(ages.sum())
        with self._lock:
            self._counts[table] = self._counts.get(table, 0) + counts
            self._sums[table] = self._sums.get(table, 0) + total

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(
            "telamon_replay_sampled_age_rows", "Rows appended to its environment since a sampled window's first row.",
            labels=["table"],
        )  # fmt: skip
        bounds = [*(str(float(bound)) for bound in AGES), "+Inf"]
        with self._lock:
            for table, counts in self._counts.items():
                cumulative = [float(count) for count in counts.cumsum()]
                family.add_metric([table], list(zip(bounds, cumulative, strict=True)), self._sums[table])
        yield family


_GAUGES: dict[str, tuple[str, Callable[[Table, ReplayStats], float]]] = {
    "held_rows": ("Rows in the rings.", lambda table, stats: stats.rows_held),
    "held_bytes": ("Bytes of the rows in the rings.", lambda table, stats: stats.bytes_held),
    "full_bytes": ("Bytes of the table when all its rings are full.", lambda table, stats: table.spec.nbytes),
    "environments": ("Environments that have joined.", lambda table, stats: table.num_envs),
    "items": ("What a draw chooses among: windows, or closed episodes.", lambda table, stats: stats.items),
    "online_queue_windows": ("Fresh windows that wait to be served.", lambda table, stats: stats.online_queue),
    "credit_rows": ("Rows that may have been appended in all; negative: no bound.", lambda table, stats: table.credit),
}
_COUNTERS: dict[str, tuple[str, Callable[[Table, ReplayStats], float]]] = {
    "appended_rows": ("Rows appended.", lambda table, stats: stats.rows),
    "appended_bytes": ("Bytes of the rows appended.", lambda table, stats: stats.rows * table.spec.row.nbytes),
    "written_back_rows": ("Rows whose latents were replaced.", lambda table, stats: stats.written_back),
    "stale_rows": ("Rows of write-backs dropped because they were no longer held.", lambda table, stats: stats.stale),
}
"""Since this process began; the table itself counts on after a restart."""


class _Rising:
    """Counters that never fall: what a restore takes back from a table is not taken from them, or `rate` would add all
    that is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}
        """(table, counter) -> value at the last look, and what is shown."""

    def begin(self, table: str, counter: str, value: float) -> None:
        """From now on the counter starts at 0 here, where it is at `value`."""
        self._seen[table, counter] = value, 0.0

    def look(self, table: str, counter: str, value: float) -> float:
        """What to show."""
        with self._lock:
            last, shown = self._seen.get((table, counter), (0.0, 0.0))
            shown += max(0.0, value - last)
            self._seen[table, counter] = value, shown
            return shown


class TableMetrics(Collector):
    """What tables tell of themselves, in `registry`. tables: (name, table) of every table, asked for at each look.

    The counters of those that are there already start at 0 here: where a restore had taken something back, what is
    shown would fall with a restart to what the table has, and `increase` would add all of that.
    """

    def __init__(self, tables: Callable[[], Iterable[tuple[str, Table]]], registry: CollectorRegistry) -> None:
        self._tables = tables
        self._rising = _Rising()
        for name, table in tables():
            stats = table.stats()
            for entry, (_, value) in _COUNTERS.items():
                self._rising.begin(name, entry, value(table, stats))
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        looked = [(name, table, table.stats()) for name, table in self._tables()]
        for entry, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"telamon_replay_{entry}", text, labels=["table"])
            for name, table, stats in looked:
                gauge.add_metric([name], value(table, stats))
            yield gauge
        for entry, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(f"telamon_replay_{entry}", text, labels=["table"])
            for name, table, stats in looked:
                counter.add_metric([name], self._rising.look(name, entry, value(table, stats)))
            yield counter


@dataclass(frozen=True)
class Embedded:
    """A store that a process keeps for itself, as a table: its environments are all there, its appends never wait."""

    store: Store
    credit: int = -1

    @property
    def spec(self) -> TableSpec:
        return self.store.spec

    @property
    def num_envs(self) -> int:
        return self.spec.max_envs

    def stats(self) -> ReplayStats:
        return self.store.stats()


class StoreMetrics(Collector):
    """Those of a server's table, in `registry`, for a store that this process keeps for itself: as far as it counts.

    name: of the table. Counters start at 0 here: what a resumed run goes on from, it may have gone beyond before.
    """

    def __init__(self, name: str, store: Store, registry: CollectorRegistry) -> None:
        self._name, self._store = name, store
        self._window_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in store.served.values())
        self._served_before = store.stats().sampled_windows
        tables = [(name, Embedded(store))]
        TableMetrics(lambda: tables, registry)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        served = self._store.stats().sampled_windows - self._served_before
        windows = CounterMetricFamily("telamon_replay_sampled_windows", SERVED, labels=["table", "purpose"])
        windows.add_metric([self._name, "train"], served)
        yield windows
        sizes = CounterMetricFamily("telamon_replay_sampled_bytes", SERVED_BYTES, labels=["table"])
        sizes.add_metric([self._name], served * self._window_bytes)
        yield sizes


class DiskMetrics(Collector):
    """The file system of `directory`, in `registry`."""

    def __init__(self, directory: Path, registry: CollectorRegistry) -> None:
        self._directory = directory
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        usage = shutil.disk_usage(self._directory)
        yield GaugeMetricFamily(
            "telamon_replay_disk_size_bytes", "Size of the file system that the rows are on.", value=usage.total
        )
        yield GaugeMetricFamily(
            "telamon_replay_disk_free_bytes", "Free bytes of the file system that the rows are on.", value=usage.free
        )
