"""The sub-commands of `telamon`. Each takes the arguments after its name and returns an exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from deploy import local
from deploy.cli import SUMMARIES
from deploy.config import RunConfig, default_run_dir, with_preset


@dataclass(frozen=True)
class TrainOptions:
    """Options of `telamon train` that are not part of the run's config."""

    preset: int = 5
    """Size of the agent in millions of parameters: 1, 5, 19, 48 or 317. Fields under --agent override it."""
    run_dir: Path | None = None
    """Where the run lives; by default runs/ALGORITHM-TASK-seedSEED."""
    resume: bool = False
    """Continue the run in the run directory from its last checkpoint."""


@dataclass(frozen=True)
class Train:
    options: Annotated[TrainOptions, tyro.conf.arg(name="")]
    config: Annotated[RunConfig, tyro.conf.arg(name="")]


def train(args: list[str]) -> int:
    # the preset is read first: it sets the defaults of the fields that may override it
    wanted = [a for a in args if a not in ("-h", "--help")]
    options, _ = tyro.cli(TrainOptions, args=wanted, return_unknown_args=True)
    default = Train(TrainOptions(), RunConfig("tdmpc2", tyro.MISSING, agent=with_preset(options.preset)))
    parsed = tyro.cli(Train, args=args, default=default, prog="telamon train", description=SUMMARIES["train"])
    run_dir = parsed.options.run_dir or default_run_dir(parsed.config)
    return local.train(parsed.config, run_dir, parsed.options.resume, Console())
