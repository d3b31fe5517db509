"""The rate limiter, against simulated shards whose every row is in a ledger, and against the rings themselves."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from prometheus_client.registry import CollectorRegistry

from learner import limiter
from learner.limiter import Limiter, Reading, Totals
from learner.metrics import LimiterMetrics
from replay_server.table import Table, Tables
from telamon.data import ArraySpec, Clock, LimiterConfig, Rows, RowSpec, Schedule, TrainRatio, WindowSpec, to_columns
from telamon.replay import TableSpec
from tests.waiting import SECONDS

NO_BOUND = -1
"""The credit of a shard that nobody has bounded yet."""
# One update trains on 16 rows and is worth 8 inserted ones.
CONFIG = LimiterConfig(ratio=2.0, rows_per_update=16, tick_rows=4, capacity=1000, band=20)


@dataclass
class Shard:
    """A replay server as the limiter sees it. Its writers look at the credit first and append later."""

    streams: list[int]
    """Rows of one tick of each writer."""
    window: int = 1
    """Rows before the first can be sampled."""
    rows: int = 0
    credit: int = NO_BOUND
    incarnation: int = 1
    up: bool = True
    calls: int = 0
    passed: set[int] = field(default_factory=set)
    """Streams whose next tick is on its way past its look."""
    written: list[int] = field(default_factory=list)
    """Ticks of each stream that have arrived."""
    meanwhile: Callable[[Shard], None] = lambda shard: None
    """Called before and after every call: what happens between the limiter's looks at two shards."""
    heard: Callable[[Shard, Reading | None], None] = lambda shard, reading: None
    """Told what the limiter was answered."""

    def __post_init__(self) -> None:
        self.written = [0] * len(self.streams)

    @property
    def items(self) -> int:
        return max(0, self.rows - self.window + 1)

    @property
    def open(self) -> bool:
        return self.items == 0 or self.credit < 0 or self.rows < self.credit

    def look(self, stream: int) -> None:
        if self.up and self.open:
            self.passed.add(stream)

    def land(self, stream: int) -> None:
        if self.up and stream in self.passed:
            self.passed.remove(stream)
            self.rows += self.streams[stream]
            self.written[stream] += 1

    def write(self, stream: int = 0) -> bool:
        """One tick, if it need not wait."""
        before = self.written[stream]
        self.look(stream)
        self.land(stream)
        return self.written[stream] > before

    def lose(self, rows: int, credit: int = NO_BOUND) -> None:
        """Another incarnation: made anew, or restored to `rows`."""
        self.rows, self.credit, self.incarnation = rows, credit, self.incarnation + 1
        self.passed.clear()

    def counters(self) -> Reading:
        self._called(None)
        reading = Reading(self.incarnation, self.rows, self.rows, self.items, self.credit)
        self.heard(self, reading)
        self.meanwhile(self)
        return reading

    def grant(self, rows: int) -> None:
        self._called(None)
        self.credit = rows
        self.meanwhile(self)

    def _called(self, reading: None) -> None:
        self.calls += 1
        self.meanwhile(self)
        if not self.up:
            self.heard(self, reading)
            raise ConnectionError("no route to shard")


def open_limiter(config: LimiterConfig = CONFIG, **shards: Shard) -> Limiter:
    """A limiter after its first look, for which no time passes."""
    found = Limiter(config, shards, clock=lambda: 0.0)
    found.look()
    return found


def train(found: Limiter) -> bool:
    """One update, if it need not wait."""
    if not found.wait_to_train(0.0):
        return False
    found.trained()
    return True


def train_all(found: Limiter, at_most: int = 1000) -> int:
    """As many updates as need not wait."""
    return next(n for n in range(at_most + 1) if n == at_most or not train(found))


