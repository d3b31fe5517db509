"""Who listens at an address of this host, as Linux tells it under /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
LISTENING = "0A"
"""State of a TCP socket (linux/tcp_states.h)."""
ACCEPTING = 1 << 16
"""Flag of a unix socket (linux/net.h, __SO_ACCEPTCON)."""
COMMAND_CHARACTERS = 200


class Owner(NamedTuple):
    """A process that listens."""

    pid: int
    command: str


class AddressInUse(OSError):
    """Something else listens there; the message names it if it can be seen."""


def in_use(address: str, instead: str) -> AddressInUse:
    """The error for an address that is taken. instead: what to do where its owner is to stay."""
    found = owner(listeners(address) or set())
    who = "another user's process" if found is None else f"process {found.pid} ({found.command})"
    return AddressInUse(f"{address} is in use by {who}; stop it, or {instead}")


def bracketed(host: str) -> str:
    """The host as an address has it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def listeners(address: str, proc: Path = PROC) -> set[str] | None:
    """Inodes of the sockets that listen at `host:port` (whatever the host) or `unix:/path`; None: nobody knows."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            rows = (line.split(maxsplit=7) for line in (proc / "net/unix").read_text().splitlines()[1:])
            return {row[6] for row in rows if len(row) == 8 and row[7] == path and int(row[3], 16) & ACCEPTING}
        port = f":{int(address.rpartition(':')[2]):04X}"
        files = [proc / "net" / name for name in ("tcp", "tcp6")]
        lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
        return {row[9] for row in lines if row[1].endswith(port) and row[3] == LISTENING}
    except OSError:
        return None


def owner(inodes: set[str], proc: Path = PROC) -> Owner | None:
    """The process that holds one of these sockets; None where none can be seen, as for those of other users."""
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in proc.glob("[0-9]*"):
        if links & set(_links(process / "fd")):
            try:
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:  # it has ended
                continue
            return Owner(int(process.name), words[:COMMAND_CHARACTERS])
    return None


def _links(folder: Path) -> Iterator[str]:
    try:
        for name in os.listdir(folder):
            yield os.readlink(folder / name)
    except OSError:  # another user's process, or one that has ended
        return
