"""`telamon check-env`: loads an environment, steps a few episodes at random, and says what an agent will see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from telamon.data import ActionSpec, EnvSpec
from telamon.envs.base import Bounds, Step, random_action
from telamon.envs.registry import make_env
from telamon.keys import Stream, generator

AgentCheck = Callable[[EnvSpec], object]
"""Raises ValueError, with one plain sentence, where an agent cannot be trained on an environment."""


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value seen."""

    low: float
    high: float


@dataclass(frozen=True)
class Report:
    """What an environment declares and what it did."""

    spec: EnvSpec
    bounds: Bounds
    """The environment's own, of its continuous actions."""
    steps: int
    """Agent steps taken."""
    obs: Mapping[str, Range]
    reward: Range
    """Per agent step."""
    returns: tuple[float, ...]
    """One per finished episode."""
    terminations: int
    truncations: int
    saves: bool
    """Whether the environment's state can be saved, so that a run resumes bit for bit."""
    refusals: Mapping[str, str | None]
    """Agent name -> why it cannot be trained here; None where it can."""


def check_env(
    env_id: str,
    *,
    seed: int = 0,
    episodes: int = 2,
    max_steps: int = 2000,
    agents: Mapping[str, AgentCheck] | None = None,
    **kwargs: Any,
) -> Report:
    """Steps one environment with uniformly random actions until `episodes` have ended or `max_steps` were taken.

    agents: name -> check of the spec alone. kwargs: those of `make_env`.
    Raises EnvError, with one plain sentence, for whatever cannot work.
    """
    env = make_env(env_id, 1, seed, **kwargs)
    try:
        rng = generator(seed, Stream.RANDOM_ACTION)
        rows, ended = [env.reset()], 0
        while len(rows) <= max_steps and ended < episodes:
            rows.append(env.step(random_action(env.spec.action, 1, rng)))
            ended += int(rows[-1].is_last[0])
        saves = env.get_state() is not None
    finally:
        env.close()
    moved = [r for r in rows if not r.is_first[0]]
    return Report(
        spec=env.spec,
        bounds=env.bounds,
        steps=len(moved),
        obs={k: _range([r.obs[k] for r in rows]) for k, _ in env.spec.obs},
        reward=_range([r.reward for r in moved]),
        returns=_returns(rows),
        terminations=sum(bool(r.is_terminal[0]) for r in rows),
        truncations=sum(bool(r.is_last[0] and not r.is_terminal[0]) for r in rows),
        saves=saves,
        refusals={name: _refusal(check, env.spec) for name, check in (agents or {}).items()},
    )


def _range(values: list[np.ndarray]) -> Range:
    return Range(float(min(v.min() for v in values)), float(max(v.max() for v in values)))


def _returns(rows: list[Step]) -> tuple[float, ...]:
    finished, total = [], 0.0
    for row in rows:
        total = 0.0 if row.is_first[0] else total + float(row.reward[0])
        if row.is_last[0]:
            finished.append(total)
    return tuple(finished)


def _refusal(check: AgentCheck, spec: EnvSpec) -> str | None:
    try:
        check(spec)
    except ValueError as error:
        return str(error)
    return None


def to_text(report: Report) -> str:
    """The report as `telamon check-env` prints it."""
    spec = report.spec
    width = max(len(k) for k, _ in spec.obs)
    lines = [("environment", spec.id)]
    lines += [
        (
            "observation" if i == 0 else "",
            f"{key:<{width}}  {a.dtype} {a.shape}{'' if a.classes is None else f' of {a.classes} classes'}  "
            f"seen {report.obs[key].low:.4g} to {report.obs[key].high:.4g}",
        )
        for i, (key, a) in enumerate(spec.obs)
    ]
    lines += [
        *(("action" if i == 0 else "", text) for i, text in enumerate(_action_texts(report))),
        ("episode", _episode_text(spec)),
        ("reward", f"seen {report.reward.low:.4g} to {report.reward.high:.4g} per agent step"),
        ("stepped", _stepped_text(report)),
        (
            "resume",
            "exact: its state can be saved" if report.saves else "with new episodes: its state cannot be saved",
        ),
    ]
    lines += [
        (name, "can be trained here" if why is None else f"refuses: {why}") for name, why in report.refusals.items()
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _action_texts(report: Report) -> list[str]:
    parts = report.spec.actions
    if isinstance(report.spec.action, ActionSpec):
        return [_action_text(key, part, report.bounds) for key, part in parts]
    width = max(len(key) for key, _ in parts)
    return [f"{key:<{width}}  {_action_text(key, part, report.bounds)}" for key, part in parts]


def _action_text(key: str, part: ActionSpec, bounds: Bounds) -> str:
    if key not in bounds:
        return f"int32 {part.shape}, classes per element {part.classes}"
    pairs = sorted(set(zip(*(b.ravel().tolist() for b in bounds[key]), strict=True)))
    return f"float32 {part.shape}, [-1, 1] mapped to " + ", ".join(f"[{low:g}, {high:g}]" for low, high in pairs)


def _episode_text(spec: EnvSpec) -> str:
    limit = "no known time limit" if spec.episode_length is None else f"at most {spec.episode_length} agent steps"
    return f"{limit}; each action is applied {spec.action_repeat} time{'s' * (spec.action_repeat > 1)}"


def _stepped_text(report: Report) -> str:
    ended = f"{report.terminations} terminated, {report.truncations} truncated"
    returns = ", ".join(f"{r:.4g}" for r in report.returns)
    return f"{report.steps} agent steps at random; episodes: {ended}" + (f"; returns {returns}" if returns else "")
