"""A training run on a cluster under fire: every part is killed in turn, and everything is checked afterwards.

    python bench/chaos_launch.py OUT [--env counting:continuous] [--rounds 2] [--parts ...] [--options ...]

Prints a JSON line per death: what was killed, seconds until its place was filled again and until it did its work, rows
and updates then. The last line is about the whole run. Counting environments know their own position, so the check of
the shards' tables afterwards finds any row that was lost, repeated or out of order; of other environments it checks the
flags. `node` needs a cluster of several nodes, which this script makes on this machine (`ray.cluster_utils`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from deploy import running
from deploy.running import RunStatus
from replay_server.table import Tables
from telamon.envs.counting import encode
from telamon.telemetry.writer import read_metrics, series

PARTS = ("actor-0", "shard-0", "learner", "evaluator")
PATIENCE = 600.0
TABLE = "run"


class Run:
    """A `telamon launch` as its user sees it: a command, and a run directory."""

    def __init__(self, run_dir: Path, args: Sequence[str], environment: dict[str, str]) -> None:
        self.run_dir, self.args, self.environment = run_dir, list(args), environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, or resumes what is there."""
        resume = ["--resume"] if (self.run_dir / "config.yaml").exists() else []
        with self.run_dir.with_suffix(".out").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "launch", *self.args, "--run-dir", str(self.run_dir), *resume],
                env=self.environment, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def status(self) -> RunStatus | None:
        """None before the first."""
        try:
            return running.read(self.run_dir)
        except FileNotFoundError:
            return None

    def until(self, reached: Callable[[RunStatus], bool], seconds: float = PATIENCE) -> RunStatus:
        """Waits for a status, of this moment or later, in which `reached`. Raises RuntimeError where the run ends."""
        began, since = time.monotonic(), time.time()
        assert self.process is not None
        while True:
            found = self.status()
            if found is not None and found.seconds >= since and reached(found):
                return found
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended with {self.process.returncode}; see {self.run_dir}.out")
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not reached within {seconds:g} s: {found}")
            time.sleep(0.05)

    def end(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(seconds)


def pid_of(status: RunStatus, part: str) -> int | None:
    """The process of a part; None while it has none."""
    where = [p.where for p in status.parts if p.name == part]
    match = re.search(r"pid (\d+)", where[0]) if where else None
    return None if match is None else int(match[1])


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def works(status: RunStatus) -> bool:
    """Whether rows and updates are being made."""
    return status.state == "running" and status.numbers.get("updates", 0) > 0


def kill(run: Run, part: str) -> dict[str, Any]:
    """SIGKILL of one part; how long until another process has its place, and until it does its work."""
    before = run.until(works)
    victim = pid_of(before, part)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    again = run.until(lambda s: pid_of(s, part) not in (None, victim))
    replaced = time.monotonic() - began
    if part == "learner":
        run.until(lambda s: works(s) and s.numbers["version"] > before.numbers["version"] and not _starts(s, part))
    else:
        run.until(lambda s: not _starts(s, part))
        run.until(lambda s: s.numbers["rows"] > again.numbers["rows"])
    return {"killed": part, "replaced_seconds": round(replaced, 1), **_since(began, before, run)}


def _starts(status: RunStatus, part: str) -> bool:
    return next(p.now for p in status.parts if p.name == part).startswith(("starting", "restoring", "compiling"))


def _since(began: float, before: RunStatus, run: Run) -> dict[str, Any]:
    after = run.until(lambda s: True)
    return {
        "recovered_seconds": round(time.monotonic() - began, 1),
        **{f"{name}_{when}": status.numbers.get(name, 0) for name in ("rows", "updates", "version")
           for when, status in (("before", before), ("after", after))},
    }  # fmt: skip


def kill_driver(run: Run) -> dict[str, Any]:
    """SIGKILL of the driver; how long until nothing of it is left, and until a resumed one trains."""
    before = run.until(works)
    pids = {part.name: pid_of(before, part.name) for part in before.parts}
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    began = time.monotonic()
    while left := [name for name, pid in pids.items() if pid is not None and alive(pid)]:
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"still there after {PATIENCE:g} s: {left}")
        time.sleep(0.05)
    gone = time.monotonic() - began
    run.start()
    run.until(lambda s: works(s) and s.numbers["version"] > before.numbers["version"])
    return {"killed": "driver", "others_gone_seconds": round(gone, 1), **_since(began, before, run)}


def kill_node(run: Run, remove: Callable[[], set[int]]) -> dict[str, Any]:
    """A node with everything on it; `remove` ends it and returns the processes that it had."""
    before = run.until(works)
    pids = remove()
    began = time.monotonic()
    lost = [part.name for part in before.parts if pid_of(before, part.name) in pids]
    run.until(lambda s: all(pid_of(s, name) not in (None, pid_of(before, name)) for name in lost))
    replaced = time.monotonic() - began
    again = run.until(lambda s: works(s) and not any(_starts(s, name) for name in lost))
    run.until(lambda s: s.numbers["rows"] > again.numbers["rows"])
    return {"killed": "node", "had": lost, "replaced_seconds": round(replaced, 1), **_since(began, before, run)}


@dataclass
class Found:
    """What the shards' tables hold."""

    rows: int = 0
    rings: int = 0
    episodes: int = 0
    abandoned: int = 0
    """Episodes without a last row, but for those that were going on at the end."""
    faults: list[str] = field(default_factory=list)
    """Rows that do not follow on the one before."""


