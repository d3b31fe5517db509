"""A keeper: a server that is killed is back on its files and at its address; none is left behind."""

from __future__ import annotations

import os
import signal

import pytest

from deploy import shards
from deploy.shards import Keeper, ShardSetup
from telamon.rpc.client import Client
from telamon.rpc.security import Endpoint
from telamon.telemetry.logs import LogBuffer
from tests.service import TOKEN
from tests.telamon.rpc.test_sharded import SPEC, episode
from tests.waiting import SECONDS, until

pytestmark = pytest.mark.slow  # real servers


def keeper(directory, **options) -> Keeper:
    setup = ShardSetup(**{"name": "shard-0", "directory": directory, "listen": "127.0.0.1:0",
                          "metrics_host": "127.0.0.1", **options})  # fmt: skip
    return Keeper(setup, TOKEN, LogBuffer(100))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_killed_server_is_back_at_its_address_with_its_rows(tmp_path):
    shard = keeper(tmp_path)
    assert shard.status().address is None
    address = shard.open()
    first = shard.status()
    assert (first.address, first.starts) == (address, 1)
    with Client(Endpoint(address, TOKEN), "t", SPEC, stream="w", num_envs=1, timeout=SECONDS) as client:
        episode(client, 33, 1)
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: shard.status().starts == 2)
        assert client.stats().rows == 33
    again = shard.status()
    assert again.address == address
    assert again.pid != first.pid
    shard.close()
    assert gone(again.pid)
    assert shard.status().pid is None


def test_what_its_server_says_is_in_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "START_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"(?s)shard-0 does not start: .*without TLS shows token"):
        keeper(tmp_path, listen="0.0.0.0:0").open()


def test_two_keepers_of_one_directory(tmp_path):
    """The second one waits for the first one's server to be gone, as after the death of a keeper."""
    first, second = keeper(tmp_path), keeper(tmp_path)
    first.open()
    pid = first.status().pid
    started = second._start()
    assert started is not None
    assert "in use" in started or "locked" in started or "another" in started
    first.close()
    assert gone(pid)
    second.open()
    second.close()
