"""The plainest model of a replay: lists of every row that was ever appended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from telamon.data import ArraySpec, Rows, RowSpec, Window, WindowSpec, WriteBack
from telamon.replay import Replay

Flags = tuple[bool, bool]  # is_first, is_last

ROW = RowSpec(
    obs=(("where", ArraySpec((2,), "int64")), ("scalar", ArraySpec(()))),
    action=ArraySpec((1,)),
    latents=(("version", ArraySpec((), "int32")), ("wide", ArraySpec((2, 3), "bfloat16"))),
)

EPISODES = WindowSpec(4)
WINDOWS = WindowSpec(4, cross_episodes=True, closed_only=False, start="windows")
FRESH = WindowSpec(4, cross_episodes=True, closed_only=False, start="windows", online=True, annotate=True)
CONTEXT = WindowSpec(
    4, context=3, cross_episodes=True, closed_only=False, start="windows", latents="context", online=True, annotate=True
)


def rows_of(env: np.ndarray, row: np.ndarray, is_first: np.ndarray, is_last: np.ndarray, salt: int = 0) -> Rows:
    """One tick whose values say their own environment and number. env, row: [N]; salt: tells one past from another."""
    return Rows(
        env_id=env,
        obs={"where": np.stack([env, row], -1).astype(np.int64), "scalar": (7 * row + salt).astype(np.float32)},
        reward=(1000 * env + row).astype(np.float32),
        is_first=is_first,
        is_last=is_last,
        is_terminal=is_last & (row % 2 == 0),
        action=-row[:, None].astype(np.float32),
        latents={
            "version": np.zeros(env.size, np.int32),
            "wide": np.broadcast_to(row[:, None, None] % 256, (env.size, 2, 3)).astype(ml_dtypes.bfloat16),
        },
    )


def latents_of(env: np.ndarray, row: np.ndarray, version: np.ndarray) -> WriteBack:
    """New latents for rows: `version` in both columns. All [N]."""
    wide = np.broadcast_to(version[:, None, None], (version.size, 2, 3)).astype(ml_dtypes.bfloat16)
    return WriteBack(env.astype(np.int32), row.astype(np.int64), {"version": version.astype(np.int32), "wide": wide})


class History:
    """The flags of all rows that were ever appended to a table, and what follows from them."""

    def __init__(self, window: WindowSpec, num_envs: int, capacity: int) -> None:
        self.window = window
        self.capacity = capacity
        self.flags: list[list[Flags]] = [[] for _ in range(num_envs)]
        self.salts: dict[tuple[int, int], int] = {}  # of rows that have one

    def tail(self, env: int) -> int:
        return max(0, len(self.flags[env]) - self.capacity)

    def episodes(self) -> list[tuple[int, range]]:
        """(environment, rows) of every closed episode that is wholly held, by walking over all rows ever appended."""
        found = []
        for env, flags in enumerate(self.flags):
            begins = [row for row, (is_first, _) in enumerate(flags) if is_first]
            for i, begin in enumerate(begins):
                end = begins[i + 1] if i + 1 < len(begins) else len(flags)
                closed = i + 1 < len(begins) or flags[-1][1]
                if closed and begin >= self.tail(env):
                    found.append((env, range(begin, end)))
        return found

    def choices(self) -> list[list[tuple[int, int]]]:
        """The declared distribution of (environment, first row): uniform over the lists, then inside the list."""
        length, shift = self.window.length, 1 if self.window.last_start else 0
        if self.window.start == "windows":
            held = [(e, range(self.tail(e), len(flags))) for e, flags in enumerate(self.flags)]
            return [[(e, first)] for e, rows in held for first in rows[: max(0, len(rows) - length + 1)]]
        starts = [[(e, first) for first in rows[: max(0, len(rows) - length + shift)]] for e, rows in self.episodes()]
        return [s for s in starts if s]

    def check(self, window: Window) -> None:
        """Every value is that of consecutive rows of one environment, and of one episode if required."""
        env, row = window.env_id[:, None], window.first_row[:, None] + np.arange(self.window.length)
        assert window.env_id.dtype == np.int32
        assert window.first_row.dtype == np.int64
        salt = [[self.salts.get((e, r), 0) for r in rs] for e, rs in zip(window.env_id.tolist(), row, strict=True)]
        np.testing.assert_array_equal(window.obs["where"], np.stack(np.broadcast_arrays(env, row), -1))
        np.testing.assert_array_equal(window.obs["scalar"], 7 * row + salt)
        np.testing.assert_array_equal(window.reward, 1000 * env + row)
        np.testing.assert_array_equal(window.action, -row[..., None])
        flags = np.array([[self.flags[e][r] for r in rs] for e, rs in zip(window.env_id, row, strict=True)])
        is_last = flags[..., 1].copy()
        if self.window.annotate:
            flags[:, :-1, 1] |= flags[:, 1:, 0]
            flags[:, 0, 0] = True
        np.testing.assert_array_equal(window.is_first, flags[..., 0])
        np.testing.assert_array_equal(window.is_last, flags[..., 1])
        np.testing.assert_array_equal(window.is_terminal, is_last & (row % 2 == 0))
        if not self.window.cross_episodes:
            assert not window.is_first[:, 1:].any()
            assert not window.is_last[:, :-1].any()


class Tracked(History):
    """A replay beside its history."""

    def __init__(self, replay: Replay, window: WindowSpec, num_envs: int, capacity: int) -> None:
        super().__init__(window, num_envs, capacity)
        self.replay = replay

    def tick(self, flags: Mapping[int, Flags]) -> None:
        """Appends one row to each environment named."""
        env = np.array(list(flags), np.int32)
        row = np.array([len(self.flags[e]) for e in flags], np.int64)
        self.replay.append(rows_of(env, row, *np.array(list(flags.values()), bool).reshape(-1, 2).T))
        for e, f in flags.items():
            self.flags[e].append(f)

    def fill(self, *streams: Sequence[Flags]) -> None:
        """One stream per environment; those that end early fall behind."""
        for flags in zip_longest(*streams):
            self.tick({e: f for e, f in enumerate(flags) if f is not None})


def stream(episodes: Sequence[tuple[int, bool]]) -> list[Flags]:
    """One environment's flags: episodes of (rows, whether is_last is given; if not, the next is_first closes it)."""
    return [(i == 0, ended and i == rows - 1) for rows, ended in episodes for i in range(rows)]