# settings


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ratio": 0.0}, "a ratio of 0.0 .* limiter.ratio must be above 0"),
        ({"ratio": -1.0}, "limiter.ratio"),
        ({"ratio": math.nan}, "limiter.ratio"),
        ({"ratio": math.inf}, "limiter.ratio"),
        ({"rows_per_update": 0}, "limiter.rows_per_update=0 .* at least 1"),
        ({"tick_rows": 0}, "limiter.tick_rows=0"),
        ({"min_rows": -1}, "limiter.min_rows=-1"),
        ({"min_items": 0}, "limiter.min_items=0"),
        ({"lead": -1}, "limiter.lead=-1"),
        ({"band": 7}, "a band of 7 rows .* worth 8 inserted rows and one tick is 4; limiter.band must be at least 8"),
        ({"tick_rows": 30}, "a band of 20 rows .* limiter.band must be at least 34"),
        ({"min_rows": 1001}, "1001 rows .* 1000 rows of replay .* replay.capacity"),
        ({"min_items": 1001}, "1001 items .* 1000 rows of replay"),
    ],
)
def test_settings_under_which_one_could_only_wait_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        replace(CONFIG, **change)


def test_a_shard_without_writers_is_refused():
    with pytest.raises(ValueError, match=r"5 shards .* limiter.tick_rows=4"):
        Limiter(CONFIG, {str(n): Shard([1]) for n in range(5)})
    with pytest.raises(ValueError, match="0 shards"):
        Limiter(CONFIG, {})


def test_the_smallest_band_is_the_smallest():
    least = replace(CONFIG, band=CONFIG.smallest_band)
    less = copy.copy(least)
    object.__setattr__(less, "band", least.band - 1)  # past the refusal
    blocked = [
        (i, u)
        for i in range(40)
        for u in range(8)
        if not limiter.may_train(less, i, u) and limiter.headroom(less, i, u) < less.tick_rows
    ]
    assert blocked


configs = st.builds(
    lambda ratio, update, tick, slack, fill: LimiterConfig(
        ratio, update, tick, capacity=10_000, band=math.ceil(update / ratio / 2) + tick + slack, min_rows=fill
    ),
    st.floats(0.05, 50) | st.sampled_from([1.0, 0.5, 2.0, 1 / 3]),
    st.integers(1, 64), st.integers(3, 12), st.integers(0, 30), st.integers(0, 20),
)  # fmt: skip


@given(configs, st.integers(0, 10**7), st.integers(0, 10**7))
def test_one_side_may_always_go_on(config, inserted, updates):
    room = limiter.headroom(config, inserted, updates)
    assert limiter.may_train(config, inserted, updates) or room >= config.tick_rows
    # and what is handed out ends in the band, with the tick that may be on its way
    assert room + config.tick_rows <= limiter.lead(config, inserted, updates) + config.band


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6), st.data())
def test_what_is_handed_out(members, data):
    held, used = zip(*members, strict=True)
    room, turn = data.draw(st.integers(-20, 200)), data.draw(st.integers(0, 100))
    rows = limiter.allot(room, held, used, turn)
    # never more in force than all may take, whichever of the grants arrive
    assert sum(map(max, rows, held)) <= max(room, sum(held))
    assert min(rows) >= 0
    if room >= sum(held) and 0 not in held:
        assert sum(rows) == room
    # once what is given back has been, nobody is without
    if room >= len(held):
        again = limiter.allot(room, rows, [0] * len(held), turn + 1)
        assert min(again) >= 1
    # a share is equal, to the row that does not divide
    fresh = [rows[s] for s in range(len(held)) if held[s] == 0]
    assert not fresh or max(fresh) - min(fresh) <= 1


def test_rows_that_do_not_divide_go_round():
    given_to = [limiter.allot(1, [0, 0, 0], [0, 0, 0], turn).index(1) for turn in range(6)]
    assert sorted(given_to[:3]) == [0, 1, 2]
    assert given_to[3:] == given_to[:3]


def test_an_idle_shard_gives_back_all_but_a_row_and_a_busy_one_its_surplus():
    assert limiter.allot(30, [0, 9, 20], [5, 0, 4], 0) == [1, 1, 10]
    assert limiter.allot(30, [1, 1, 10], [0, 0, 4], 0) == [7, 7, 16]  # nobody is without: equal parts of the rest


