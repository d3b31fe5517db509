"""What a run and other commands say to each other, through two small files of its run directory.

`status.json` is the run's: who runs where, what each waits for, when it said so. `control.json` is the others': what
they want changed of a launch, under an id that the status repeats once it is done or refused. Whoever may write the run
directory may steer the run; nothing listens.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.files import replace_text
from learner import checkpoint
from telamon.telemetry.live import Part, duration, parts_table, speed, summarised

LOG = logging.getLogger(__name__)

Made = TypeVar("Made")

STATUS_FILE, CONTROL_FILE = "status.json", "control.json"
STALE_SECONDS = 60.0
"""A status that is older than this is that of a run that has died: it writes one every second or two."""
RETURNS_SAID = {"train/return": "in training", "eval/return": "in evaluation"}
"""Metric of a return -> what it is of."""
TELL_SECONDS = LOOK_SECONDS = 1.0
"""Between two statuses of a run of one process, and between two looks of somebody who watches."""
RUNNING = ("starting", "running", "stopping")
"""States of a run that goes on."""
STATES = (*RUNNING, "finished", "stopped", "failed")
"""All that a run may be in."""
NOTABLE = 0.05
"""Share of the time that something must take for a sentence to say so."""


@dataclass(frozen=True)
class RunStatus:
    """How a run stands."""

    seconds: float
    """Since the epoch, when this was written."""
    state: str
    """starting, running, stopping, finished, stopped or failed."""
    summary: str
    """One line: steps, updates, ratio, returns."""
    actors: int
    """Rollout workers that are wanted; 0 in a run of one process."""
    parts: Sequence[Part] = ()
    notes: Sequence[str] = ()
    control: str | None = None
    """Id of the last request that was seen."""
    refusal: str | None = None
    """Why it was refused."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What a script may want: env_steps, asked_env_steps, rows, updates, version, ratio, train/return, ..."""
    rates: dict[str, float] = field(default_factory=dict)
    """What some of them came to per second lately: env_steps, updates, rows; those not known yet are left out."""
    waits: str = ""
    """Who waits for whom, in a sentence."""
    command: str = "launch"
    """launch, or train."""

    @property
    def alive(self) -> bool:
        """As far as the file can tell."""
        return self.state in RUNNING and time.time() - self.seconds < STALE_SECONDS


@dataclass(frozen=True)
class Request:
    """What somebody wants of a running launch."""

    id: str
    actors: int


def write(status: RunStatus, run_dir: Path) -> None:
    """Replaces the status, complete or not at all."""
    replace_text(run_dir / STATUS_FILE, json.dumps(asdict(status), indent=1))


