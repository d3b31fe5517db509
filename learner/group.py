"""The processes of a learner agree on what to do next: one chooses, all do it.

Their programs run over the devices of all, so each must start the same ones in the same order, and one that started
alone would wait inside for the others. Therefore every process says once a turn whether it has a batch, and nobody
begins an update before all have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax


class Group(Protocol):
    """The processes of a learner; number 0 leads."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def order(self, turn: int, able: bool, decide: Callable[[bool], str], timeout: float) -> str:
        """What all do in turn `turn` (1, 2, ...), as the leading process decides once all have come to it.

        able: whether this process has a batch. decide: is given whether all have one; called in the leading process.
        timeout: seconds for the others to come, or for the leading one to decide. Raises TimeoutError.
        """
        ...


class Solo:
    """One process, alone."""

    rank, size = 0, 1

    def order(self, turn: int, able: bool, decide: Callable[[bool], str], timeout: float) -> str:
        return decide(able)


SOLO = Solo()


class DistributedGroup:
    """The processes of `jax.distributed`, over its coordinator's key-value store. client: of that store."""

    def __init__(self, client: Any, rank: int, size: int) -> None:
        self._client, self.rank, self.size = client, rank, size

    def order(self, turn: int, able: bool, decide: Callable[[bool], str], timeout: float) -> str:
        told = lambda turn: f"telamon/order/{turn}"
        ready = lambda rank: f"telamon/ready/{turn}/{rank}"
        if self.rank > 0:
            self._client.key_value_set(ready(self.rank), "able" if able else "unable")
            return self._get(told(turn), 0, turn, timeout)
        for rank in range(1, self.size):
            able = self._get(ready(rank), rank, turn, timeout) == "able" and able
            self._client.key_value_delete(ready(rank))
        order = decide(able)
        self._client.key_value_set(told(turn), order)
        self._client.key_value_delete(told(turn - 1))  # all have read it, or they would not have come to this turn
        return order

    def _get(self, key: str, rank: int, turn: int, timeout: float) -> str:
        """What `rank` says in turn `turn`. Raises TimeoutError."""
        try:
            value: str = self._client.blocking_key_value_get(key, int(1000 * timeout))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(
                f"process {rank} of the learner has said nothing in turn {turn} for {timeout:g} s, "
                "and is taken for dead"
            ) from error
        return value
