"""Bounded pieces of acting: what a worker is asked for again and again, with new parameters in between.

Environments on the host act tick by tick (`Collector`). Those that are JAX programs do so on the device (`Unroll`): act
or plan, step and rows of many ticks are one jitted loop, whose arrays come to the host in one transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np

from actors.collector import Books, Collector, Doing, Episode, Sink, params_like, random_draws
from telamon.agents.base import Agent, PyTree
from telamon.data import Counters, Rows, as_dtype
from telamon.envs.base import BatchedEnv, Step, map_action, random_action
from telamon.envs.checks import check_action
from telamon.keys import Stream, stream
from telamon.telemetry.histogram import Histogram
from telamon.telemetry.stopwatch import Stopwatch

log = logging.getLogger(__name__)

LONGEST = 64
"""Ticks of one unroll at most."""
UNROLL_BYTES = 2**26
"""Of the rows of one unroll at most, where that is more than one tick."""
DELAYS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds, in seconds, of the histogram of the time from the offer of a snapshot to its use."""


class Snapshot(NamedTuple):
    """Acting parameters and their version."""

    version: int
    params: PyTree


class Snapshots:
    """Where new parameters wait until the rollout takes them, between two ticks. The newest wins.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived = threading.Condition()
        self._pending: tuple[Snapshot, float] | None = None
        self.newest: int | None = None
        """Version of the newest one that was offered."""
        self.delays: deque[float] = deque(maxlen=1000)
        """Seconds from the offer to the taking of the last ones that were taken."""
        self.waited = Histogram(DELAYS)
        """Those of all."""

    def offer(self, snapshot: Snapshot) -> bool:
        """Puts a snapshot into the slot; False where it is not newer than one that was offered before."""
        with self._arrived:
            if self.newest is not None and snapshot.version <= self.newest:
                return False
            self._pending, self.newest = (snapshot, self._clock()), snapshot.version
            self._arrived.notify_all()
            return True

    def take(self) -> Snapshot | None:
        """What waits in the slot, and empties it."""
        with self._arrived:
            if self._pending is None:
                return None
            (snapshot, offered), self._pending = self._pending, None
            delay = self._clock() - offered
            self.delays.append(delay)
            self.waited.observe(delay)
            return snapshot

    def wait(self, timeout: float) -> bool:
        """Waits until something is in the slot; False if nothing is after `timeout` seconds."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._pending is not None, timeout)


class Writer(Protocol):
    """A replay's writing side that may be away, or have no credit; `telamon.rpc.client.Client` is one."""

    def append(self, rows: Rows, timeout: float | None = None) -> None:
        """Takes one tick. Raises OSError, TimeoutError among them, after it was taken: it is sent as soon as it can."""
        ...

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all is acknowledged. Raises as `append`."""
        ...


class Outbox:
    """Appends to a Writer without waiting for ever: a row that it could not send within `patience` seconds it keeps."""

    def __init__(self, writer: Writer, patience: float) -> None:
        self._writer, self._patience = writer, patience
        self.resets = 0
        """Rows appended that are is_first."""
        self.late = False
        """Whether a row is kept, so that nothing more should be appended before a `flush`."""

    def append(self, rows: Rows) -> None:
        self.resets += int(rows.is_first.sum())
        try:
            self._writer.append(rows, self._patience)
        except PermissionError:
            raise
        except OSError as error:
            self._delay(error)

    def flush(self) -> bool:
        """Whether all that was appended has been acknowledged, within the patience."""
        try:
            self._writer.flush(self._patience)
        except PermissionError:
            raise
        except OSError as error:
            self._delay(error)
            return False
        if self.late:
            log.info("event=rows_sent")
        self.late = False
        return True

    def _delay(self, error: OSError) -> None:
        if not self.late:
            log.info("event=rows_wait reason=%r", str(error))
        self.late = True


class Unrollable(BatchedEnv, Protocol):
    """Environments that a jitted unroll can advance; `telamon.envs.jax.JaxEnvs` are."""

    rebuilds: bool

    def start(self) -> tuple[jax.Array, PyTree, Any]: ...

    def advance(self, keys: jax.Array, tick: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, Any]: ...

    def take(self, rows: Step) -> None: ...


def can_unroll(env: BatchedEnv) -> TypeGuard[Unrollable]:
    """Whether `env` is a JAX program. Not with env.on_error=rebuild: resetting one of many is the host's business."""
    return not getattr(env, "rebuilds", True)


