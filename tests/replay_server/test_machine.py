"""Everything that may happen to a table, in any order, beside a list model.

Two adversities strike operations at any line of the code. *Killed*: what the files are at that moment is what SIGKILL
would leave, so a copy of them is opened and must be the table before the operation or after it. *Meanwhile*: another
thread does something else at that moment.
"""

import copy
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import replay_server
from replay_server.table import Table, Tables
from telamon.data import Window, WindowSpec, WriteBack, from_columns, to_columns
from telamon.replay import Purpose, ReplayStats, StreamSuperseded, TableSpec, TickGap
from tests.replay_server.model import CONTEXT, EPISODES, ROW, Flags, History, latents_of, rows_of

CODE = str(Path(replay_server.__file__).parent)


@contextmanager
def at_line(number: int, act: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Calls `act` before the `number`-th line of replay_server that this thread runs; gives whether it has."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                sys.settrace(None)
                act()
                return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines >= number
    finally:
        sys.settrace(before)


class Disk:
    """The folders of one server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("tables", "latents"):
            (root / folder).mkdir(parents=True)

    def open(self, seed: int) -> Tables:
        rng = np.random.default_rng(seed)
        return Tables(self.root / "tables", memory_limit=1 << 30, rng=rng, latents_root=self.root / "latents")

    def copy(self) -> None:
        """Keeps what a process that is killed now leaves."""
        shutil.copytree(self.root, self.root.with_suffix(".copy"))

    def killed(self) -> None:
        """Puts what was kept in place of what came after."""
        shutil.rmtree(self.root)
        self.root.with_suffix(".copy").rename(self.root)


@dataclass
class Stream:
    first_env: int
    num_envs: int
    epoch: int = 0
    next_tick: int = 0


class Model(History):
    """A table as lists."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec.window, 0, spec.capacity)
        self.max_waiting = spec.max_envs * (spec.capacity // spec.window.length)
        self.streams: dict[str, Stream] = {}
        self.versions: dict[tuple[int, int], int] = {}
        self.floor: dict[int, int] = {}  # rows below it were given up for a tick that never was
        self.queue: list[tuple[int, int]] = []
        self.passed: dict[int, int] = {}  # fresh windows before it are not served again
        self.sampled = self.written = self.stale = 0

    def tail(self, env: int) -> int:
        return max(super().tail(env), self.floor.get(env, 0))

    def held(self, env: int, row: int) -> bool:
        return self.tail(env) <= row < len(self.flags[env])

    def environments(self, stream: str) -> range:
        first = self.streams[stream].first_env
        return range(first, first + self.streams[stream].num_envs)

    def must_begin(self, env: int) -> bool:
        """Whether no episode is open."""
        return not self.flags[env] or self.flags[env][-1][1]

    def join(self, name: str, num_envs: int) -> None:
        if name not in self.streams:
            self.streams[name] = Stream(len(self.flags), num_envs)
            self.flags += [[] for _ in range(num_envs)]

    def append(self, name: str, tick: int, flags: dict[int, Flags], salt: int) -> None:
        """Exactly once: a tick that is held already is ignored."""
        stream = self.streams[name]
        if tick < stream.next_tick:
            return
        stream.next_tick += 1
        for e, f in flags.items():
            self.salts[e, len(self.flags[e])] = salt
            before = self.fresh(e)
            self.flags[e].append(f)
            self.queue += [(e, first) for first in self.fresh(e) if first not in before]
        self.queue = self.queue[-self.max_waiting :]

    def fresh(self, env: int) -> range:
        """First rows of the windows that were whole at some time and do not overlap."""
        length = self.window.length
        return range(1 % length, len(self.flags[env]) - length + 1, length) if self.window.online else range(0)

    def pop(self, count: int) -> list[tuple[int, int]]:
        """Fresh windows to serve, at most `count`."""
        taken = []
        while self.queue and len(taken) < count:
            env, first = self.queue.pop(0)
            self.passed[env] = first + self.window.length
            if first >= self.tail(env):
                taken.append((env, first))
        return taken

    def write(self, update: WriteBack) -> None:
        for e, r, v in zip(
            update.env_id.tolist(), update.row.tolist(), update.latents["version"].tolist(), strict=True
        ):
            if self.held(e, r):
                self.versions[e, r] = v
                self.written += 1
            else:
                self.stale += 1

    def reopen(self) -> None:
        """Fresh windows that were not served are there again while they are held, by age."""
        waiting = [(first, e) for e in range(len(self.flags)) for first in self.fresh(e)]
        held = sorted(w for w in waiting if w[0] >= max(self.tail(w[1]), self.passed.get(w[1], 0)))
        self.queue = [(e, first) for first, e in held][-self.max_waiting :]

    def restored(self, streams: dict[str, Stream]) -> "Model":
        """A mark, once the table has returned to it; `streams`: those that have come since are there, empty."""
        model = copy.deepcopy(self)
        for name, stream in streams.items():
            model.join(name, stream.num_envs)
        for e in range(len(model.flags)):
            waiting = [first for env, first in model.queue if env == e]
            whole = [first + model.window.length for first in model.fresh(e)]
            model.passed[e] = min(waiting, default=max(whole, default=0))
        return model

    def stats(self) -> ReplayStats:
        heads = [len(flags) for flags in self.flags]
        held = sum(heads) - sum(map(self.tail, range(len(heads))))
        shortest = self.window.length + (not self.window.last_start)
        return ReplayStats(
            rows=sum(heads),
            rows_held=held,
            bytes_held=held * ROW.nbytes,
            episodes=sum(len(rows) >= shortest for _, rows in self.episodes()),
            items=len(self.choices()),
            online_queue=len(self.queue),
            sampled_windows=self.sampled,
            written_back=self.written,
            stale=self.stale,
        )


def served(table: Table, env_id: np.ndarray, first_row: np.ndarray) -> Window:
    """Chosen windows, gathered."""
    env_id, first_row = env_id.astype(np.int64), first_row.astype(np.int64)
    out = {name: np.empty((env_id.size, *shape), dtype) for name, (shape, dtype) in table.served.items()}
    table.fill(env_id, first_row, out, "report")
    return Window(env_id=env_id.astype(np.int32), first_row=first_row, **from_columns(out))


def contents(table: Table, model: Model) -> None:
    """Every row that lies in a held window is what the model says, its latents the newest."""
    length, context = model.window.length, model.window.context
    places = [(e, r) for e, f in enumerate(model.flags) for r in range(model.tail(e), len(f) - length + 1)]
    if not places:
        return
    window = served(table, *np.array(places).T)
    assert list(zip(window.env_id.tolist(), window.first_row.tolist(), strict=True)) == places
    anywhere = copy.copy(model)
    anywhere.window = replace(model.window, start="windows", cross_episodes=True, closed_only=False, last_start=True)
    anywhere.check(window)
    if context:
        rows = window.first_row[:, None] + np.arange(context)
        pairs = [[(e, int(r)) for r in rs] for (e, _), rs in zip(places, rows, strict=True)]
        version = [[model.versions.get(pair, 0) for pair in ps] for ps in pairs]
        wide = [[model.versions.get((e, r), r % 256) for e, r in ps] for ps in pairs]
        np.testing.assert_array_equal(window.latents["version"], version)
        np.testing.assert_array_equal(window.latents["wide"][..., 1, 2].astype(np.int64), wide)


def agree(table: Table, model: Model) -> None:
    """Everything that can be seen of the table is as the model says."""
    assert table.stats() == model.stats()
    assert table.num_envs == len(model.flags)
    contents(table, model)


T = TypeVar("T")
GROWTH = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 12))


