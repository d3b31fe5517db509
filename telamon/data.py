"""What crosses a boundary: specs (hashable, frozen) and batches of rows (numpy).

A *row* is what one environment gave at one tick, plus the action chosen after it (docs/design.md, "The row").
This module needs numpy alone (ml_dtypes gives numpy its bfloat16), so that a replay process never loads JAX.

Axes: E environments, B batch, T time, A action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import ml_dtypes
import numpy as np

FLAGS = ("is_first", "is_last", "is_terminal")


def as_dtype(name: str) -> np.dtype:
    """The numpy dtype of `name`, bfloat16 included. Raises TypeError for a name numpy does not know."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclass(frozen=True)
class ArraySpec:
    """Shape (without leading E, B or T axes) and dtype name of one array."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    classes: int | None = None
    """Entries are categories 0..classes-1, known for integers and booleans of bounded spaces; None for quantities."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * as_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ActionSpec:
    """An action: continuous in [-1, 1] per element (`classes` None), or integers in 0..classes-1 per element."""

    shape: tuple[int, ...]
    classes: tuple[int, ...] | None = None
    """One entry per element, in C order; None for a continuous action."""

    @property
    def array(self) -> ArraySpec:
        return ArraySpec(self.shape, "float32" if self.classes is None else "int32")


BARE_ACTION = "action"
"""The key of an action that is not a dict."""


@dataclass(frozen=True)
class EnvSpec:
    """What an agent may know of an environment."""

    id: str
    obs: tuple[tuple[str, ArraySpec], ...]
    """(key, array) in the environment's own key order."""
    action: ActionSpec | tuple[tuple[str, ActionSpec], ...]
    """One array, or (key, array) of a dict action; actions are then dicts of arrays everywhere."""
    episode_length: int | None
    """Time limit in agent steps (after action repeat); None where the environment has none or hides it."""
    action_repeat: int = 1

    @property
    def actions(self) -> tuple[tuple[str, ActionSpec], ...]:
        """(key, array) of every part of the action; a bare one is called `action`."""
        return ((BARE_ACTION, self.action),) if isinstance(self.action, ActionSpec) else self.action

    @property
    def action_arrays(self) -> ArraySpec | tuple[tuple[str, ArraySpec], ...]:
        """What `RowSpec.action` is for this environment."""
        if isinstance(self.action, ActionSpec):
            return self.action.array
        return tuple((key, part.array) for key, part in self.action)


@dataclass(frozen=True)
class RowSpec:
    """The columns that a replay table stores for one row."""

    obs: tuple[tuple[str, ArraySpec], ...]
    action: ArraySpec | tuple[tuple[str, ArraySpec], ...]
    """(key, array) of a dict action."""
    latents: tuple[tuple[str, ArraySpec], ...] = ()
    """Agent-defined extras that `write_back` may replace."""

    @property
    def columns(self) -> dict[str, ArraySpec]:
        """Flat column name -> array: `obs/KEY`, `reward`, the flags, `action` (or `action/KEY`), `latents/KEY`."""
        return {
            **{f"obs/{k}": v for k, v in self.obs},
            "reward": ArraySpec((), "float32"),
            **{k: ArraySpec((), "bool") for k in FLAGS},
            **(
                {"action": self.action}
                if isinstance(self.action, ArraySpec)
                else {f"action/{k}": v for k, v in self.action}
            ),
            **{f"latents/{k}": v for k, v in self.latents},
        }

    @property
    def nbytes(self) -> int:
        """Bytes of one stored row."""
        return sum(c.nbytes for c in self.columns.values())


