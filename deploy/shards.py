"""A replay shard of a cluster: a server process on its files, started again whenever it ends.

No Ray here; `deploy.cluster` puts a `Keeper` into an actor on the node that has the files.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from telamon.rpc.security import TOKEN_VARIABLE
from telamon.telemetry.logs import LogBuffer, setup_buffer
from telamon.telemetry.process import resident_bytes

LOG = logging.getLogger(__name__)

DRAIN_SECONDS = 3.0
"""That a server has for requests in progress when it is told to end: shorter than Ray's patience with its keeper."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds before a server is started again: doubled with each start that did not get as far as serving."""
START_SECONDS = 60.0
"""In which the first start must succeed, other starts of it included: the directory may still be held by the server of
a keeper that was killed."""


@dataclass(frozen=True)
class ShardSetup:
    """What a keeper is made of."""

    name: str
    directory: Path
    """On the keeper's node."""
    listen: str
    """HOST:PORT; port 0 takes a free one, and every later start takes the same."""
    metrics_host: str
    options: tuple[str, ...] = ()
    """Further options of the server's command line."""
    log_level: int = logging.INFO
    """Of the keeper: events of this level and above travel with the statuses."""


@dataclass(frozen=True)
class ShardStatus:
    """How a shard stands."""

    address: str | None
    """None before it has served."""
    host: str
    """Name of the node."""
    pid: int | None
    """Of the server; None while it is down."""
    metrics: str | None
    """URL of the page of the last server that served."""
    starts: int
    """How often a server has served."""
    log: tuple[str, ...]
    """What the servers and the keeper have said since the last status."""
    memory: int | None = None
    """Resident bytes of the server; None while it is down."""


class Keeper:
    """Keeps one `python -m replay_server` alive, once it was opened.

    token: given to the server in its environment, never on its command line.
    log: of this process; its lines travel with the status.
    """

    def __init__(
        self, setup: ShardSetup, token: str, log: LogBuffer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._setup, self._token, self._log, self._clock = setup, token, log, clock
        self._listen = setup.listen
        self._address: str | None = None
        self._metrics: str | None = None
        self._starts = 0
        self._stop = threading.Event()
        self._state = threading.Lock()
        """Guards `_process` against a start while it is told to stop."""
        self._process: subprocess.Popen[str] | None = None
        self._watcher = threading.Thread(target=self._watch, name="telamon-keeper", daemon=True)

    def open(self) -> str:
        """Starts the server; its address. Raises RuntimeError with what it said, if it never serves."""
        deadline, pause = self._clock() + START_SECONDS, FIRST_PAUSE
        while (said := self._start()) is not None:
            if self._clock() >= deadline:
                raise RuntimeError(f"replay shard {self._setup.name} does not start: {said}")
            LOG.info("event=shard_does_not_start name=%s said=%r", self._setup.name, said)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._watcher.start()
        return self._listen

    def status(self) -> ShardStatus:
        process = self._process
        pid = None if process is None or process.poll() is not None else process.pid
        memory = None
        if pid is not None:
            with suppress(OSError):  # it has ended since
                memory = resident_bytes(pid)
        return ShardStatus(
            self._address, socket.gethostname(), pid, self._metrics, self._starts, tuple(self._log.drain()), memory
        )

    def close(self) -> None:
        """Ends the server as SIGTERM does, and waits for it."""
        self._stop.set()
        with self._state:
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(4 * DRAIN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # what was acknowledged lies in the files
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            process = self._process
            assert process is not None  # set before this thread, and kept
            code = process.wait()
            if self._stop.is_set():
                return
            LOG.warning("event=shard_ended name=%s code=%d", self._setup.name, code)
            while not self._stop.wait(pause) and (said := self._start()) is not None:
                pause = min(2 * pause, LONGEST_PAUSE)
                LOG.error("event=shard_does_not_start name=%s said=%r", self._setup.name, said)
            pause = FIRST_PAUSE

    def _start(self) -> str | None:
        """Starts a server and waits until it serves; None if it does, else what it said."""
        s = self._setup
        command = [
            sys.executable, "-m", "replay_server", "--directory", str(s.directory), "--listen", self._listen,
            "--metrics-port", "0", "--metrics-host", s.metrics_host, "--drain-seconds", str(DRAIN_SECONDS),
            "--parent", str(os.getpid()), *s.options,
        ]  # fmt: skip
        environment = {**os.environ, TOKEN_VARIABLE: self._token}
        with self._state:
            if self._stop.is_set():
                return "it was told to stop"
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace",
            )  # fmt: skip
            self._process = process
        assert process.stdout is not None
        assert process.stderr is not None  # both are pipes
        line = process.stdout.readline()
        if not line:
            _, said = process.communicate()
            return said.strip() or f"it ended with {process.returncode}"
        info = json.loads(line)
        self._address, self._metrics = info["address"], info["metrics"]
        self._listen = info["address"]  # its clients know it there
        self._starts += 1
        LOG.info("event=shard_serves name=%s address=%s pid=%d", s.name, self._address, info["pid"])
        threading.Thread(target=self._relay, args=(process,), name="telamon-keeper-relay", daemon=True).start()
        return None

    def _relay(self, process: subprocess.Popen[str]) -> None:
        """What the server says on stderr, into this process's log."""
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            for line in process.stderr:
                LOG.warning("event=shard_says name=%s text=%r", self._setup.name, line.rstrip())


class ShardActor(Keeper):
    """A Keeper that is a process of its own. The driver applies `ray.remote`."""

    def __init__(self, setup: ShardSetup, token: str) -> None:
        super().__init__(setup, token, setup_buffer(level=setup.log_level))
