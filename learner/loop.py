"""A learner's loop: one update after the other, and whatever may take time beside it.

A turn of the loop is one *order*: an update, a snapshot for the actors, a checkpoint, a report, or nothing yet. The
process that leads chooses it from its own clock, limiter and requests; where there are several processes all carry out
the same orders, so that their programs over all devices meet (learner/group.py). Updates are dispatched, not waited
for: the loop looks at what an update told once the next one was started. Batches are made, latents sent and snapshots
published by threads; every queue between them is bounded.

What others ask of a loop (`finish`, `report`, `status`, ...) may be asked from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation
from jax.sharding import Mesh

from learner import checkpoint, limiter, mesh, update
from learner.background import POLL_SECONDS, Beside, Outbox
from learner.batches import Batch, Batches, Source, WriteBacks, Written
from learner.checkpoint import Saved
from learner.compilations import Compilations, Compiled
from learner.group import SOLO, Group
from learner.limiter import Totals
from learner.tracing import FOLDER as TRACES
from learner.tracing import Trace, tracing
from learner.update import LearnerState, Outcome
from telamon.agents.base import Agent, PyTree, Report
from telamon.data import Counters, LimiterConfig, RowSpec, Window, WindowSpec, as_dtype, from_columns
from telamon.keys import Stream, stream
from telamon.replay import TableSpec
from telamon.telemetry.stopwatch import Stopwatch

if TYPE_CHECKING:  # which needs gRPC, that a loop over an embedded replay does not
    from telamon.rpc.security import Endpoint

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
"""A run that is to finish, and owes updates, gives up after so long without a batch: its shards are gone."""
TURN_SECONDS = 600.0
"""For all processes to come to a turn: each may have to compile, or to wait for its shards. One that has died is
noticed by its heartbeat."""
DRAIN_SECONDS = 30.0
"""At the end of a run, for latents and snapshots that are still on their way."""

Stage = Literal["starting", "restoring", "compiling", "waiting for rows", "training", "saving", "finished"]
"""What a learner does."""
Doing = Literal["rows", "batch", "compute", "write_back", "publish", "checkpoint", "report", "other"]
"""What the loop's time goes to: waiting for rows, or for a batch while there are rows (`batches.Lack`), the updates
themselves, waiting until latents can be sent, taking snapshots, beginning checkpoints and removing old ones, reports.
`other`: the start and its compiling, choosing, waiting for the other processes of a learner."""
End = Literal["finished", "stopped"]
"""Why a loop ended: no more rows will come and all updates were made, or it was told to."""
Connect = Callable[["Sequence[Endpoint]", Totals], AbstractContextManager[Source]]
"""A source over shards, for a run that has done so much. Raises TimeoutError or ConnectionError while one is away."""


@dataclass(frozen=True)
class LearnerSetup:
    """What a process of a learner is told."""

    make_agent: Callable[[], Agent]
    run_dir: Path
    """Seen by all processes of the learner; checkpoints/ is theirs."""
    seed: int
    endpoints: tuple[Endpoint, ...]
    """Of the shards, in the order of their numbers."""
    table: str
    spec: TableSpec
    """Of one shard's table."""
    limiter: LimiterConfig
    timeout: float
    """Seconds that a call waits for a shard that is away."""
    checkpoint_every: int
    """Environment steps."""
    checkpoint_keep: int
    max_skipped: int
    """Updates that may be skipped in a row."""
    first_version: int
    """The least version that snapshots may have: above all that a learner of this run has published."""
    meta: Mapping[str, Any]
    """Stored with every checkpoint: config, env_spec, versions."""
    fsdp: int = 1
    """Devices that share the parameters."""
    publish_seconds: float = 0.1
    """Between two snapshots, at least."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = 0
    """Of the page for Prometheus; 0: a free one; None: no page."""
    profile: int = 0
    """Updates of which the leading process writes a trace into `run_dir`/profile, once it is warm."""
    log_level: int = logging.INFO
    """Events of this level and above travel with the statuses."""
    rank: int = 0
    """Of this process, of `size`; number 0 leads."""
    size: int = 1
    coordinator: str | None = None
    """host:port of the leading process; None where there is one only."""


@dataclass(frozen=True)
class Finished:
    """How a loop ended."""

    reason: End
    counters: Counters
    version: int
    """Of the last snapshot."""
    checkpoint: str | None


@dataclass(frozen=True)
class LoopStatus:
    """How a loop stands."""

    stage: Stage
    counters: Counters = field(default_factory=Counters)
    """rows: as the limiter saw them; transitions and episodes: as `Loop.count` was told."""
    version: int = 0
    """Of the last snapshot; below the first one where there was none."""
    snapshots: int = 0
    """Taken by this process."""
    checkpoint: str | None = None
    """The newest: read, or written since."""
    saved: Saved = field(default_factory=Saved)
    """By this process."""
    checkpoint_age: float = 0.0
    """Seconds since the newest that this process has written became whole, or since the loop was made."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the newest update that has ended; NaN or infinite as they were where it was skipped."""
    seconds: Mapping[Doing, float] = field(default_factory=dict)
    """What the time since the loop was made went to; they add up to it."""
    beside: Beside | None = None
    """None where no threads help."""
    batch_wait_ratio: float = 0.0
    """Share of the time waiting for batches, of the time in which there were rows to train on."""
    updates: int = 0
    """Made by this process, those skipped included."""
    skipped: int = 0
    """Of these."""
    trained_rows: int = 0
    """Of these."""
    update_seconds: float = 0.0
    """Total time of the turns with an update: the device's work, as the loop waits for the update before."""
    written: Written = field(default_factory=Written)
    compiled: Compiled = field(default_factory=Compiled)
    devices: int = 0
    """Of all processes; 0 before they are known."""
    limiter: limiter.Status | None = None
    """None without shards."""


