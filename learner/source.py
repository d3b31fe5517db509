"""Where batches come from in a cluster: one replay over all shards, and the limiter that looks at them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from learner import limiter
from learner.background import Background
from learner.batches import Gate, Source
from learner.limiter import Limiter, Reading, Totals
from telamon.data import LimiterConfig
from telamon.replay import TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from telamon.rpc.sharded import ShardedReplay

LOOK_SECONDS = 5.0
"""Time-out of a look of the limiter at a shard. One that is late is off the clock until it answers again, which costs
ratio: so it is long."""
LOOK_INTERVAL = 0.05
"""Seconds between two looks. What comes meanwhile must fit into the band, and a narrow band keeps actors close to the
learner; a look costs about a millisecond for each shard."""


@dataclass(frozen=True)
class ShardCounters:
    """A replay server as the limiter looks at it."""

    client: Client

    def counters(self) -> Reading:
        state = self.client.state(LOOK_SECONDS)
        stats = state.stats
        return Reading(state.incarnation, stats.rows, stats.rows_held, stats.items, state.credit)

    def grant(self, rows: int) -> None:
        self.client.grant(rows, LOOK_SECONDS)


class Ungated:
    """The gate of a process that does not lead: it samples ahead, and the leading one says when to train on it."""

    def wait_to_train(self, timeout: float) -> bool:
        return True

    def trained(self) -> None:
        pass

    def look(self) -> None:
        pass

    def totals(self) -> Totals:
        return Totals()

    def status(self) -> limiter.Status:
        return limiter.Status(limiter.Waits(0.0, 0.0, "none"), 0.0, {}, math.nan, math.nan, 0)


@contextmanager
def connect(
    endpoints: Sequence[Endpoint],
    totals: Totals,
    *,
    table: str,
    spec: TableSpec,
    config: LimiterConfig,
    rng: np.random.Generator,
    timeout: float,
    leading: bool,
) -> Iterator[Source]:
    """A source over replay servers, and the limiter's thread where this process leads; all ends with the block.

    totals: of the run so far. spec: of one shard's table, which is made where there is none. rng: draws how many
    windows each shard serves, and seeds tables. timeout: seconds that a call waits for a shard that is away.
    Raises as `Client`.
    """
    with ExitStack() as stack:
        clients: list[Client] = []
        for endpoint in endpoints:
            seed = int(rng.integers(2**63))
            clients.append(Client(endpoint, table, spec, seed=seed, timeout=timeout))
            stack.callback(clients[-1].close)
        replay = ShardedReplay(clients, home=None, rng=rng, max_envs=spec.max_envs, timeout=timeout)
        stack.callback(replay.close)
        gate: Gate = Ungated()
        if leading:
            shards = {f"shard-{i}": ShardCounters(client) for i, client in enumerate(clients)}
            gate = controller = Limiter(config, shards, totals=totals, interval=LOOK_INTERVAL)
            stack.callback(Background(controller.run, "limiter").end)
        yield Source(replay, gate, lambda: replay.dropped_rows)
