"""The `Replay` protocol: what actors and learners need of a replay, embedded or remote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from telamon.data import Rows, RowSpec, Window, WindowSpec, WriteBack

Purpose = Literal["train", "report"]
"""What windows are for: an update, or a look that must change nothing."""


@dataclass(frozen=True)
class TableSpec:
    """What a replay service is told of a table."""

    row: RowSpec
    window: WindowSpec
    capacity: int
    """Rows per environment."""
    max_envs: int
    """Environments that may join while it runs."""

    @property
    def nbytes(self) -> int:
        """Bytes of the full table."""
        return self.row.nbytes * self.capacity * self.max_envs


class StreamSuperseded(RuntimeError):
    """Another writer has opened this stream, or the table was restored: this epoch is over."""


class TickGap(RuntimeError):
    """Ticks are missing before the one that was sent."""


@dataclass(frozen=True)
class ReplayStats:
    """Counts since the table was created, and what it holds now."""

    rows: int
    """Rows ever appended."""
    rows_held: int
    bytes_held: int
    """Bytes that the held rows occupy."""
    episodes: int
    """Closed episodes that can be sampled."""
    items: int
    """What a draw chooses among now: windows, or closed episodes (`WindowSpec.start`)."""
    online_queue: int
    """Fresh windows that wait to be served (`WindowSpec.online`)."""
    sampled_windows: int
    """For training alone."""
    written_back: int
    stale: int
    """Write-backs dropped because their row had been overwritten."""


class Replay(Protocol):
    """A table of per-environment rings. Rows are identified by (env_id, row); slots stay hidden."""

    def append(self, rows: Rows) -> None:
        """Adds one tick: one row per environment. Raises ValueError naming the column, expected and found."""
        ...

    def can_sample(self) -> bool:
        """Whether at least one window may be drawn."""
        ...

    def sample(self, batch: int, purpose: Purpose = "train") -> Window:
        """Serves `batch` windows: fresh ones first if declared (`WindowSpec.online`), and drawn ones.

        Reports only draw, and neither count nor change what training will be served.
        Raises LookupError while no window can be drawn.
        """
        ...

    def write_back(self, update: WriteBack) -> int:
        """Replaces latents of rows that are still held; returns how many were. Stale rows are dropped and counted."""
        ...

    def stats(self) -> ReplayStats: ...

    def mark(self, name: str) -> None:
        """Makes the present state, generators and online queue included, restorable under `name`; atomic."""
        ...

    def restore(self, name: str) -> None:
        """Returns to a mark. Raises FileNotFoundError or ValueError naming what is missing or damaged."""
        ...

    def marks(self) -> list[str]:
        """Names of all marks, damaged ones included."""
        ...

    def forget(self, name: str) -> None:
        """Drops a mark and the files that no other mark needs."""
        ...