class Machine(RuleBasedStateMachine):
    """A table, reopened and killed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="telamon-machine-", dir="/dev/shm"))  # where fsync costs nothing
        self.disk = Disk(self.root / "disk")
        self.opened = itertools.count()
        self.tables = self.disk.open(next(self.opened))
        self.marks: dict[str, Model] = {}
        self.past: list[int] = []  # incarnations that are over
        self.salt = 0

    @initialize(
        window=st.sampled_from([EPISODES, CONTEXT, replace(CONTEXT, length=2, context=1, online=False)]),
        capacity=st.integers(4, 12),
        max_envs=st.integers(1, 4),
    )
    def configure(self, window: WindowSpec, capacity: int, max_envs: int) -> None:
        self.spec = TableSpec(ROW, window, capacity, max_envs)
        self.table = self.tables.configure("it", self.spec, seed=0)
        self.model = Model(self.spec)
        stream = self.table.open_stream("a", 1)
        self.model.join("a", 1)
        self.model.streams["a"].epoch = stream.epoch

    def teardown(self) -> None:
        self.tables.close()
        shutil.rmtree(self.root)

    # adversity

    def reopen(self) -> None:
        self.tables = self.disk.open(next(self.opened))
        self.table = self.tables.get("it")

    def perform(self, data: st.DataObject | None, act: Callable[[], T], states: Callable[[Model], list[Model]]) -> T:
        """Does something to the table, and now and then kills the server in the middle; then it is done again.

        act: what to do, to `self.table`. states: a model -> what may be left of it by a kill, first what it was and
        last what it shall be.
        """
        if data is not None and data.draw(st.integers(0, 5), "kill") == 5:
            with at_line(data.draw(st.integers(1, 250), "before line"), self.disk.copy) as killed:
                act()
            if not killed():
                self.disk.copy()
            self.tables.close()
            self.disk.killed()
            self.reopen()
            self.model = self.found(states(self.model))
        result = act()
        self.model = states(self.model)[-1]
        return result

    def found(self, candidates: list[Model]) -> Model:
        """The candidate that the table is."""
        for model in candidates:
            model.reopen()
            try:
                agree(self.table, model)
            except AssertionError as error:
                wrong = error
            else:
                return model
        raise wrong

    @rule(growth=GROWTH)
    def close_and_open(self, growth: tuple[int, int]) -> None:
        self.grow(growth)
        self.tables.close()
        self.reopen()
        self.model.reopen()

    # writers

    @rule(data=st.data(), name=st.sampled_from("abc"), num_envs=st.integers(1, 2))
    def join(self, data: st.DataObject, name: str, num_envs: int) -> None:
        stream = self.model.streams.get(name)
        if stream is None and len(self.model.flags) + num_envs > self.spec.max_envs:
            with pytest.raises(OSError, match="raise max_envs"):
                self.table.open_stream(name, num_envs)
            return
        if stream is not None and stream.num_envs != num_envs:
            with pytest.raises(ValueError, match=f"{name!r} has {stream.num_envs} environments"):
                self.table.open_stream(name, num_envs)
            return

        def states(model: Model) -> list[Model]:
            after = copy.deepcopy(model)
            after.join(name, num_envs)
            return [model, after]

        opened = self.perform(data, lambda: self.table.open_stream(name, num_envs), states)
        stream = self.model.streams[name]
        assert (opened.next_tick, opened.first_env_id) == (stream.next_tick, stream.first_env)
        assert opened.epoch > stream.epoch
        stream.epoch = opened.epoch

    @rule(data=st.data(), ticks=st.integers(1, 4))
    def append(self, data: st.DataObject, ticks: int) -> None:
        """Ticks of some of a stream's environments: uneven, abandoned and open episodes."""
        name = data.draw(st.sampled_from(sorted(self.model.streams)), "stream")
        for _ in range(ticks):
            flags = {}
            for e in self.model.environments(name):
                code = data.draw(st.integers(0, 4), f"environment {e}")  # 1: begins; 2: ends; 3: both; 4: stays
                if code != 4:
                    flags[e] = (self.model.must_begin(e) or code in (1, 3), code in (2, 3))
            self.tick(data, name, flags)

    def grow(self, growth: tuple[int, int]) -> None:
        """Any number of ticks, of any streams."""
        rng = np.random.default_rng(growth[0])
        for _ in range(growth[1]):
            name = rng.choice(sorted(self.model.streams)).item()
            self.tick(None, name, {
                e: (self.model.must_begin(e) or rng.random() < 0.05, rng.random() < 0.15)
                for e in self.model.environments(name)
                if rng.random() < 0.9
            })  # fmt: skip

    def tick(self, data: st.DataObject | None, name: str, flags: dict[int, Flags]) -> None:
        stream, salt = self.model.streams[name], self.salt
        tick, epoch = stream.next_tick, stream.epoch
        env = np.array(list(flags), np.int32)
        row = np.array([len(self.model.flags[e]) for e in flags], np.int64)
        columns = to_columns(rows_of(env, row, *np.array(list(flags.values()), bool).reshape(-1, 2).T, salt))

        def states(model: Model) -> list[Model]:
            given_up, after = copy.deepcopy(model), copy.deepcopy(model)
            for e in flags:
                given_up.floor[e] = max(model.tail(e), len(model.flags[e]) + 1 - model.capacity)
            after.append(name, tick, flags, salt)
            return [model, given_up, after]

        act = lambda: self.table.append(name, epoch, self.table.incarnation, tick, env, columns)
        assert self.perform(data, act, states) == tick

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Ticks that change nothing: repeats, gaps, old epochs and incarnations, bad rows, strangers."""
        name = data.draw(st.sampled_from(sorted(self.model.streams)), "stream")
        stream = self.model.streams[name]
        incarnation, tick = self.table.incarnation, stream.next_tick
        env = np.arange(stream.first_env, stream.first_env + stream.num_envs, dtype=np.int32)
        begins = np.ones(env.size, bool)
        good = to_columns(rows_of(env, np.full(env.size, -5), begins, ~begins, -1))

        def append(epoch=stream.epoch, incarnation=incarnation, tick=tick, env=env, name=name, **changed) -> int:
            return self.table.append(name, epoch, incarnation, tick, env, {**good, **changed})

        if tick:
            assert append(tick=data.draw(st.integers(0, tick - 1), "repeat")) == tick - 1
        with pytest.raises(TickGap):
            append(tick=tick + data.draw(st.integers(1, 3), "gap"))
        with pytest.raises(StreamSuperseded):
            append(epoch=data.draw(st.integers(0, stream.epoch - 1), "epoch"))
        with pytest.raises(StreamSuperseded):
            append(incarnation=data.draw(st.sampled_from([0, incarnation + 1, *self.past]), "incarnation"))
        with pytest.raises(FileNotFoundError):
            append(name="nobody")
        with pytest.raises(ValueError, match=r"env_id .* leaves"):
            append(env=env + stream.num_envs)
        with pytest.raises(ValueError, match="reward"):
            append(reward=good["reward"].astype(np.float64))
        if any(map(self.model.must_begin, env.tolist())):
            with pytest.raises(ValueError, match="without is_first"):
                append(is_first=~begins)
        for call in (self.table.restore, self.table.forget):
            with pytest.raises(FileNotFoundError, match=r"there is no mark .*three"):
                call("three")

    # readers

    @rule(data=st.data(), growth=GROWTH, batch=st.integers(1, 5), purpose=st.sampled_from(["train", "report"]))
    def sample(self, data: st.DataObject, growth: tuple[int, int], batch: int, purpose: Purpose) -> None:
        self.grow(growth)
        allowed = {start for choice in self.model.choices() for start in choice}
        if not allowed:
            with pytest.raises(LookupError, match="append more first"):
                self.table.choose(batch, purpose)
            return
        fresh = []

        def states(model: Model) -> list[Model]:
            if purpose == "report":
                return [model]
            left = [copy.deepcopy(model)]
            for _ in range(batch):  # fresh windows may be gone before the count is written
                left.append(copy.deepcopy(left[-1]))
                left[-1].pop(1)
            after = copy.deepcopy(model)
            fresh[:] = after.pop(batch)
            after.sampled += batch
            return [*left, after]

        window = served(self.table, *self.perform(data, lambda: self.table.choose(batch, purpose), states))
        self.model.check(window)
        starts = list(zip(window.env_id.tolist(), window.first_row.tolist(), strict=True))
        assert starts[: len(fresh)] == fresh
        assert set(starts) <= allowed

    @rule(data=st.data(), growth=GROWTH, count=st.integers(0, 6), old=st.booleans())
    def write_back(self, data: st.DataObject, growth: tuple[int, int], count: int, old: bool) -> None:
        """For any rows that ever were, some of them twice; those of another incarnation are stale."""
        self.grow(growth)
        envs = [e for e, flags in enumerate(self.model.flags) if flags]
        if not envs:
            return
        env = np.array([data.draw(st.sampled_from(envs), "environment") for _ in range(count)], np.int64)
        row = np.array([data.draw(st.integers(0, len(self.model.flags[e]) - 1), "row") for e in env], np.int64)
        update = latents_of(env, row, np.array([data.draw(st.integers(1, 255), "version") for _ in env], np.int64))
        incarnation = data.draw(st.sampled_from(self.past), "incarnation") if old and self.past else None
        if incarnation is not None:
            assert self.table.write_back(incarnation, update) == 0
            self.model.stale += count
            return
        before = self.model.written
        after = copy.deepcopy(self.model)
        after.write(update)
        # not killed: half an update, which is not acknowledged, is a state that `states` cannot name
        assert self.table.write_back(self.table.incarnation, update) == after.written - before
        self.model = after
        never = latents_of(np.array([envs[0]]), np.array([len(self.model.flags[envs[0]])]), np.ones(1))
        with pytest.raises(ValueError, match="was never appended"):
            self.table.write_back(self.table.incarnation, never)

    # marks

    @rule(data=st.data(), growth=GROWTH, name=st.sampled_from(["one", "two"]))
    def mark(self, data: st.DataObject, growth: tuple[int, int], name: str) -> None:
        self.grow(growth)
        self.perform(data, lambda: self.table.mark(name), lambda model: [model])
        self.marks[name] = copy.deepcopy(self.model)

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.marks)), "mark")
        self.past.append(self.table.incarnation)

        def states(model: Model) -> list[Model]:
            return [model, self.marks[name].restored(model.streams)]

        self.perform(data, lambda: self.table.restore(name), states)
        self.salt += 1
        assert self.table.incarnation not in self.past
        for name in list(self.model.streams):
            stream = self.model.streams[name]
            opened = self.table.open_stream(name, stream.num_envs)
            assert (opened.next_tick, opened.first_env_id) == (stream.next_tick, stream.first_env)
            stream.epoch = opened.epoch

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.marks)), "mark")
        self.table.forget(name)
        del self.marks[name]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "table"):
            agree(self.table, self.model)
            assert sorted(self.table.marks()) == sorted(self.marks)


class TestMachine(Machine.TestCase):
    settings = hypothesis.settings(
        max_examples=30,
        stateful_step_count=40,
        # explaining runs everything once more under a tracer
        phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
