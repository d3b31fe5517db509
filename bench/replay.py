"""Speed of the replay in process: rows added, windows sampled, windows sampled and written back. JSON lines.

`memcpy` is the rate of numpy's copy of 64 MB, one thread, timed between the repetitions of the case in the same run;
`share` is the case's bytes per second over it. A case's bytes are those it must copy once: rows in, windows out,
latents back.

python bench/replay.py [--envs 16] [--deter 2048] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.timing import commit
from replay_server.store import Store
from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec, WriteBack, as_dtype

OBS, ACTION, STOCH = 24, 6, 32
BATCH, LENGTH, CONTEXT = 16, 65, 1
EPISODE = 500
COPY = 64 << 20
WARM_UP = 3


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--envs", type=int, nargs="+", default=[16], help="environments, one row of each per tick")
    p.add_argument("--deter", type=int, nargs="+", default=[512, 2048], help="512 is size1m, 2048 is size12m")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of deter")
    p.add_argument("--rows", type=int, default=100_000, help="rows that the table holds over all environments")
    p.add_argument("--repetitions", type=int, default=30)
    return p


def rates(case: Callable[[], int], repetitions: int) -> tuple[list[float], list[float]]:
    """(units, copied bytes) per second, the case and the copy in turn; `case` returns how many units it did."""
    source, target = np.ones(COPY, np.uint8), np.empty(COPY, np.uint8)

    def copy() -> int:
        np.copyto(target, source)
        return COPY

    found: tuple[list[float], list[float]] = ([], [])
    for i in range(WARM_UP + repetitions):
        for call, rate in zip((case, copy), found, strict=True):
            begin = time.perf_counter()
            count = call()
            if i >= WARM_UP:
                rate.append(count / (time.perf_counter() - begin))
    return found


class Case:
    """A full table of rows as DreamerV3 stores them, and what is done with it; all rows have the same values."""

    def __init__(self, num_envs: int, deter: int, dtype: str, rows: int) -> None:
        latents = (("deter", ArraySpec((deter,), dtype)), ("stoch", ArraySpec((STOCH,), "uint8")))
        self.spec = RowSpec((("obs", ArraySpec((OBS,))),), ArraySpec((ACTION,)), latents)
        window = WindowSpec(
            LENGTH, CONTEXT, cross_episodes=True, closed_only=False, start="windows", latents="context",
            online=True, annotate=True,
        )  # fmt: skip
        self.num_envs, capacity = num_envs, rows // num_envs
        self.store = Store(self.spec, window, num_envs, capacity, np.random.default_rng(0))
        ones = lambda count: {k: np.ones((count, *v.shape), as_dtype(v.dtype)) for k, v in latents}
        self._acted, self._trained = ones(num_envs), ones(BATCH * (LENGTH - CONTEXT))
        self._ticks = 0
        self.add(capacity)  # every page is touched before anything is timed

    def add(self, ticks: int) -> int:
        """Returns the rows added."""
        env_id, off = np.arange(self.num_envs, dtype=np.int32), np.zeros(self.num_envs, bool)
        obs, action = (np.ones((self.num_envs, n), np.float32) for n in (OBS, ACTION))
        reward = np.zeros(self.num_envs, np.float32)
        for _ in range(ticks):
            is_first, is_last = off | (self._ticks % EPISODE == 0), off | (self._ticks % EPISODE == EPISODE - 1)
            self.store.append(Rows(env_id, {"obs": obs}, reward, is_first, is_last, off, action, self._acted))
            self._ticks += 1
        return ticks * self.num_envs

    def sample(self, batches: int) -> int:
        """Returns the windows sampled."""
        for _ in range(batches):
            self.store.sample(BATCH)
        return batches * BATCH

    def sample_and_write_back(self, batches: int) -> int:
        """Returns the windows sampled; all rows but the context are written back."""
        for _ in range(batches):
            drawn = self.store.sample(BATCH)
            row = drawn.first_row[:, None] + np.arange(CONTEXT, LENGTH)
            self.store.write_back(WriteBack(np.repeat(drawn.env_id, LENGTH - CONTEXT), row.reshape(-1), self._trained))
        return batches * BATCH


def measure(case: Case, repetitions: int) -> Iterator[dict[str, object]]:
    """One line of results per kind of call."""
    latents = sum(array.nbytes for _, array in case.spec.latents)
    served = LENGTH * (case.spec.nbytes - latents) + CONTEXT * latents
    for name, unit, nbytes, call in (
        ("add", "row", case.spec.nbytes, lambda: case.add(2000 // case.num_envs)),
        ("sample", "window", served, lambda: case.sample(20)),
        ("sample + write-back", "window", served + (LENGTH - CONTEXT) * latents,
         lambda: case.sample_and_write_back(10)),
    ):  # fmt: skip
        rate, copied = (statistics.median(found) for found in rates(call, repetitions))
        yield {
            "case": f"replay {name}", "unit": unit, "per_second": round(rate), "bytes_per_unit": nbytes,
            "gb_per_second": round(rate * nbytes / 1e9, 2), "memcpy_gb_per_second": round(copied / 1e9, 2),
            "share": round(rate * nbytes / copied, 3),
        }  # fmt: skip


def main() -> None:
    options = parser().parse_args()
    for deter, num_envs in product(options.deter, options.envs):
        case = Case(num_envs, deter, options.dtype, options.rows)
        for line in measure(case, options.repetitions):
            line |= {
                "envs": num_envs, "deter": deter, "dtype": options.dtype, "bytes_per_row": case.spec.nbytes,
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "numpy": np.__version__, "python": platform.python_version(), "commit": commit(),
            }  # fmt: skip
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
