"""What a running launch and other commands say to each other, through two small files of its run directory.

`status.json` is the launch's: who runs where, what each waits for, when it said so. `control.json` is the others': what
they want changed, under an id that the status repeats once it is done or refused. Whoever may write the run directory
may steer the run; nothing listens.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from deploy.files import replace_text
from telamon.telemetry.live import Part, parts_table

STATUS_FILE, CONTROL_FILE = "status.json", "control.json"
STALE_SECONDS = 60.0
"""A status that is older than this is that of a launch that has died: it writes one every second or two."""


@dataclass(frozen=True)
class RunStatus:
    """How a launch stands."""

    seconds: float
    """Since the epoch, when this was written."""
    state: str
    """starting, running, stopping, finished, stopped or failed."""
    summary: str
    """One line: steps, updates, ratio, returns."""
    actors: int
    """Rollout workers that are wanted."""
    parts: Sequence[Part] = ()
    notes: Sequence[str] = ()
    control: str | None = None
    """Id of the last request that was seen."""
    refusal: str | None = None
    """Why it was refused."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What a script may want: env_steps, rows, updates, version, ratio, ..."""

    @property
    def alive(self) -> bool:
        """As far as the file can tell."""
        return self.state in ("starting", "running", "stopping") and time.time() - self.seconds < STALE_SECONDS


@dataclass(frozen=True)
class Request:
    """What somebody wants of a running launch."""

    id: str
    actors: int


def write(status: RunStatus, run_dir: Path) -> None:
    """Replaces the status, complete or not at all."""
    replace_text(run_dir / STATUS_FILE, json.dumps(asdict(status), indent=1))


def read(run_dir: Path) -> RunStatus:
    """The last status. Raises FileNotFoundError where there is none, ValueError where it is damaged."""
    path = run_dir / STATUS_FILE
    try:
        values = json.loads(path.read_text())
        return RunStatus(**{**values, "parts": [Part(**part) for part in values["parts"]]})
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{run_dir} holds no {STATUS_FILE}: no `telamon launch` has run there") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def requested(run_dir: Path) -> Request | None:
    """The last request; None where there is none. Raises ValueError where it is damaged."""
    path = run_dir / CONTROL_FILE
    try:
        values = json.loads(path.read_text())
        request = Request(str(values["id"]), int(values["actors"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return request


def ask(
    run_dir: Path,
    actors: int,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Asks a running launch for a number of rollout workers, and waits until it has seen that.

    Raises ValueError for a number that it refuses, RuntimeError where none is running, TimeoutError.
    """
    found = read(run_dir)
    if not found.alive:
        raise RuntimeError(f"no launch is running in {run_dir}; its last state is {found.state!r}")
    request = Request(secrets.token_hex(8), actors)
    replace_text(run_dir / CONTROL_FILE, json.dumps(asdict(request), indent=1))
    deadline = clock() + timeout
    while (found := read(run_dir)).control != request.id:
        if clock() >= deadline:
            raise TimeoutError(f"the launch in {run_dir} did not answer within {timeout:g} s; the bound is --timeout")
        sleep(0.1)
    if found.refusal is not None:
        raise ValueError(found.refusal)


def screen(status: RunStatus) -> RenderableType:
    """What `telamon status` prints."""
    age = max(0.0, time.time() - status.seconds)
    said = f"{status.state}, as of {age:.0f} s ago" if status.alive or age < STALE_SECONDS else status.state
    if status.state in ("starting", "running", "stopping") and not status.alive:
        said = f"gone: it was {status.state} {age:.0f} s ago and has said nothing since"
    notes = [Text(note, style="dim") for note in status.notes]
    return Group(Text(said, style="bold"), Text(status.summary), parts_table(status.parts), *notes)
