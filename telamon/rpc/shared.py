"""Memory that a client and a server on one host share: slots in a file under /dev/shm.

The client makes the file, offers its path, and unlinks it once the server has answered that it has mapped it: from
then on nothing is left of it when both have ended, however they end. A client killed in between leaves a file whose
lock nobody holds; `sweep` removes those. Names are never reused, and a slot only when nobody looks at it any more.

A process of the same user could shorten the file and so kill who has mapped it (SIGBUS); such a process could kill it
anyway.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import weakref
from pathlib import Path

import numpy as np

from telamon.rpc.codec import SLOT, Layout

DIRECTORY = Path("/dev/shm")
MAX_SHARED_BYTES = 2**32
"""Of one file."""

_NAME = re.compile("telamon-slots-[0-9a-f]{32}")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class SharedSlots:
    """`slots` slots of `slot_bytes` bytes, mapped. Made by `create` or `attach`; safe to use from several threads."""

    def __init__(self, path: Path, slots: int, slot_bytes: int, fd: int, free: list[int]) -> None:
        self.path = path
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._free = free
        # the mapping has its own copy of fd, and with it the lock; it ends with the last view of it
        self._memory = memoryview(mmap.mmap(fd, slots * slot_bytes))

    @classmethod
    def create(cls, slots: int, slot_bytes: int, directory: Path = DIRECTORY) -> SharedSlots:
        """Makes and maps a new file. Raises OSError naming the bytes that there is no space for."""
        nbytes = _check_sizes(slots, slot_bytes)
        path, fd = _make(directory)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # or a page that there is no space for would end the process (SIGBUS)
            return cls(path, slots, slot_bytes, fd, list(range(slots)))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(
                error.errno, f"{directory} cannot give {nbytes} bytes for {slots} slots: {error.strerror}"
            ) from error
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, path: str, slots: int, slot_bytes: int, directory: Path = DIRECTORY) -> SharedSlots:
        """Maps what a client says it has made. Its slots are the client's: `take` gives none.

        Raises ValueError unless it is such a file: of this user, directly in `directory`, of that size and allocated.
        """
        nbytes = _check_sizes(slots, slot_bytes)
        parent, _, name = path.rpartition("/")
        if parent != str(directory) or not _NAME.fullmatch(name):
            raise ValueError(f"{path[:256]!r} is no shared memory; its path must be {directory}/{_NAME.pattern}")
        try:
            fd = os.open(path, _FLAGS)
        except OSError as error:
            raise ValueError(f"{path} cannot be opened on this host: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ValueError(f"{path} is not a regular file of user {os.geteuid()}, who serves")
            if status.st_size != nbytes or status.st_blocks * 512 < nbytes:
                raise ValueError(
                    f"{path} has {status.st_size} bytes, {status.st_blocks * 512} of them allocated; "
                    f"{slots} slots of {slot_bytes} bytes need {nbytes}"
                )
            return cls(Path(path), slots, slot_bytes, fd, [])
        finally:
            os.close(fd)

    def slot(self, index: int) -> memoryview:
        """The memory of one slot, writable. Raises ValueError for a slot that there is not, and after `close`."""
        if not 0 <= index < self.slots:
            raise ValueError(f"slot {index} is none of the {self.slots} slots of {self.path}")
        return self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def take(self) -> int | None:
        """A slot that nobody uses, now the caller's until `give_back` or the end of its `views`; None if there is none.

        Only the end of the call ends what the other side may do to a slot that it was told of.
        """
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, index: int) -> None:
        """Returns a slot that was taken."""
        if index in self._free:
            raise ValueError(f"slot {index} was given back twice")
        self._free.append(index)

    def views(self, index: int, layout: Layout, count: int) -> dict[str, np.ndarray]:
        """Column name -> array [count, ...] in a slot that was taken. It is given back when the last of them has died,
        with all that numpy or others have derived from them without copying.
        """
        base = np.frombuffer(self.slot(index), np.uint8)
        views = layout.views(base, count, SLOT)
        weakref.finalize(base, self.give_back, index).atexit = False
        return views

    def unlink(self) -> None:
        """Takes the file's name away, when the other side has mapped it or never will. The memory stays."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmaps the memory, as soon as the last view of it has died. Its maker calls `unlink` too."""
        self._memory.release()
        self._free = []


def _make(directory: Path) -> tuple[Path, int]:
    """A new, empty file that is open and locked."""
    while True:
        path = directory / f"telamon-slots-{secrets.token_hex(16)}"
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)  # waits only for a `sweep` that came in between
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # swept away


def _check_sizes(slots: int, slot_bytes: int) -> int:
    """Bytes of all slots."""
    if slots < 1 or slot_bytes < SLOT or slot_bytes % SLOT or slots * slot_bytes > MAX_SHARED_BYTES:
        raise ValueError(
            f"{slots} slots of {slot_bytes} bytes cannot be shared; a slot has a positive multiple of {SLOT} bytes, "
            f"and all have at most {MAX_SHARED_BYTES}"
        )
    return slots * slot_bytes


def sweep(directory: Path = DIRECTORY) -> int:
    """Removes what killed clients left: files of this user's `SharedSlots` whose lock nobody holds.

    Returns how many. Called when a server or a client starts; 0 where there is no such directory.
    """
    removed = 0
    for path in directory.iterdir() if directory.is_dir() else ():
        if not _NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, _FLAGS)
        except OSError:
            continue  # gone meanwhile, another user's, or no file
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                removed += 1
        except BlockingIOError:
            pass  # its maker lives
        finally:
            os.close(fd)
    return removed