def check_tables(run_dir: Path, counting: bool) -> Found:
    """Reads every row of every ring. The run must have ended."""
    found = Found()
    for directory in sorted((run_dir / "replay").iterdir()):
        tables = Tables(directory, memory_limit=2**40, rng=np.random.default_rng(0))
        try:
            table = tables.get(TABLE)
            held = table.stats().rows_held
            seen = 0
            for env in range(table.num_envs):
                columns = _ring(table, env)
                seen += len(columns["reward"])
                _check_ring(f"{directory.name}, environment {env}", columns, counting, found)
            if seen != held:
                found.faults.append(f"{directory.name} holds {held} rows, of which {seen} were read")
        finally:
            tables.close()
    return found


def _ring(table: Any, env: int) -> dict[str, np.ndarray]:
    """All rows that a ring holds, oldest first, by column."""
    ring = table._store._content.ring
    names = [name for name in table.spec.row.columns if not name.startswith("latents/")]
    return {name: ring.held(name, env) for name in names}


def _check_ring(where: str, columns: dict[str, np.ndarray], counting: bool, found: Found) -> None:
    first, last = columns["is_first"], columns["is_last"]
    found.rings += 1
    found.rows += first.size
    found.episodes += int(first.sum())
    if first.size and not first[0]:
        found.faults.append(f"{where}: the first row begins no episode")
    follows = np.flatnonzero(last[:-1] & ~first[1:])
    found.faults += [f"{where}, row {row + 1}: follows a last row and begins no episode" for row in follows]
    found.abandoned += int((first[1:] & ~last[:-1]).sum())
    if not counting:
        return
    position, action = columns["obs/where"], columns["action"]
    for row in range(1, first.size):
        before, here = position[row - 1], position[row]
        if first[row]:
            if here[2] != 0:
                found.faults.append(f"{where}, row {row}: an episode begins at {here}")
        elif not (here[:2] == before[:2]).all() or here[2] != before[2] + 1:
            found.faults.append(f"{where}, row {row}: {here} follows {before}")
        elif not np.isclose(columns["reward"][row], encode(action[row - 1]), atol=1e-4):
            found.faults.append(f"{where}, row {row}: reward {columns['reward'][row]} is not of the action before")


def report(run: Run, counting: bool) -> dict[str, Any]:
    """About the whole run, once it has ended."""
    found, status = check_tables(run.run_dir, counting), run.status()
    assert status is not None
    at, returns = series(read_metrics(run.run_dir), "train/return")
    third = max(1, len(returns) // 3)
    return {
        "state": status.state, "rows": found.rows, "rows_counted": status.numbers["rows"], "rings": found.rings,
        "episodes": found.episodes, "abandoned": found.abandoned, "faults": found.faults[:5],
        "updates": status.numbers["updates"], "train_ratio": status.numbers["train_ratio"],
        "asked_ratio": status.numbers["asked_ratio"], "steps_monotone": bool((np.diff(at) >= 0).all()),
        "return_first_third": round(float(returns[:third].mean()), 2),
        "return_last_third": round(float(returns[-third:].mean()), 2),
    }  # fmt: skip


def tiny() -> list[str]:
    """Options of a TD-MPC2 that compiles and runs as fast as one can."""
    values = {
        "enc-dim": 16, "mlp-dim": 16, "latent-dim": 16, "num-enc-layers": 1, "num-q": 2, "num-bins": 21, "horizon": 2,
        "batch-size": 8, "num-samples": 16, "num-elites": 4, "num-pi-trajs": 4, "iterations": 1, "seed-steps": 30,
    }  # fmt: skip
    return [word for name, value in values.items() for word in (f"--agent.{name}", str(value))]


@contextmanager
def nodes(second_cpus: int) -> Iterator[tuple[str, Callable[[], set[int]]]]:
    """A Ray cluster of two nodes on this machine: its address, and what ends the second one.

    The first has hardly more room than for what sits beside the driver, so that workers go to the second.
    """
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": 200_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **size})
    add = partial(cluster.add_node, num_cpus=second_cpus, object_store_memory=200_000_000)
    second = add()
    cluster.wait_for_nodes()

    def remove() -> set[int]:
        nonlocal second
        raylet = next(p.process for p in second.all_processes["raylet"])
        pids = {child.pid for child in psutil.Process(raylet.pid).children(recursive=True)}
        cluster.remove_node(second, allow_graceful=False)
        for pid in pids:  # what a machine that is gone no longer runs
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        second = add()
        return pids

    try:
        yield cluster.address, remove
    finally:
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=[*PARTS, "driver"], choices=[*PARTS, "driver", "node"])
    parser.add_argument("--env", default="counting:continuous")
    parser.add_argument(
        "--options",
        nargs=argparse.REMAINDER,
        help="of telamon launch, to the end of the line; by default a tiny TD-MPC2's",
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    args = ["tdmpc2", given.env, *(given.options or tiny()), "--actors", "2", "--replay-shards", "2"]
    args += ["--steps", "1000000000", "--eval.every", "2000", "--eval.episodes", "2", "--checkpoint.every", "500"]
    args += ["--agent.buffer-size", "200000", "--restarts", "1000"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with ExitStack() as stack:
        remove: Callable[[], set[int]] = set
        if "node" in given.parts:
            address, remove = stack.enter_context(nodes(second_cpus=4))
            args += ["--address", address, "--insecure"]
        run = Run(given.out / "run", args, environment)
        run.start()
        stack.callback(lambda: run.process is not None and run.process.kill())
        began = time.monotonic()
        run.until(works)
        print(json.dumps({"started_seconds": round(time.monotonic() - began, 1)}), flush=True)
        for _ in range(given.rounds):
            for part in given.parts:
                how = {"driver": lambda: kill_driver(run), "node": lambda: kill_node(run, remove)}
                print(json.dumps(how.get(part, lambda part=part: kill(run, part))()), flush=True)
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        code = run.end()
        print(json.dumps({"exit_code": code, **report(run, given.env.startswith("counting:"))}), flush=True)


if __name__ == "__main__":
    main()
