"""The sub-commands of `telamon`. Each takes the arguments after its name and returns an exit code."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from actors.collector import jit_act
from actors.evaluate import evaluate
from deploy import doctor as checks
from deploy import local, presets, running
from deploy.cli import SUMMARIES
from deploy.config import ALGORITHMS, OPTION_WORDS, ClusterConfig, Name, Option, RunConfig, default_run_dir
from deploy.loading import load_agent
from deploy.local import Extras
from deploy.plot import plot_runs
from deploy.video import write_video
from telamon.envs.base import BatchedEnv
from telamon.envs.check import check_env as run_check
from telamon.envs.check import to_text
from telamon.envs.registry import list_envs
from telamon.keys import Stream, stream

Options = TypeVar("Options")
Parsed = TypeVar("Parsed", bound="Start")

FILE_WIDTH = 160
"""Columns of a status that is no terminal's."""


def parse(
    kind: type[Options], name: str, args: Sequence[str], default: Options | None = None, description: str | None = None
) -> Options:
    """Command-line arguments as a dataclass; prints help or what is wrong, and exits, by itself."""
    prog, description = f"telamon {name}", description or SUMMARIES[name]
    if default is None:
        return tyro.cli(kind, args=args, prog=prog, description=description)
    return tyro.cli(kind, args=args, default=default, prog=prog, description=description)


# train


@dataclass(frozen=True)
class RunOptions:
    """Options of `telamon train` and `telamon launch` that are not part of the run's config."""

    preset: tuple[str, ...] = ()
    """Named settings, as above; later ones win, other options win over all."""
    run_dir: Path | None = None
    """Where the run lives; by default runs/ALGORITHM-TASK-seedSEED."""
    resume: bool = False
    """Continue the run in the run directory from its last checkpoint."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Events of this level and above go into RUN/log.txt, and those of a launch's parts into RUN/logs."""

    @property
    def level(self) -> int:
        """`log_level` as the logging library has it."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


@dataclass(frozen=True)
class Start:
    """What every command that trains takes."""

    options: Annotated[RunOptions, tyro.conf.arg(name="")]
    config: Annotated[RunConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Train(Start):
    """What `telamon train ALGORITHM` takes."""

    extras: Annotated[Extras, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Launch(Start):
    """What `telamon launch ALGORITHM` takes."""

    cluster: Annotated[ClusterConfig, tyro.conf.arg(name="")]
    profile: int = 0
    """Updates of which the learner writes a trace into RUN/profile, once it is warm; 0 for none."""


@dataclass(frozen=True)
class Recipe:
    """The option under --agent that decides what a preset sets."""

    recipe: Literal["paper", "latest"] = "paper"


@dataclass(frozen=True)
class First:
    """What is read first, because it sets the defaults of the options that may override it."""

    preset: tuple[str, ...] = ()
    agent: Recipe = Recipe()


def train(args: list[str]) -> int:
    """Trains; the exit code is 0 at the end of the run, 130 after Ctrl-C, 2 after wrong usage."""
    parsed = parse_run("train", args, lambda config: Train(RunOptions(), config, Extras()))
    if isinstance(parsed, int):
        return parsed
    options = parsed.options
    return local.train(parsed.config, run_dir_of(parsed), options.resume, Console(), parsed.extras, options.level)


def launch(args: list[str]) -> int:
    """Trains on a cluster; exit codes as of `train`."""
    parsed = parse_run("launch", args, lambda config: Launch(RunOptions(), config, ClusterConfig()))
    if isinstance(parsed, int):
        return parsed
    if parsed.cluster.address is None and "RAY_ADDRESS" not in os.environ:
        # Of the cluster that this command will start. Ray listens on every interface: whoever has no token is refused.
        # It reads these when it is imported.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        from deploy.cluster import launch as on_cluster
    except ImportError as e:
        raise ImportError(f"{e}; a cluster needs more: pip install 'telamon[service,cluster]'") from e
    options = parsed.options
    return on_cluster(
        parsed.config, parsed.cluster, run_dir_of(parsed), options.resume, Console(), parsed.profile, options.level
    )


def parse_run(name: str, args: list[str], fresh: Callable[[RunConfig], Parsed]) -> Parsed | int:
    """What comes after `telamon train` or `telamon launch`; the exit code where no algorithm is named.

    fresh: the defaults of everything, from those of the config.
    """
    if not args or args[0] not in ALGORITHMS:
        asked = bool({"-h", "--help"} & set(args))
        rows = "\n".join(f"  {known:<10} {algorithm.summary}" for known, algorithm in ALGORITHMS.items())
        usage = f"usage: telamon {name} ALGORITHM ENV ... (telamon {name} ALGORITHM --help says more)\n\n{rows}"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    algorithm, rest = args[0], args[1:]
    first, _ = tyro.cli(First, args=[a for a in rest if a not in ("-h", "--help")], return_unknown_args=True)
    bare = RunConfig(cast(Name, algorithm), tyro.MISSING, agent=ALGORITHMS[algorithm].config(recipe=first.agent.recipe))
    config = presets.apply(bare, first.preset)
    summary = f"{name.capitalize()} {algorithm}: {ALGORITHMS[algorithm].summary}."
    description = f"{summary}\n\nPresets:\n{presets.listing(algorithm)}"
    default = fresh(config)
    parsed = parse(type(default), f"{name} {algorithm}", rest, default, description)
    # a preset's options for the environment stay unless they are given another value
    options = {**config.env.options, **parsed.config.env.options}
    return replace(parsed, config=replace(parsed.config, env=replace(parsed.config.env, options=options)))


def run_dir_of(parsed: Start) -> Path:
    """Where the run lives."""
    return parsed.options.run_dir or default_run_dir(parsed.config)


# scale, status


@dataclass(frozen=True)
class Scale:
    """What `telamon scale` takes."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run directory of a `telamon launch` that is running."""
    actors: int
    """Rollout workers that the run shall have."""
    timeout: float = 60.0
    """Seconds to wait until the run says that it has taken the number."""


