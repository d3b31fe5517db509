"""What a run directory says of its run besides the curves: how it stands, its settings, its warnings, its pictures."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from deploy import running
from deploy.config import CLUSTER_FILE, CONFIG_FILE, RunConfig, flatten, load, load_cluster
from deploy.local import REPORTS
from telamon.telemetry.logs import LOG_FILE

FOLDERS = ("videos", REPORTS)
"""Where a run keeps what can be looked at. Nothing else of a run directory is shown as a file."""
TYPES = {".png": "image/png", ".mp4": "video/mp4"}
UNFINISHED = ".part.mp4"
STEP = re.compile(r"-(\d+)$")
"""The environment steps at the end of a picture's name."""
LOG_TAIL_BYTES = 2**16
MOST_WARNINGS = 30
"""Newest ones of a run that are shown."""
EVENT = re.compile(r"time=(\S+) level=(WARNING|ERROR|CRITICAL) logger=\S+ (.*)")


@dataclass(frozen=True)
class Picture:
    """A file that can be looked at."""

    name: str
    """`FOLDER/FILE` in the run directory."""
    title: str
    """What it is of, the same for its sequels."""
    step: int | None
    """Environment steps, where its name tells."""
    path: Path
    version: str
    """Changes with its content."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Warned:
    """A line of a log that asks for attention."""

    time: str
    level: str
    part: str
    """Who said it: the stem of the log's name."""
    text: str


def distinct(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Run directories by name, each once: the last parts of their paths, as many as tell them apart.

    Raises ValueError where there are none.
    """
    paths = list(dict.fromkeys(path.resolve() for path in run_dirs))
    if not paths:
        raise ValueError("there is no run to view; name at least one run directory: telamon view RUN...")
    count = 1
    while len({path.parts[-count:] for path in paths}) < len(paths):
        count += 1
    return {"/".join(path.parts[-count:]): path for path in paths}


def config(run_dir: Path) -> RunConfig:
    """The run's config, read again only where the file has changed. Raises as `deploy.config.load`."""
    path = run_dir / CONFIG_FILE
    return _config(run_dir, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=256)
def _config(run_dir: Path, changed: int) -> RunConfig:
    return load(run_dir)


def settings(run_dir: Path) -> dict[str, Any]:
    """The resolved settings by name, `env.num`; those of a launch under `cluster`. Raises as `deploy.config.load`."""
    path = run_dir / CLUSTER_FILE
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return {**flatten(asdict(config(run_dir))), **_cluster_settings(run_dir, changed)}


@lru_cache(maxsize=256)
def _cluster_settings(run_dir: Path, changed: int) -> dict[str, Any]:
    return flatten({"cluster": asdict(load_cluster(run_dir))}) if changed else {}


def standing(run_dir: Path) -> dict[str, Any]:
    """How the run stands, as its status file has it: a state, a sentence, parts. Without one the state is unknown."""
    try:
        found = running.read(run_dir)
    except FileNotFoundError:
        return {"state": "unknown", "says": "", "parts": []}
    except ValueError as error:
        return {"state": "unknown", "says": str(error), "parts": []}
    if found.alive:
        parts = [{"name": p.name, "where": p.where, "now": p.now, "numbers": p.numbers} for p in found.parts]
        return {"state": found.state, "says": f"Waits: {found.waits}" if found.waits else "", "parts": parts}
    if found.state not in running.RUNNING:
        return {"state": found.state, "says": "", "parts": []}
    age = time.time() - found.seconds
    says = f"It was {found.state} {age:,.0f} s ago and has said nothing since."
    return {"state": "crashed", "says": says, "parts": []}


def warnings(run_dir: Path) -> list[Warned]:
    """The newest warnings and errors in the logs of the run and of its parts, newest first."""
    found = [warned for path in [run_dir / LOG_FILE, *(run_dir / "logs").glob("*.log")] for warned in _warnings(path)]
    return sorted(found, key=lambda warned: warned.time, reverse=True)[:MOST_WARNINGS]


def _warnings(path: Path) -> list[Warned]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    matches = (EVENT.match(line) for line in lines)
    return [Warned(m[1], m[2], path.stem, m[3]) for m in matches if m is not None]


def pictures(run_dir: Path) -> list[Picture]:
    """Pictures and films of the run, whole ones, newest first. Links in it are not followed; it may be one itself."""
    folders = [run_dir / name for name in FOLDERS if (run_dir / name).is_dir() and not (run_dir / name).is_symlink()]
    paths = (path for folder in folders for path in sorted(folder.iterdir()))
    found = [_picture(path) for path in paths if path.suffix in TYPES and not path.name.endswith(UNFINISHED)]
    return sorted((picture for picture in found if picture is not None), key=lambda p: p.step or 0, reverse=True)


def _picture(path: Path) -> Picture | None:
    try:
        stat = path.stat(follow_symlinks=False)
    except FileNotFoundError:  # the run keeps only its newest
        return None
    if path.is_symlink() or not path.is_file():
        return None
    step = STEP.search(path.stem)
    title = path.stem if step is None else path.stem[: step.start()]
    version = f"{stat.st_mtime_ns:x}-{stat.st_size:x}"
    return Picture(
        f"{path.parent.name}/{path.name}", title, None if step is None else int(step[1]), path, version, stat.st_size
    )
