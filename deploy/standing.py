"""How a run of one process stands, looked at by threads beside its loop: what `telamon status` shows of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from deploy.running import NOTABLE, RunStatus
from telamon.telemetry.live import RETURNS, Part, Progress, Rates
from telamon.telemetry.logs import LOG_FILE
from telamon.telemetry.process import resident_bytes

if TYPE_CHECKING:
    from deploy.local import Run

PART = "train"
"""Name and role of the one process."""


def counts(run: Run) -> dict[str, float]:
    """What a run has done."""
    c = run.counters
    return {"env_steps": run.env_steps, "updates": c.updates, "rows": c.rows}


def spent(run: Run) -> dict[str, float]:
    """Seconds that the loop has spent, by what on."""
    acting, rest = run.collector.stopwatch.seconds, run.stopwatch.seconds
    return {
        "updates": rest["compute"],
        "batches": rest["batch"],
        "latents": rest["write_back"],
        "acting": acting["acting"],
        "environments": acting["environment"],
        "replay": acting["replay"],
        "evaluations": rest["evaluation"],
        "reports": rest["report"],
        "checkpoints": rest["checkpoint"],
    }


def goes_to(shares: Mapping[str, float]) -> str:
    """What the time goes to, in words, the largest share first; nothing where none is known."""
    notable = sorted(((share, name) for name, share in shares.items() if share >= NOTABLE), reverse=True)
    said = ", ".join(f"{min(share, 1.0):.0%} {name}" for share, name in notable)
    return f"nobody for another, in one process; its time: {said}" if said else ""


class Standing:
    """Makes the status of `run`, once a second or so. progress: what its screen was told.

    Reads counters and words that the loop replaces as a whole: it never waits for the loop, nor a device.
    """

    def __init__(self, run: Run, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._progress, self._clock = run, progress, clock
        self._rates, self._minutes = Rates(), Rates(60.0)
        self._where = f"{socket.gethostname()} pid {os.getpid()}"
        self.notes: list[str] = [f"log {run.run_dir / LOG_FILE}"]
        """Where everything is."""
        self.state = "starting"
        """When it was last looked at."""
        self.minute: dict[str, float] = {}
        """Speeds over the last minute then, by the names of `counts`; those that are not known yet are left out."""

    @property
    def returns(self) -> dict[str, float]:
        """Metric of a return -> its newest value, as far as there were any."""
        metrics = self._progress.metrics
        return {key: value for key in RETURNS.values() if (value := metrics.get(key)) is not None}

    def status(self, state: str) -> RunStatus:
        """state: as in `RunStatus`."""
        run, now = self._run, self._clock()
        done, c = counts(run), run.counters
        self.state, self.minute = state, self._minutes.add(done, now)
        shares = self._rates.add(spent(run), now, "time")
        part = Part(
            PART, self._where, self._progress.status or state, f"{c.rows:,} rows, {c.episodes:,} episodes",
            memory=resident_bytes(),
        )  # fmt: skip
        return RunStatus(
            seconds=time.time(),
            state=state,
            summary=f"{run.env_steps:,} of {run.config.steps:,} env steps, {c.updates:,} updates",
            actors=0,
            parts=[part],
            notes=self.notes,
            numbers={
                **done,
                "asked_env_steps": run.config.steps,
                "episodes": c.episodes,
                **self.returns,
            },
            rates=self._rates.add(done, now, "run"),
            waits=goes_to(shares),
            command="train",
        )
