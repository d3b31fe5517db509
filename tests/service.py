"""Replay servers for tests: in this process, or as real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replay_server.__main__ import Served, serving
from replay_server.config import ServerConfig
from telamon.rpc.security import TOKEN_VARIABLE, Endpoint
from tests.waiting import SECONDS, next_line

TOKEN = "a-token-for-tests-of-the-replay"


@contextmanager
def serve(directory: Path, **config: Any) -> Iterator[Endpoint]:
    """A server in this process, on a free port of loopback; `config`: other fields of ServerConfig."""
    with serve_open(directory, **config) as served:
        yield endpoint_of(served.info)


@contextmanager
def serve_open(directory: Path, **config: Any) -> Iterator[Served]:
    """As `serve`, with its tables and metrics in reach."""
    chosen = ServerConfig(directory, **{"drain_seconds": 1.0, "max_calls": 64, **config})
    with serving(chosen, TOKEN) as served:
        try:
            yield served
        finally:
            served.server.drain(chosen.drain_seconds)
            # what was cut off keeps the folder from the next server until it ends, as it does not in a process
            served.server.service.wait_idle(SECONDS)


def endpoint_of(info: dict[str, Any]) -> Endpoint:
    return Endpoint(info["address"], TOKEN)


class Process:
    """A real server, which has said that it serves. Killed with the `with` block, unless it has ended before."""

    def __init__(self, directory: Path, *options: str, command: tuple[str, ...] = ("-m", "replay_server")) -> None:
        self.directory = directory
        self.popen = subprocess.Popen(
            [sys.executable, *command, "--directory", str(directory), *options],
            env={**os.environ, TOKEN_VARIABLE: TOKEN}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        line = next_line(self.popen)
        if not line:
            raise RuntimeError(f"the server ended with {self.popen.wait(SECONDS)}: {self.popen.communicate()[1]}")
        self.info = json.loads(line)
        self.endpoint = endpoint_of(self.info)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        """SIGKILL; returns once it and whoever has its output have ended."""
        self.popen.kill()
        self.popen.communicate(timeout=SECONDS)

    def terminate(self, timeout: float = SECONDS) -> tuple[int, str]:
        """SIGTERM; (exit code, what it said on stderr)."""
        self.popen.terminate()
        _, said = self.popen.communicate(timeout=timeout)
        return self.popen.returncode, said

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.popen.stdout is not None
        if not self.popen.stdout.closed:  # nobody has waited for its end
            self.kill()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """PEM files of a certificate for localhost and of its key, mode 0600, by the openssl command."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    return certificate, key


def spawn(directory: Path, *options: str) -> Process:
    """Starts `python -m replay_server` and waits until it serves; `options` as on the command line."""
    return Process(directory, *options)
