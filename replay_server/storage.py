"""Where the arrays of a table live: in this process, or in memory-mapped files that outlive it.

A store in `Memory` goes with its process. In `Files` whatever was written is there for the next process, also after
SIGKILL: a store into a shared mapping is in the kernel's page cache at once. Against the death of the machine only
marks help (persist.py).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import numpy as np

LATENTS = "latents/"
"""Columns of this prefix may be written again after their row was appended."""


class Storage(Protocol):
    """Named arrays."""

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype, sparse: bool = False) -> np.ndarray:
        """The array of that name: zeros, or what was written to it before. Asking again gives the same memory.

        sparse: it has space only where it was written, or where `reserve` made some. Raises OSError as `reserve`.
        """
        ...

    def reserve(self, name: str, begin: int, end: int) -> None:
        """Makes sure that bytes begin <= i < end of an array can be written. Raises OSError naming path and bytes."""
        ...


class Memory:
    """Arrays of this process. Pages are given out by the kernel when they are first written (calloc)."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype, sparse: bool = False) -> np.ndarray:
        if name not in self._arrays:
            self._arrays[name] = np.zeros(shape, dtype)
        return self._arrays[name]

    def reserve(self, name: str, begin: int, end: int) -> None:
        """Nothing to do: the table was sized before it was made."""


class Files:
    """One sparse file per array, mapped: latents in the folder `latents` (on a tmpfs), everything else in `rows`.

    Makes the files that are missing if `create`, and otherwise raises ValueError naming every file that is missing or
    has another size than its array.
    """

    def __init__(self, rows: Path, latents: Path, create: bool) -> None:
        self.rows, self.latents = rows, latents
        self._create = create
        self._arrays: dict[str, np.ndarray] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._held: Callable[[], object] | None = None

    def path(self, name: str) -> Path:
        """The file of an array; names may hold what file names must not."""
        return (self.latents if name.startswith(LATENTS) else self.rows) / f"{quote(name, safe='')}.bin"

    def damage(self, sizes: dict[str, int]) -> list[str]:
        """What is wrong with the files of arrays of these sizes (bytes), a clause each."""
        found = []
        for name, nbytes in sizes.items():
            path = self.path(name)
            if not path.exists():
                found.append(f"{path} is missing")
            elif (size := path.stat().st_size) != max(nbytes, 1):
                found.append(f"{path} has {size} bytes instead of {max(nbytes, 1)}")
        return found

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype, sparse: bool = False) -> np.ndarray:
        if name not in self._arrays:
            # a file is never empty, because an empty one cannot be mapped
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            size, path = max(nbytes, 1), self.path(name)
            if not self._create and (wrong := self.damage({name: nbytes})):
                raise ValueError(wrong[0])
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(size)
                if not sparse:
                    allocate(file.fileno(), path, 0, size)
                self._maps[name] = mmap.mmap(file.fileno(), size)
            self._arrays[name] = np.frombuffer(self._maps[name], dtype, nbytes // dtype.itemsize).reshape(shape)
        return self._arrays[name]

    def reserve(self, name: str, begin: int, end: int) -> None:
        if end > begin:
            path = self.path(name)
            with path.open("r+b") as file:
                allocate(file.fileno(), path, begin, end)

    def hold(self, descriptor: int) -> None:
        """Keeps a descriptor open, and so the lock on its file, until `release` or the end of this object."""
        self.release()
        self._held = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Closes what is held; may be called again."""
        if self._held is not None:
            self._held()  # which does it once

    def flush(self) -> None:
        """Writes everything through to the disk."""
        for mapped in self._maps.values():
            mapped.flush()


def allocate(descriptor: int, path: Path, begin: int, end: int) -> None:
    """Gives a file space for bytes begin <= i < end; what is there stays. Raises OSError naming path and bytes.

    A write to a hole of a mapped file when the disk is full is a SIGBUS; an allocation that fails is an error.
    """
    try:
        os.posix_fallocate(descriptor, begin, end - begin)
    except OSError as error:
        text = f"no space for {end - begin} more bytes of a table ({error.strerror})"
        raise OSError(error.errno, text, str(path)) from error
