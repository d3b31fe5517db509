"""What the screen says of each part of a cluster: where it runs, what it does or waits for, what it has done; and who
waits for whom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from actors.collector import Doing
from actors.worker import WorkerStatus
from deploy.running import NOTABLE
from deploy.shards import ShardStatus
from learner.limiter import Status as LimiterStatus
from learner.worker import LearnerStatus
from telamon.telemetry.live import Part

DOING: Mapping[Doing, str] = {
    "idle": "acts",
    "acting": "acts",
    "environment": "steps its environments",
    "replay": "waits for the learner or the replay",
    "snapshot": "waits for a snapshot",
}
"""What a worker does, in words."""
STARTING, AGAIN = "starting", "starting again"


def learner(status: LearnerStatus | None, starts: int, ratio: float) -> Part:
    """ratio: replayed rows per row inserted that are asked for. starts: how often it was started."""
    if status is None:
        return Part("learner", "", STARTING if starts < 2 else AGAIN)
    loop = status.loop
    numbers = f"{loop.counters.updates:,} updates, snapshot {loop.version}"
    if loop.limiter is not None and not math.isnan(loop.limiter.run_ratio):
        numbers += f", train ratio {loop.limiter.run_ratio:.4g} of {ratio:.4g}"
    if loop.updates:
        numbers += f", waited {loop.batch_wait_ratio:.0%} for batches"
    return Part(
        "learner", _where(status.host, status.pid), _learns(loop.stage, loop.limiter), numbers,
        counts={"updates": loop.counters.updates}, memory=status.memory,
    )  # fmt: skip


def follower(name: str, status: LearnerStatus | None) -> Part:
    """Another process of the learner."""
    if status is None:
        return Part(name, "", STARTING)
    return Part(name, _where(status.host, status.pid), status.loop.stage, memory=status.memory)


def _learns(stage: str, limiter: LimiterStatus | None) -> str:
    """What it does, and which side waits for the other."""
    if limiter is None or stage not in ("training", "waiting for rows"):
        return stage
    side = limiter.waits.side
    return {"learner": "waits for rows", "writers": f"{stage}; actors wait for it", "none": stage}[side]


def actor(name: str, status: WorkerStatus | None) -> Part:
    """A rollout worker."""
    if status is None or not status.open:
        return Part(name, "" if status is None else _where(status.host, status.pid), STARTING)
    f = status.figures
    numbers = f"{f.rows:,} rows, {f.episodes:,} episodes"
    if f.version is not None:
        numbers += f", snapshot {f.version}"
    return Part(
        name, _where(status.host, status.pid), DOING[f.doing], numbers,
        counts={"rows": f.rows}, lag=None if f.version is None else f.lag, memory=status.memory,
    )  # fmt: skip


def shard(name: str, status: ShardStatus | None, starts: int) -> Part:
    """starts: of its keeper; those of its servers are in the status."""
    if status is None or status.address is None:
        return Part(name, "", STARTING if starts < 2 else AGAIN)
    if status.pid is None:
        return Part(name, status.host, AGAIN)
    again = f", started {status.starts} times" if status.starts > 1 else ""
    where = _where(status.host, status.pid)
    return Part(name, where, "serves", f"at {status.address}{again}", memory=status.memory)


def evaluator(status: WorkerStatus | None, evaluated: int | None, busy: bool) -> Part:
    """evaluated: environment steps at the last evaluation."""
    if status is None:
        return Part("evaluator", "", STARTING)
    now = "evaluates" if busy else "waits for its turn"
    last = "" if evaluated is None else f"last at {evaluated:,} env steps"
    return Part("evaluator", _where(status.host, status.pid), now, last, memory=status.memory)


def waiting(learner: LearnerStatus | None, workers: Iterable[WorkerStatus | None]) -> dict[str, float]:
    """Seconds that each side has waited for the other: counters, of which the driver knows the speed. A worker's is the
    mean over all."""
    found = {} if learner is None else {"learner": learner.loop.seconds.get("rows", 0.0)}
    spent = [worker.figures.seconds["replay"] for worker in workers if worker is not None and worker.figures.seconds]
    return found | ({"writers": sum(spent) / len(spent)} if spent else {})


def waits(status: LearnerStatus | None, shares: Mapping[str, float]) -> str:
    """Who waits for whom, in a sentence. shares: what `waiting` came to per second lately."""
    if status is None:
        return "everybody waits for the learner, which starts"
    if status.loop.limiter is None or status.loop.stage not in ("training", "waiting for rows"):
        return f"the learner is {status.loop.stage}"
    learner, writers = (min(1.0, max(0.0, shares.get(side, 0.0))) for side in ("learner", "writers"))
    if max(learner, writers) < NOTABLE:
        return "neither side waits for the other"
    if learner >= writers:
        return f"the learner waits for rows, {learner:.0%} of the time (the actors for it or the replay: {writers:.0%})"
    return f"the actors wait for the learner or the replay, {writers:.0%} of the time (it for rows: {learner:.0%})"


def _where(host: str, pid: int) -> str:
    return f"{host} pid {pid}"
