"""A trained agent back from its run directory: what evaluation, scripts and robots start from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from deploy import config as configs
from deploy.config import RunConfig, make_agent
from deploy.files import replace_text
from learner import checkpoint, update
from telamon.agents.base import Agent, PyTree
from telamon.data import EnvSpec, env_spec_from_json

SPEC_FILE = "env_spec.json"
"""Of a launch: what its environments are like, for parts whose node has no environment library."""


def save_spec(spec: EnvSpec, run_dir: Path) -> None:
    """Writes env_spec.json, complete or not at all."""
    replace_text(run_dir / SPEC_FILE, json.dumps(asdict(spec), indent=1))


def agent_of(run_dir: Path) -> Agent:
    """The agent of a launch, from its run directory alone. Raises FileNotFoundError or ValueError with one sentence."""
    path = run_dir / SPEC_FILE
    try:
        spec = env_spec_from_json(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{run_dir} holds no {SPEC_FILE}: the learner's node does not see the run directory; put it on a file "
            "system that they share (--run-dir)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return make_agent(configs.load(run_dir), spec)


class Trained(NamedTuple):
    """What a checkpoint makes of a run's config."""

    agent: Agent
    params: PyTree
    """What `agent.act` takes."""
    config: RunConfig
    name: str
    """The checkpoint that was read."""
    counters: dict[str, int]


def load_agent(run_dir: Path, name: str | None = None) -> Trained:
    """The agent of a run and its parameters at checkpoint `name` (None: the newest whole one).

    Needs no environment library: the checkpoint holds the EnvSpec. Raises FileNotFoundError or ValueError in one
    sentence where there is no such run or no whole checkpoint.
    """
    config = configs.load(run_dir)
    directory = run_dir / "checkpoints"
    candidates = [name] if name else checkpoint.names(directory)
    if not candidates:
        raise FileNotFoundError(f"{run_dir} has no checkpoint yet; the first is written after checkpoint.every steps")
    damaged: Any = None
    for candidate in candidates:
        try:
            meta = checkpoint.read_meta(directory, candidate)
            agent = make_agent(config, env_spec_from_json(meta["env_spec"]))
            like = jax.eval_shape(lambda key, agent=agent: update.init(agent, key), jax.random.key(0))
            found = checkpoint.load(directory, candidate, like)
        except ValueError as error:
            damaged = error
            continue
        return Trained(agent, agent.acting_params(found.state.train), config, candidate, meta["counters"])
    raise ValueError(f"no checkpoint of {run_dir} is whole: {damaged}")
