"""The terminal view of a service: a panel that redraws in place, or a line now and then where there is no terminal.

`update` may be called at every tick: between two drawings it only keeps what it was told. No thread draws behind the
loop's back, so a long compilation shows the status that was set before it.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PANEL_SECONDS = 0.5
"""Shortest time between two drawings of the panel."""
LINE_SECONDS = 15.0
"""Shortest time between two lines where stdout is no terminal."""
RATE_SECONDS = 30.0
"""Rates are means over about this long: shorter ones jump with every episode's end."""
PANEL_WIDTH, PARTS_WIDTH = 100, 150
"""Columns at most, of a panel of one process and of one with many."""
MOST_ALIKE = 8
"""Parts of one kind that are shown apart."""
MARGIN = 3
"""Columns left free beside the panel: the terminal's own "^C" fits there and moves no line."""
RETURNS = {"return": "train/return", "eval": "eval/return"}
"""Label -> metric of the returns shown, last and best."""


@dataclass(frozen=True)
class Part:
    """One process of a run, as its screen shows it."""

    name: str
    """`learner`, `actor-3`, `shard-0`, ..."""
    where: str
    """Host and process id; empty while it has none."""
    now: str
    """What it does or waits for."""
    numbers: str = ""
    """What it has done, in short."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What it counts, by name: rows, updates, ... They begin again with the process."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """What that came to per second lately; those that are not known yet are left out."""
    lag: int | None = None
    """Versions by which the snapshot that it acts with is older than the newest one; None where it has none."""
    memory: int | None = None
    """Resident bytes; None where they are not known."""


class Rate:
    """Speed of a counter, the mean over its last `seconds`."""

    def __init__(self, seconds: float = RATE_SECONDS) -> None:
        self._seconds = seconds
        self._points: deque[tuple[float, float]] = deque()

    def add(self, count: float, now: float) -> float:
        """Notes the counter's value at `now` seconds; returns its change per second, NaN before a second has passed.

        A counter that goes back has begun again.
        """
        if self._points and count < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[1][0] >= self._seconds:
            self._points.popleft()
        then, base = self._points[0]
        return (count - base) / (now - then) if now - then >= 1.0 else math.nan


class Rates:
    """Speeds of counters by name, means over their last `seconds`."""

    def __init__(self, seconds: float = RATE_SECONDS) -> None:
        self._seconds = seconds
        self._rates: dict[str, Rate] = {}

    def add(self, counts: Mapping[str, float], now: float, of: str = "") -> dict[str, float]:
        """Notes counters of `of` at `now` seconds; their change per second, without those that are not known yet."""
        found = {}
        for name, count in counts.items():
            rate = self._rates.setdefault(f"{of} {name}", Rate(self._seconds)).add(count, now)
            if not math.isnan(rate):
                found[name] = rate
        return found

    def of_parts(self, parts: Sequence[Part], now: float) -> list[Part]:
        """The parts with their speeds."""
        return [replace(part, rates=self.add(part.counts, now, part.name)) for part in parts]


def summarised(parts: Sequence[Part], most: int = MOST_ALIKE) -> list[Part]:
    """The parts, with one line for those beyond the first `most` of a kind, where at least two are."""
    kinds: dict[str, list[Part]] = {}
    for part in parts:
        kinds.setdefault(part.name.rstrip("-0123456789"), []).append(part)
    found: list[Part] = []
    for kind, alike in kinds.items():
        shown, rest = (alike, []) if len(alike) <= most + 1 else (alike[:most], alike[most:])
        found += [*shown, *([_together(f"{len(rest)} more {kind}s", rest)] if rest else [])]
    return found


def _together(name: str, parts: Sequence[Part]) -> Part:
    doing = Counter(part.now for part in parts)
    rates: Counter[str] = Counter()
    for part in parts:
        rates.update(part.rates)
    return Part(
        name,
        "",
        ", ".join(f"{count} {now}" for now, count in doing.most_common()),
        rates=dict(rates),
        lag=max((part.lag for part in parts if part.lag is not None), default=None),
        memory=sum(part.memory or 0 for part in parts) or None,
    )


_COLUMNS: Mapping[str, tuple[str, Literal["left", "right"], Callable[[Part], str]]] = {
    "part": ("bold", "left", lambda part: part.name),
    "where": ("dim", "left", lambda part: part.where),
    "now": ("", "left", lambda part: part.now),
    "speed": ("", "right", lambda part: "  ".join(f"{speed(rate)} {name}/s" for name, rate in part.rates.items())),
    "lag": ("", "right", lambda part: "" if part.lag is None else str(part.lag)),
    "memory": ("", "right", lambda part: "" if part.memory is None else size(part.memory)),
    "done": ("", "left", lambda part: part.numbers),
}
"""Heading -> style, side, text."""


def parts_table(parts: Sequence[Part]) -> Table:
    """Who runs where, what each waits for, how fast it is. Columns of which nothing is known are left out."""
    known = lambda heading: heading == "now" or any(_COLUMNS[heading][2](part) for part in parts)
    shown = {heading: column for heading, column in _COLUMNS.items() if known(heading)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading, (style, side, _) in shown.items():
        table.add_column(heading, style=style, justify=side, overflow="fold")
    for part in parts:
        idle = part.now.startswith(("waits", "start"))
        cells = {heading: Text(text(part)) for heading, (_, _, text) in shown.items()}
        cells["now"].stylize("yellow" if idle else "green")
        table.add_row(*cells.values())
    return table


def speed(rate: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{rate:,.0f}" if rate >= 99.95 else f"{rate:.3g}"


def size(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


@dataclass
class Progress:
    """What a service has told its view so far."""

    title: str
    total: int
    """Environment steps of the whole run."""
    env_steps: int = 0
    updates: int = 0
    status: str = ""
    """What it is busy with where that is not plain training; shown until replaced."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of each metric, by the metrics writer's names."""
    best: dict[str, float] = field(default_factory=dict)
    """Highest return so far, by the same names."""
    parts: Sequence[Part] = ()
    """The processes of a cluster; none where there is one process alone. Lines tell them when one has moved."""
    notes: Sequence[str] = ()
    """Sentences at the end of the panel."""
    elapsed: float = 0.0
    """Seconds since the view was made."""
    env_steps_rate: float = math.nan
    updates_rate: float = math.nan

    @property
    def seconds_left(self) -> float:
        """At the present speed; NaN before updates run, when random actions would promise too much."""
        if not (self.updates_rate > 0 and self.env_steps_rate > 0):
            return math.nan
        return max(0, self.total - self.env_steps) / self.env_steps_rate


