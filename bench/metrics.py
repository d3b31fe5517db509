"""What being seen costs: CPU time of all that is counted, timed and named per tick and update, and of a look at a page.

Calls are counted in real ticks and in a real learner's loop; what one call takes comes from calling it many times, as
an end-to-end difference of 1 % drowns in a machine's noise. They are compared with the CPU time of the tick or update
itself, of the smallest agent there is. A page is looked at every 5 seconds. JSON lines, with the share of each.

python bench/metrics.py [--preset laptop] [--ticks 300] [--updates 100] [--calls 20000] [--scrapes 100]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation, TraceAnnotation

sys.path.insert(0, str(Path(__file__).parent.parent))  # a bare accelerator machine has no installed telamon

from actors.collector import LENGTHS, RETURNS, Collector
from actors.metrics import ActorMetrics, EvalFigures, EvaluatorMetrics, figures_of
from bench.timing import commit
from deploy.discovery import Targets
from deploy.metrics import DriverMetrics, RunFigures
from learner.batches import Source
from learner.loop import LearnerSetup, Loop
from learner.metrics import LearnerMetrics, LimiterMetrics
from learner.source import Ungated
from replay_server.metrics import DiskMetrics, Embedded, Metrics
from replay_server.store import Store
from telamon.agents.base import Agent
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import PRESETS, TDMPC2Config
from telamon.allocator import keep_freed_memory
from telamon.data import Counters, LimiterConfig
from telamon.envs import counting
from telamon.telemetry import pages
from telamon.telemetry.histogram import Histogram
from telamon.telemetry.stopwatch import Stopwatch

SCRAPE_SECONDS = 5.0
"""Between two looks at a page."""
EPISODE = 500
"""Environment steps of an episode; so long are the shortest of the tasks that published results are of."""
CAPACITY = 5000
REPEATS = 5
"""Of every micro-benchmark; the smallest counts, for a busy machine only adds."""
ACCEPT = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
"""As Prometheus asks."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--preset", default="laptop", choices=[*map(str, PRESETS)], help="of TD-MPC2")
    p.add_argument("--ticks", type=int, default=300)
    p.add_argument("--updates", type=int, default=100)
    p.add_argument("--calls", type=int, default=20_000, help="of each micro-benchmark")
    p.add_argument("--scrapes", type=int, default=100)
    return p


# what one call takes


def cpu_seconds(call: Callable[[], object], times: int) -> float:
    """CPU seconds of this thread per call, the loop around it included."""
    found = []
    for _ in range(REPEATS):
        began = time.thread_time()
        for _ in range(times):
            call()
        found.append((time.thread_time() - began) / times)
    return min(found)


def costs(times: int) -> dict[str, float]:
    """CPU seconds of one call of everything that counts or times."""
    watch = Stopwatch(("a", "b"), "a")
    returns, lengths = Histogram(RETURNS), Histogram(LENGTHS)
    replay = Metrics(pages.new_registry(), lambda: [])
    ages = np.arange(1, 257)
    spent = Counters()

    def episode() -> None:
        returns.observe(500.0)
        lengths.observe(500)

    def request() -> None:
        with replay.request("Append"):
            pass

    def add() -> None:
        spent.rows += 1

    def named() -> None:
        with TraceAnnotation("batch"):
            pass

    def numbered() -> None:
        with StepTraceAnnotation("update", step_num=spent.updates):
            pass

    calls: Mapping[str, Callable[[], object]] = {
        "stopwatch": lambda: watch.now("b"),
        "clock": time.monotonic,
        "add": add,
        "named": named,
        "numbered": numbered,
        "episode": episode,
        "request": request,
        "sampled": lambda: replay.sampled("main", "train", 1000, ages),
    }
    return {name: cpu_seconds(call, times) for name, call in calls.items()}


# how often it is called


