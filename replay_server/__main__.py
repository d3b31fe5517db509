"""A replay server as a process: `python -m replay_server --directory DIR`, or `telamon replay`.

Once it serves it prints one line of JSON and writes the same to DIR/server.json:
{"address": ..., "pid": ..., "metrics": URL or null, "tables": {NAME: rows held}, "tls": true or false}.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import tyro

from replay_server import metrics, servicer
from replay_server.config import ServerConfig
from replay_server.folders import machine_memory
from replay_server.table import Tables
from telamon.allocator import keep_freed_memory
from telamon.rpc import security, shared
from telamon.telemetry import owners, pages
from telamon.telemetry.logs import setup_logging
from telamon.telemetry.owners import AddressInUse

LOG = logging.getLogger("replay_server")

INFO_FILE = "server.json"
FLUSH_MARK = "flush"
LOOK_SECONDS = 0.5
"""Time between two looks for the parent. A death signal of the kernel would come with the end of the thread that
started this process, not of the process, and on Linux alone."""
USAGE, FAILED = 2, 1
"""Exit codes: what was asked for cannot be; something went wrong."""


def main(args: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    keep_freed_memory()
    try:
        config = tyro.cli(ServerConfig, args=args, prog="telamon replay", description="Serve a replay over gRPC.")
        token = security.read_token(config.token_file, os.environ)
        return run(config, token)
    except (ValueError, PermissionError, AddressInUse) as error:
        return _say(error, USAGE)
    except OSError as error:
        return _say(error, FAILED)


def run(config: ServerConfig, token: str) -> int:
    """Serves until SIGTERM or SIGINT, then lets requests in progress end; a second signal ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)  # what was acknowledged lies in the files
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    config.directory.mkdir(parents=True, exist_ok=True)
    setup_logging(config.directory)
    with serving(config, token) as served:
        sys.stdout.write(json.dumps(served.info) + "\n")
        sys.stdout.flush()
        while not stop.wait(LOOK_SECONDS):
            if config.parent not in (None, os.getppid()):
                LOG.warning("event=parent_gone pid=%d", config.parent)
                break
    LOG.info("event=stop")
    if not served.server.service.wait_idle(0):
        # threads cannot be ended, and the interpreter would wait for them
        logging.shutdown()
        os._exit(0)
    return 0


class Served(NamedTuple):
    """A server that serves."""

    server: servicer.Server
    tables: Tables
    counts: metrics.Metrics
    info: dict[str, Any]
    """See above."""


@contextmanager
def serving(config: ServerConfig, token: str) -> Iterator[Served]:
    """Serves while the block runs, and drains after it.

    Raises AddressInUse, OSError for an address that is not this host's, and as `Tables`.
    """
    shared.sweep()
    limit = machine_memory() if config.memory_limit is None else int(config.memory_limit * 2**30)
    tables = Tables(config.directory, memory_limit=limit, rng=np.random.default_rng())
    with ExitStack() as stack:
        registry = pages.new_registry()
        metrics.DiskMetrics(config.directory, registry)
        counts = metrics.Metrics(registry, tables.items)
        server = servicer.Server(tables, token, counts, config.max_calls)
        stack.callback(_close, tables, server)
        address = bind(server, config)
        page = stack.enter_context(_metrics_page(counts, config))
        stack.enter_context(_flushing(tables, config.flush_every))
        server.start()
        stack.callback(server.drain, config.drain_seconds)
        found = {name: table.stats().rows_held for name, table in tables.items()}
        tls = config.tls_certificate is not None
        info = {"address": address, "pid": os.getpid(), "metrics": page, "tables": found, "tls": tls}
        stack.enter_context(_announced(config.directory / INFO_FILE, info))
        LOG.info("event=start address=%s pid=%d metrics=%s tables=%s", address, os.getpid(), page, ",".join(found))
        yield Served(server, tables, counts, info)
        LOG.info("event=drain seconds=%g", config.drain_seconds)


def _close(tables: Tables, server: servicer.Server) -> None:
    if server.service.wait_idle(0):
        tables.close()
    else:  # What was acknowledged lies in the files, as after SIGKILL, and marks are atomic.
        LOG.warning("event=not-closed text='some requests were not answered in time'")


def bind(server: servicer.Server, config: ServerConfig) -> str:
    """Listens where the config says; returns the address, with the port that was chosen.

    Raises AddressInUse, and OSError for an address that is not this host's.
    """
    local = config.listen.startswith("unix:")
    _probe(config)
    umask = os.umask(0o177)  # a unix socket is for its owner
    try:
        if config.tls_certificate is None or config.tls_key is None:
            port = server.grpc.add_insecure_port(config.listen)
        else:
            credentials = security.read_server_credentials(config.tls_certificate, config.tls_key)
            port = server.grpc.add_secure_port(config.listen, credentials)
    except RuntimeError as error:
        raise _not_here(config.listen) from error
    finally:
        os.umask(umask)
    return config.listen if local else f"{owners.bracketed(config.host)}:{port}"


def _probe(config: ServerConfig) -> None:
    """Raises as `bind`.

    gRPC takes the path of a unix socket from a living server, is content with one of the addresses of a name, and
    prints lines of its own where it cannot listen.
    """
    if config.listen.startswith("unix:"):
        if owners.listeners(config.listen):
            raise _in_use(config.listen)
        if not (folder := Path(config.listen.removeprefix("unix:")).parent).is_dir():
            raise OSError(f"cannot listen on {config.listen}; there is no folder {folder}")
        return
    free = False
    try:
        found = socket.getaddrinfo(config.host, int(config.listen.rpartition(":")[2]), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise _not_here(config.listen) from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC, after a server that has ended
                probe.bind(address)
                free = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _in_use(config.listen) from error
    if not free:
        raise _not_here(config.listen)


def _not_here(address: str) -> OSError:
    return OSError(f"cannot listen on {address}; give an address of this host")


def _in_use(address: str) -> AddressInUse:
    free = "" if address.startswith("unix:") else ", or port 0 for a free one"
    return owners.in_use(address, f"give --listen another address{free}")


@contextmanager
def _metrics_page(counts: metrics.Metrics, config: ServerConfig) -> Iterator[str | None]:
    """Gives the page's URL; None where none is wanted."""
    if config.metrics_port is None:
        yield None
        return
    with pages.serving(counts.registry, config.metrics_host, config.metrics_port, "--metrics-port") as url:
        yield url


@contextmanager
def _announced(file: Path, info: Mapping[str, object]) -> Iterator[None]:
    """Says in `file` that the server serves, and takes the file away in the end."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(info) + "\n")
    temporary.rename(file)
    try:
        yield
    finally:
        file.unlink()


@contextmanager
def _flushing(tables: Tables, seconds: float | None) -> Iterator[None]:
    """Marks every table now and then, on a thread of its own, while the block runs."""
    if seconds is None:
        yield
        return
    end = threading.Event()

    def flush() -> None:
        while not end.wait(seconds):
            for name, table in tables.items():
                try:
                    table.mark(FLUSH_MARK)
                except Exception:  # the next one may succeed, and rows are safe from SIGKILL without any
                    LOG.exception("event=flush-failed table=%s", name)

    thread = threading.Thread(target=flush, name="flush")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _say(error: Exception, code: int) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:  # its text begins with its number, which helps nobody
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    sys.stderr.write(f"telamon replay: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