def scale(args: list[str]) -> int:
    """Changes the number of rollout workers of a running launch."""
    options = parse(Scale, "scale", args)
    running.ask(options.run, options.actors, options.timeout)
    Console().print(f"{options.run} goes on with {options.actors} rollout workers", highlight=False)
    return 0


@dataclass(frozen=True)
class Status:
    """What `telamon status` takes."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    once: bool = False
    """Print it once, as where stdout is no terminal, instead of again and again until the run ends or Ctrl-C."""


def status(args: list[str]) -> int:
    """Shows who runs where and what each waits for; 0 while the run is alive, 1 when it is not."""
    options = parse(Status, "status", args)
    terminal = sys.stdout.isatty()  # it is asked, not rich: FORCE_COLOR makes that call any file a terminal
    console = Console(width=None if terminal else FILE_WIDTH)
    if terminal and not options.once:
        found = running.watch(options.run, console)
    else:
        found = running.read(options.run)
        console.print(running.screen(found, options.run))
    return 0 if found.alive else 1


# eval


@dataclass(frozen=True)
class Eval:
    """What `telamon eval` takes."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run directory."""
    episodes: int = 10
    """Episodes, run side by side."""
    seed: int = 0
    """Of the environments and of the agent's draws."""
    video: Path | None = None
    """Write the first episode to this .mp4."""
    fps: float = 30.0
    """Frames per second of the video; it has one frame per agent step."""
    checkpoint: str | None = None
    """Name of a checkpoint in RUN/checkpoints; by default the newest."""


def eval(args: list[str]) -> int:
    """Evaluates fresh environments in eval mode and prints every return."""
    options = parse(Eval, "eval", args)
    if options.episodes < 1:
        raise ValueError(f"episodes={options.episodes} must be at least 1")
    trained = load_agent(options.run, options.checkpoint)
    env = local.build_env(trained.config, options.episodes, options.seed)
    frames: list[np.ndarray] = []
    film = None if options.video is None else partial(_film, frames)
    try:
        act = jit_act(trained.agent, options.episodes, "eval")
        found = evaluate(trained.agent, act, trained.params, env, stream(options.seed, Stream.EVAL), film)
    finally:
        env.close()
    steps = trained.counters["transitions"] * trained.agent.env.action_repeat
    table = Table(title=f"{trained.config.task} after {steps:,} env steps", title_justify="left")
    table.add_column("episode", justify="right")
    table.add_column("return", justify="right")
    table.add_column("length", justify="right")
    for i, (total, length) in enumerate(zip(found.total_reward, found.length, strict=True)):
        table.add_row(str(i), f"{total:.1f}", str(length))
    console = Console()
    console.print(table)
    spread = f" (lowest {found.total_reward.min():.1f}, highest {found.total_reward.max():.1f})"
    console.print(f"mean return {found.total_reward.mean():.1f}{spread}", highlight=False)
    if options.video is not None:
        count = write_video(frames, options.video, options.fps)
        console.print(f"wrote {options.video}: {count} frames", highlight=False)
    return 0


def _film(frames: list[np.ndarray], env: BatchedEnv) -> None:
    frames.append(env.render(0))


# plot


@dataclass(frozen=True)
class Plot:
    """What `telamon plot` takes."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories; runs that differ only in their seed become one curve."""
    out: Path = Path("curve.png")
    """The picture, .png."""
    reference: str | None = None
    """A published curve to draw underneath: tdmpc2, tdmpc2-size1, dreamerv3 (from vectors), dreamerv3-vision or
    dreamerv3-atari100k."""