def test_it_follows_the_clock_of_a_train_ratio():
    schedule = TrainRatio(ratio=1 / 8, start=50, window=5)
    config = LimiterConfig.following(schedule, rows_per_update=16, tick_rows=2, capacity=1000, band=20)
    assert (config.ratio, config.min_items, config.min_rows, config.lead) == (2.0, 50, 0, None)
    # A learner that is never held up and one that follows the clock differ by no more than the band.
    shard, clock, done = Shard([2], window=1), Clock(), 0
    found = Limiter(config, {"a": shard})
    for _ in range(400):
        shard.write()
        clock = schedule.tick(clock, 2)
        found.look()
        done += train_all(found)
    assert abs(done - clock.due) * config.update_rows <= config.band + config.tick_rows + 2 * schedule.window
    assert done > 80
    assert LimiterConfig.following(replace(schedule, ratio=-1.0), 16, 2, 1000, 20).update_rows == 1.0
    with pytest.raises(ValueError, match=r"limiter\.ratio"):
        LimiterConfig.following(replace(schedule, ratio=0.0), 16, 2, 1000, 20)


def test_it_follows_a_schedule_through_its_burst():
    schedule = Schedule("rows", start=100, lead=4, ratio=0.5)
    config = LimiterConfig.following(schedule, rows_per_update=6, tick_rows=4, capacity=1000, band=8)
    assert (config.ratio, config.update_rows, config.min_rows, config.lead) == (3.0, 2.0, 101, 4)
    shard = Shard([4])
    found = Limiter(config, {"a": shard})
    while shard.rows <= 100:
        found.look()
        assert not train(found)
        assert shard.write()
    found.look()
    burst = 0
    while not shard.write():
        assert train(found)
        burst += 1
        found.look()
    due = schedule.due(104)
    # Inserts wait until the burst is worked off to the band's edge, less the tick that is kept free; then all of it is.
    assert burst == due - (config.band - config.tick_rows) // 2 + 1
    found.look()
    assert burst + train_all(found) == schedule.due(shard.rows) + config.band // 2


# what is never, and what is always


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([*range(4)] * 3 + [4])), max_size=12)
"""(shard, stream, what) that happens between the calls of one look."""


