"""Several processes of a learner, as threads over a store that behaves as the coordinator's. The real one is in the
last test, and in test_mesh.py."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from learner.group import SOLO, DistributedGroup

LONG = 60.0


class Store:
    """The coordinator's key-value store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values.pop(key, None)


def test_one_process_decides_for_itself():
    assert (SOLO.rank, SOLO.size) == (0, 1)
    assert [SOLO.order(1, able, lambda able: f"update {able}", 1.0) for able in (True, False)] == [
        "update True",
        "update False",
    ]


def never(able: bool) -> str:
    raise AssertionError("only the leading process decides")


def test_all_are_told_what_the_first_one_decides_and_it_knows_who_is_able():
    store, size = Store(), 3
    able = [[True, True, True], [True, False, True], [False, True, True], [True, True, False], [True, True, True]]

    def process(rank: int) -> list[str]:
        group = DistributedGroup(store, rank, size)
        found = []
        for turn, who in enumerate(able, 1):
            decide = (lambda ready, turn=turn: f"{turn} {ready}") if rank == 0 else never
            found.append(group.order(turn, who[rank], decide, LONG))
        return found

    with ThreadPoolExecutor(size) as pool:
        orders = list(pool.map(process, range(size)))
    assert orders[0] == ["1 True", "2 False", "3 False", "4 False", "5 True"]
    assert orders[1] == orders[2] == orders[0]


def test_nobody_begins_an_update_that_another_has_no_batch_for():
    """The slow process comes to its first turns without a batch; the fast one is free meanwhile."""
    store = Store()
    begun: list[list[int]] = [[], []]

    def process(rank: int) -> None:
        group = DistributedGroup(store, rank, 2)
        for turn in range(1, 7):
            able = rank == 0 or turn > 4
            order = group.order(turn, able, lambda ready: "update" if ready else "wait", LONG)
            if order == "update":
                begun[rank].append(turn)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(process, range(2)))
    assert begun == [[5, 6], [5, 6]]


def test_the_store_does_not_grow():
    store = Store()
    first, second = (DistributedGroup(store, rank, 2) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        for turn in range(1, 20):
            told = pool.submit(second.order, turn, True, never, LONG)
            assert first.order(turn, True, lambda able: "update", LONG) == "update"
            assert told.result() == "update"
            assert len(store.values) == 1


@pytest.mark.parametrize(("rank", "silent"), [(0, 1), (1, 0)])
def test_a_process_that_says_nothing_is_named(rank, silent):
    message = rf"^process {silent} of the learner has said nothing in turn 3 for 0.01 s, and is taken for dead$"
    with pytest.raises(TimeoutError, match=message):
        DistributedGroup(Store(), rank, 2).order(3, True, lambda able: "update", 0.01)


def test_another_error_of_the_store_is_passed_on():
    store = Store()
    DistributedGroup(store, 0, 1).order(1, True, lambda able: "update", LONG)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ALREADY_EXISTS"):
        DistributedGroup(store, 0, 1).order(1, True, lambda able: "update", LONG)


REAL = """
import sys
import jax
from jax._src import distributed
from learner.group import DistributedGroup
jax.distributed.initialize(sys.argv[1], 1, 0)
client = distributed.global_state.client
for turn in range(1, 4):
    assert DistributedGroup(client, 0, 1).order(turn, True, lambda able: f"update {able}", 60.0) == "update True"
try:
    DistributedGroup(client, 0, 2).order(4, True, lambda able: "update", 0.1)
except TimeoutError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_real_store_behaves_as_this_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", REAL, f"127.0.0.1:{port}"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "process 1 of the learner has said nothing in turn 4 for 0.1 s" in done.stdout
