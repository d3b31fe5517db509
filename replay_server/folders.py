"""Folders and files of tables: who may serve them, whose latents are whose, what can be trusted.

Latents outlive their process in a folder that all services of a host share, so each says whose they are, in a file
that its process holds a lock on. What nobody holds, and no table of this host means any more, is removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from replay_server import durable
from replay_server.ring import sizes
from replay_server.storage import LATENTS, Files
from replay_server.streams import Stream
from telamon.replay import TableSpec

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of tables and streams; they become names of files and labels of metrics."""
LATENTS_PREFIX = "telamon-table-"
OWNER = "owner"
"""The file beside latents that says whose they are."""
LOCK = "server.lock"
"""The file that the process which serves a folder has locked; no table can have its name."""


class Owner(NamedTuple):
    """Whose latents they are."""

    namespace: int
    """Paths mean the same to processes of one mount namespace alone."""
    directory: Path
    """The table's folder."""


def check_name(name: str, what: str) -> None:
    """Raises ValueError for what cannot be the name of a table or stream."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{what} name {name!r} must be 1 to 64 letters, digits, '_' and '-'")


def save_table(
    directory: Path,
    spec: TableSpec,
    seed: int,
    incarnation: int,
    streams: Mapping[str, Stream],
    base: tuple[str, int] | None,
) -> None:
    """Writes table.json. Raises OSError naming path and bytes; the file is then as it was."""
    body = {
        "spec": asdict(spec),
        "seed": seed,
        "incarnation": f"{incarnation:x}",
        "streams": [[name, s.first_env_id, s.num_envs] for name, s in streams.items()],
        "base": base,
    }
    durable.write_json(directory / "table.json", body)


def files_of(directory: Path, latents_root: Path, incarnation: int, create: bool) -> Files:
    """The files of one incarnation of a table."""
    name = f"{incarnation:016x}"
    return Files(directory / f"rows-{name}", latents_root / f"{LATENTS_PREFIX}{name}", create)


def sweep_rows(directory: Path, keep: Path) -> None:
    """Removes rows that an interrupted restore left."""
    for path in directory.glob("rows-*"):
        if path != keep:
            shutil.rmtree(path)


def latents_of(spec: TableSpec) -> list[str]:
    """Names of the columns of latents."""
    return [name for name in spec.row.columns if name.startswith(LATENTS)]


def sizes_of(spec: TableSpec, names: list[str]) -> dict[str, int]:
    """Bytes of the files of some columns."""
    columns = spec.row.columns
    return sizes({name: columns[name] for name in names}, spec.max_envs, spec.capacity)


def damage(files: Files, spec: TableSpec, state: Mapping[str, Any]) -> list[str]:
    """Why the rows of a table cannot be trusted, a clause each; empty where they can."""
    clean, boot = state["clean"], state["boot"]
    if not clean and boot != boot_id():
        return ["the machine was started anew and the service was not stopped before, so its newest rows are lost"]
    # after a clean stop latents lie beside the rows
    saved = Files(files.rows, files.rows, create=False) if clean else files
    return saved.damage(sizes_of(spec, list(spec.row.columns)))


def boot_id() -> str:
    """Changes whenever the machine is started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists() and (text := Path(path).read_text().strip()) != "max":
            limits.append(int(text))
    return min(limits)


def make_folders(files: Files, spec: TableSpec) -> None:
    """The folders of a new incarnation. Raises OSError."""
    files.rows.mkdir(mode=0o700)
    if spec.row.latents:
        claim_latents(files)


def remove_files(files: Files) -> None:
    """What is mapped stays readable."""
    files.release()
    shutil.rmtree(files.rows, ignore_errors=True)
    shutil.rmtree(files.latents, ignore_errors=True)


# latents


def claim_latents(files: Files) -> None:
    """Makes the folder of latents if it is missing, and says that they are this table's while this process lives.

    Raises ValueError where they are those of another folder of the same table: one of the two is a copy.
    """
    directory = files.rows.parent
    files.latents.mkdir(mode=0o700, exist_ok=True)
    owner = owner_of(files.latents)
    if owner is not None and owner.directory != directory:
        here = owner.namespace == namespace()
        if is_meant(files.latents, owner) if here else is_locked(files.latents / OWNER):
            raise ValueError(
                f"{files.latents} belongs to {owner.directory}, of which {directory} is a copy; they cannot be served "
                "at the same time: stop the service of the other one first, or remove the copy"
            )
    descriptor = os.open(files.latents / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    files.hold(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{namespace()} {directory}".encode())


def owner_of(latents: Path) -> Owner | None:
    """Whose latents lie there; None where nobody of this user says so yet."""
    path = latents / OWNER
    if not path.is_file() or path.stat().st_uid != os.getuid():
        return None
    number, _, directory = path.read_text().partition(" ")
    return Owner(int(number), Path(directory)) if number.isdecimal() and directory else None


def is_meant(latents: Path, owner: Owner) -> bool:
    """Whether the owner's table is the incarnation that these latents belong to.

    What cannot be seen from here, or is damaged, may be.
    """
    if owner.namespace != namespace():
        return True
    try:
        body, _ = durable.read_json(owner.directory / "table.json", "table file")
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return f"{int(body['incarnation'], 16):016x}" == latents.name.removeprefix(LATENTS_PREFIX)


def sweep_latents(latents_root: Path) -> None:
    """Removes latents of tables that are gone or go on as another incarnation; never those of a running service."""
    for path in latents_root.glob(f"{LATENTS_PREFIX}*"):
        try:
            if is_locked(path / OWNER):
                continue
            owner = owner_of(path)
            if owner is not None and not is_meant(path, owner):
                log.info("event=latents_removed path=%s owner=%s", path, owner.directory)
                shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another service swept it first


def bring_latents(files: Files, spec: TableSpec) -> None:
    """Puts the latents that a clean stop saved where they live. Raises OSError."""
    names = latents_of(spec)
    if names:
        claim_latents(files)
    for name in names:
        path = files.path(name)
        durable.copy_sparse(files.rows / path.name, path)


# locks


def lock_directory(directory: Path) -> int:
    """Locks a folder for this process; returns the descriptor. Raises OSError naming who has it."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(descriptor, 32).decode() or "unknown"
        os.close(descriptor)
        text = f"process {owner} already serves this folder; stop it, or give --directory another one"
        raise OSError(errno.EBUSY, text, str(directory)) from error
    os.truncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether some process holds a lock on this file. Raises FileNotFoundError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def namespace() -> int:
    """Of mounts, of this process."""
    return os.stat("/proc/self/ns/mnt").st_ino