class World(RuleBasedStateMachine):
    """Writers, a learner and shards that die and come back at any moment, with a ledger beside the limiter's sums."""

    @initialize(
        config=configs,
        sizes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4),
        window=st.integers(1, 9),
        head_start=st.integers(0, 30),
    )
    def begin(self, config, sizes, window, head_start):
        tick = sum(map(sum, sizes))
        self.config = replace(config, tick_rows=tick, band=config.band + tick)
        self.shards = {f"shard{n}": Shard(s, window) for n, s in enumerate(sizes)}
        self.names = {id(s): name for name, s in self.shards.items()}
        for shard in self.shards.values():
            shard.heard, shard.meanwhile = self.hear, self.meanwhile
        self.events: list[tuple[int, int, int]] = []
        self.rows: set[tuple[str, int, int]] = set()  # every row that was ever read: (shard, incarnation, number)
        self.starts: dict[tuple[str, int], int] = {}  # (shard, incarnation) -> first row that counts
        self.updates: list[int] = []  # every update made, by number
        self.saved = Totals(), set(), {}, []
        self.learn()
        self.live(head_start, [3] * 4, 3)

    def learn(self):
        totals, self.rows, self.starts, self.updates = copy.deepcopy(self.saved)
        # as a checkpoint's JSON gives it back
        totals = Totals(**{**asdict(totals), "shards": {k: list(v) for k, v in totals.shards.items()}})
        self.limiter = Limiter(self.config, self.shards, totals=totals, clock=lambda: 0.0)
        self.admitted = self.made = 0
        self.gone = 0  # rows of memberships that have ended
        self.base: dict[str, int] = {}  # member -> its rows when it joined
        self.counted: dict[str, int] = {}  # its rows when last read as a member
        self.broken: set[str] = set()  # members that are none any more as soon as the look ends

    # the ledger

    def hear(self, shard, reading):
        name = self.names[id(shard)]
        if reading is None:
            self.broken.add(name)
            return
        known = any(n == name for n, _ in self.starts)
        start = self.starts.setdefault((name, shard.incarnation), shard.rows if known else 0)
        self.rows |= {(name, shard.incarnation, k) for k in range(start, shard.rows)}
        if reading.items == 0:
            self.broken.add(name)
        elif name not in self.broken:
            self.counted[name] = shard.rows
        self.last[name] = shard.rows

    def meanwhile(self, shard):
        if self.events:
            n, stream, what = self.events.pop()
            target = list(self.shards.values())[n % len(self.shards)]
            stream %= len(target.streams)
            if what == 0:
                target.look(stream)
            elif what == 1:
                target.land(stream)
            elif what == 4:
                target.up = False
            else:
                target.write(stream)
            self.in_band()

    def inserted(self) -> int:
        """Rows on the clock, down to the last one that has arrived."""
        now = {n: self.counted[n] if n in self.broken else self.shards[n].rows for n in self.base}
        return self.gone + sum(now[n] - base for n, base in self.base.items())

    @invariant()
    def in_band(self):
        lead = self.admitted * self.config.update_rows - self.inserted()
        assert -self.config.band <= lead <= self.config.band * (1 + 1e-9)

    @invariant()
    def right_to_the_row(self):
        status = self.limiter.status()
        totals = self.limiter.totals()
        assert (totals.inserted, totals.updates) == (len(self.rows), len(self.updates))
        assert len(set(self.updates)) == len(self.updates)
        if self.rows:
            assert status.run_ratio == len(self.updates) * self.config.rows_per_update / len(self.rows)
        else:
            assert math.isnan(status.run_ratio)

    # what happens

    @rule(events=EVENTS)
    def look(self, events):
        self.events, self.last = events, {}
        self.limiter.look()
        self.events = []
        members = set(self.limiter.status().headroom)
        for name in list(self.base):
            if name in self.broken or name not in members:
                self.gone += self.counted[name] - self.base.pop(name)
        self.broken.clear()
        for name in members - self.base.keys():
            self.base[name] = self.counted[name] = self.last[name]

    @rule(n=st.integers(0, 3), stream=st.integers(0, 2), ticks=st.integers(1, 9))
    def write(self, n, stream, ticks):
        shard = list(self.shards.values())[n % len(self.shards)]
        for _ in range(ticks):
            shard.write(stream % len(shard.streams))
            self.in_band()

    @rule(n=st.integers(0, 3), stream=st.integers(0, 2), land=st.booleans())
    def write_slowly(self, n, stream, land):
        shard = list(self.shards.values())[n % len(self.shards)]
        (shard.land if land else shard.look)(stream % len(shard.streams))

    @rule(batches=st.integers(1, 9))
    def sample(self, batches):
        for _ in range(batches):
            if self.limiter.wait_to_train(0.0):
                self.admitted += 1
                assert self.base  # and something can be sampled

    @rule()
    def train(self):
        while self.made < self.admitted:
            self.limiter.trained()
            self.made += 1
            self.updates.append(len(self.updates))

    @rule()
    def checkpoint(self):
        self.saved = copy.deepcopy((self.limiter.totals(), self.rows, self.starts, self.updates))

    @rule()
    def restart_learner(self):
        self.learn()

    @rule(n=st.integers(0, 3))
    def kill_shard(self, n):
        list(self.shards.values())[n % len(self.shards)].up = False

    @rule(n=st.integers(0, 3))
    def start_shard(self, n):
        shard = list(self.shards.values())[n % len(self.shards)]
        if not shard.up:
            shard.passed.clear()
        shard.up = True

    @rule(n=st.integers(0, 3))
    def lift_the_bound(self, n):
        """Somebody else's grant: what a shard takes without a bound is not on the clock."""
        name, shard = list(self.shards.items())[n % len(self.shards)]
        shard.credit = NO_BOUND
        if name in self.base:
            self.broken.add(name)

    @rule(n=st.integers(0, 3), kept=st.none() | st.floats(0, 1))
    def lose_shard(self, n, kept):
        """Made anew, or restored to a mark; its credit then stays, as it does over a restart."""
        name, shard = list(self.shards.items())[n % len(self.shards)]
        if name in self.base:
            self.broken.add(name)
        if kept is None:
            shard.lose(0)
        else:
            shard.lose(int(shard.rows * kept), shard.credit)

    @rule(
        rounds=st.integers(1, 20), ticks=st.lists(st.integers(0, 6), min_size=4, max_size=4), batches=st.integers(0, 9)
    )
    def live(self, rounds, ticks, batches):
        """Some rounds in which nothing goes wrong, at some speed of every shard's writers and of the learner."""
        for turn in range(rounds):
            self.look([])
            for n, count in enumerate(ticks[: len(self.shards)]):
                self.write(n, turn, count)
            self.sample(batches)
            self.train()

    @rule()
    def somebody_may_go_on(self):
        """Whatever has happened, after two looks either the learner need not wait or no writer of a living shard."""
        self.look([])
        self.look([])
        if self.limiter.wait_to_train(0.0):
            self.admitted += 1
        else:
            assert all(s.open for s in self.shards.values() if s.up)

    def teardown(self):
        """Nobody is blocked for ever: once all are up, every writer and the learner get on."""
        if not hasattr(self, "limiter"):
            return
        for n in range(4):
            self.start_shard(n)
        c = self.config
        rounds = 20 + int(4 * (2 * c.band + c.update_rows + c.min_rows + 10 * len(self.shards)))
        before = self.admitted
        waiting = {(s, k) for s, shard in self.shards.items() for k in range(len(shard.streams))}
        for turn in range(rounds):
            self.look([])
            for s, shard in self.shards.items():
                order = range(len(shard.streams))
                for k in (*order[turn % len(order) :], *order[: turn % len(order)]):
                    if shard.write(k):
                        waiting.discard((s, k))
                    self.in_band()
            while self.limiter.wait_to_train(0.0):
                self.admitted += 1
            self.in_band()
            if not waiting and self.admitted > before:
                return
        raise AssertionError(f"after {rounds} rounds {waiting} and {self.admitted - before} updates")


