"""The configuration of a run: frozen dataclasses, resolved once, saved as config.yaml in the run directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro
import yaml

from deploy.files import replace_text
from telamon.agents.base import Agent
from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.data import EnvSpec

CONFIG_FILE = "config.yaml"
CLUSTER_FILE = "cluster.yaml"

SAFE_TO_CHANGE = {
    "steps", "log_every", "memory_limit", "max_skipped", "eval", "report", "checkpoint", "env.timeout", "env.on_error",
    "replay.address", "replay.token_file", "replay.timeout",
}  # fmt: skip
"""Keys (or whole groups) that a resumed run may change: they touch neither an update nor the data of a sound run."""

AgentConfig = TDMPC2Config | DreamerV3Config


class Algorithm(NamedTuple):
    """What a name on the command line stands for."""

    config: type[AgentConfig]
    agent: Callable[[Any, EnvSpec], Agent]
    """From a config of that class and a spec; raises ValueError for what it cannot learn."""
    summary: str


Name = Literal["tdmpc2", "dreamerv3"]
ALGORITHMS: Mapping[str, Algorithm] = {
    "tdmpc2": Algorithm(TDMPC2Config, TDMPC2, "plans in a latent model; continuous actions, vector observations"),
    "dreamerv3": Algorithm(DreamerV3Config, DreamerV3, "learns in imagination; any actions, vectors and images"),
}
"""By the name that `telamon train` takes."""

Option = int | float | bool | str


def parse_options(words: list[str]) -> dict[str, Option]:
    """KEY=VALUE words as a dict; a value is an integer, a float, true or false, or else a string."""
    options: dict[str, Option] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"env.options takes KEY=VALUE, and {word!r} is none")
        options[key] = _option(text)
    return options


def _option(text: str) -> Option:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


OPTION_WORDS = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="KEY=VALUE ...",
    instance_from_str=parse_options,
    is_instance=lambda value: isinstance(value, Mapping),
    str_from_instance=lambda options: [f"{k}={v}" for k, v in options.items()],
)


@dataclass(frozen=True)
class EnvConfig:
    """How environments are run."""

    num: int = 1
    """Environments that advance in lockstep; updates per transition (or row) stay the same."""
    action_repeat: int | None = None
    """Environment steps per agent step; None: the backend's usual one (2 on DMControl, else 1)."""
    on_error: Literal["stop", "rebuild"] = "stop"
    """When an environment raises or gives a value that is not finite: stop the run, or abandon the episode and
    rebuild the environment."""
    timeout: float = 120.0
    """Seconds after which an environment that does not return is named and the run stopped."""
    options: Annotated[Mapping[str, Option], OPTION_WORDS] = field(default_factory=dict)
    """What the environment itself takes, for example size=64 gray=true (docs/environments.md); added to a preset's."""


@dataclass(frozen=True)
class ReplayConfig:
    """Where rows are kept: in this process, or by a replay service (`telamon replay`, docs/replay.md)."""

    address: str | None = None
    """HOST:PORT or unix:/PATH of a replay service; None: rows are kept in this process."""
    token_file: str | None = None
    """File of mode 0600 with the service's token; None: the environment variable TELAMON_TOKEN."""
    root_certificate: str | None = None
    """PEM file of what the service's TLS certificate descends from; None: no TLS."""
    table: str | None = None
    """Name of the run's table there; None: the name of the run directory."""
    timeout: float = 60.0
    """Seconds that a call waits for the service, also while it is away."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation by fresh environments in eval mode."""

    every: int = 100_000
    """Environment steps between evaluations, from step 0 on; 0 for none."""
    episodes: int = 10
    """Episodes per evaluation."""
    videos: int = 0
    """Newest evaluations of whose first episode RUN/videos keeps a film; 0: none is made."""


