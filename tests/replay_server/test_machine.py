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
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
from replay_server.store import Chosen
from replay_server.table import Table, Tables
from telamon.data import Window, WindowSpec, WriteBack, from_columns, to_columns
from telamon.replay import Purpose, ReplayStats, StreamSuperseded, TableSpec, TickGap
from tests.replay_server.model import CONTEXT, EPISODES, ROW, Flags, History, latents_of, rows_of

CODE = str(Path(replay_server.__file__).parent)
T = TypeVar("T")


@contextmanager
def before_lines(act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act` before every line of replay_server that this thread runs; they count from 1."""
    numbers = itertools.count(1)

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        if event == "line":
            act(next(numbers))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def meanwhile(line: int, act: Callable[[], T]) -> Iterator[list[Future[T]]]:
    """Another thread does `act` before that line, or after the last one; gives it as soon as it was begun."""
    begun: list[Future[T]] = []
    with ThreadPoolExecutor(1) as pool:

        def begin(number: int) -> None:
            if number == line:
                begun.append(pool.submit(act))
                wait(begun, timeout=0.005)  # no longer: it may need what this thread has locked

        with before_lines(begin):
            yield begun
        for future in begun:
            future.result()


class Disk:
    """The folders of one server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("tables", "latents"):
            (root / folder).mkdir(parents=True)

    def open(self, seed: int) -> Tables:
        rng = np.random.default_rng(seed)
        return Tables(self.root / "tables", memory_limit=1 << 30, rng=rng, latents_root=self.root / "latents")

    def copy(self, number: int) -> None:
        """Keeps what a process that is killed now leaves."""
        shutil.copytree(self.root, self.kept(number))

    def kept(self, number: int) -> Path:
        return self.root.with_suffix(f".{number}")

    def killed(self, number: int) -> None:
        """Puts what was kept in place of what came after."""
        shutil.rmtree(self.root)
        self.kept(number).rename(self.root)


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


def served(table: Table, chosen: Chosen) -> Window:
    """Chosen windows, gathered."""
    out = {name: np.empty((chosen.env_id.size, *shape), dtype) for name, (shape, dtype) in table.served.items()}
    table.fill(chosen, out)
    return Window(env_id=chosen.env_id.astype(np.int32), first_row=chosen.first_row, **from_columns(out))


def by_hand(table: Table, env_id: np.ndarray, first_row: np.ndarray) -> Chosen:
    """Windows as if they had been drawn."""
    return Chosen(env_id.astype(np.int64), first_row.astype(np.int64), "report", table._store._content)


def contents(table: Table, model: Model) -> None:
    """Every row that lies in a held window is what the model says, its latents the newest."""
    length, context = model.window.length, model.window.context
    places = [(e, r) for e, f in enumerate(model.flags) for r in range(model.tail(e), len(f) - length + 1)]
    if not places:
        return
    window = served(table, by_hand(table, *np.array(places).T))
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


def which(table: Table, candidates: list[Model]) -> int:
    """The first candidate that the table is. Raises AssertionError."""
    wrong = []
    for number, model in enumerate(candidates):
        try:
            agree(table, model)
        except AssertionError as error:
            wrong.append(error)
        else:
            return number
    raise ExceptionGroup("the table is none of these", wrong)


def agree(table: Table, model: Model) -> None:
    """Everything that can be seen of the table is as the model says."""
    assert table.stats() == model.stats()
    assert table.num_envs == len(model.flags)
    contents(table, model)


def newest(model: Model, age: int) -> list[tuple[int, int]]:
    return [(e, len(flags) - age) for e, flags in enumerate(model.flags)]


def oldest(model: Model) -> list[tuple[int, int]]:
    return [(e, model.tail(e)) for e in range(len(model.flags))]


def update_of(rows: list[tuple[int, int]], version: int) -> WriteBack:
    return latents_of(*np.array(rows).T, np.full(len(rows), version))


class Beside:
    """A table beside its model, which follows whatever is done through this."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="telamon-machine-", dir="/dev/shm"))  # where fsync costs nothing
        self.disk = Disk(self.root / "disk")
        self.opened = itertools.count()
        self.tables = self.disk.open(next(self.opened))
        self.marks: dict[str, Model] = {}
        self.past: list[int] = []  # incarnations that are over
        self.salt = 0

    def make(self, spec: TableSpec) -> None:
        self.spec = spec
        self.table = self.tables.configure("it", spec, seed=0)
        self.model = Model(spec)

    def end(self) -> None:
        self.tables.close()
        shutil.rmtree(self.root)

    def reopen(self) -> None:
        self.tables = self.disk.open(next(self.opened))
        self.table = self.tables.get("it")

    def perform(
        self,
        act: Callable[[], T],
        change: Callable[[Model], Model],
        kill_before: int | None = None,
        halfway: Callable[[Model], list[Model]] = lambda model: [],
    ) -> T:
        """Does something to the table, perhaps kills the server before some line of it, and then does it once more.

        act: what to do, to `self.table`. change: what that makes of a model, which it may use up. halfway: what else a
        kill may leave.
        """
        if kill_before is not None:
            with before_lines(lambda line: self.disk.copy(0) if line == kill_before else None):
                act()
            if not self.disk.kept(0).exists():  # there are not so many lines
                self.disk.copy(0)
            self.tables.close()
            self.killed(0, self.candidates(change, halfway))
        result = act()
        self.model = change(self.model)
        return result

    def candidates(self, change: Callable[[Model], Model], halfway: Callable[[Model], list[Model]]) -> list[Model]:
        """What a kill may leave."""
        return [copy.deepcopy(self.model), *halfway(self.model), change(copy.deepcopy(self.model))]

    def killed(self, number: int, candidates: list[Model]) -> int:
        """Goes on with what a kill has left; which of the candidates that is."""
        self.disk.killed(number)
        self.reopen()
        for model in candidates:
            model.reopen()
        found = which(self.table, candidates)
        self.model = candidates[found]
        return found

    def open_stream(self, name: str, num_envs: int, kill_before: int | None = None) -> None:
        def change(model: Model) -> Model:
            model.join(name, num_envs)
            return model

        opened = self.perform(lambda: self.table.open_stream(name, num_envs), change, kill_before)
        stream = self.model.streams[name]
        assert (opened.next_tick, opened.first_env_id) == (stream.next_tick, stream.first_env)
        assert opened.epoch > stream.epoch
        stream.epoch = opened.epoch

    def append(self, name: str, flags: list[dict[int, Flags]], kill_before: int | None = None) -> None:
        """Ticks of the same environments, at once."""
        act = self.append_of(name, flags)
        if not flags[0]:
            with pytest.raises(ValueError, match="has no rows"):
                act()
            return
        tick, salt = self.model.streams[name].next_tick, self.salt

        def change(model: Model) -> Model:
            for i, each in enumerate(flags):
                model.append(name, tick + i, each, salt)
            return model

        def halfway(model: Model) -> list[Model]:
            """Some of the ticks are there, and none or some of the rows in whose place the next ones come are gone."""
            left, model = [], copy.deepcopy(model)
            for i, each in enumerate(flags):
                for gone in range(1, len(flags) - i + 1):
                    left.append(copy.deepcopy(model))
                    for e in each:
                        left[-1].floor[e] = max(model.tail(e), len(model.flags[e]) + gone - model.capacity)
                model.append(name, tick + i, each, salt)
                left.append(copy.deepcopy(model))
            return left

        assert self.perform(act, change, kill_before, halfway) == tick + len(flags) - 1

    def append_of(self, name: str, flags: list[dict[int, Flags]]) -> Callable[[], int]:
        """What appends it to the table, as often as it is called."""
        stream = self.model.streams[name]
        tick, epoch = stream.next_tick, stream.epoch
        env = np.array(list(flags[0]), np.int32)
        head = np.array([len(self.model.flags[e]) for e in flags[0]], np.int64)
        ticks = [
            to_columns(rows_of(env, head + i, *np.array(list(each.values()), bool).reshape(-1, 2).T, self.salt))
            for i, each in enumerate(flags)
        ]
        columns = {name: np.stack([each[name] for each in ticks]) for name in ticks[0]}
        return lambda: self.table.append(name, epoch, self.table.incarnation, tick, env, columns)

    def grow(self, growth: tuple[int, int]) -> None:
        """(seed, ticks), of any streams."""
        rng = np.random.default_rng(growth[0])
        for _ in range(growth[1]):
            name = rng.choice(sorted(self.model.streams)).item()
            envs = [e for e in self.model.environments(name) if rng.random() < 0.9]
            self.append(name, self.flags_of(envs, rng.random((int(rng.integers(1, 4)), len(envs), 2)) < [0.05, 0.15]))

    def flags_of(self, envs: list[int], wanted: np.ndarray) -> list[dict[int, Flags]]:
        """Flags of ticks of these environments: `wanted` [ticks, environments, 2], and where episodes must begin."""
        begins = np.array([self.model.must_begin(e) for e in envs], bool)
        flags = []
        for is_first, is_last in np.moveaxis(wanted, -1, 1):
            flags.append(dict(zip(envs, zip((is_first | begins).tolist(), is_last.tolist(), strict=True), strict=True)))
            begins = is_last
        return flags

    def mark(self, name: str, kill_before: int | None = None) -> None:
        self.perform(lambda: self.table.mark(name), lambda model: model, kill_before)
        self.marks[name] = copy.deepcopy(self.model)

    def restore(self, name: str, kill_before: int | None = None) -> None:
        self.past.append(self.table.incarnation)
        change = lambda model: self.marks[name].restored(model.streams)
        self.perform(lambda: self.table.restore(name), change, kill_before)
        self.salt += 1
        assert self.table.incarnation not in self.past
        if rows := [(e, r) for e, flags in enumerate(self.model.flags) for r in range(self.model.tail(e), len(flags))]:
            assert self.table.write_back(self.past[-1], update_of(rows, 99)) == 0
            self.model.stale += len(rows)
        for stream in self.model.streams.values():
            stream.epoch = 0  # epochs belong to an incarnation
        for stream, known in list(self.model.streams.items()):
            self.open_stream(stream, known.num_envs)


GROWTH = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 12))
KILL = st.one_of(*[st.none()] * 4, st.integers(1, 250))
"""Before which line of an operation the server is killed, if it is."""


class Machine(Beside, RuleBasedStateMachine):
    """Anything in any order."""

    @initialize(
        window=st.sampled_from([EPISODES, CONTEXT, replace(CONTEXT, length=2, context=1, online=False)]),
        capacity=st.sampled_from([4, 5, 7, 12, 24]),
        max_envs=st.integers(1, 4),
    )
    def configure(self, window: WindowSpec, capacity: int, max_envs: int) -> None:
        self.make(TableSpec(ROW, window, capacity, max_envs))
        self.open_stream("a", 1)

    def teardown(self) -> None:
        self.end()

    @rule(growth=GROWTH)
    def close_and_open(self, growth: tuple[int, int]) -> None:
        self.grow(growth)
        self.tables.close()
        self.reopen()
        self.model.reopen()

    # writers

    @rule(name=st.sampled_from("abc"), num_envs=st.integers(1, 2), kill=KILL)
    def join(self, name: str, num_envs: int, kill: int | None) -> None:
        stream = self.model.streams.get(name)
        if stream is None and len(self.model.flags) + num_envs > self.spec.max_envs:
            with pytest.raises(OSError, match="raise max_envs"):
                self.table.open_stream(name, num_envs)
        elif stream is not None and stream.num_envs != num_envs:
            with pytest.raises(ValueError, match=f"{name!r} has {stream.num_envs} environments"):
                self.table.open_stream(name, num_envs)
        else:
            self.open_stream(name, num_envs, kill)

    @rule(data=st.data(), ticks=st.integers(1, 6), kill=KILL)
    def append_ticks(self, data: st.DataObject, ticks: int, kill: int | None) -> None:
        """Ticks of some of a stream's environments: uneven, abandoned and open episodes."""
        name = data.draw(st.sampled_from(sorted(self.model.streams)), "stream")
        envs = [e for e in self.model.environments(name) if data.draw(st.integers(0, 4), f"environment {e}") != 4]
        kinds = st.sampled_from([(False, False), (True, False), (False, True), (True, True)])
        wanted = [[data.draw(kinds, f"flags of {e}") for e in envs] for _ in range(ticks)]
        self.append(name, self.flags_of(envs, np.array(wanted, bool).reshape(ticks, len(envs), 2)), kill)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Ticks that change nothing: repeats, gaps, old epochs and incarnations, bad rows, strangers."""
        name = data.draw(st.sampled_from(sorted(self.model.streams)), "stream")
        stream = self.model.streams[name]
        incarnation, tick = self.table.incarnation, stream.next_tick
        env = np.arange(stream.first_env, stream.first_env + stream.num_envs, dtype=np.int32)
        begins = np.ones(env.size, bool)
        rows = to_columns(rows_of(env, np.full(env.size, -5), begins, ~begins, -1))
        good = {name: value[None] for name, value in rows.items()}

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
                append(is_first=~begins[None])
        for call in (self.table.restore, self.table.forget):
            with pytest.raises(FileNotFoundError, match=r"there is no mark .*three"):
                call("three")

    @rule(data=st.data(), before=st.integers(0, 4), after=st.integers(0, 2))
    def refuse_in_the_middle(self, data: st.DataObject, before: int, after: int) -> None:
        """Of ticks that come together those before a bad one stay."""
        name = data.draw(st.sampled_from(sorted(self.model.streams)), "stream")
        envs = list(self.model.environments(name))
        flags = self.flags_of(envs, np.zeros((before + 1, len(envs), 2), bool))
        flags[-1] = dict.fromkeys(envs, (True, True))
        flags += [dict.fromkeys(envs, (False, False))] * (1 + after)  # the first of them begins no episode
        stream = self.model.streams[name]
        with pytest.raises(ValueError, match="without is_first"):
            self.append_of(name, flags)()
        for each in flags[: before + 1]:
            self.model.append(name, stream.next_tick, each, self.salt)

    # readers

    @rule(growth=GROWTH, batch=st.integers(1, 5), purpose=st.sampled_from(["train", "report"]), kill=KILL)
    def sample(self, growth: tuple[int, int], batch: int, purpose: Purpose, kill: int | None) -> None:
        self.grow(growth)
        allowed = {start for choice in self.model.choices() for start in choice}
        if not allowed:
            with pytest.raises(LookupError, match="append more first"):
                self.table.choose(batch, purpose)
            return
        fresh = []

        def change(model: Model) -> Model:
            if purpose == "train":
                fresh[:] = model.pop(batch)
                model.sampled += batch
            return model

        def popped(model: Model) -> list[Model]:  # and not counted
            left = [copy.deepcopy(model)]
            for _ in range(batch if purpose == "train" else 0):
                left.append(copy.deepcopy(left[-1]))
                left[-1].pop(1)
            return left

        window = served(self.table, self.perform(lambda: self.table.choose(batch, purpose), change, kill, popped))
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

    @rule(growth=GROWTH, name=st.sampled_from(["one", "two"]), kill=KILL)
    def make_mark(self, growth: tuple[int, int], name: str, kill: int | None) -> None:
        self.grow(growth)
        self.mark(name, kill)

    @precondition(lambda self: self.marks)
    @rule(data=st.data(), kill=KILL)
    def return_to_mark(self, data: st.DataObject, kill: int | None) -> None:
        self.restore(data.draw(st.sampled_from(sorted(self.marks)), "mark"), kill)

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def forget_mark(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.marks)), "mark")
        self.table.forget(name)
        del self.marks[name]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "table"):
            agree(self.table, self.model)
            assert sorted(self.table.marks()) == sorted(self.marks)


SETTINGS = hypothesis.settings(
    max_examples=30,
    stateful_step_count=40,
    # explaining runs everything once more under a tracer
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


class TestMachine(Machine.TestCase):
    settings = SETTINGS


@pytest.mark.slow
class TestMachineForLonger(Machine.TestCase):
    settings = hypothesis.settings(SETTINGS, max_examples=150, stateful_step_count=80)


# At every line.


class Everywhere(Beside):
    """Kills the server before the lines of one operation in turn."""

    step = 0
    """So many lines lie between two kills; 0: none is killed."""

    def perform(
        self,
        act: Callable[[], T],
        change: Callable[[Model], Model],
        kill_before: int | None = None,
        halfway: Callable[[Model], list[Model]] = lambda model: [],
    ) -> T:
        if not self.step:
            return super().perform(act, change)
        lines, self.left = self.kept_of(act), set()
        before = self.model
        for line in lines:
            self.model = copy.deepcopy(before)
            self.left.add(self.killed(line, self.candidates(change, halfway)))
            result = act()
            self.model = change(self.model)
            agree(self.table, self.model)
            self.tables.close()
        self.reopen()
        self.model.reopen()
        return result

    def kept_of(self, act: Callable[[], object]) -> list[int]:
        """Does something and closes the tables; the lines before which there are copies."""
        lines = []

        def keep(line: int) -> None:
            if line % self.step == 0:
                self.disk.copy(line)
                lines.append(line)

        with before_lines(keep):
            act()
        self.tables.close()
        self.step = 0
        return lines


@pytest.fixture
def everywhere():
    beside = Everywhere()
    yield beside
    beside.end()


def fill(beside: Beside, window: WindowSpec, capacity: int = 8) -> None:
    """Full rings of three environments of two writers, with a mark, and some latents written back."""
    beside.make(TableSpec(ROW, window, capacity, 4))
    beside.open_stream("a", 2)
    beside.open_stream("b", 1)
    beside.grow((1, 20))
    beside.mark("then")
    beside.grow((2, 5))
    write(beside, newest(beside.model, 4), 7)


def write(beside: Beside, rows: list[tuple[int, int]], version: int) -> None:
    beside.table.write_back(beside.table.incarnation, update_of(rows, version))
    beside.model.write(update_of(rows, version))


def advance(beside: Beside) -> None:
    """A tick of writer a."""
    beside.append("a", beside.flags_of([0, 1], np.zeros((1, 2, 2), bool)))


OPERATIONS: dict[str, tuple[Callable[[Beside], None], int, set[int] | None]] = {
    "append": (advance, 1, {0, 1, 2}),
    "append many": (
        lambda beside: beside.append("a", beside.flags_of([0, 1], np.arange(20).reshape(5, 2, 2) % 3 == 0)),
        4,
        None,
    ),
    "open a new stream": (lambda beside: beside.open_stream("c", 1), 1, {0, 1}),
    "open a stream again": (lambda beside: beside.open_stream("a", 2), 1, {0}),
    "mark": (lambda beside: beside.mark("now"), 5, {0}),
    "restore": (lambda beside: beside.restore("then"), 20, {0, 1}),
}
"""Name -> (operation, lines between two kills in the fast test, which candidates kills leave if that is certain)."""


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kill_before_any_line_leaves_what_was_or_what_shall_be(everywhere, operation, fast):
    operate, step, left = OPERATIONS[operation]
    fill(everywhere, CONTEXT, capacity=16)
    everywhere.step = step if fast else 1
    operate(everywhere)
    assert left in (None, everywhere.left)
    advance(everywhere)
    agree(everywhere.table, everywhere.model)


def test_a_kill_in_a_mark_leaves_the_old_one_or_the_new_one(everywhere):
    fill(everywhere, CONTEXT)
    old, new = everywhere.marks["then"], everywhere.model
    everywhere.step = 3
    left = []
    for line in everywhere.kept_of(lambda: everywhere.table.mark("then")):
        everywhere.disk.killed(line)
        everywhere.reopen()
        assert everywhere.table.marks() == ["then"]
        everywhere.table.restore("then")
        left.append(which(everywhere.table, [mark.restored(new.streams) for mark in (old, new)]))
        everywhere.tables.close()
    everywhere.reopen()
    assert left == sorted(left)
    assert set(left) == {0, 1}


def test_a_mark_after_a_kill_in_a_mark_is_whole(everywhere):
    """It writes only chunks that changed, so it must know what the files of which mark hold."""
    fill(everywhere, CONTEXT)
    everywhere.step = 3
    model = everywhere.model
    for line in everywhere.kept_of(lambda: everywhere.table.mark("now")):
        everywhere.disk.killed(line)
        everywhere.reopen()
        everywhere.table.mark("again")
        everywhere.table.restore("again")
        after = copy.deepcopy(model)
        after.reopen()
        agree(everywhere.table, after)
        everywhere.tables.close()
    everywhere.reopen()


def test_a_kill_in_a_write_back_leaves_old_latents_or_new_ones(everywhere):
    fill(everywhere, CONTEXT)
    model = everywhere.model
    rows = [row for age in (6, 5, 4) for row in newest(model, age)]
    everywhere.step = 1
    write_again = lambda: everywhere.table.write_back(everywhere.table.incarnation, update_of(rows, 9))
    found = Counter()
    for line in everywhere.kept_of(write_again):
        everywhere.disk.killed(line)
        everywhere.reopen()
        for e, r in rows:
            window = served(everywhere.table, by_hand(everywhere.table, np.array([e]), np.array([r])))
            version, wide = window.latents["version"][0, 0].item(), window.latents["wide"][0, 0, 1, 2].item()
            assert version in (model.versions.get((e, r), 0), 9)
            assert wide in (model.versions.get((e, r), r % 256), 9)
            found[version] += 1
        assert write_again() == len(rows)
        after = copy.deepcopy(model)
        after.write(update_of(rows, 9))
        contents(everywhere.table, after)
        everywhere.tables.close()
    everywhere.reopen()
    assert found.keys() == {0, 7, 9}


@pytest.fixture
def beside():
    beside = Beside()
    yield beside
    beside.end()


PLAIN = replace(CONTEXT, context=0, latents="none", online=False)


def every_line(work: Callable[[int], bool], step: int = 1) -> None:
    """Does `work` with a line at which something else happens, for one line after the other, until there is none."""
    assert work(1)
    for line in itertools.count(1 + step, step):
        if not work(line):
            break


def check_window(model: Model, window: Window) -> None:
    """A window is what the model says of those rows, latents that were never written included."""
    model.check(window)
    if model.window.context:
        rows = window.first_row[:, None] + np.arange(model.window.context)
        np.testing.assert_array_equal(window.latents["version"], 0)
        np.testing.assert_array_equal(window.latents["wide"][..., 1, 2].astype(np.int64), rows % 256)


@pytest.mark.parametrize(("window", "capacity"), [(PLAIN, 8), (CONTEXT, 8), (EPISODES, 30)])
def test_rows_that_are_overwritten_during_a_gather_are_not_served(beside, window, capacity):
    fill(beside, window, capacity)
    beside.grow((3, capacity))  # rows with latents of their own are gone
    redrawn = 0

    def work(line: int) -> bool:
        nonlocal redrawn
        chosen = beside.table.choose(16, "report")
        drawn = chosen.first_row.copy()
        with meanwhile(line, lambda: beside.grow((line, capacity // 4))) as begun:
            got = served(beside.table, chosen)
        check_window(beside.model, got)
        redrawn += int((got.first_row != drawn).sum())
        return bool(begun)

    every_line(work)
    assert redrawn > 0


@pytest.mark.parametrize("window", [PLAIN, CONTEXT])
def test_rows_that_are_gathered_during_an_append_are_whole(beside, window):
    fill(beside, window)
    beside.grow((3, 10))

    def work(line: int) -> bool:
        drawn, places = beside.table.choose(16, "report"), np.array(oldest(beside.model)).T  # the latter go now
        chosen = by_hand(
            beside.table, np.concatenate([drawn.env_id, places[0]]), np.concatenate([drawn.first_row, places[1]])
        )
        with meanwhile(line, lambda: served(beside.table, chosen)) as begun:
            advance(beside)
        for future in begun:
            check_window(beside.model, future.result())
        return bool(begun)

    every_line(work)


@pytest.mark.parametrize("first", ["append", "write back"])
def test_latents_never_reach_the_row_that_took_the_place_of_theirs(beside, first):
    fill(beside, CONTEXT)
    orders = set()

    def work(line: int) -> bool:
        rows = oldest(beside.model)
        back = lambda: beside.table.write_back(beside.table.incarnation, update_of(rows, 9))
        one, two = (lambda: advance(beside)), back
        if first == "write back":
            one, two = two, one
        with meanwhile(line, two) as begun:
            one()
        if not begun:
            two()
        written_first, appended_first = copy.deepcopy(beside.model), copy.deepcopy(beside.model)
        written_first.versions |= dict.fromkeys(rows, 9)
        written_first.written += len(rows)
        appended_first.write(update_of(rows, 9))
        candidates = [written_first, appended_first]
        order = which(beside.table, candidates)
        beside.model = candidates[order]
        orders.add(order)
        return bool(begun)

    every_line(work)
    assert orders == {0, 1}


@pytest.mark.parametrize("first", ["gather", "write back"])
def test_a_write_back_is_never_seen_half(beside, first):
    fill(beside, CONTEXT)
    versions = itertools.count(10)

    def work(line: int) -> bool:
        rows = [row for age in (6, 5, 4) for row in newest(beside.model, age)]
        back = lambda: write(beside, rows, next(versions) % 256)
        gather = lambda: served(
            beside.table, by_hand(beside.table, *np.array([row for row in rows if row in newest(beside.model, 6)]).T)
        )
        one, two = (gather, back) if first == "gather" else (back, gather)
        before = copy.deepcopy(beside.model)
        with meanwhile(line, two) as begun:
            results = [one()]
        results += [future.result() for future in begun] or [two()]
        (window,) = (result for result in results if result is not None)
        for e, r, latents in zip(window.env_id, window.first_row, range(window.env_id.size), strict=True):
            seen = {
                "version": window.latents["version"][latents].tolist(),
                "wide": window.latents["wide"][latents, :, 1, 2].astype(np.int64).tolist(),
            }
            states = [
                {
                    "version": [model.versions.get((e, r + i), 0) for i in range(3)],
                    "wide": [model.versions.get((e, r + i), (r + i) % 256) for i in range(3)],
                }
                for model in (before, beside.model)
            ]
            assert seen in states
        return bool(begun)

    every_line(work)


def test_two_writers_at_once(beside):
    fill(beside, CONTEXT)

    def work(line: int) -> bool:
        stream = beside.model.streams["b"]
        tick, flags = stream.next_tick, {2: (beside.model.must_begin(2), False)}
        append = beside.append_of("b", [flags])
        with meanwhile(line, append) as begun:
            advance(beside)
        if not begun:
            append()
        beside.model.append("b", tick, flags, beside.salt)
        agree(beside.table, beside.model)
        return bool(begun)

    every_line(work)


def one_of(window: Window, i: int) -> Window:
    """The i-th window alone."""
    alone = lambda value: {k: v[i : i + 1] for k, v in value.items()} if isinstance(value, dict) else value[i : i + 1]
    return replace(window, **{name: alone(value) for name, value in vars(window).items() if name != "incarnation"})


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", ["append", "write back"])
def test_a_mark_is_of_one_moment_while_others_go_on(beside, act, step):
    """And the next one, which writes only what has changed since, misses nothing of what they did meanwhile."""
    fill(beside, CONTEXT)
    versions = itertools.count(10)

    def work(line: int) -> bool:
        others = {"append": advance, "write back": lambda b: write(b, newest(b.model, 4), next(versions) % 256)}
        for other in others.values():
            other(beside)  # so that there is something to write
        before = copy.deepcopy(beside.model)
        with meanwhile(line, lambda: others[act](beside)) as begun:
            beside.table.mark("now")
        if not begun:
            others[act](beside)
        after = beside.model
        beside.table.mark("again")
        for name, moments in (("again", [after]), ("now", [before, after])):
            beside.table.restore(name)
            which(beside.table, [moment.restored(after.streams) for moment in moments])
        beside.table.restore("again")
        beside.salt += 1
        beside.model = after.restored(after.streams)
        for stream in beside.model.streams.values():
            stream.epoch = 0
        for name, known in list(beside.model.streams.items()):
            beside.open_stream(name, known.num_envs)
        return bool(begun)

    every_line(work, step)


@pytest.mark.parametrize("first", ["restore", "sample"])
def test_windows_are_of_one_past_while_a_table_is_restored(beside, first):
    fill(beside, PLAIN)
    beside.mark("then")

    def work(line: int) -> bool:
        beside.grow((line, 5))
        old, new = beside.model, beside.marks["then"].restored(beside.model.streams)
        one, two = (lambda: beside.restore("then")), (lambda: served(beside.table, beside.table.choose(16, "report")))
        if first == "sample":
            one, two = two, one
        with meanwhile(line, two) as begun:
            results = [one()]
        results += [future.result() for future in begun] or [two()]
        (window,) = (result for result in results if result is not None)
        for i in range(16):
            try:
                old.check(one_of(window, i))
            except (AssertionError, IndexError):
                new.check(one_of(window, i))
        agree(beside.table, beside.model)
        return bool(begun)

    every_line(work, step=7 if first == "restore" else 1)