def test_the_ledger_agrees():
    run_state_machine_as_test(World, settings=settings(max_examples=100))


# one thing at a time


@dataclass
class Served:
    """A table of the replay service: which rows can be sampled, and who waits for credit, is its own word."""

    table: Table
    envs: int
    length: int
    """Rows of an episode."""
    ticks: int = 0

    def __post_init__(self) -> None:
        self.epoch = self.table.open_stream("worker", self.envs).epoch

    def counters(self) -> Reading:
        s = self.table.stats()
        return Reading(self.table.incarnation, s.rows, s.rows_held, s.items, self.table.credit)

    def grant(self, rows: int) -> None:
        self.table.grant(rows)

    def write(self) -> bool:
        """One tick of all environments, if it need not wait."""
        if not self.table.wait_for_credit(0.0):
            return False
        e, place = self.envs, self.ticks % self.length
        rows = Rows(
            env_id=np.arange(e, dtype=np.int32),
            obs={"x": np.full(e, self.ticks, np.int32)},
            reward=np.zeros(e, np.float32),
            is_first=np.full(e, place == 0),
            is_last=np.full(e, place == self.length - 1),
            is_terminal=np.zeros(e, bool),
            action=np.zeros((e, 1), np.float32),
        )
        columns = {name: value[None] for name, value in to_columns(rows).items()}  # one tick
        self.table.append("worker", self.epoch, self.table.incarnation, self.ticks, rows.env_id, columns)
        self.ticks += 1
        return True


def test_sixteen_environments_whose_first_episode_closes_after_8000_rows(tmp_path):
    """Windows of closed episodes: nothing can be sampled for 500 ticks, and no bound of earlier days may stop them."""
    envs, length = 16, 500
    row = RowSpec((("x", ArraySpec((), "int32")),), ArraySpec((1,)))
    tables = Tables(tmp_path, memory_limit=None, rng=np.random.default_rng(0), latents_root=tmp_path)
    try:
        table = tables.configure("t", TableSpec(row, WindowSpec(length=4), capacity=1000, max_envs=envs), seed=0)
        table.grant(0)
        shard = Served(table, envs, length)
        config = LimiterConfig(ratio=1.0, rows_per_update=32, tick_rows=envs, capacity=envs * 1000, band=64)
        found = Limiter(config, {"a": shard})
        for turn in range(length):
            if turn % 7 == 0:
                found.look()
            assert not found.wait_to_train(0.0)
            assert shard.write()
        assert (table.stats().rows, table.stats().items) == (8000, envs)
        found.look()
        assert train_all(found) == config.band // 32  # the fill is not caught up
        # and now the band holds
        found.look()
        while shard.write():
            pass
        assert 8000 + config.band < table.stats().rows <= 8000 + 2 * config.band
    finally:
        tables.close()