@contextmanager
def counted(kind: type, name: str) -> Iterator[Counter[str]]:
    """Counts the calls of a method, by its name, while the block runs."""
    counts: Counter[str] = Counter()
    method = getattr(kind, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(*args, **kwargs)

    setattr(kind, name, call)
    try:
        yield counts
    finally:
        setattr(kind, name, method)


def ticks(collector: Collector, params: Any, number: int) -> tuple[float, Counter[str]]:
    """(CPU seconds of a tick of the whole process, calls in all ticks)."""
    for _ in range(5):
        collector.tick(params)  # compiles
    found = []
    for _ in range(number):
        began = time.process_time()
        collector.tick(params)
        found.append(time.process_time() - began)
    with counted(Stopwatch, "now") as calls:
        for _ in range(number):
            collector.tick(params)
    return statistics.median(found), calls


class Budget(Ungated):
    """A gate that ends the loop after so many updates, and notes the CPU time at each."""

    def __init__(self, updates: int) -> None:
        self.left = updates
        self.times: list[float] = []
        self.stop: Callable[[], None] = lambda: None

    def trained(self) -> None:
        self.times.append(time.process_time())
        self.left -= 1
        if not self.left:
            self.stop()


def learner_loop(agent: Agent, store: Store, updates: int, run_dir: Path) -> tuple[Loop, Budget, Counter[str]]:
    """A loop that made so many updates, and the calls in all of its life."""
    gate = Budget(updates)
    length = agent.window_spec.length - agent.window_spec.context
    limiter = LimiterConfig(
        1.0,
        rows_per_update=agent.batch_size * length,
        tick_rows=1,
        capacity=CAPACITY,
        band=10 * agent.batch_size * length,
    )
    setup = LearnerSetup(
        make_agent=lambda: agent, run_dir=run_dir, seed=0, endpoints=(), table="run", spec=store.spec, limiter=limiter,
        timeout=60.0, checkpoint_every=10**9, checkpoint_keep=1, max_skipped=5, first_version=1, meta={},
        metrics_port=None,
    )  # fmt: skip
    calls: Counter[str] = Counter()

    def clock() -> float:
        calls["clock"] += 1
        return time.monotonic()

    @contextmanager
    def connect(endpoints: object, totals: object) -> Iterator[Source]:
        yield Source(store, gate)

    loop = Loop(setup, connect, publish=lambda version, params: None, clock=clock)
    gate.stop = loop.stop
    with counted(Stopwatch, "now") as called:
        loop.run()
    return loop, gate, calls + called


# what a look takes


def scrape(register: Callable[[Any], object], times: int) -> tuple[float, int]:
    """(CPU seconds of this process per look, its reader's included; bytes as they are sent)."""
    registry = pages.new_registry()
    register(registry)
    with pages.serving(registry, "127.0.0.1", 0, "--metrics-port") as url:

        def look() -> int:
            with urllib.request.urlopen(urllib.request.Request(url, headers=ACCEPT)) as answer:
                return len(answer.read())

        size = look()
        found = []
        for _ in range(times):
            began = time.process_time()
            look()
            found.append(time.process_time() - began)
    return statistics.median(found), size


def replay_page(store: Store) -> Callable[[Any], object]:
    """A server with a table, all of whose methods have been called."""

    def register(registry: Any) -> None:
        DiskMetrics(Path.cwd(), registry)
        counts = Metrics(registry, lambda: [("run", Embedded(store))])
        for method in ("Append", "Sample", "WriteBack", "Configure", "Open", "Stats", "Grant", "Mark", "Restore"):
            with counts.call(method, "peer", lambda: "OK"), counts.request(method):
                pass
        counts.sampled("run", "train", 1000, np.arange(1, 257))

    return register


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results, one case each."""
    config = {str(name): values for name, values in PRESETS.items()}[options.preset]
    env = counting.make("continuous", 1, 0, lengths=(EPISODE,))
    agent = TDMPC2(TDMPC2Config(**config), env.spec)
    params = agent.acting_params(jax.jit(agent.init)(jax.random.key(0)))
    store = Store(agent.row_spec, agent.window_spec, 1, CAPACITY, np.random.default_rng(0))
    collector = Collector(agent, env, store, 0, Counters())
    shared = {
        "preset": options.preset, "device": jax.devices()[0].device_kind, "python": platform.python_version(),
        "jax": version("jax"), "commit": commit(),
    }  # fmt: skip
    each = costs(options.calls)
    yield {"case": "calls", **{f"{name}_us": round(1e6 * cost, 3) for name, cost in each.items()}, **shared}

    for _ in range(2 * EPISODE):  # episodes to sample from
        collector.tick(None)
    cpu, calls = ticks(collector, params, options.ticks)
    # the counts of rows, ticks, transitions and episodes, as if an episode ended; the name that it has in a trace of a
    # run of one process; the replay server's, which is sent it
    per_tick = {"stopwatch": calls["now"] / options.ticks, "add": 4, "episode": 1, "named": 1, "request": 1}
    yield case("tick", cpu, per_tick, each) | shared

    with tempfile.TemporaryDirectory() as folder:
        loop, gate, calls = learner_loop(agent, store, options.updates, Path(folder))
    cpu = statistics.median(np.diff(gate.times))
    # every reading of the clock in the loop's life, and an addition for each; the names in a trace, of the update, and
    # of its draw, its copy and its write-back; the server's, of the batch that it serves
    reads, watched = calls["clock"] / options.updates, calls["now"] / options.updates
    per_update = {
        "stopwatch": watched, "clock": reads, "add": reads, "numbered": 1, "named": 3, "request": 1, "sampled": 1,
    }  # fmt: skip
    yield case("update", cpu, per_update, each) | shared

    run = RunFigures("tdmpc2", "dmc:walker-walk", 0, version("telamon"), Path.cwd(), 10**6)
    shown: Mapping[str, Callable[[Any], object]] = {
        "actor": lambda registry: ActorMetrics(lambda: figures_of(collector), registry),
        "evaluator": lambda registry: EvaluatorMetrics(EvalFigures, registry),
        "learner": lambda registry: (
            LearnerMetrics(loop.status, loop.device_bytes, None, registry),
            LimiterMetrics(Ungated().status, loop._setup.limiter, registry),
        ),
        "replay": replay_page(store),
        "driver": lambda registry: DriverMetrics(lambda: run, Targets(Path.cwd()).counts, registry),
    }
    for page, register in shown.items():
        cpu, size = scrape(register, options.scrapes)
        yield {
            "case": "scrape", "page": page, "cpu_ms": round(1e3 * cpu, 3), "bytes": size, "every_s": SCRAPE_SECONDS,
            "share": round(cpu / SCRAPE_SECONDS, 6), **shared,
        }  # fmt: skip


def case(name: str, cpu: float, calls: Mapping[str, float], each: Mapping[str, float]) -> dict[str, Any]:
    """One line: what the calls take together, of `cpu` seconds."""
    spent = sum(number * each[call] for call, number in calls.items())
    return {
        "case": name, "cpu_ms": round(1e3 * cpu, 3), "metrics_us": round(1e6 * spent, 2),
        "share": round(spent / cpu, 6),
        "calls": {call: round(number, 2) for call, number in calls.items()},
    }  # fmt: skip


def main(arguments: Iterable[str] | None = None) -> None:
    options = parser().parse_args(None if arguments is None else [*arguments])
    keep_freed_memory()
    for line in lines(options):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