def read(run_dir: Path) -> RunStatus:
    """The last status. Raises FileNotFoundError where there is none, ValueError naming the key where it is damaged."""
    path = run_dir / STATUS_FILE
    try:
        found = _made(RunStatus, json.loads(path.read_text()), "")
        return replace(found, parts=[_made(Part, part, f"parts[{i}].") for i, part in enumerate(found.parts)])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{run_dir} holds no {STATUS_FILE}: nothing has been trained there") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _whole(value: object) -> bool:
    """An integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: object) -> bool:
    """NaN and infinity are: a return can be either."""
    return isinstance(value, float) or _whole(value)


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


_KINDS: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    str | None: ("text", lambda value: value is None or isinstance(value, str)),
    int: ("whole number", _whole),
    int | None: ("whole number", lambda value: value is None or _whole(value)),
    float: ("finite number", lambda value: _number(value) and math.isfinite(value)),
    dict[str, float]: ("object of numbers", _numbers),
    Mapping[str, float]: ("object of numbers", _numbers),
    Sequence[str]: ("list of texts", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value)),
    Sequence[Part]: ("list", lambda value: isinstance(value, list)),
}
"""Type of a field -> what that is in JSON, and whether a value is."""


def _made(kind: type[Made], values: Any, at: str) -> Made:
    """A dataclass of what JSON gave for it, `at` a place. Raises ValueError or TypeError naming the key."""
    if not isinstance(values, dict):
        raise ValueError(f"{at.rstrip('.') or 'it'} is no object")
    types = get_type_hints(kind)
    for key, value in values.items():
        what, fits = _KINDS[types[key]] if key in types else ("known key", lambda value: False)
        if not fits(value):
            raise ValueError(f"{at}{key}={value!r:.60} is no {what}")
    return kind(**values)


def requested(run_dir: Path) -> Request | None:
    """The last request; None where there is none. Raises ValueError where it is damaged."""
    path = run_dir / CONTROL_FILE
    try:
        values = json.loads(path.read_text())
        request = Request(str(values["id"]), int(values["actors"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
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
    if found.command != "launch":
        raise RuntimeError(
            f"{run_dir} is a run of `telamon {found.command}`, which has no workers to add or to take away"
        )
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


# what a run of one process says


class Teller:
    """Whether, and how, a run has ended."""

    def __init__(self) -> None:
        self.state = "starting"
        """As in `RunStatus`."""


@contextmanager
def telling(run_dir: Path, status: Callable[[str], RunStatus], seconds: float = TELL_SECONDS) -> Iterator[Teller]:
    """While the block runs, a thread writes the status every so many `seconds`, and once more at the end.

    status: makes it, given the state that the block has set. A state that the block leaves as if it went on becomes
    failed or, where it was interrupted, stopped.
    A thread, because the loop is not to be slowed down, and compiles and evaluates for minutes.
    """
    teller, done = Teller(), threading.Event()

    def tell() -> None:
        try:
            write(status(teller.state), run_dir)
        except OSError as error:  # no reason to end the run, and it may pass
            LOG.warning("event=status_not_written error=%r", str(error))

    def repeat() -> None:
        while not done.wait(seconds):
            tell()

    tell()
    thread = threading.Thread(target=repeat, name="status", daemon=True)
    thread.start()
    try:
        yield teller
    except BaseException as error:
        teller.state = "failed" if isinstance(error, Exception) else "stopped"
        raise
    finally:
        done.set()
        thread.join()
        tell()


# what somebody sees


def screen(status: RunStatus, run_dir: Path) -> RenderableType:
    """What `telamon status` shows of the run in `run_dir`."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    for label, text in _facts(status, run_dir):
        facts.add_row(label, Text(text, style={"state": "bold", "waits": "yellow"}.get(label, "")))
    over = status.state in ("finished", "stopped")
    parts: list[RenderableType] = [] if over else ["", parts_table(summarised(status.parts))]
    return Group(facts, *parts, "", *(Text(note, style="dim") for note in status.notes))


def _facts(status: RunStatus, run_dir: Path) -> Iterator[tuple[str, str]]:
    """(label, text); what is unknown is left out."""
    now = time.time()
    age = max(0.0, now - status.seconds)
    if status.state in RUNNING and not status.alive:
        yield "state", f"gone: it was {status.state} {age:.0f} s ago and has said nothing since"
    else:
        yield "state", status.state + (f", as of {age:.0f} s ago" if status.alive else f" {duration(age)} ago")
    yield "done", status.summary
    if status.rates and status.alive:
        left = ""
        if status.rates.get("env_steps", 0) > 0 and status.rates.get("updates"):
            steps = status.numbers.get("asked_env_steps", math.nan) - status.numbers.get("env_steps", math.nan)
            seconds = steps / status.rates["env_steps"]
            left = f"  {duration(max(0.0, seconds))} left" if math.isfinite(seconds) else ""
        rates = (f"{speed(rate)} {name.replace('_', ' ')}/s" for name, rate in status.rates.items())
        yield "speed", "  ".join(rates) + left
    returns = [f"{status.numbers[key]:,.1f} {label}" for key, label in RETURNS_SAID.items() if key in status.numbers]
    if returns:
        yield "return", "  ".join(returns)
    for name in checkpoint.names(run_dir / "checkpoints")[:1]:
        with suppress(FileNotFoundError):  # the run has removed it just now: it has a newer one
            written = (run_dir / "checkpoints" / name).stat().st_mtime
            yield "checkpoint", f"{name}, written {duration(max(0.0, now - written))} ago"
    if status.waits and status.alive:
        yield "waits", status.waits


def watch(run_dir: Path, console: Console, sleep: Callable[[float], None] = time.sleep) -> RunStatus:
    """Shows the status in place, again and again, until the run has ended or Ctrl-C; the last one. Raises as `read`."""
    found = read(run_dir)
    with Live(screen(found, run_dir), console=console, auto_refresh=False) as live:
        try:
            while found.alive:
                sleep(LOOK_SECONDS)
                found = read(run_dir)
                live.update(screen(found, run_dir), refresh=True)
        except KeyboardInterrupt:  # how one stops to watch
            pass
    return found