@dataclass(frozen=True)
class ReportConfig:
    """Looks at the world model: losses on replayed windows, and what it foresees against what came."""

    every: int = 20_000
    """Environment steps between reports, from the first update on; 0 for none. One costs about as much as an update."""
    keep: int = 10
    """Newest pictures kept of each observation, under RUN/report; TensorBoard keeps all."""


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

    algorithm: Annotated[Name, tyro.conf.Fixed, tyro.conf.Suppress]
    """The agent: a key of ALGORITHMS."""
    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
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
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    agent: Annotated[AgentConfig, tyro.conf.AvoidSubcommands] = field(default_factory=TDMPC2Config)

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} is none of {', '.join(ALGORITHMS)}")
        kind = ALGORITHMS[self.algorithm].config
        if not isinstance(self.agent, kind):
            raise ValueError(f"algorithm={self.algorithm} takes a {kind.__name__}, not a {type(self.agent).__name__}")
        low = {"steps": 1, "seed": 0, "log_every": 1, "max_skipped": 1, "env.num": 1, "eval.every": 0,
               "eval.episodes": 1, "eval.videos": 0, "report.every": 0, "report.keep": 1, "checkpoint.every": 1,
               "checkpoint.keep": 1}  # fmt: skip
        values = flatten(asdict(self))
        for key, bound in low.items():
            if values[key] < bound:
                raise ValueError(f"{key}={values[key]} must be at least {bound}")
        if taken := {"name", "env_id", "num_envs", "seed", "action_repeat", "on_error"} & set(self.env.options):
            raise ValueError(f"env.options holds {', '.join(sorted(taken))}, which the run itself sets")
        if not self.env.timeout > 0:
            raise ValueError(f"env.timeout={self.env.timeout} must be above 0 seconds")
        if not self.replay.timeout > 0:
            raise ValueError(f"replay.timeout={self.replay.timeout} must be above 0 seconds")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ValueError(f"memory_limit={self.memory_limit} must be above 0 GiB")


@dataclass(frozen=True)
class MeshConfig:
    """How the learner's devices share the work. The batch is always split over all of them."""

    fsdp: int = 1
    """Devices over which parameters and optimiser are split; 1: each device has all of them."""


@dataclass(frozen=True)
class ClusterConfig:
    """How a run is spread over a cluster (`telamon launch`)."""

    actors: int = 2
    """Rollout workers, each with env.num environments; `telamon scale` changes it while the run goes on."""
    max_actors: int | None = None
    """Most rollout workers that the replay has room for; None: twice `actors`, and 4 at least."""
    replay_shards: int = 1
    """Replay servers; a worker's rows all go to one of them."""
    learners: int = 1
    """Processes of the learner, each on a host of its own, with all of its accelerators."""
    address: str | None = None
    """A Ray cluster that this machine belongs to, HOST:PORT or auto; None: the environment variable RAY_ADDRESS, else a
    cluster of its own on this machine, which ends with the command."""
    actor_cpus: float = 1.0
    """CPUs that Ray reserves for each rollout worker, and for the evaluator."""
    actor_gpus: float = 0.0
    """GPUs, or parts of one, for each."""
    actor_tpus: float = 0.0
    """TPU chips for each; with neither GPUs nor TPUs they act on the CPU."""
    learner_cpus: float = 1.0
    """CPUs for each process of the learner."""
    learner_gpus: float = 0.0
    """GPUs for each; with neither GPUs nor TPUs the learner runs on the CPU of this command's host."""
    learner_tpus: float = 0.0
    """TPU chips for each."""
    publish_seconds: float = 0.1
    """Shortest time between two snapshots of the parameters for the actors."""
    band: int | None = None
    """Rows by which learner and actors may be ahead of the train ratio; None: the fewest that keep both going, and an
    update's worth more."""
    restarts: int = 10
    """Deaths of one part within ten minutes after which the run gives up."""
    flush_every: float = 300.0
    """Seconds between marks of the replay on disk, which outlive the machine."""
    tls_certificate: str | None = None
    """PEM file, on every node, of the certificate that replay servers on several nodes show; with it, tls_key and
    root_certificate."""
    tls_key: str | None = None
    """PEM file of its private key."""
    root_certificate: str | None = None
    """PEM file of what the certificate descends from."""
    metrics_port: int = 0
    """Of the page of this command's own metrics, and of /targets beside it, the list of all pages that Prometheus can
    discover by HTTP; 0: a free port."""
    insecure: bool = False
    """Let replay servers on several nodes serve without TLS: rows and token can be read on the way."""
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        low = {"actors": 1, "replay_shards": 1, "learners": 1, "restarts": 0, "actor_cpus": 0, "actor_gpus": 0,
               "actor_tpus": 0, "learner_cpus": 0, "learner_gpus": 0, "learner_tpus": 0, "publish_seconds": 0,
               "metrics_port": 0, "mesh.fsdp": 1}  # fmt: skip
        values = flatten(asdict(self))
        for key, bound in low.items():
            if not values[key] >= bound:
                raise ValueError(f"{key}={values[key]} must be at least {bound}")
        if self.metrics_port >= 2**16:
            raise ValueError(f"metrics_port={self.metrics_port} must be at most {2**16 - 1}")
        if not self.flush_every > 0:
            raise ValueError(f"flush_every={self.flush_every} must be above 0 seconds")
        if self.most_actors < self.actors:
            raise ValueError(f"max_actors={self.max_actors} is less than actors={self.actors}")
        if self.replay_shards > self.actors:
            raise ValueError(
                f"replay_shards={self.replay_shards} is more than actors={self.actors}: each shard needs a worker that "
                "writes to it"
            )
        tls = (self.tls_certificate, self.tls_key, self.root_certificate)
        if any(tls) and not all(tls):
            raise ValueError("TLS needs all of tls_certificate, tls_key and root_certificate")

    @property
    def most_actors(self) -> int:
        """Workers that the replay has room for."""
        return max(4, 2 * self.actors) if self.max_actors is None else self.max_actors