def facts(progress: Progress) -> list[tuple[str, str]]:
    """The rows of the panel and the parts of the line: (label, text), what is unknown left out."""
    p = progress
    left = "" if math.isnan(p.seconds_left) else f"  {duration(p.seconds_left)} left"
    rows = [("time", f"{duration(p.elapsed)} elapsed{left}")]
    if not math.isnan(p.env_steps_rate):
        rows.append(("speed", f"{p.env_steps_rate:,.1f} env steps/s  {p.updates_rate:,.1f} updates/s"))
    rows.append(("updates", f"{p.updates:,}"))
    for label, key in RETURNS.items():
        if key in p.metrics:
            rows.append((label, f"{p.metrics[key]:,.1f} last  {p.best[key]:,.1f} best"))
    losses = {k.removeprefix("loss/").removesuffix("_loss"): v for k, v in p.metrics.items() if k.startswith("loss/")}
    if losses:
        rows.append(("loss", "  ".join(f"{name} {value:.3g}" for name, value in losses.items())))
    if p.status:
        rows.append(("now", p.status))
    return rows


def line(progress: Progress) -> str:
    """One line of plain text."""
    done = f"{progress.env_steps:,}/{progress.total:,} env steps ({_percent(progress)})"
    return " | ".join([done, *(f"{label}: {text}" for label, text in facts(progress))])