def test_a_shard_that_joins_late_fills_up_while_the_others_are_bounded():
    old, new = Shard([2]), Shard([2], window=40)
    found = open_limiter(old=old, new=new)
    old.write()
    found.look()
    while old.write():
        found.look()
    while new.items == 0:
        found.look()
        assert not old.write()
        assert new.write()
    assert new.rows == 40
    assert not new.write()  # until it has joined, and then as the clock says
    found.look()
    assert not new.write()
    assert train_all(found) > 0
    found.look()
    assert new.write()
    assert old.write()


def test_the_burst_is_owed_once():
    config = replace(CONFIG, min_rows=100, lead=20)
    shard = Shard([4])
    found = Limiter(config, {"a": shard})
    for _ in range(25):
        assert shard.write()
        found.look()
    assert found.status().lead == -80
    assert not shard.write()
    for _ in range(3):
        assert train(found)
    # the learner dies in the middle of it and goes on from a checkpoint: nothing is owed
    again = Limiter(config, {"a": shard}, totals=found.totals())
    again.look()
    assert again.status().lead == 0
    assert train_all(again) == config.band // 8
    assert again.status().run_ratio == 5 * 16 / 100
    # it dies again, and while it is away its shard takes what credit it has
    again.look()
    while shard.write():
        pass
    third = Limiter(config, {"a": shard}, totals=again.totals())
    third.look()
    assert third.status().lead == 0
    assert third.totals().inserted == shard.rows > 100


def test_without_a_checkpoint_the_burst_is_owed_again():
    config = replace(CONFIG, min_rows=100, lead=20)
    shard = Shard([4], rows=100)
    assert open_limiter(config, a=shard).status().lead == -80
    assert open_limiter(config, a=shard).status().lead == -80


def test_a_shard_that_hangs_leaves_its_credit_to_the_others():
    one, other = Shard([2]), Shard([2])
    one.write()
    other.write()
    found = open_limiter(one=one, other=other)
    train_all(found)
    found.look()
    room = sum(found.status().headroom.values())
    one.up = False
    found.look()
    assert found.status().headroom == {"other": room}
    while other.write():
        found.look()
    assert train_all(found) > 0
    # it was only out of reach, and its writers used up what they had: counted for the run, not on the clock
    before, seen = found.status(), found.totals().inserted
    one.up, one.rows = True, one.credit
    found.look()
    assert found.status().lead == before.lead
    assert found.totals().inserted == seen + one.rows - 2
    assert (before.rebases, found.status().rebases) == (0, 1)
    assert set(found.status().headroom) == {"one", "other"}


def test_a_shard_that_dies_before_it_has_its_credit_is_none_of_the_members():
    one, other = Shard([2], rows=5), Shard([2], rows=5)
    found = open_limiter(one=one, other=other)
    train(found)  # more to hand out

    def dies_after_its_reading(shard: Shard) -> None:
        one.up = shard.calls < calls + 2

    calls, one.meanwhile = one.calls, dies_after_its_reading
    found.look()
    assert set(found.status().headroom) == {"other"}
    one.up, one.meanwhile = True, lambda shard: None
    found.look()
    assert set(found.status().headroom) == {"one", "other"}
    assert found.status().rebases == 1


def test_rows_that_are_gone_are_not_taken_back():
    """A machine died, and its shard came back with the rows that its disk had."""
    shard = Shard([4], rows=8)
    found = open_limiter(a=shard)
    while shard.write():
        found.look()
    before = found.status().lead
    shard.rows = 8
    found.look()
    assert found.status().lead == before < 0
    assert found.totals().inserted == 8 - before
    assert found.status().rebases == 1


def test_rows_after_a_restore_count_from_the_first_look():
    shard = Shard([4], rows=100)
    found = open_limiter(a=shard)
    shard.lose(80, credit=200)  # to a mark, with whatever credit; and its writers go on beyond where they were
    while shard.rows < 120:
        assert shard.write()
    found.look()
    assert found.status().lead == 0
    assert found.totals().inserted == 100
    assert shard.credit < 120 + CONFIG.band
    shard.write()
    found.look()
    assert (found.status().lead, found.totals().inserted) == (-4, 104)