@dataclass(frozen=True)
class Case:
    """A new table, and ticks for it."""

    window: WindowSpec
    num_envs: int
    capacity: int
    seed: int
    ticks: list[dict[int, Flags]]


@st.composite
def cases(draw: st.DrawFn, rows: int = 200) -> Case:
    """Uneven and abandoned episodes, an open one, environments that fall behind. rows: of the largest ring."""
    capacity = draw(st.integers(1, rows))
    length = draw(st.integers(1, min(6, capacity)))
    kind = draw(st.sampled_from(["episodes", "exclusive", "windows"]))
    if kind == "windows":
        window = WindowSpec(
            length, cross_episodes=True, closed_only=False, start="windows",
            online=draw(st.booleans()), annotate=draw(st.booleans()),
        )  # fmt: skip
    else:
        window = WindowSpec(length, last_start=kind == "episodes" or length == capacity)
    episode = st.tuples(st.integers(1, max(2, rows * 3 // 20)), st.booleans())
    streams = [stream(e) for e in draw(st.lists(st.lists(episode, min_size=1, max_size=12), min_size=1, max_size=3))]
    ticks = [{e: f for e, f in enumerate(flags) if f is not None} for flags in zip_longest(*streams)]
    return Case(window, len(streams), capacity, draw(st.integers(0, 99)), ticks)
