"""Which windows may be drawn, and drawing them.

An episode is closed by its is_last row, or by the next is_first row (it was abandoned: it has no final observation
and its rows up to the last one are valid). One whose first row was overwritten is gone as a whole.

A `Start` is a way of choosing: how many choices each environment offers, and which first row a choice means. Drawing is
then the same for all: uniform over the choices of all environments.

Axes: E environments, K ticks, N rows of one tick, B windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from telamon.data import WindowSpec

NO_EPISODE = -1


def min_rows(spec: WindowSpec) -> int:
    """Rows of the shortest episode in which a window may start."""
    return spec.length if spec.last_start else spec.length + 1


def check_spec(spec: WindowSpec, capacity: int) -> None:
    """Raises ValueError for windows that rings of `capacity` rows per environment cannot serve."""
    if capacity < min_rows(spec):
        raise ValueError(
            f"each env holds {capacity} rows, fewer than one window of {min_rows(spec)} "
            f"(context {spec.context} + length {spec.length - spec.context}"
            f"{'' if spec.last_start else ' + the last start that is never drawn'}); raise replay.capacity"
        )
    if spec.start == "windows" and not (spec.cross_episodes and not spec.closed_only and spec.last_start):
        raise ValueError(
            "window.start='windows' draws every run of held rows; "
            "it needs window.cross_episodes=True, closed_only=False and last_start=True"
        )
    if spec.online and spec.start != "windows":
        raise ValueError(
            f"window.online=True serves fresh windows that cross episodes, which window.start={spec.start!r} "
            "never draws; it needs window.start='windows'"
        )


def annotate(is_first: np.ndarray, is_last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The flags (is_first, is_last) of windows, completed. bool [B, T] each.

    The first row begins a sequence, whatever it was when it was appended. A row before an is_first row ended its
    episode, which was abandoned if it did not say so; the last row's successor is not in the window. The reference
    looks at is_first before it sets the first row's.
    """
    last, first = is_last.copy(), is_first.copy()
    last[:, :-1] |= is_first[:, 1:]
    first[:, 0] = True
    return first, last


class Episodes:
    """The closed episodes of at least `shortest` rows that each environment holds wholly, oldest first.

    Follows every append at constant cost per row. Episodes do not overlap, so a ring of `capacity` rows holds at most
    capacity // shortest of them: number k of an environment is kept in place k modulo that.
    """

    def __init__(self, num_envs: int, capacity: int, shortest: int) -> None:
        self._shortest = shortest
        self._places = capacity // shortest
        self._open = np.full(num_envs, NO_EPISODE, np.int64)  # first row of the open episode
        self._added = np.zeros(num_envs, np.int64)
        self._dropped = np.zeros(num_envs, np.int64)
        self._first_row = np.zeros((num_envs, self._places), np.int64)
        self._rows = np.zeros((num_envs, self._places), np.int64)

    @property
    def count(self) -> np.ndarray:
        """int64 [E]."""
        return self._added - self._dropped

    def get(self, env_id: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first row, rows) [B] of the k-th oldest [B] episode, 0 <= k < count, of environments `env_id` [B]."""
        place = (self._dropped[env_id] + k) % self._places
        return self._first_row[env_id, place], self._rows[env_id, place]

    def check(self, env_id: np.ndarray, is_first: np.ndarray, is_last: np.ndarray) -> None:
        """Raises ValueError when a row of K ticks [K, N] that must begin an episode is not is_first."""
        none_open = np.concatenate([self._open[None, env_id] == NO_EPISODE, is_last[:-1]])
        orphan = (none_open & ~is_first).any(0)
        if orphan.any():
            raise ValueError(
                f"environment {env_id[orphan.argmax()]} gave a row without is_first where an episode must begin; "
                "the tick after an is_last row is a reset tick"
            )

    def append(
        self, env_id: np.ndarray, row: np.ndarray, tail: np.ndarray, is_first: np.ndarray, is_last: np.ndarray
    ) -> None:
        """Follows K ticks. `row` [K, N] are the new rows' numbers, `tail` [N] their environments' oldest rows now."""
        # A tail moves by one row per tick and first rows differ, so at most one episode goes with each.
        for _ in range(row.shape[0]):
            oldest = self._first_row[env_id, self._dropped[env_id] % self._places]
            gone = (self.count[env_id] > 0) & (oldest < tail)
            if not gone.any():
                break
            self._dropped[env_id] += gone
        for k in np.flatnonzero((is_first | is_last).any(1)).tolist():
            if is_first[k].any():
                self._close(env_id[is_first[k]], row[k, is_first[k]], tail[is_first[k]])
                self._open[env_id[is_first[k]]] = row[k, is_first[k]]
            if is_last[k].any():
                self._close(env_id[is_last[k]], row[k, is_last[k]] + 1, tail[is_last[k]])
                self._open[env_id[is_last[k]]] = NO_EPISODE

    def rebuild(self, env: int, tail: int, is_first: np.ndarray, is_last: np.ndarray) -> None:
        """Sets one environment's episodes from the flags [head - tail] of all rows it holds, oldest first."""
        first = tail + np.flatnonzero(is_first)
        end = np.append(first[1:], tail + is_first.size)
        open_ = is_last.size > 0 and not is_last[-1]
        # no first row among the held ones: the open episode began before the tail and can never be drawn
        self._open[env] = NO_EPISODE if not open_ else first[-1] if first.size else tail - 1
        if open_:
            first, end = first[:-1], end[:-1]
        long = end - first >= self._shortest
        first, end = first[long], end[long]
        self._dropped[env], self._added[env] = 0, first.size
        self._first_row[env, : first.size] = first
        self._rows[env, : first.size] = end - first

    def _close(self, env_id: np.ndarray, end: np.ndarray, tail: np.ndarray) -> None:
        """Closes the open episodes of `env_id` [N], where there are any, before row `end` [N]."""
        first = self._open[env_id]
        # an episode that began before the tail is not wholly held (NO_EPISODE lies before every tail)
        keep = (first >= tail) & (end - first >= self._shortest)
        env_id, first, end = env_id[keep], first[keep], end[keep]
        place = self._added[env_id] % self._places
        self._first_row[env_id, place] = first
        self._rows[env_id, place] = end - first
        self._added[env_id] += 1