def plot(args: list[str]) -> int:
    """Writes a picture of learning curves."""
    options = parse(Plot, "plot", args)
    if not options.runs:
        raise ValueError("no run to plot; name at least one run directory: telamon plot RUN...")
    plot_runs(options.runs, options.out, options.reference)
    Console().print(f"wrote {options.out}", highlight=False)
    return 0


# view


@dataclass(frozen=True)
class View:
    """What `telamon view` takes."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories; runs that differ only in their seed become one curve."""
    port: int = 0
    """Of the page on this machine; 0 for a free one."""
    out: Path | None = None
    """Write the page to this .html, with everything in it, instead of serving it."""
    reference: str | None = None
    """The published curve to draw underneath, as of `telamon plot`, or none; by default the one that there is."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port={self.port} must be from 0 to {2**16 - 1}")


def view(args: list[str]) -> int:
    """Serves the page of runs until Ctrl-C, which is its normal end."""
    from deploy.view import document, rundir, server, static

    options = parse(View, "view", args)
    runs = rundir.distinct(options.runs)
    curves = document.references(document.readable(runs), options.reference)
    static.plotly()  # says what to install before anything listens
    console = Console()
    if options.out is not None:
        static.write(runs, curves, options.out)
        console.print(f"wrote {options.out}", highlight=False, soft_wrap=True)
        return 0
    with server.Viewer(runs, curves, options.port) as viewer, suppress(KeyboardInterrupt):
        console.print(f"{viewer.url}\nCtrl-C ends it.", highlight=False, soft_wrap=True)
        viewer.serve_forever()
    return 0


# envs, check-env


@dataclass(frozen=True)
class Envs:
    """What `telamon envs` takes."""

    all: bool = False
    """List every environment, not only how many there are."""


def envs(args: list[str]) -> int:
    """Prints a table of the backends, and every id on request."""
    options = parse(Envs, "envs", args)
    table = Table()
    for heading in ("backend", "environments", "for example", "note"):
        table.add_column(heading, overflow="fold")
    listed = list_envs()
    for row in listed:
        table.add_row(row.prefix, str(len(row.ids)) if row.ids else "", row.example, row.missing or "")
    table.add_row("your own", "", "my_package.my_env:make_env", "a callable that returns a gymnasium.Env")
    console = Console()
    console.print(table)
    if options.all:
        for env_id in (i for row in listed for i in row.ids):
            console.print(env_id, highlight=False)
    return 0


@dataclass(frozen=True)
class CheckEnv:
    """What `telamon check-env` takes."""

    env: Annotated[str, tyro.conf.Positional]
    """BACKEND:NAME, PACKAGE.MODULE:CALLABLE or PATH.py:CALLABLE."""
    episodes: int = 2
    """Episodes to step at random."""
    max_steps: int = 2000
    """Agent steps after which it stops waiting for episodes to end."""
    seed: int = 0
    """Of the environment and the random actions."""
    action_repeat: int | None = None
    """Environment steps per agent step; None: the backend's usual one."""
    options: Annotated[Mapping[str, Option], OPTION_WORDS] = field(default_factory=dict)
    """What the environment itself takes."""


def check_env(args: list[str]) -> int:
    """0 when some agent can be trained on the environment, 1 when none can."""
    options = parse(CheckEnv, "check-env", args)
    report = run_check(
        options.env, seed=options.seed, episodes=options.episodes, max_steps=options.max_steps,
        agents={name: partial(a.agent, a.config()) for name, a in ALGORITHMS.items()},
        action_repeat=options.action_repeat, **options.options,
    )  # fmt: skip
    Console().print(to_text(report), highlight=False, soft_wrap=True, markup=False)
    return 0 if None in report.refusals.values() else 1


# replay


def replay(args: list[str]) -> int:
    """Becomes `python -m replay_server`: a process that never loads JAX. Returns only from --help and wrong usage."""
    try:
        from replay_server.config import ServerConfig
    except ImportError as e:
        raise ImportError(f"{e}; a replay server needs more: pip install 'telamon[service]'") from e
    parse(ServerConfig, "replay", args)
    os.execv(sys.executable, [sys.executable, "-m", "replay_server", *args])


# doctor


@dataclass(frozen=True)
class Doctor:
    """`telamon doctor` takes nothing."""


def doctor(args: list[str]) -> int:
    """0 when training can run here, 1 when something that it needs is missing."""
    parse(Doctor, "doctor", args)
    found = checks.examine(Path.cwd())
    table = Table()
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "missing": "[red]missing[/red]"}
    for check in found:
        table.add_row(check.name, marks[check.verdict], check.text)
    Console().print(table)
    return 1 if any(c.verdict == "missing" for c in found) else 0
