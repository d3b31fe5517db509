"""Whether a run on a cluster learns what a local one does: returns of both at the same number of environment steps.

    python bench/equivalence.py OUT [--seeds 1 2 3] [--only tdmpc2 dreamerv3]

Runs `telamon train` and `telamon launch --actors 2` one after the other, on tasks of minutes, under OUT; what is done
is not done again. Prints a JSON line per run, and one per algorithm with means and spreads. The return of a run is the
mean of its training episodes in the last quarter of its steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from deploy.running import STATUS_FILE
from telamon.telemetry.writer import read_metrics, series

TASKS = {
    "tdmpc2": ["gymnax:Pendulum-v1", "--preset", "laptop", "--steps", "4000"],
    "dreamerv3": [
        "gymnax:CartPole-v1", "--preset", "laptop", "--steps", "2500", "--agent.batch-size", "8",
        "--agent.batch-length", "32", "--agent.train-ratio", "128", "--report.every", "0",
    ],
}  # fmt: skip
"""Algorithm -> what follows it on the command line."""
MODES = {"local": ["train"], "cluster": ["launch"]}
CLUSTER = ["--actors", "2"]


def run(out: Path, algorithm: str, mode: str, seed: int) -> dict[str, object]:
    """One run, unless it was done before; its line."""
    folder = out / f"{algorithm}-{mode}-{seed}"
    done = folder.with_suffix(".json")
    if done.exists():
        return json.loads(done.read_text())
    command = [
        sys.executable, "-m", "deploy.cli", *MODES[mode], algorithm, *TASKS[algorithm], "--seed", str(seed),
        "--run-dir", str(folder), "--eval.every", "0", "--log-every", "100", "--checkpoint.every", "1000000",
        *(CLUSTER if mode == "cluster" else []), *(["--resume"] if (folder / "config.yaml").exists() else []),
    ]  # fmt: skip
    began = time.monotonic()
    with folder.with_suffix(".out").open("a") as said:
        subprocess.run(command, check=True, stdout=said, stderr=said)
    line = {
        "algorithm": algorithm, "mode": mode, "seed": seed, "seconds": round(time.monotonic() - began),
        **measured(folder, int(TASKS[algorithm][TASKS[algorithm].index("--steps") + 1])),
    }  # fmt: skip
    done.write_text(json.dumps(line))
    return line


def measured(folder: Path, steps: int) -> dict[str, object]:
    """What the record of a run says, up to `steps` environment steps."""
    rows = read_metrics(folder)
    at, returns = series(rows, "train/return")
    last = (at > 0.75 * steps) & (at <= steps)
    line: dict[str, object] = {
        "return": round(float(returns[last].mean()), 1),
        "episodes": int(last.sum()),
        "first_return": round(float(returns[at <= 0.25 * steps].mean()), 1),
        "updates": int(series(rows, "counters/updates")[1][-1]),
        "rows": int(series(rows, "counters/rows")[1][-1]),
    }
    if (folder / STATUS_FILE).exists():
        numbers = json.loads((folder / STATUS_FILE).read_text())["numbers"]
        _, lag = series(rows, "cluster/snapshot_lag_versions")
        line |= {
            "train_ratio": numbers["train_ratio"], "asked_ratio": numbers["asked_ratio"],
            "updates": int(numbers["updates"]), "rows": int(numbers["rows"]),
            "lag_mean": round(float(lag.mean()), 2), "lag_most": int(lag.max()),
        }  # fmt: skip
    return line


def summary(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    """Per algorithm: mean and spread over seeds of both modes, and their difference in standard errors."""
    found = []
    for algorithm in dict.fromkeys(line["algorithm"] for line in lines):
        by = {m: np.array([x["return"] for x in lines if (x["algorithm"], x["mode"]) == (algorithm, m)]) for m in MODES}
        if min(len(values) for values in by.values()) < 2:
            continue
        error = np.sqrt(sum(values.var(ddof=1) / len(values) for values in by.values()))
        found.append({
            "algorithm": algorithm,
            **{f"{m}_mean": round(float(values.mean()), 1) for m, values in by.items()},
            **{f"{m}_std": round(float(values.std(ddof=1)), 1) for m, values in by.items()},
            "difference_in_standard_errors": round(float((by["cluster"].mean() - by["local"].mean()) / error), 2),
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for seed in options.seeds:
        for algorithm in options.only:
            for mode in MODES:
                lines.append(run(options.out, algorithm, mode, seed))
                print(json.dumps(lines[-1]), flush=True)
    for line in summary(lines):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
