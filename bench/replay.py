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
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.timing import commit
from replay_server.store import Store
from telamon.data import ArraySpec, Rows, RowSpec, WindowSpec, WriteBack

OBS, ACTION, STOCH, CLASSES = 24, 6, 32, 16
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
    """(case's units per second, copied bytes per second), interleaved; `case` returns how many units it did."""
    source, target = np.ones(COPY, np.uint8), np.empty(COPY, np.uint8)
    found: tuple[list[float], list[float]] = ([], [])
    for i in range(WARM_UP + repetitions):
        for call, rate in zip((case, lambda: np.copyto(target, source) or COPY), found, strict=True):
            begin = time.perf_counter()
            count = call()
            if i >= WARM_UP:
                rate.append(count / (time.perf_counter() - begin))
    return found


def tick(num_envs: int, deter: np.ndarray) -> Callable[[int], Rows]:
    """Rows of tick t; all arrays but the flags are the same every time."""
    rng = np.random.default_rng(0)
    env_id, off = np.arange(num_envs, dtype=np.int32), np.zeros(num_envs, bool)
    values = dict(
        obs={"obs": rng.standard_normal((num_envs, OBS), np.float32)},
        reward=np.zeros(num_envs, np.float32), is_terminal=off,
        action=rng.uniform(-1, 1, (num_envs, ACTION)).astype(np.float32),
        latents={"deter": deter[:num_envs], "stoch": rng.integers(CLASSES, size=(num_envs, STOCH), dtype=np.uint8)},
    )  # fmt: skip
    return lambda t: Rows(
        env_id, is_first=off | (t % EPISODE == 0), is_last=off | (t % EPISODE == EPISODE - 1), **values
    )


def main() -> None:
    options = parser().parse_args()
    dtype = np.dtype(np.float32 if options.dtype == "float32" else ml_dtypes.bfloat16)
    for width in options.deter:
        for num_envs in options.envs:
            latents = (("deter", ArraySpec((width,), options.dtype)), ("stoch", ArraySpec((STOCH,), "uint8")))
            rows = RowSpec((("obs", ArraySpec((OBS,))),), ArraySpec((ACTION,)), latents)
            window = WindowSpec(
                LENGTH, CONTEXT, cross_episodes=True, closed_only=False, start="windows", latents="context",
                online=True, annotate=True,
            )  # fmt: skip
            capacity = options.rows // num_envs
            store = Store(rows, window, num_envs, capacity, np.random.default_rng(0))
            trained = (BATCH, LENGTH - CONTEXT)
            fresh = {
                "deter": np.ones((*trained, width), dtype).reshape(-1, width),
                "stoch": np.ones((*trained, STOCH), np.uint8).reshape(-1, STOCH),
            }
            make, now = tick(num_envs, np.ones((num_envs, width), dtype)), 0

            def add(count: int = 2000 // num_envs, store=store, make=make, num_envs=num_envs) -> int:
                nonlocal now
                for _ in range(count):
                    store.append(make(now))
                    now += 1
                return count * num_envs

            def sample(count: int = 20, store=store) -> int:
                for _ in range(count):
                    store.sample(BATCH)
                return count * BATCH

            def sample_and_write(count: int = 10, store=store, fresh=fresh) -> int:
                for _ in range(count):
                    drawn = store.sample(BATCH)
                    row = drawn.first_row[:, None] + np.arange(CONTEXT, LENGTH)
                    store.write_back(WriteBack(np.repeat(drawn.env_id, LENGTH - CONTEXT), row.reshape(-1), fresh))
                return count * BATCH

            add(capacity)  # every page is touched before anything is timed
            latent = sum(spec.nbytes for _, spec in latents)
            served = LENGTH * (rows.nbytes - latent) + CONTEXT * latent
            for name, unit, nbytes, case in (
                ("add", "rows", rows.nbytes, add),
                ("sample", "windows", served, sample),
                ("sample + write-back", "windows", served + (LENGTH - CONTEXT) * latent, sample_and_write),
            ):
                rate, copy = (statistics.median(r) for r in rates(case, options.repetitions))
                line = {
                    "case": f"replay {name}", "envs": num_envs, "deter": width, "dtype": options.dtype,
                    "unit": unit, "per_second": round(rate), "bytes_per_unit": nbytes,
                    "gb_per_second": round(rate * nbytes / 1e9, 2), "memcpy": round(copy / 1e9, 2),
                    "share": round(rate * nbytes / copy, 3), "bytes_per_row": rows.nbytes,
                    "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                    "numpy": np.__version__, "python": platform.python_version(), "commit": commit(),
                }  # fmt: skip
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