@dataclass(frozen=True)
class WindowSpec:
    """Which runs of consecutive rows of one environment a learner is served."""

    length: int
    """Rows per window, `context` included."""
    context: int = 0
    """Leading rows that only set the carry."""
    cross_episodes: bool = False
    """Whether a window may run over an episode's end."""
    closed_only: bool = True
    """Whether rows become sampleable only once their episode is closed."""
    start: Literal["episodes", "windows"] = "episodes"
    """Uniform over closed episodes and then over their starts, or uniform over all windows."""
    last_start: bool = True
    """Whether the last start of an episode is drawn; False reproduces an early TD-MPC2's exclusive bound."""
    latents: Literal["none", "context"] = "none"
    """Rows of which latents are sent."""
    online: bool = False
    """Whether each environment's fresh, non-overlapping windows are served to training before any drawn one."""
    annotate: bool = False
    """Whether served flags are completed: is_first on the first row, is_last where the next row is_first."""

    def __post_init__(self) -> None:
        if self.length < 1 or not 0 <= self.context < self.length:
            raise ValueError(
                f"a window of {self.length} rows with {self.context} of context trains on nothing; "
                "window.length must exceed window.context"
            )
        if self.start == "episodes" and (self.cross_episodes or not self.closed_only):
            raise ValueError(
                "window.start='episodes' needs cross_episodes=False and closed_only=True: "
                "it draws a closed episode first, then a start inside it"
            )


@dataclass(frozen=True)
class Schedule:
    """How many updates are due: arithmetic on one counter, so that it resumes in the middle of a burst.

    Until `counter` exceeds `start` nothing is due and actors act uniformly at random; from then on
    `ratio * (counter - lead)` updates are due in all, so the first tick beyond `start` owes a burst.
    """

    counter: Literal["rows", "transitions"]
    start: int
    lead: int = 0
    ratio: float = 1.0
    """Updates per unit of `counter`."""

    def due(self, count: int) -> int:
        """Updates that should have been made when the counter stands at `count`."""
        return 0 if count <= self.start else max(0, int((count - self.lead) * self.ratio))


@dataclass(frozen=True)
class Clock:
    """Where a TrainRatio stands."""

    rows: int = 0
    prev: float | None = None
    """Rows that the updates so far account for; None before the first."""
    due: int = 0
    """Updates due in all."""


@dataclass(frozen=True)
class TrainRatio:
    """How many updates are due: DreamerV3's clock, evaluated after every single row of a tick, in float64.

    Once enough windows can be sampled the first row owes one update, and every later one what has accumulated since:
    the fill phase is not caught up. `prev` advances by repeats / ratio, as the reference rounds it.
    """

    ratio: float
    """Updates per row: train ratio / rows trained per update. Negative: one per row; 0: none."""
    start: int
    """Windows that must be sampleable before the first update."""
    window: int
    """Rows per window; windows start at every row."""

    def tick(self, clock: Clock, num_envs: int) -> Clock:
        """The clock after one more row of each of `num_envs` environments."""
        held, prev, due = clock.rows // num_envs, clock.prev, clock.due
        for env in range(num_envs):
            windows = (env + 1) * max(0, held + 2 - self.window) + (num_envs - env - 1) * max(0, held + 1 - self.window)
            if windows < self.start:
                continue
            repeats, prev = ratio_repeats(self.ratio, clock.rows + env + 1, prev)
            due += repeats
        return Clock(clock.rows + num_envs, prev, due)


def ratio_repeats(ratio: float, step: int, prev: float | None) -> tuple[int, float | None]:
    """(updates owed at `step`, the new `prev`); the first call owes one."""
    if ratio == 0:
        return 0, prev
    if ratio < 0:
        return 1, prev
    if prev is None:
        return 1, float(step)
    repeats = int((step - prev) * ratio)
    return repeats, prev + repeats / ratio