@pytest.mark.parametrize("credit", [NO_BOUND, 50])  # as a table is made, and as the limiter before left it
def test_the_fill_is_passed_by_no_more_than_a_band(credit):
    shard = Shard([4], rows=50, credit=credit)
    found = open_limiter(replace(CONFIG, min_rows=100), a=shard)
    while shard.rows < 100:
        before = shard.rows
        assert shard.write()
        while shard.write():
            pass
        assert CONFIG.band <= shard.rows - before < CONFIG.band + CONFIG.tick_rows
        assert not train(found)
        if shard.rows < 100:
            found.look()
    found.look()
    assert shard.rows <= 100 + CONFIG.band + CONFIG.tick_rows
    assert 100 < shard.credit < shard.rows + 2 * CONFIG.band


def test_a_shard_that_hangs_does_not_keep_the_others_waiting():
    time, one, other = Time(), Shard([2], rows=5), Shard([2], rows=5)
    found = Limiter(CONFIG, {"one": one, "other": other}, clock=time.clock)
    found.look()

    def hangs(shard: Shard) -> None:
        time.now += 1.0
        raise TimeoutError("one is stopped")

    one.meanwhile = hangs
    looks = asked = 0
    while time.now < 100:
        found.look()
        time.now += 0.1
        looks += 1
    asked = one.calls
    assert other.calls >= looks
    assert asked <= 25 < 800 <= looks
    one.meanwhile = lambda shard: None
    time.now += 4.0
    found.look()
    assert set(found.status().headroom) == {"one", "other"}


def test_what_no_shard_may_do_is_raised():
    shard = Shard([1])

    def refuse() -> Reading:
        raise PermissionError("wrong token")

    shard.counters = refuse  # type: ignore[method-assign]  # a server that knows no such token
    with pytest.raises(PermissionError, match="wrong token"):
        Limiter(CONFIG, {"a": shard}).look()


def test_few_writers_and_many_get_what_they_can_use():
    """A shard with one environment beside one with twelve and one with none, and a learner that is the slower side."""
    config = replace(CONFIG, tick_rows=13, band=60)
    few, many, idle = Shard([1]), Shard([1] * 12), Shard([1])
    for shard in (few, many, idle):
        shard.write()
    found = open_limiter(config, few=few, many=many, idle=idle)
    written, blocked = {"few": 0, "many": 0}, {"few": 0, "many": 0}
    for turn in range(2000):
        train(found)  # worth 8 rows
        found.look()
        for name, shard in (("few", few), ("many", many)):
            done = sum(shard.write((turn + s) % len(shard.streams)) for s in range(len(shard.streams)))
            written[name] += done
            blocked[name] = 0 if done else blocked[name] + 1
            assert blocked[name] <= 2
    # Twelve writers would take twelve of thirteen rows; one that always has a row to write is not starved by them.
    assert written["few"] >= 0.95 * 2000
    assert written["many"] >= 0.95 * (8 * 2000 - written["few"])
    assert idle.rows == 1


# waiting


