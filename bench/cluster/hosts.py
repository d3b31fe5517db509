"""Hosts for a cluster on one machine: Linux namespaces with an sshd each, on a network of their own. Needs root.

A host has its own network, processes, host name, /root, /tmp, /run and /dev/shm; the rest of the file system is the
machine's. One more, the client, owns the switch and has no sshd. Nothing of it is visible outside, and all of it ends
with the processes that `Hosts` holds: no named namespaces, no addresses of the machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

NETWORK = "10.231.7"
CLIENT = f"{NETWORK}.1"
READY_SECONDS = 60.0

INIT = """
set -eu
folder=$1 name=$2; shift 2
hostname "$name"
mount --make-rprivate /
mkdir "$folder/kept"; i=0
for path in "$@"; do i=$((i+1)); mkdir "$folder/kept/$i"; mount --bind "$path" "$folder/kept/$i"; done
mount --bind "$folder/root" /root
mount --bind "$folder/tmp" /tmp
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$folder/../hosts" /etc/hosts
i=0; for path in "$@"; do i=$((i+1)); mkdir -p "$path"; mount --bind "$folder/kept/$i" "$path"; done
mkdir /run/sshd; touch /root/.bashrc; export HOME=/root
touch "$folder/ready"
if [ -e "$folder/sshd_config" ]; then exec "$(command -v sshd)" -D -e -f "$folder/sshd_config"; fi
exec sleep infinity
"""

SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/../key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""


class Hosts:
    """The client and `names`, whose addresses follow one another; a context that ends them all.

    folder: an empty one outside /tmp and /root; its `key` logs in everywhere, what is in NAME/root is NAME's /root.
    kept: folders below /tmp or /root that the hosts must see at the same place.
    """

    def __init__(self, folder: Path, names: Sequence[str], kept: Sequence[Path]) -> None:
        self.folder = folder
        self.addresses = {name: f"{NETWORK}.{i}" for i, name in enumerate(names, start=2)}
        self._kept = [str(path) for path in kept]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            stack.callback(self._end)
            self._make()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """What runs `words` as a process of that host (or of the client), in `folder`."""
        flags = ["--net", "--pid", "--mount", "--uts", "--ipc"]
        return [
            "nsenter",
            "--target",
            str(self._first(name)),
            *flags,
            "env",
            f"--chdir={self.folder}",
            "HOME=/root",
            *words,
        ]

    def processes(self, name: str) -> list[str]:
        """Command lines of that host, without its first process."""
        run = self.command(name, ["ps", "-eo", "pid,args", "--no-headers"])
        lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
        pairs = [line.split(maxsplit=1) for line in lines]
        return [args for pid, args in pairs if pid != "1" and not args.startswith(("ps -eo", "sshd"))]

    def _make(self) -> None:
        key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        entries = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{CLIENT} client\n{entries}")
        for name in ["client", *self.addresses]:
            self._start(name)
        self._in("client", "ip", "link", "add", "switch", "type", "bridge")
        self._address("client", "switch", CLIENT)
        for name, address in self.addresses.items():
            there = ["peer", "name", "eth0", "netns", str(self._first(name))]
            self._in("client", "ip", "link", "add", f"to-{name}", "type", "veth", *there)
            self._in("client", "ip", "link", "set", f"to-{name}", "master", "switch", "up")
            self._address(name, "eth0", address)
            # Ray takes the address of the interface with this route for the host's own.
            self._in(name, "ip", "route", "add", "default", "via", CLIENT)
        for name, address in self.addresses.items():
            probe = f"until (exec 3<>/dev/tcp/{address}/22) 2>/dev/null; do sleep 0.1; done"
            words = self.command("client", ["timeout", str(READY_SECONDS), "bash", "-c", probe])
            if subprocess.run(words, check=False).returncode != 0:
                raise RuntimeError(f"no sshd on {name}: {(self.folder / name / 'log').read_text()}")

    def _start(self, name: str) -> None:
        folder = self.folder / name
        for part in ("root", "tmp"):
            (folder / part).mkdir(parents=True)
        (folder / "tmp").chmod(0o1777)
        if name in self.addresses:
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key"], check=True)
            (folder / "sshd_config").write_text(SSHD.format(folder=folder))
        own = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", *own]  # it ends with this process too
        with (folder / "log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*unshare, "bash", "-c", INIT, "init", str(folder), name, *self._kept], stdout=log, stderr=log
            )
        deadline = time.monotonic() + READY_SECONDS
        while not (folder / "ready").exists():
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not start: {(folder / 'log').read_text()}")
            time.sleep(0.02)
        self._in(name, "ip", "link", "set", "lo", "up")

    def _address(self, name: str, link: str, address: str) -> None:
        self._in(name, "ip", "address", "add", f"{address}/24", "dev", link)
        self._in(name, "ip", "link", "set", link, "up")

    def _in(self, name: str, *words: str) -> None:
        """In that host's network alone: the machine's tools, its view of processes."""
        subprocess.run(["nsenter", "--target", str(self._first(name)), "--net", *words], check=True)

    def _first(self, name: str) -> int:
        """Process 1 of that host, as the machine numbers it."""
        parent = self._processes[name].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])

    def _end(self) -> None:
        for process in self._processes.values():
            process.kill()  # --kill-child: and with it the host's first process, and with that all others
            process.wait()


def kept_paths(paths: Sequence[Path]) -> list[Path]:
    """Of these, what lies below folders that a host has its own of; outer ones first, none below another."""
    found: list[Path] = []
    for path in sorted(p.resolve() for p in paths):
        hidden = any(path.is_relative_to(folder) for folder in ("/tmp", "/root"))
        if hidden and not any(path.is_relative_to(outer) for outer in found):
            found.append(path)
    return found


def missing_tools() -> list[str]:
    """What this machine lacks."""
    tools = ["ip", "nsenter", "ps", "rsync", "setpriv", "ssh", "ssh-keygen", "sshd", "unshare"]
    return [name for name in tools if shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin") is None]


if __name__ == "__main__":
    sys.exit("this is a module of ray_up.py")
