"""Checkpoints on disk: a directory each, complete or absent.

`CHECKPOINTS/NAME/` holds `state/` (Orbax: the train state), `loop.npz` (arrays of the loop) and `meta.json` (the rest,
and a checksum of every other file). It is written and removed under a temporary name, so a kill at any moment leaves
either the whole checkpoint or a directory that nothing trusts and the next `save` clears away. No pickles.

Where several processes hold a state together each writes its part of it, into a directory that all see, and the first
one does the rest. Any number of devices can read it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

log = logging.getLogger(__name__)

TEMPORARY = ".partial-"
"""Prefix of a directory that is being written or removed."""
CHUNK = 2**22
"""Bytes that a checksum reads at a time."""


class Checkpoint(NamedTuple):
    """What `save` was given, read back."""

    state: Any
    """The pytree that was saved."""
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


class Saved(NamedTuple):
    """What a `Saver` has written."""

    checkpoints: int = 0
    seconds: float = 0.0
    """From the wish to the whole checkpoint, of all."""
    newest: float | None = None
    """When the newest became whole, by the saver's clock; None before the first."""


def save(directory: Path, name: str, state: Any, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Writes `directory`/`name`, in place of what has that name, and clears away what a kill left half done.

    Every process of `state` calls it; arrays and meta are the first one's. Raises OSError naming the path when the disk
    does not take it.
    """
    target, temporary = directory / name, directory / f"{TEMPORARY}{name}"
    if jax.process_index() > 0:
        _save_state(temporary, state)
        return target
    for partial in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(partial)
    temporary.mkdir(parents=True)
    try:
        _save_state(temporary, state)
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


class Saver:
    """Writes checkpoints, one at a time, while training goes on.

    Not for several threads. In each process of a learner there is one, and all save the same checkpoints in one order.
    clock: seconds, monotonic. `saved`: up to now; another thread may look at it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.saved = Saved()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    @property
    def idle(self) -> bool:
        """Whether `save` would not have to wait for the one before."""
        return self._pending is None or self._pending.done()

    def save(
        self, directory: Path, name: str, state: Any, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
    ) -> None:
        """As the function `save`, behind the caller's back: it returns once the one before is written.

        What is written is a copy of `state` on its devices, as large as it, until the host has read it. So nobody waits
        for a device either, and `state` may be donated at once. Raises what went wrong with the one before.
        """
        self.wait()
        began = self._clock()
        self._pending = self._writer.submit(
            self._write, began, directory, name, self._copied(state), dict(arrays), dict(meta)
        )

    def _write(self, began: float, *what: Any) -> Path:
        path = save(*what)
        count, seconds, _ = self.saved
        ended = self._clock()
        self.saved = Saved(count + 1, seconds + ended - began, ended)
        return path

    def wait(self) -> None:
        """Until everything is written: in the first process, which comes last. Raises what went wrong, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Ends the thread. What goes wrong now is only logged."""
        self._writer.shutdown()
        if self._pending is not None and (error := self._pending.exception()) is not None:
            log.error("event=checkpoint_failed error=%r", error)


def load(directory: Path, name: str, like: Any) -> Checkpoint:
    """Reads a checkpoint whose state has the shapes and dtypes of `like`, onto the devices of `like`.

    A leaf of `like` without a sharding goes to this process's first device. Raises ValueError naming the file where one
    is missing or fails its checksum.
    """
    path = directory / name
    meta = read_meta(directory, name)
    for file, expected in meta["checksums"].items():
        if not (path / file).is_file() or _checksum(path / file) != expected:
            raise ValueError(f"{path / file} is missing or damaged: its checksum does not match meta.json")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), like)
    with _checkpointer() as checkpointer:
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


def _save_state(temporary: Path, state: Any) -> None:
    with _checkpointer() as checkpointer:
        checkpointer.save(temporary.absolute() / "state", state)


def _checkpointer() -> ocp.StandardCheckpointer:
    """Orbax's, for all processes. Naming them makes them meet at their coordinator, not in a program on their devices:
    from a thread that would get in between the programs of training, in each process elsewhere."""
    count = jax.process_count()
    processes = set(range(count)) if count > 1 else None
    return ocp.StandardCheckpointer(
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=processes)
    )


def _files(path: Path) -> Iterator[Path]:
    return (f for f in sorted(path.rglob("*")) if f.is_file())


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            total = zlib.crc32(chunk, total)
    return total


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
