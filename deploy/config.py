"""The configuration of a run: frozen dataclasses, resolved once, saved as config.yaml in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
import yaml

from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import PRESETS, TDMPC2Config
from telamon.data import EnvSpec

CONFIG_FILE = "config.yaml"

SAFE_TO_CHANGE = {
    "steps", "log_every", "memory_limit", "max_skipped", "eval", "checkpoint", "env.timeout", "env.on_error"
}  # fmt: skip
"""Keys (or whole groups) that a resumed run may change: they touch neither an update nor the data of a sound run."""


@dataclass(frozen=True)
class EnvConfig:
    """How environments are run."""

    num: int = 1
    """Environments that advance in lockstep; each owes one update per transition."""
    action_repeat: int | None = None
    """Environment steps per agent step; None: the backend's usual one (2 on DMControl, else 1)."""
    on_error: Literal["stop", "rebuild"] = "stop"
    """When an environment raises or gives a value that is not finite: stop the run, or abandon the episode and
    rebuild the environment."""
    timeout: float = 120.0
    """Seconds after which an environment that does not return is named and the run stopped."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation by fresh environments in eval mode."""

    every: int = 100_000
    """Environment steps between evaluations, from step 0 on; 0 for none."""
    episodes: int = 10
    """Episodes per evaluation."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which a run is resumed and a trained agent is loaded."""

    every: int = 5_000
    """Environment steps between checkpoints; one more is written at the end and on Ctrl-C."""
    keep: int = 2
    """Newest checkpoints kept."""


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    algorithm: Annotated[Literal["tdmpc2"], tyro.conf.Positional]
    """The agent."""
    task: Annotated[str, tyro.conf.Positional]
    """The environment, BACKEND:NAME (`telamon envs` lists them) or your own, PACKAGE.MODULE:CALLABLE."""
    steps: int = 1_000_000
    """Environment steps (agent steps times action repeat)."""
    seed: int = 1
    """Every random draw of the run follows from it."""
    log_every: int = 1_000
    """Environment steps between lines of losses in metrics.jsonl."""
    memory_limit: float | None = None
    """GiB that replay and parameters may take; None: 80 % of this machine's memory."""
    max_skipped: int = 20
    """Updates in a row that may be skipped because something was not finite."""
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    agent: TDMPC2Config = field(default_factory=TDMPC2Config)

    def __post_init__(self) -> None:
        low = {"steps": 1, "seed": 0, "log_every": 1, "max_skipped": 1, "env.num": 1, "eval.every": 0,
               "eval.episodes": 1, "checkpoint.every": 1, "checkpoint.keep": 1}  # fmt: skip
        values = flatten(asdict(self))
        for key, bound in low.items():
            if values[key] < bound:
                raise ValueError(f"{key}={values[key]} must be at least {bound}")
        if not self.env.timeout > 0:
            raise ValueError(f"env.timeout={self.env.timeout} must be above 0 seconds")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ValueError(f"memory_limit={self.memory_limit} must be above 0 GiB")


def with_preset(preset: str) -> TDMPC2Config:
    """The agent's config at a size of `PRESETS`. Raises ValueError for an unknown one."""
    sizes = {str(name): values for name, values in PRESETS.items()}
    if preset not in sizes:
        raise ValueError(f"preset {preset!r} is none of {', '.join(sizes)}")
    return TDMPC2Config(**sizes[preset])  # type: ignore[arg-type]  # sizes are fields of type int


def make_agent(config: RunConfig, env: EnvSpec) -> TDMPC2:
    """The agent of a run. Raises ValueError where it cannot learn this environment."""
    return TDMPC2(config.agent, env)


def default_run_dir(config: RunConfig) -> Path:
    """runs/ALGORITHM-TASK-SEED, the task with path-safe characters only."""
    task = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.task)
    return Path("runs") / f"{config.algorithm}-{task}-seed{config.seed}"


def save(config: RunConfig, run_dir: Path) -> None:
    """Writes config.yaml, complete or not at all."""
    temporary = run_dir / f".{CONFIG_FILE}"
    temporary.write_text(yaml.safe_dump(asdict(config), sort_keys=False))
    temporary.replace(run_dir / CONFIG_FILE)


def load(run_dir: Path) -> RunConfig:
    """The config of a run directory. Raises FileNotFoundError or ValueError with one sentence."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} is no run directory: it holds no {CONFIG_FILE}")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return _build(RunConfig, values, "", path)


def _build(kind: type, values: Any, prefix: str, path: Path) -> Any:
    """A dataclass from what YAML gave for it. `prefix`: the group it is, with its dot."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} is damaged: {prefix.rstrip('.') or 'it'} holds {values!r} where keys are expected")
    if unknown := sorted(set(values) - {f.name for f in fields(kind)}):
        raise ValueError(f"{path} has keys that this version does not know: {_listed(prefix, unknown)}")
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{path} lacks keys without a default: {_listed(prefix, missing)}")
    hints = get_type_hints(kind)
    for key, value in values.items():
        if not is_dataclass(hints[key]) and not _fits(value, hints[key]):
            wanted = hints[key].__name__ if isinstance(hints[key], type) else str(hints[key]).removeprefix("typing.")
            raise ValueError(f"{path} has {prefix}{key}: {value!r}, which is no {wanted}")
    built = {k: _build(hints[k], v, f"{prefix}{k}.", path) if is_dataclass(hints[k]) else v for k, v in values.items()}
    return kind(**built)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML has a field's type. An int may stand for a float, a bool for no number."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_args(hint):  # a union
        return any(_fits(value, part) for part in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _listed(prefix: str, names: list[str]) -> str:
    return ", ".join(f"{prefix}{name}" for name in names)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> {"group.key": value}, as the command line names them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def differing_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys that differ and may not, each with both values."""
    a, b = flatten(asdict(old)), flatten(asdict(new))
    safe = lambda key: key in SAFE_TO_CHANGE or key.split(".")[0] in SAFE_TO_CHANGE
    return [f"{k} ({a.get(k)} -> {b.get(k)})" for k in {**a, **b} if a.get(k) != b.get(k) and not safe(k)]