class Time:
    """A clock that only waiting moves, a tenth of a second at a time, and what happens meanwhile."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now, self.meanwhile, self.sides = 0.0, meanwhile, []

    def clock(self) -> float:
        return self.now

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        self.now += min(0.1, seconds)
        self.meanwhile()


def test_a_wait_ends_at_its_deadline_and_is_booked():
    time = Time()
    shard = Shard([4])
    found = Limiter(CONFIG, {"a": shard}, clock=time.clock, wait=time.wait)
    assert not found.wait_to_train(1.25)
    assert time.now == pytest.approx(1.25)
    assert found.waits() == limiter.Waits(time.now, 0.0, "none")
    assert not found.wait_to_train(0.0)
    assert time.now == pytest.approx(1.25)


def test_a_learner_goes_on_as_soon_as_rows_arrive():
    shard, sides = Shard([4]), []

    def meanwhile() -> None:
        sides.append(found.waits().side)
        shard.write()
        found.look()

    time = Time(meanwhile)
    found = Limiter(CONFIG, {"a": shard}, clock=time.clock, wait=time.wait)
    assert found.wait_to_train(60.0)  # the first rows
    assert time.now == pytest.approx(0.1)
    while time.now < 2:
        assert found.wait_to_train(60.0)
    assert set(sides) == {"learner"}
    assert found.waits().learner == pytest.approx(time.now)
    assert found.waits().writers == 0.0


def test_time_without_credit_is_the_writers():
    time, shard = Time(), Shard([4])
    shard.write()
    found = Limiter(CONFIG, {"a": shard}, clock=time.clock, wait=time.wait)
    found.look()
    time.now = 5.0
    found.look()
    assert found.waits() == limiter.Waits(0.0, 0.0, "none")
    while shard.write():
        found.look()
    assert found.waits().side == "writers"
    time.now = 8.0
    found.look()
    assert found.waits() == limiter.Waits(0.0, 3.0, "writers")
    assert train(found)
    found.look()
    time.now = 9.0
    found.look()
    assert found.waits() == limiter.Waits(0.0, 3.0, "none")


def test_the_recent_ratio_forgets_and_the_runs_does_not():
    time, shard = Time(), Shard([4])
    found = Limiter(CONFIG, {"a": shard}, clock=time.clock, wait=time.wait)
    assert math.isnan(found.status().run_ratio)
    shard.rows = 1000  # a long fill
    found.look()
    for _ in range(400):
        time.now += 1.0
        train(found)
        shard.write()
        found.look()
    assert shard.rows > 2000
    assert found.status().recent_ratio == pytest.approx(2.0, rel=0.1)
    assert found.status().run_ratio == found.totals().updates * 16 / shard.rows < 1.5


def test_looks_run_in_a_thread_and_what_ends_them_reaches_the_learner():
    shard, stop = Shard([4]), threading.Event()
    shard.write()
    found = Limiter(CONFIG, {"a": shard}, interval=0.001)
    thread = threading.Thread(target=found.run, args=(stop,))
    shard.meanwhile = lambda shard: shard.write() if shard.calls % 100 == 0 else None
    thread.start()
    while found.wait_to_train(0.0 if found.status().headroom else SECONDS):
        pass
    assert found.wait_to_train(10 * SECONDS)  # once the next rows have come
    assert found.waits().learner < SECONDS
    shard.meanwhile = lambda shard: [][1]  # a defect
    with pytest.raises(RuntimeError, match="stopped looking") as raised:
        found.wait_to_train(SECONDS)
    assert isinstance(raised.value.__cause__, IndexError)
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_looks_end_when_they_are_told_to():
    shard, stop = Shard([4]), threading.Event()
    shard.meanwhile = lambda shard: stop.set() if shard.calls > 10 else None
    thread = threading.Thread(target=Limiter(CONFIG, {"a": shard}, interval=0.001).run, args=(stop,))
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_metrics_are_read_off_the_limiter():
    registry = CollectorRegistry()
    time, shard = Time(), Shard([4])
    found = Limiter(CONFIG, {"a": shard}, clock=time.clock, wait=time.wait)
    LimiterMetrics(found.status, CONFIG, registry)
    shard.write()
    found.look()
    assert train(found)
    found.wait_to_train(0.5)
    found.wait_to_train(0.5)
    name = "telamon_learner_limiter_"
    expected = {
        (f"{name}wait_seconds_total", "side", "learner"): 0.5,
        (f"{name}wait_seconds_total", "side", "writers"): 0.0,
        (f"{name}waiting", "side", "learner"): 0.0,
        (f"{name}waiting", "side", "none"): 1.0,
        ("telamon_learner_replayed_rows_per_inserted_row", "over", "run"): 4.0,
        ("telamon_learner_asked_replayed_rows_per_inserted_row", "", ""): CONFIG.ratio,
        (f"{name}lead_rows", "", ""): 16.0,
        (f"{name}band_rows", "", ""): 20.0,
        (f"{name}credit_rows", "shard", "a"): 16.0,
        (f"{name}rebases_total", "", ""): 0.0,
    }
    for (metric, label, value), number in expected.items():
        assert registry.get_sample_value(metric, {label: value} if label else {}) == number, (metric, value)