def blank(row: RowSpec, window: WindowSpec, batch: int) -> Window:
    """A batch of windows as a replay serves them, of zeros: an update can be compiled for it before there are rows."""
    rows = {name: window.length for name in row.columns}
    latents = {f"latents/{key}" for key, _ in row.latents}
    rows |= dict.fromkeys(latents, window.context if window.latents == "context" else 0)
    columns = {
        name: np.zeros((batch, rows[name], *array.shape), as_dtype(array.dtype))
        for name, array in row.columns.items()
        if rows[name]
    }
    return Window(np.zeros(batch, np.int32), np.zeros(batch, np.int64), **from_columns(columns))  # type: ignore[arg-type]  # from_columns gives each field its array or dict


class Loop:
    """One process of a learner.

    connect: makes the source of batches. publish: hands (version, acting parameters on the devices) to the actors; it
    is called in a thread of the leading process, and no snapshot is taken while it runs. join: meets the other
    processes, before JAX has been used. clock: seconds, monotonic.
    """

    def __init__(
        self,
        setup: LearnerSetup,
        connect: Connect,
        publish: Callable[[int, PyTree], None],
        join: Callable[[], Group] = lambda: SOLO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setup, self._connect, self._join, self._clock = setup, connect, join, clock
        self._directory = setup.run_dir / "checkpoints"
        self._publish = publish
        self._publisher: Outbox[tuple[int, PyTree]] = Outbox(self._publish_item, 1, "publish", clock)
        self._saver = checkpoint.Saver(clock)
        self._compilations = Compilations()
        self._watch: Stopwatch[Doing] = Stopwatch(get_args(Doing), "other", clock)
        self._beside = Beside()
        self._turns: Mapping[str, Callable[[str], None]] = {
            "update": self._update_turn,
            "publish": lambda _: self._publish_turn(),
            "save": self._save_turn,
            "report": self._report_turn,
            "wait": self._wait_turn,
        }
        self._turn = 0

        # made when it runs
        self._group: Group
        self._agent: Agent
        self._mesh: Mesh
        self._key: jax.Array
        self._update: Any
        self._snapshot: Any
        self._report: Any
        self.devices: tuple[str, ...] = ()
        """Of all processes, by name."""

        # what is trained, and what has been done
        self._state: LearnerState
        self._trace: Trace
        self._updates = self._skipped = self._skipped_before = 0
        self._totals = Totals()
        """Of the run up to the present source."""
        self._version = setup.first_version - 1
        self._pending: Outcome | None = None
        """Of the newest update, not yet looked at."""
        self._looked: Outcome | None = None
        """Of the newest that was."""
        self._checkpoint: str | None = None
        """The one that holds the present state, or did until something changed."""
        self._whole: str | None = None
        """The newest that is known to be on disk."""
        self._saved = 0
        """Environment steps at the last checkpoint."""
        self._published: tuple[float, int] | None = None
        """When, and after how many updates, the last snapshot was taken; None before the first."""

        # where its batches come from
        self._session = ExitStack()
        self._source: Source | None = None
        self._batches: Batches
        self._write_backs: WriteBacks
        self._batch: Batch | None = None
        """The next update's."""

        # what others ask for
        self._lock = threading.Lock()
        self._endpoints: Sequence[Endpoint] = setup.endpoints
        self._moved = False
        self._told = 0, 0
        """Transitions and episodes of the run."""
        self._reports: deque[tuple[int, Future[Report]]] = deque()
        self._stopping = threading.Event()
        self._finishing = threading.Event()

        # what others see
        self._stage: Stage = "starting"
        self._written = Written()
        self._made_at = clock()
        self._began: float | None = None
        """When there was a first batch."""
        self._fed = 0.0
        """When there was a batch last, or the wish to finish was heard."""
        self._settled = False
        """Whether that wish was heard, and the limiter has counted the last rows."""
        self._made = self._snapshots = 0
        self._update_seconds = 0.0

    # what others ask for, from their threads

    def finish(self) -> None:
        """No more rows will come: the loop makes the updates that are due, writes a checkpoint and ends."""
        self._finishing.set()

    def stop(self) -> None:
        """The loop writes a checkpoint and ends."""
        self._stopping.set()

    def count(self, transitions: int, episodes: int) -> None:
        """Tells what the actors have done in the whole run: what checkpoints are due by, and say."""
        with self._lock:
            self._told = transitions, episodes

    def set_shards(self, endpoints: Sequence[Endpoint]) -> None:
        """From now on the shards are reached there. Where that is news all connections are made anew."""
        with self._lock:
            self._moved = self._moved or tuple(endpoints) != tuple(self._endpoints)
            self._endpoints = tuple(endpoints)

    def report(self, index: int) -> Future[Report]:
        """A look at the agent, by the windows of the next update before it is made, with the keys of `index`.

        Its arrays are on the devices. The future raises RuntimeError where the loop ends before.
        """
        asked: Future[Report] = Future()
        with self._lock:
            if self._stage == "finished":
                asked.set_exception(RuntimeError("the learner has finished"))
            else:
                self._reports.append((index, asked))
        return asked

    def status(self) -> LoopStatus:
        """How the loop stands; waits for no update that is going on."""
        looked = self._looked
        metrics = {} if looked is None else {k: float(v) for k, v in looked.metrics.items()}
        seconds, now, saved, counters = self._watch.seconds, self._clock(), self._saver.saved, self._counted()
        fed = 0.0 if self._began is None else now - self._began - seconds["rows"]
        return LoopStatus(
            stage=self._stage,
            counters=counters,
            version=self._version,
            snapshots=self._snapshots,
            checkpoint=self._whole,
            saved=saved,
            checkpoint_age=now - (self._made_at if saved.newest is None else saved.newest),
            metrics=metrics,
            seconds=seconds,
            beside=replace(self._beside),
            batch_wait_ratio=seconds["batch"] / fed if fed > 0 else 0.0,
            updates=self._made,
            skipped=self._skipped - self._skipped_before,
            trained_rows=self._made * self._setup.limiter.rows_per_update,
            update_seconds=self._update_seconds,
            written=replace(self._written),
            compiled=self._compilations.figures,
            devices=len(self.devices),
            limiter=self.limiter_status(),
        )

    def device_bytes(self) -> Mapping[str, Mapping[mesh.Held, int]]:
        """As `mesh.device_bytes`; of no device before they are known: asking for them would begin to use JAX."""
        return mesh.device_bytes() if self.devices else {}

    def limiter_status(self) -> limiter.Status | None:
        """How the limiter stands; None without shards."""
        source = self._source
        return None if source is None else source.gate.status()

    # the loop

    def run(self) -> Finished:
        """From the newest whole checkpoint, or the start, to `finish` or `stop`.

        Raises NonFiniteUpdate, ValueError where no checkpoint is whole, and what a shard, the actors or the disk raise.
        """
        s = self._setup
        traced = s.profile if s.rank == 0 else 0
        with (
            self._compilations.counted(warm=lambda: self._stage == "training"),
            tracing(traced, s.run_dir / TRACES) as self._trace,
        ):
            try:
                self._build()
                self._restore()
                if self._updates or not self._agent.acts_at_random:
                    self._publish_turn()  # so that actors begin while this process compiles
                self._watch.now("other")
                self._open()
                self._compile()
                while True:
                    kind, _, argument = self._order().partition(" ")
                    if kind == "end":
                        return self._end(argument)
                    self._turns[kind](argument)
                    self._watch.now("other")
            finally:
                self._close()

    def _build(self) -> None:
        """Meets the other processes, makes what follows from the setup. Raises ValueError for what cannot be split."""
        self._group = self._join()
        self._agent = self._setup.make_agent()
        self._mesh = mesh.make_mesh(jax.devices(), self._setup.fsdp)
        mesh.check_batch(self._agent.batch_size, self._mesh)
        self.devices = tuple(str(device) for device in self._mesh.devices.flat)
        self._key = stream(self._setup.seed, Stream.UPDATE)
        self._snapshot = update.make_snapshot(self._agent, self._mesh)
        self._report = update.make_report(self._agent, self._mesh)

    def _restore(self) -> None:
        """The newest checkpoint that is whole, onto the present devices, or a fresh state."""
        self._stage = "restoring"
        candidates = checkpoint.names(self._directory)
        for name in candidates:
            try:
                found = checkpoint.load(self._directory, name, self._like())
            except (ValueError, OSError) as error:
                log.warning("event=checkpoint_damaged name=%s error=%s", name, error)
                continue
            counters, self._state = found.meta["counters"], found.state
            self._checkpoint = self._whole = name
            self._updates = counters["updates"]
            self._skipped = self._skipped_before = counters["skipped"]
            self._told = counters["transitions"], counters["episodes"]
            self._totals = Totals(**found.meta["limiter"])
            self._version = max(self._version, found.meta["version"])
            self._saved = self._env_steps()
            log.info("event=restored checkpoint=%s updates=%d version=%d", name, self._updates, self._version)
            return
        if candidates:
            raise ValueError(
                f"none of the {len(candidates)} checkpoints under {self._directory} is whole; the log says why"
            )
        self._state = update.init(self._agent, stream(self._setup.seed, Stream.INIT), self._mesh)

    def _like(self) -> LearnerState:
        """Shapes, dtypes and shardings of a state."""
        shapes = jax.eval_shape(partial(update.fresh, self._agent), jax.random.key(0))
        like: LearnerState = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            update.shardings(self._agent, self._mesh),
        )
        return like

    def _compile(self) -> None:
        """The update, before there are rows: from then on nothing is compiled in it, or it raises TypeError."""
        self._stage = "compiling"
        began = self._clock()
        agent, window = self._agent, blank(self._agent.row_spec, self._agent.window_spec, self._slice)
        lowered = update.make_update(agent, self._mesh).lower(self._state, self._place(window), self._key, np.uint32(0))
        self._update = lowered.compile()
        log.info("event=compiled seconds=%.1f devices=%d", self._clock() - began, self._mesh.size)

    @property
    def _slice(self) -> int:
        """This process's windows of a batch."""
        return self._agent.batch_size // self._group.size

    def _place(self, window: Window) -> Window:
        return mesh.place(window, self._mesh)

    # where batches come from

    def _open(self) -> None:
        """Connects, again and again while a shard is away; without a source where the loop is to stop before."""
        while not self._stopping.is_set():
            with self._lock:
                endpoints, self._moved = self._endpoints, False
            session = ExitStack()
            try:
                source = session.enter_context(self._connect(endpoints, self._totals))
            except (TimeoutError, ConnectionError) as error:
                log.warning("event=no_shards error=%s", error)
                self._stopping.wait(POLL_SECONDS)
                continue
            sample = partial(source.replay.sample, self._slice)
            self._batches = Batches(
                sample, source.gate.wait_to_train, self._place, self._watch.now, self._beside, clock=self._clock
            )
            context = self._agent.window_spec.context
            self._write_backs = WriteBacks(source, context, mesh.local, self._written, self._beside, self._clock)
            self._session, self._source = session, source
            return

    def _disconnect(self) -> None:
        """Ends the source's calls, and the threads that make them; what they hold is dropped."""
        source, self._source, self._batch = self._source, None, None
        if source is None:
            return
        self._totals = source.gate.totals()
        self._batches.stop()
        self._write_backs.stop()
        self._session.close()
        self._batches.end()
        self._write_backs.end()

    def _close(self) -> None:
        """Ends all threads. Reports that were asked for fail."""
        self._disconnect()
        self._publisher.end()
        self._saver.close()
        with self._lock:
            self._stage = "finished"
            for _, asked in self._reports:
                asked.set_exception(RuntimeError("the learner has finished"))
            self._reports.clear()

    # what is to be done next

    def _order(self) -> str:
        """Waits for a batch, for a short time, and gives this turn's order: of all processes."""
        self._publisher.check()
        if self._saver.idle:
            self._keep()
        if self._moved:
            log.info("event=shards_moved endpoints=%s", [endpoint.address for endpoint in self._endpoints])
            self._disconnect()
            self._open()
        if self._batch is None and self._source is not None:
            self._batch = self._batches.get(POLL_SECONDS)
            self._watch.now("other")
            if self._batch is not None:
                self._fed = self._clock()
                if self._began is None:
                    self._began = self._fed - self._watch.seconds["rows"]
        self._stage = "waiting for rows" if self._batch is None else "training"
        self._turn += 1
        return self._group.order(self._turn, self._batch is not None, self._decide, TURN_SECONDS)

    def _decide(self, able: bool) -> str:
        """The leading process's choice. able: whether all have a batch."""
        if self._stopping.is_set():
            if self._source is not None:
                self._source.gate.look()  # the last rows count
            return f"end stopped {self._name()}"
        if self._finishing.is_set() and self._all_made():
            return f"end finished {self._name()}"
        if self._publish_due():
            return "publish"
        if self._save_due():
            return f"save {self._name()}"
        if able and self._reports:
            return f"report {self._reports[0][0]}"
        if able and not (self._finishing.is_set() and not self._owes()):
            return "update"
        return "wait"

    def _all_made(self) -> bool:
        """Whether the updates that are due for all rows of the run were made, or cannot be made any more."""
        if self._source is not None and not self._settled:
            self._source.gate.look()
            self._settled, self._fed = True, self._clock()
        if not self._owes():
            return True
        gone = self._clock() - self._fed > QUIET_SECONDS
        if gone:
            log.warning("event=updates_left_out reason='no batch for %g s'", QUIET_SECONDS)
        return gone

    def _owes(self) -> bool:
        """Whether one more update is due by the rows that have come."""
        if self._source is None:
            return False
        unmade = self._batches.ahead + (self._batch is not None)
        lead = self._source.gate.status().lead - unmade * self._setup.limiter.update_rows
        return lead + self._setup.limiter.update_rows <= 0

    def _publish_due(self) -> bool:
        """Not while a snapshot is on its way, not without an update since, and not before the first burst is over."""
        if self._updates == 0 or not self._publisher.idle:
            return False
        if self._published is None:
            return self._source is not None and self._source.gate.status().lead >= -self._setup.limiter.band
        when, updates = self._published
        return self._updates > updates and self._clock() - when >= self._setup.publish_seconds

    def _save_due(self) -> bool:
        """Once a multiple of so many environment steps was passed."""
        every = self._setup.checkpoint_every
        return (
            self._env_steps() // every > self._saved // every and self._saver.idle and self._name() != self._checkpoint
        )

    def _env_steps(self) -> int:
        return self._told[0] * self._agent.env.action_repeat

    def _inserted(self) -> int:
        """Rows of the run, as the limiter saw them."""
        source = self._source
        return (self._totals if source is None else source.gate.totals()).inserted

    def _counted(self) -> Counters:
        transitions, episodes = self._told
        return Counters(self._inserted(), transitions, episodes, self._updates, self._skipped)

    def _name(self) -> str:
        """Of a checkpoint of the present state: names sort by age, and two states never share one."""
        return f"{self._inserted():012d}-{self._updates:012d}"

    # the things a turn can be

    def _update_turn(self, _: str) -> None:
        """Starts an update, hands its latents on, and looks at the update before."""
        batch, self._batch, source = self._batch, None, self._source
        assert batch is not None
        assert source is not None
        began = self._clock()
        self._watch.now("compute")
        if self._setup.profile:
            self._trace.before_update(self._inserted())
        with StepTraceAnnotation("update", step_num=self._updates):
            index = np.uint32(self._updates)
            self._state, outcome = self._update(self._state, batch.window, self._key, index)
        source.gate.trained()
        self._watch.now("write_back")
        self._write_backs.put(batch.origin, outcome)
        self._look()
        self._pending = outcome._replace(write_back=None)
        self._updates += 1
        self._made += 1
        self._update_seconds += self._clock() - began

    def _look(self) -> None:
        """Waits for the newest update that was not looked at. Raises NonFiniteUpdate."""
        self._watch.now("compute")
        outcome, self._pending = self._pending, None
        if outcome is None:
            return
        streak = int(outcome.streak)
        self._looked = outcome
        if streak > 0:
            self._skipped = int(outcome.skipped)
            update.check_streak(self._updates, streak, outcome.metrics, self._setup.max_skipped)

    def _publish_turn(self) -> None:
        """Takes a snapshot, which the leading process hands on."""
        self._watch.now("publish")
        params = self._snapshot(self._state)
        self._version += 1
        self._snapshots += 1
        self._published = self._clock(), self._updates
        if self._group.rank == 0:
            self._publisher.put((self._version, params))

    def _publish_item(self, item: tuple[int, PyTree]) -> None:
        """In the publisher's thread."""
        began = self._clock()
        self._publish(*item)
        self._beside.publish += self._clock() - began

    def _save_turn(self, name: str) -> None:
        """Begins to write a checkpoint; it is written while updates go on."""
        self._stage = "saving"
        self._look()
        self._watch.now("checkpoint")
        looked = {} if self._looked is None else self._looked.metrics
        arrays = {f"metrics/{k}": np.asarray(v) for k, v in looked.items()}
        meta = {
            **self._setup.meta,
            "counters": self._counted().as_dict(),
            "limiter": asdict(self._totals if self._source is None else self._source.gate.totals()),
            "version": self._version,
        }
        self._saver.save(self._directory, name, self._state, arrays, meta)
        self._checkpoint, self._saved = name, self._env_steps()

    def _keep(self) -> None:
        """Once the last checkpoint is whole: removes all but the newest `checkpoint_keep`. Raises what went wrong."""
        self._saver.wait()
        if self._whole == self._checkpoint or self._checkpoint is None:
            return
        self._watch.now("checkpoint")
        self._whole = self._checkpoint
        log.info("event=checkpoint name=%s", self._whole)
        if self._group.rank == 0:
            # Names sort by progress: what lies ahead is damaged, or this run would have started from there.
            known = checkpoint.names(self._directory)
            kept = [name for name in known if name <= self._whole][: self._setup.checkpoint_keep]
            for old in set(known) - set(kept):
                checkpoint.remove(self._directory, old)

    def _report_turn(self, index: str) -> None:
        """A look at the agent by the windows of the next update."""
        assert self._batch is not None
        self._watch.now("report")
        found = self._report(self._state, self._batch.window, stream(self._setup.seed, Stream.REPORT, int(index)))
        if self._group.rank == 0:
            with self._lock:
                _, asked = self._reports.popleft()
            asked.set_result(found)

    def _wait_turn(self, _: str) -> None:
        """Nothing is to be done; a loop that has a batch waits here for what it lacks."""
        if self._batch is not None:
            self._stopping.wait(POLL_SECONDS)

    def _end(self, argument: str) -> Finished:
        """The last snapshot and the last checkpoint."""
        reason, _, name = argument.partition(" ")
        self._look()
        if self._updates > (0 if self._published is None else self._published[1]):
            self._publish_turn()
        if name != self._checkpoint:
            self._save_turn(name)
        self._watch.now("checkpoint")
        self._keep()
        if self._source is not None:
            self._watch.now("write_back")
            self._write_backs.drain(DRAIN_SECONDS)
        self._watch.now("publish")
        self._publisher.drain(DRAIN_SECONDS)
        self._watch.now("other")
        log.info("event=stop reason=%s updates=%d version=%d", reason, self._updates, self._version)
        return Finished(
            "stopped" if reason == "stopped" else "finished", self._counted(), self._version, self._checkpoint
        )
