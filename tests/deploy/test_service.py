"""A run whose rows are kept by a replay service is, bit for bit, the run that keeps them itself."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from deploy import local
from deploy.config import EvalConfig, ReplayConfig, ReportConfig, RunConfig
from replay_server.store import table_bytes
from telamon.data import WindowSpec
from telamon.replay import TableSpec
from telamon.rpc.client import Client
from telamon.rpc.security import TOKEN_VARIABLE
from tests.harness import TINY, Killed, after, kill, lines, probing, stop
from tests.probe import Remembering
from tests.replay_server.model import ROW
from tests.service import TOKEN, serve, spawn

SPEC = TableSpec(ROW, WindowSpec(4), capacity=20, max_envs=1)

KINDS = {
    "one env": {"lengths": (3, 7, 5), "every": 30},
    "latents and a train ratio": {"num_envs": 3, "steps": 130, "kind": Remembering, "report": ReportConfig(every=25)},
}


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    monkeypatch.setattr(local.openloop, "show", lambda *args: set())
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def assert_same(run: local.Run, twin: local.Run) -> None:
    """As tests.harness.assert_same, but for what lies in a service."""
    assert lines(run.run_dir) == lines(twin.run_dir)
    for a, b in zip(jax.tree.leaves(run.state), jax.tree.leaves(twin.state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert (run.counters, run.progress, run.clock) == (twin.counters, twin.progress, twin.clock)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_over_a_service_is_the_embedded_run(monkeypatch, tmp_path, kind):
    harness = probing(monkeypatch, eval=EvalConfig(every=40, episodes=2), **KINDS[kind])
    embedded = harness.run(tmp_path / "embedded")
    with serve(tmp_path / "replay") as endpoint:
        run = harness.run(tmp_path / "served", replay=ReplayConfig(endpoint.address))
        assert_same(run, embedded)
        with harness.open(tmp_path / "served", replay=ReplayConfig(endpoint.address)) as again:
            assert again.replay.stats().rows == embedded.replay.stats().rows
            assert sorted(again.replay.marks()) == sorted(embedded.replay.marks())
        with pytest.raises(ValueError, match=r"holds \d+ rows of another run; give a new replay\.table"):
            harness.run(tmp_path / "served", replay=ReplayConfig(endpoint.address))
        other = ReplayConfig(endpoint.address, table="served")
        with pytest.raises(ValueError, match=r"capacity is .*; give this run another replay\.table"):
            harness.run(tmp_path / "other", replay=other, steps=40)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_or_stopped_and_resumed(monkeypatch, tmp_path, kind):
    harness = probing(monkeypatch, **KINDS[kind])
    embedded = harness.run(tmp_path / "embedded")
    with serve(tmp_path / "replay") as endpoint:
        replay = ReplayConfig(endpoint.address)
        for turn in (1, 10, 37, 70):  # the first ones before there is a checkpoint
            run_dir = tmp_path / str(turn)
            harness.run(run_dir, replay=replay, stopped=after(turn, kill))
            harness.run(run_dir, replay=replay, resume=True, stopped=after(turn, stop))
            assert_same(harness.run(run_dir, replay=replay, resume=True), embedded)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_service_that_is_killed_again_and_again_changes_nothing(monkeypatch, tmp_path):
    """In the middle of a run, and between a run that is killed too and its resume."""
    harness = probing(monkeypatch, **KINDS["latents and a train ratio"])
    embedded = harness.run(tmp_path / "embedded")
    address = f"unix:{tmp_path}/replay.sock"
    servers = [spawn(tmp_path / "replay", "--listen", address)]
    turn = 0

    def struck(run: local.Run) -> bool:
        nonlocal turn
        turn += 1
        if turn % 25 == 0:
            servers[-1].kill()
            servers.append(spawn(tmp_path / "replay", "--listen", address))
        if turn == 110:
            raise Killed
        return False

    try:
        harness.run(tmp_path / "served", replay=ReplayConfig(address), stopped=struck)
        run = harness.run(tmp_path / "served", replay=ReplayConfig(address), resume=True, stopped=struck)
        assert len(servers) > 5
        # After a restart of the service windows are drawn from another seed, until a mark brings the generator back.
        assert run.counters == embedded.counters
        assert run.env_steps == embedded.env_steps
    finally:
        servers[-1].terminate()  # which gives back what the table has under /dev/shm


def test_the_size_of_a_table_is_said_wherever_it_lies(monkeypatch, tmp_path):
    with probing(monkeypatch).open(tmp_path) as run:
        config, agent = run.config, run.agent
    there = replace(config, replay=ReplayConfig("127.0.0.1:1"))
    monkeypatch.setattr(local, "capacity", lambda config, agent, num_envs: 10**8)
    size = f"{table_bytes(agent.row_spec, config.env.num, 10**8) / local.GIB:.2f}"
    assert float(size) > 1
    predicted = {"replay": 3 * local.GIB, "train state": local.GIB}
    assert local.sizes(config, agent, predicted) == "memory when full: replay 3.00 GiB, train state 1.00 GiB"
    assert local.sizes(there, agent, {**predicted, "replay": 0}) == (
        f"memory when full: train state 1.00 GiB; at 127.0.0.1:1: replay {size} GiB"
    )


def test_what_the_service_refuses_leaves_no_run_behind(monkeypatch, tmp_path):
    config = RunConfig("tdmpc2", "counting:continuous", steps=60, agent=TINY)
    train = lambda replay: local.train(replace(config, replay=replay), tmp_path / "run", False, Console(quiet=True))
    with serve(tmp_path / "replay") as endpoint:
        with Client(endpoint, "taken", SPEC, stream="w", num_envs=1):
            pass
        refused = {
            ReplayConfig("nonsense"): "address 'nonsense' must be host:port",
            ReplayConfig(endpoint.address, table="taken"): "exists with other specs: .*; give this run another",
            ReplayConfig(endpoint.address, token_file=str(tmp_path / "none")): "No such file",
            ReplayConfig("127.0.0.1:1", timeout=0.3): r"127\.0\.0\.1:1 did not answer within 0\.3 s",
        }
        for replay, text in refused.items():
            with pytest.raises((ValueError, OSError), match=text):
                train(replay)
        monkeypatch.setenv(TOKEN_VARIABLE, "another-token-of-tests")
        with pytest.raises(PermissionError):
            train(ReplayConfig(endpoint.address))
    assert not (tmp_path / "run").exists()