@dataclass(frozen=True)
class Start:
    """A way of choosing windows."""

    weights: Callable[[WindowSpec, Episodes, np.ndarray, np.ndarray], np.ndarray]
    """(spec, episodes, tail [E], head [E]) -> int64 [E]: how many choices each environment offers."""
    first_row: Callable[[WindowSpec, Episodes, np.ndarray, np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
    """(spec, episodes, tail [E], env_id [B], choice [B], rng) -> int64 [B], 0 <= choice < weights[env_id]."""


def _episode_weights(spec: WindowSpec, episodes: Episodes, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
    return episodes.count


def _start_in_episode(
    spec: WindowSpec,
    episodes: Episodes,
    tail: np.ndarray,
    env_id: np.ndarray,
    choice: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    first, rows = episodes.get(env_id, choice)
    return first + rng.integers(rows - min_rows(spec) + 1)


def _window_weights(spec: WindowSpec, episodes: Episodes, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
    return np.maximum(head - tail - spec.length + 1, 0)


def _window_at(
    spec: WindowSpec,
    episodes: Episodes,
    tail: np.ndarray,
    env_id: np.ndarray,
    choice: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    return tail[env_id] + choice


STARTS = {
    "episodes": Start(_episode_weights, _start_in_episode),
    "windows": Start(_window_weights, _window_at),
}


def choices(spec: WindowSpec, episodes: Episodes, tail: np.ndarray, head: np.ndarray) -> int:
    """How many choices all environments offer together; 0 while no window may be drawn."""
    return int(STARTS[spec.start].weights(spec, episodes, tail, head).sum())


def draw(
    spec: WindowSpec,
    episodes: Episodes,
    tail: np.ndarray,
    head: np.ndarray,
    batch: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `batch` windows with replacement: (env_id, first_row), int64 [B] each.

    tail, head: int64 [E], the rows held. Raises LookupError while no window may be drawn.
    """
    start = STARTS[spec.start]
    weights = start.weights(spec, episodes, tail, head)
    ends = weights.cumsum()
    if ends[-1] == 0:
        rows = "closed episode" if spec.start == "episodes" else "environment"
        raise LookupError(f"no {rows} holds the {min_rows(spec)} rows that a window needs; append more first")
    choice = rng.integers(ends[-1], size=batch)
    env_id = ends.searchsorted(choice, side="right")
    choice -= ends[env_id] - weights[env_id]
    return env_id, start.first_row(spec, episodes, tail, env_id, choice, rng)
