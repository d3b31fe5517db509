"""Environments that cannot be saved start over with another seed after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from deploy import local
from deploy.config import CheckpointConfig, EvalConfig, RunConfig
from replay_server.store import Store
from telamon.agents.tdmpc2.config import TDMPC2Config

EXAMPLE = str(Path(__file__).parents[2] / "examples/point_mass_env.py") + ":make_env"


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seed of every training environment that is built."""
    built: list[int] = []
    make = local.make_env
    monkeypatch.setattr(
        local, "make_env", lambda task, n, seed, **kw: (built.append(seed), make(task, n, seed, **kw))[1]
    )
    return built


def config(task: str) -> RunConfig:
    agent = TDMPC2Config(
        enc_dim=8, mlp_dim=8, latent_dim=8, num_samples=8, num_elites=4, num_pi_trajs=2, iterations=1, batch_size=4,
        seed_steps=500, episode_length=100,
    )  # fmt: skip
    return RunConfig(
        "tdmpc2", task, steps=150, agent=agent, eval=EvalConfig(every=0), checkpoint=CheckpointConfig(every=1000)
    )


def test_gymnasium_environments_begin_other_episodes(seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = config(EXAMPLE)
    held: list[np.ndarray] = []
    append = Store.append
    record = lambda self, rows: (held.append(rows.obs["obs"][0][:2].copy()), append(self, rows))[1]
    monkeypatch.setattr(Store, "append", record)
    local.train(first, tmp_path, resume=False, console=Console(quiet=True))
    start = held[0]
    rows = len(held)
    local.train(replace(first, steps=200), tmp_path, resume=True, console=Console(quiet=True))
    assert seeds[0] == first.seed != seeds[1]
    assert not np.array_equal(held[rows], start)


def test_environments_that_are_restored_keep_the_seed(seeds: list[int], tmp_path: Path):
    first = config("counting:continuous")
    local.train(first, tmp_path, resume=False, console=Console(quiet=True))
    local.train(replace(first, steps=200), tmp_path, resume=True, console=Console(quiet=True))
    assert seeds == [first.seed, first.seed]