@dataclass(frozen=True)
class LimiterConfig:
    """How far a learner and the writers of its replay may run apart where nobody takes turns (learner/limiter.py).

    `Schedule` and `TrainRatio` say which update is due after which row, and a synchronous run does exactly those. A
    limiter asks the same ratio of both sides, within a band; `following` takes it from either of the two.
    Raises ValueError for settings under which one side, or both, could only wait.
    """

    ratio: float
    """Replayed rows per inserted row."""
    rows_per_update: int
    """Rows that one update trains on: its windows times their rows without context."""
    tick_rows: int
    """Rows that can still arrive once credit is used up: one tick of all environments that may join."""
    capacity: int
    """Rows that all shards hold when they are full."""
    band: int
    """Inserted rows that either side may run ahead of the ratio."""
    min_rows: int = 0
    """Rows that all shards must hold before the first update."""
    min_items: int = 1
    """What a draw must choose among before the first update: windows, or closed episodes (`WindowSpec.start`)."""
    lead: int | None = None
    """Rows inserted before the first update that owe none; the others are caught up in one burst. None: all of them."""

    def __post_init__(self) -> None:
        # `not >` also refuses NaN.
        if not (self.ratio > 0 and math.isfinite(self.ratio)):
            raise ValueError(
                f"a ratio of {self.ratio} replayed rows per inserted row asks for no update at all; "
                "limiter.ratio must be above 0 and finite"
            )
        for name, least in (("rows_per_update", 1), ("tick_rows", 1), ("min_rows", 0), ("min_items", 1), ("lead", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"limiter.{name}={value} is too small; it must be at least {least}")
        if self.band < self.smallest_band:
            raise ValueError(
                f"a band of {self.band} rows lets both sides wait for each other: one update is worth "
                f"{self.update_rows:.6g} inserted rows and one tick is {self.tick_rows}; "
                f"limiter.band must be at least {self.smallest_band}"
            )
        if max(self.min_rows, self.min_items) > self.capacity:
            raise ValueError(
                f"{self.min_rows} rows and {self.min_items} items are asked for before the first update, of which "
                f"{self.capacity} rows of replay cannot hold as many; lower limiter.min_rows and min_items, "
                "or raise replay.capacity"
            )

    @property
    def update_rows(self) -> float:
        """Inserted rows that one update is worth."""
        return self.rows_per_update / self.ratio

    @property
    def smallest_band(self) -> int:
        """The least band in which one side can always go on.

        A learner that waits is ahead by more than `band - update_rows`, so inserts have `2 band - update_rows` left.
        One tick of it is kept for rows under way, and with the other every environment can add a row.
        """
        return math.ceil(self.update_rows / 2) + self.tick_rows

    @classmethod
    def following(
        cls, schedule: Schedule | TrainRatio, rows_per_update: int, tick_rows: int, capacity: int, band: int
    ) -> LimiterConfig:
        """The same updates per row as `schedule`, after the same fill, with the same debt at its end.

        A Schedule's transitions are counted as rows: the reset row of an episode of L transitions counts too, so
        L + 1 rows owe what L transitions did.
        """
        sizes = {"rows_per_update": rows_per_update, "tick_rows": tick_rows, "capacity": capacity, "band": band}
        if isinstance(schedule, TrainRatio):
            updates = 1.0 if schedule.ratio < 0 else schedule.ratio
            return cls(updates * rows_per_update, **sizes, min_items=max(1, schedule.start))
        return cls(schedule.ratio * rows_per_update, **sizes, min_rows=schedule.start + 1, lead=schedule.lead)


@dataclass(frozen=True)
class Rows:
    """One row of each of E environments (one tick). Arrays are [E, ...]."""

    env_id: np.ndarray
    """int32 [E]."""
    obs: Mapping[str, np.ndarray]
    reward: np.ndarray
    """float32 [E], received on entering `obs`; 0 where is_first."""
    is_first: np.ndarray
    is_last: np.ndarray
    is_terminal: np.ndarray
    action: np.ndarray | Mapping[str, np.ndarray]
    """[E, *action shape] in agent units, chosen after `obs`; zeros where is_last. A mapping for a dict action."""
    latents: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """B windows of T consecutive rows. Arrays are [B, T, ...]; latents are [B, context, ...]."""

    env_id: np.ndarray
    """int32 [B]."""
    first_row: np.ndarray
    """int64 [B]: row number, in its environment, of each window's first row."""
    obs: Mapping[str, np.ndarray]
    reward: np.ndarray
    is_first: np.ndarray
    is_last: np.ndarray
    is_terminal: np.ndarray
    action: np.ndarray | Mapping[str, np.ndarray]
    latents: Mapping[str, np.ndarray] = field(default_factory=dict)
    incarnation: int = 0
    """Which past of the table the rows belong to; 0: the present one. No array: what jit is given has lost it."""


@dataclass(frozen=True)
class WriteBack:
    """Fresh latents for N rows, by identity. Arrays are [N, ...]; of two updates of one row the later wins."""

    env_id: np.ndarray
    row: np.ndarray
    latents: Mapping[str, np.ndarray]
    incarnation: int = 0
    """That of the window that the rows come from; 0: the present one."""


def to_columns(rows: Rows) -> dict[str, np.ndarray]:
    """Arrays by flat column name, as in `RowSpec.columns`."""
    return {
        **{f"obs/{k}": v for k, v in rows.obs.items()},
        "reward": rows.reward,
        **{k: getattr(rows, k) for k in FLAGS},
        **(
            {f"action/{k}": v for k, v in rows.action.items()}
            if isinstance(rows.action, Mapping)
            else {"action": rows.action}
        ),
        **{f"latents/{k}": v for k, v in rows.latents.items()},
    }


def check_columns(
    columns: Mapping[str, np.ndarray], layout: Mapping[str, tuple[tuple[int, ...], np.dtype]], count: int
) -> None:
    """Raises ValueError naming the first column that is missing, unknown, or not [count, *shape] of its dtype.

    layout: column name -> (shape, dtype) of one row of it.
    """
    if columns.keys() != layout.keys():
        missing = sorted(layout.keys() - columns.keys())
        unknown = sorted(columns.keys() - layout.keys())
        raise ValueError(
            f"columns {missing} are missing and columns {unknown} are unknown; "
            f"the row spec of this table has {list(layout)}"
        )
    for name, (shape, dtype) in layout.items():
        value = columns[name]
        if value.shape != (count, *shape) or value.dtype != dtype:
            raise ValueError(
                f"column {name!r} is {value.dtype} {list(value.shape)}, "
                f"but the row spec of this table says {dtype} {[count, *shape]}"
            )


def from_columns(columns: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Flat columns -> keyword arguments of Rows or Window (the inverse of `to_columns`)."""
    out: dict[str, Any] = {"obs": {}, "latents": {}}
    for name, value in columns.items():
        group, _, key = name.partition("/")
        if key:
            out.setdefault(group, {})[key] = value
        else:
            out[name] = value
    return out


@dataclass
class Counters:
    """What a run has done. Environment steps are `transitions * action_repeat`, the x-axis of every curve."""

    rows: int = 0
    """Rows appended to replay, reset rows included."""
    transitions: int = 0
    """Environment transitions (rows that are not is_first), the newest one included before it is appended."""
    episodes: int = 0
    updates: int = 0
    skipped: int = 0
    """Updates skipped because something in them was not finite."""

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def env_spec_from_json(values: Mapping[str, Any]) -> EnvSpec:
    """An EnvSpec from `dataclasses.asdict`, after JSON has made lists of its tuples."""
    array = lambda v: ArraySpec(tuple(v["shape"]), v["dtype"], v["classes"])
    part = lambda v: ActionSpec(tuple(v["shape"]), None if v["classes"] is None else tuple(v["classes"]))
    action = values["action"]
    return EnvSpec(
        id=values["id"],
        obs=tuple((key, array(v)) for key, v in values["obs"]),
        action=part(action) if isinstance(action, Mapping) else tuple((key, part(v)) for key, v in action),
        episode_length=values["episode_length"],
        action_repeat=values["action_repeat"],
    )
