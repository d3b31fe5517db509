"""Checkpoints on disk: a directory each, complete or absent.

`CHECKPOINTS/NAME/` holds `state/` (Orbax: the train state), `loop.npz` (arrays of the loop) and `meta.json` (the rest,
and a checksum of every other file). It is written and removed under a temporary name, so a kill at any moment leaves
either the whole checkpoint or a directory that nothing trusts and the next `save` clears away. No pickles.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

log = logging.getLogger(__name__)

TEMPORARY = ".partial-"
"""Prefix of a directory that is being written or removed."""


class Checkpoint(NamedTuple):
    """What `save` was given, read back."""

    state: Any
    """The pytree that was saved, on the default device."""
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


def save(directory: Path, name: str, state: Any, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Writes `directory`/`name`, in place of what has that name, and clears away what a kill left half done.

    Raises OSError naming the path when the disk does not take it.
    """
    target, temporary = directory / name, directory / f"{TEMPORARY}{name}"
    for partial in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(partial)
    temporary.mkdir(parents=True)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary.absolute() / "state", state)
        np.savez(temporary / "loop.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub takes **kwds for allow_pickle
        sums = {str(f.relative_to(temporary)): _checksum(f) for f in _files(temporary)}
        (temporary / "meta.json").write_text(json.dumps({**meta, "checksums": sums}, indent=1))
        for path in (temporary, *temporary.rglob("*")):
            _sync(path)
        if target.exists():
            remove(directory, name)
        temporary.rename(target)
        _sync(directory)
    except OSError as error:
        size = sum(f.stat().st_size for f in _files(temporary))
        raise OSError(
            error.errno, f"checkpoint {target} could not be written after {size} bytes: {error.strerror}"
        ) from error
    return target


def load(directory: Path, name: str, like: Any) -> Checkpoint:
    """Reads a checkpoint whose state has the shapes and dtypes of `like`.

    Raises ValueError naming the file where one is missing or fails its checksum.
    """
    path = directory / name
    meta = read_meta(directory, name)
    for file, expected in meta["checksums"].items():
        if not (path / file).is_file() or _checksum(path / file) != expected:
            raise ValueError(f"{path / file} is missing or damaged: its checksum does not match meta.json")
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(path.absolute() / "state", abstract)
    with np.load(path / "loop.npz", allow_pickle=False) as file:
        arrays = dict(file)
    return Checkpoint(state, arrays, meta)


def read_meta(directory: Path, name: str) -> dict[str, Any]:
    """meta.json of a checkpoint. Raises ValueError where it is missing or not as it was written."""
    path = directory / name / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except (FileNotFoundError, ValueError) as error:  # a ValueError is bad JSON or bad UTF-8
        raise ValueError(f"{path} is missing or damaged: {error}") from error
    if not isinstance(meta, dict) or "checksums" not in meta:
        raise ValueError(f"{path} is damaged: it lists no checksums")
    return meta


def names(directory: Path) -> list[str]:
    """Complete checkpoints, newest first (names sort by age). Whatever is not named by numbers is somebody else's."""
    return sorted((p.name for p in directory.glob("[0-9]*") if re.fullmatch(r"[0-9-]+", p.name)), reverse=True)


def remove(directory: Path, name: str) -> None:
    """Removes a checkpoint, as a whole from the first moment on."""
    doomed = directory / f"{TEMPORARY}removed-{name}"
    (directory / name).rename(doomed)
    shutil.rmtree(doomed)


def _files(path: Path) -> Iterator[Path]:
    return (f for f in sorted(path.rglob("*")) if f.is_file())


def _checksum(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