FIXED = ("replay_shards", "max_actors")
"""What a resumed cluster run may not change, because the shards' files are made for it."""


def make_agent(config: RunConfig, env: EnvSpec) -> Agent:
    """The agent of a run. Raises ValueError where it cannot learn this environment."""
    return ALGORITHMS[config.algorithm].agent(config.agent, env)


def default_run_dir(config: RunConfig) -> Path:
    """runs/ALGORITHM-TASK-SEED, the task with path-safe characters only."""
    task = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.task)
    return Path("runs") / f"{config.algorithm}-{task}-seed{config.seed}"


def save(config: RunConfig, run_dir: Path) -> None:
    """Writes config.yaml, complete or not at all."""
    replace_text(run_dir / CONFIG_FILE, _dump(config))


def save_cluster(config: ClusterConfig, run_dir: Path) -> None:
    """Writes cluster.yaml, complete or not at all."""
    replace_text(run_dir / CLUSTER_FILE, _dump(config))


def load_cluster(run_dir: Path) -> ClusterConfig:
    """How a run was spread over a cluster. Raises FileNotFoundError or ValueError with one sentence."""
    path = run_dir / CLUSTER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} holds no run of `telamon launch`: it has no {CLUSTER_FILE}")
    found: ClusterConfig = _build(ClusterConfig, _read(path), "", path)
    return found


def load(run_dir: Path) -> RunConfig:
    """The config of a run directory. Raises FileNotFoundError or ValueError with one sentence."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} is no run directory: it holds no {CONFIG_FILE}")
    values = _read(path)
    name = values.get("algorithm") if isinstance(values, Mapping) else None
    agent = next((a.config for known, a in ALGORITHMS.items() if known == name), TDMPC2Config)  # else name is refused
    return _build(RunConfig, {"agent": {}, **values} if isinstance(values, Mapping) else values, "", path, agent=agent)


def _dump(config: RunConfig | ClusterConfig) -> str:
    return yaml.safe_dump(asdict(config), sort_keys=False)


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error


def _build(kind: type, values: Any, prefix: str, path: Path, **narrowed: type) -> Any:
    """A dataclass from what YAML gave for it.

    prefix: the group it is, with its dot. narrowed: the class of a field that may have one of several.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} is damaged: {prefix.rstrip('.') or 'it'} holds {values!r} where keys are expected")
    if unknown := sorted(set(values) - {f.name for f in fields(kind)}):
        raise ValueError(f"{path} has keys that this version does not know: {_listed(prefix, unknown)}")
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{path} lacks keys without a default: {_listed(prefix, missing)}")
    hints = {**get_type_hints(kind), **narrowed}
    for key, value in values.items():
        if not is_dataclass(hints[key]) and not _fits(value, hints[key]):
            wanted = hints[key].__name__ if isinstance(hints[key], type) else str(hints[key]).removeprefix("typing.")
            raise ValueError(f"{path} has {prefix}{key}: {value!r}, which is no {wanted}")
    tuples = lambda v: tuple(v) if isinstance(v, list) else v  # YAML has lists alone
    built = {
        k: _build(hints[k], v, f"{prefix}{k}.", path) if is_dataclass(hints[k]) else tuples(v)
        for k, v in values.items()
    }
    return kind(**built)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML has a field's type. An int may stand for a float, a bool for no number."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return value in parts
    if get_origin(hint) is tuple:  # of any length
        return isinstance(value, list) and all(_fits(v, parts[0]) for v in value)
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if parts:  # a union
        return any(_fits(value, part) for part in parts)
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