class Acting(NamedTuple):
    """What an unroll carries from tick to tick, on the device."""

    carry: PyTree
    """The agent's."""
    state: PyTree
    """The environments'."""
    row: Any
    """Their pending rows, without actions."""


def jit_unroll(agent: Agent, env: Unrollable, longest: int) -> tuple[Any, Any]:
    """(by_policy, at_random), each one program for any number of ticks up to `longest`.

    by_policy(params, acting, keys, key, tick, count) and at_random(actions, acting, keys, tick, count) give
    (acting, made): made is (rows, action, latents), leaves [longest, E, ...] of which the first `count` are used, rows
    being those that the ticks ended with. `acting` is donated. actions: leaves [longest, E, ...].
    """
    num_envs = env.num_envs

    def unroll(choose: Any, acting: Acting, keys: jax.Array, tick: jax.Array, count: jax.Array) -> Any:
        def one(acting: Acting, i: jax.Array) -> Any:
            row = acting.row
            action, carry, latents = choose(acting.carry, row, i)
            action = map_action(lambda a: jnp.where(_like(row.is_last, a), jnp.zeros((), a.dtype), a), action)
            state, row = env.advance(keys, tick + i + 1, acting.state, action)
            return Acting(carry, state, row), (row, action, latents)

        def body(i: jax.Array, loop: Any) -> Any:
            acting, made = loop
            acting, new = one(acting, i)
            return acting, jax.tree.map(lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, i, 0), made, new)

        # As `lax.scan` does, but with the number of ticks as an argument: no length needs a compilation of its own.
        _, shapes = jax.eval_shape(one, acting, jnp.uint32(0))
        made = jax.tree.map(lambda x: jnp.zeros((longest, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(jnp.uint32(0), count, body, (acting, made))

    def by_policy(
        params: PyTree, acting: Acting, keys: jax.Array, key: jax.Array, tick: jax.Array, count: jax.Array
    ) -> Any:
        def choose(carry: PyTree, row: Any, i: jax.Array) -> Any:
            noise = agent.draw_act_noise(jax.random.fold_in(key, tick + i), num_envs)
            return agent.act(params, carry, row.obs, row.is_first, noise, "train")

        return unroll(choose, acting, keys, tick, count)

    def at_random(actions: PyTree, acting: Acting, keys: jax.Array, tick: jax.Array, count: jax.Array) -> Any:
        latents = {k: jnp.zeros((num_envs, *a.shape), as_dtype(a.dtype)) for k, a in agent.row_spec.latents}

        def choose(carry: PyTree, row: Any, i: jax.Array) -> Any:
            return map_action(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False), actions), carry, latents

        return unroll(choose, acting, keys, tick, count)

    return jax.jit(by_policy, donate_argnames="acting"), jax.jit(at_random, donate_argnames="acting")


def _like(where: jax.Array, a: jax.Array) -> jax.Array:
    """`where` [E] with the axes of `a` [E, ...]."""
    return where.reshape(-1, *[1] * (a.ndim - 1))


class Unroll:
    """Does what Collector does, many ticks at a time: the same rows, but for the rounding of another program.

    Rows that were made and not yet appended wait here; `waiting` says for how many ticks, `longest` bounds it.
    """

    def __init__(
        self,
        agent: Agent,
        env: Unrollable,
        replay: Sink,
        seed: int,
        counters: Counters,
        index: tuple[int, ...],
        longest: int = LONGEST,
    ) -> None:
        self._agent, self.env, self._replay = agent, env, replay
        self._seed, self._index = seed, index
        self._key = stream(seed, Stream.ACT, *index)
        self._env_id = np.arange(env.num_envs, dtype=np.int32)
        self._longest = max(1, min(longest, UNROLL_BYTES // (agent.row_spec.nbytes * env.num_envs)))
        self._by_policy, self._at_random = jit_unroll(agent, env, self._longest)
        self._acting: Acting | None = None
        self._keys: jax.Array | None = None
        self._tick = 0
        """The first one that was not unrolled."""
        self._made: deque[tuple[Any, dict[str, np.ndarray], Step]] = deque()
        """(action, latents, the rows that the tick ends with) of what was not appended."""
        self.books = Books(agent, env.num_envs)
        self._step: Step | None = None
        self.tick_count = 0
        """Of those whose rows were appended."""
        self.counters = counters
        self.stopwatch: Stopwatch[Doing] = Stopwatch(get_args(Doing), "idle")

    @property
    def waiting(self) -> int:
        return len(self._made)

    def prepare(self) -> None:
        """As `Collector.prepare`."""
        if self._step is None:
            self._begin()
        zero = np.uint32(0)
        self._by_policy.lower(params_like(self._agent), self._acting, self._keys, self._key, zero, zero).compile()

    def tick(self, params: PyTree | None, ahead: int = LONGEST) -> list[Episode]:
        """As `Collector.tick`. Where nothing waits, up to `ahead` ticks are unrolled first, all with `params`."""
        watch = self.stopwatch
        if self._step is None:
            watch.now("environment")
            self._begin()
        if not self._made:
            watch.now("acting")
            self._unroll(params, min(ahead, self._longest))
        step = self._step
        assert step is not None
        action, latents, then = self._made.popleft()
        check_action(self.env.spec, self.env.num_envs, action)
        watch.now("replay")
        self._replay.append(
            Rows(self._env_id, step.obs, step.reward, step.is_first, step.is_last, step.is_terminal, action, latents)
        )
        self.counters.rows += self.env.num_envs
        self.tick_count += 1
        watch.now("environment")
        ended = self._enter(then)
        watch.now("idle")
        return ended

    def _begin(self) -> None:
        self._keys, state, row = self.env.start()
        carry = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), self._agent.initial_carry(self.env.num_envs))
        # copies: what is donated must be nobody else's, nor be there twice
        self._acting = jax.tree.map(jnp.copy, Acting(carry, state, row))
        step = self._on_host(jax.device_get(row))
        self.books.enter(step, self.counters)
        self._step = step

    def _unroll(self, params: PyTree | None, count: int) -> None:
        tick, ticks = np.uint32(self._tick % 2**32), np.uint32(count)
        if params is None:
            actions = self._random_actions(count)
            self._acting, made = self._at_random(actions, self._acting, self._keys, tick, ticks)
        else:
            self._acting, made = self._by_policy(params, self._acting, self._keys, self._key, tick, ticks)
        rows, action, latents = jax.device_get(made)
        self._tick += count
        for i in range(count):
            at = lambda x, i=i: x[i]
            self._made.append(
                (map_action(at, action), {k: v[i] for k, v in latents.items()}, self._on_host(jax.tree.map(at, rows)))
            )

    def _random_actions(self, count: int) -> Any:
        """Those that a Collector draws for the next `count` ticks, leaves [longest, E, ...]."""
        spec, num_envs = self.env.spec.action, self.env.num_envs
        drawn = [
            random_action(spec, num_envs, random_draws(self._seed, self._index, self._tick + i)) for i in range(count)
        ]
        return jax.tree.map(lambda *parts: np.stack(parts), *drawn, *[drawn[-1]] * (self._longest - count))

    def _on_host(self, row: Any) -> Step:
        obs: Mapping[str, np.ndarray] = {key: row.obs[key] for key, _ in self.env.spec.obs}  # JAX sorts a dict's keys
        return Step(obs, row.reward, row.is_first, row.is_last, row.is_terminal)

    def _enter(self, step: Step) -> list[Episode]:
        self.env.take(step)
        ended = self.books.enter(step, self.counters)
        self._step = step
        return ended


Ended = Literal["done", "stopped", "snapshot", "replay", "time"]


@dataclass(frozen=True)
class Piece:
    """What one bounded rollout did."""

    ticks: int
    rows: int
    resets: int
    """Of the rows, those that begin an episode."""
    transitions: int
    episodes: tuple[Episode, ...] = field(repr=False)
    """Those that ended."""
    first_version: int | None
    """Of the snapshot that the first row was acted with; None: at random."""
    last_version: int | None
    lag: int
    """Versions, at most, that had arrived when a row was appended and were newer than the one it was acted with."""
    seconds: float
    wait_seconds: float
    """Of these, spent on waiting for the replay or for a snapshot."""
    ended: Ended
    """Why; `snapshot` and `replay` are what it waited for in vain, `time`: the patience was at its end.

    Rows that the replay did not take are kept.
    """


class Rollout:
    """Acts in a batch of environments with the newest snapshot, and appends the rows, piece by piece.

    index: of this actor's own streams of randomness; no two actors of a run, nor two lives of one, may share it.
    acts_at_random: whether it acts uniformly at random before the first snapshot; otherwise it waits for one.
    patience: seconds that a piece waits for a snapshot, or for the replay to take a row; no later tick is begun either.
    stopped: asked once a tick.
    unroll_ticks: of JAX environments, that may be acted ahead of what the replay has taken.
    """

    def __init__(
        self,
        agent: Agent,
        env: BatchedEnv,
        writer: Writer,
        seed: int,
        index: tuple[int, ...],
        snapshots: Snapshots,
        *,
        acts_at_random: bool,
        patience: float,
        stopped: Callable[[], bool],
        unroll_ticks: int = LONGEST,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counters = Counters()
        self.snapshot: Snapshot | None = None
        """What it acts with; None: at random, or not yet."""
        self._outbox = Outbox(writer, patience)
        self._snapshots, self._acts_at_random = snapshots, acts_at_random
        self._patience, self._stopped, self._clock = patience, stopped, clock
        self._prepared = False
        self.source: Unroll | Collector
        if can_unroll(env):
            self.source = Unroll(agent, env, self._outbox, seed, self.counters, index, unroll_ticks)
        else:
            self.source = Collector(agent, env, self._outbox, seed, self.counters, index)

    @property
    def ticks(self) -> int:
        return self.source.tick_count

    @property
    def stopwatch(self) -> Stopwatch[Doing]:
        return self.source.stopwatch

    @property
    def resets(self) -> int:
        return self._outbox.resets

    def run(self, ticks: int) -> Piece:
        """Up to `ticks` ticks; fewer where it is stopped, or would have to wait for long.

        Raises EnvError, and what a Writer raises of rows that can never be stored.
        """
        began, waited = self._clock(), self._waits()
        counters = (self.counters.rows, self.counters.transitions, self._outbox.resets)
        episodes: list[Episode] = []
        versions: list[int | None] = []
        done = lag = 0
        ended: Ended = self._ready()
        while ended == "done" and done < ticks:
            if self._stopped():
                ended = "stopped"
                break
            if done and self._clock() - began > self._patience:
                ended = "time"
                break
            if isinstance(self.source, Collector):
                self._swap()
                episodes += self.source.tick(self._params())
            else:
                if not self.source.waiting:
                    self._swap()
                episodes += self.source.tick(self._params(), ticks - done)
            done += 1
            version = None if self.snapshot is None else self.snapshot.version
            versions = [*versions[:1], version]
            if version is not None and self._snapshots.newest is not None:
                lag = max(lag, self._snapshots.newest - version)
            if self._outbox.late:
                ended = "replay"
        rows, transitions, resets = counters
        return Piece(
            ticks=done,
            rows=self.counters.rows - rows,
            resets=self._outbox.resets - resets,
            transitions=self.counters.transitions - transitions,
            episodes=tuple(episodes),
            first_version=versions[0] if versions else None,
            last_version=versions[-1] if versions else None,
            lag=lag,
            seconds=self._clock() - began,
            wait_seconds=self._waits() - waited,
            ended=ended,
        )

    def flush(self) -> bool:
        """Whether all rows that were appended have been acknowledged, within the patience."""
        self.stopwatch.now("replay")
        done = self._outbox.flush()
        self.stopwatch.now("idle")
        return done

    def _ready(self) -> Literal["done", "snapshot", "replay"]:
        """`done` if it may act; otherwise what it waited for in vain."""
        able = self._acts_at_random or self.snapshot is not None
        if self.snapshot is None and not self._prepared and (self._outbox.late or not able):
            # it has time now, and none once the first snapshot is there: then the learner waits for its rows
            self.stopwatch.now("acting")
            self.source.prepare()
            self._prepared = True
        if self._outbox.late and not self.flush():
            return "replay"
        if able:
            return "done"
        self.stopwatch.now("snapshot")
        arrived = self._snapshots.wait(self._patience)
        self.stopwatch.now("idle")
        return "done" if arrived else "snapshot"

    def _waits(self) -> float:
        return self.stopwatch.seconds["replay"] + self.stopwatch.seconds["snapshot"]

    def _swap(self) -> None:
        if (new := self._snapshots.take()) is not None:
            self.snapshot = new

    def _params(self) -> PyTree | None:
        return None if self.snapshot is None else self.snapshot.params