def panel(progress: Progress, width: int) -> Panel:
    """The panel, `width` columns wide."""
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    done = f"{progress.env_steps:,} / {progress.total:,} env steps  {_percent(progress)}"
    bar.add_row(ProgressBar(total=progress.total, completed=progress.env_steps), Text(done))
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    for label, text in facts(progress):
        rows.add_row(label, Text(text, style="yellow" if label == "now" else ""))
    body = Table.grid(expand=True)
    body.add_row(bar)
    body.add_row(rows)
    if progress.parts:
        body.add_row("")
        body.add_row(parts_table(summarised(progress.parts)))
    for note in progress.notes:
        body.add_row(Text(note, style="dim"))
    return Panel(body, title=Text(progress.title), title_align="left", width=width)


class LiveView:
    """Shows one service's progress while its `with` block runs; the terminal is restored however that ends.

    title: what is running, for example "tdmpc2 on dmc:cartpole-swingup".
    total_steps: environment steps of the whole run.
    console: where to show it. A panel needs a terminal; anything else gets plain lines.
    clock: seconds, monotonic.
    """

    def __init__(
        self, title: str, total_steps: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = Progress(title, total_steps)
        self._console = console
        self._clock = clock
        self._started = self._drawn = clock()
        self._env_steps_rate, self._updates_rate = Rate(), Rate()
        self._placed: list[tuple[str, str]] = []
        """Who was where when the parts were last printed as lines."""
        # The file is asked, not the console: FORCE_COLOR makes rich call a log file a terminal.
        in_place = console.file.isatty() and not console.is_dumb_terminal
        self._interval = PANEL_SECONDS if in_place else LINE_SECONDS
        # stderr joins the panel only where both are the terminal; in `2>errors.txt` it must reach its file.
        self._live = (
            Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()) if in_place else None
        )

    def update(
        self,
        *,
        env_steps: int | None = None,
        updates: int | None = None,
        metrics: Mapping[str, float] | None = None,
        status: str | None = None,
        parts: Sequence[Part] | None = None,
        notes: Sequence[str] | None = None,
    ) -> None:
        """Takes what is new (None: unchanged) and draws if it is time, or at once for a new `status`.

        metrics: as given to the metrics writer; returns and `loss/` values are shown. An empty `status` clears it; one
            that differs from the last in its numbers alone is not new.
        """
        p = self._progress
        p.env_steps = p.env_steps if env_steps is None else env_steps
        p.updates = p.updates if updates is None else updates
        p.parts = p.parts if parts is None else parts
        p.notes = p.notes if notes is None else notes
        for key, value in (metrics or {}).items():
            p.metrics[key] = value
            if key in RETURNS.values():
                p.best[key] = max(p.best.get(key, -math.inf), value)
        news = status is not None and _words(status) != _words(p.status)
        p.status = p.status if status is None else status
        if news or self._clock() - self._drawn >= self._interval:
            self._draw()

    @property
    def progress(self) -> Progress:
        """What it was told so far; another thread may look."""
        return self._progress

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._print(f"{self._progress.title}: {self._progress.total:,} env steps")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._draw()
        finally:
            if self._live is not None:
                self._live.stop()

    def _draw(self) -> None:
        now = self._drawn = self._clock()
        p = self._progress
        p.elapsed = now - self._started
        p.env_steps_rate = self._env_steps_rate.add(p.env_steps, now)
        p.updates_rate = self._updates_rate.add(p.updates, now)
        if self._live is None:
            self._print(line(p))
            placed = [(part.name, part.where) for part in p.parts]
            if placed != self._placed and all(where for _, where in placed):
                self._placed = placed
                for part in p.parts:
                    self._print("  ".join(["", part.name, part.where, part.now, part.numbers]).rstrip())
                for note in p.notes:
                    self._print(f"  {note}")
        else:
            widest = PARTS_WIDTH if p.parts else PANEL_WIDTH
            self._live.update(panel(p, min(widest, self._console.width - MARGIN)), refresh=True)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _words(status: str) -> str:
    return re.sub(r"[\d.,]+", "", status)


def _percent(progress: Progress) -> str:
    return f"{100 * progress.env_steps / progress.total:.0f}%"
