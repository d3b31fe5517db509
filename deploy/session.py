"""A connection to Ray: to a cluster that is there, or to one of our own on this machine that ends with it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray

from actors.pool import one_line
from deploy.config import ClusterConfig

LOG = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 2**30
"""For snapshots on their way, of a cluster that this command starts: there are two or three at a time."""
RAY_ATTEMPTS = 5
SHORT_FOLDER, TEMPORARY = "/tmp", "telamon-ray-"


class Session(NamedTuple):
    """A connection to Ray."""

    node: str
    """Id of the driver's node."""
    address: str
    """Of the driver's node, as the others reach it."""
    own: bool
    """Whether this command started the cluster, on this machine alone: then loopback will do. One that was joined may
    have more nodes tomorrow."""


def alive() -> dict[str, Mapping[str, Any]]:
    """Node id -> what Ray tells of it."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


@contextmanager
def connect(cluster: ClusterConfig, num_cpus: int, logs: Path) -> Iterator[Session]:
    """Joins the cluster that is named, or starts one on this machine that ends with the block.

    num_cpus: that a cluster of our own pretends to have; the operating system shares out the real ones.
    logs: where the logs of Ray itself are kept.
    """
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError) as error:
            raise ConnectionError(f"no Ray cluster answers at {address} (address, or RAY_ADDRESS): {error}") from error
        try:
            yield _session(own=False)
        finally:
            ray.shutdown()
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default other programs of this machine come first
    _sweep()
    # Ray's sockets are in it, and a socket's path has at most 107 bytes: no run directory, and no TMPDIR
    temporary = tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-", dir=SHORT_FOLDER)
    try:
        _start_ray(num_cpus, temporary, quiet)
        yield _session(own=True)
    finally:
        ray.shutdown()
        _keep_logs(Path(temporary), logs)


def _start_ray(num_cpus: int, temporary: str, quiet: Mapping[str, Any]) -> None:
    """A cluster on this machine. Ray gives its own processes 30 seconds, which a busy machine may exceed."""
    for attempt in range(RAY_ATTEMPTS):
        try:
            ray.init(
                address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=LOOPBACK, _temp_dir=f"{temporary}/{attempt}", **quiet,
            )  # fmt: skip
            return
        except Exception as error:  # noqa: BLE001  # Ray raises nothing more specific
            ray.shutdown()
            LOG.warning("event=ray_does_not_start attempt=%d error=%r", attempt, one_line(error))
            last = one_line(error)
    raise RuntimeError(f"Ray has not started in {RAY_ATTEMPTS} attempts; the last one: {last}")


def _session(own: bool) -> Session:
    node = ray.get_runtime_context().get_node_id()
    return Session(node, alive()[node]["NodeManagerAddress"], own)


def _sweep() -> None:
    """Removes what drivers that were killed have left."""
    for path in Path(SHORT_FOLDER).glob(f"{TEMPORARY}*"):
        owner = re.fullmatch(rf"{TEMPORARY}(\d+)-\w+", path.name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _keep_logs(temporary: Path, logs: Path) -> None:
    """Keeps Ray's own logs of this session as `logs`, in place of older ones; the rest of its folder goes."""
    found = sorted(temporary.glob("*/session_latest/logs"))
    if found and logs.parent.is_dir():
        shutil.rmtree(logs, ignore_errors=True)
        with suppress(OSError):  # shutil's errors are OSErrors too; no reason to hide how the run ended
            shutil.copytree(found[-1], logs, ignore=_empty, ignore_dangling_symlinks=True)
    shutil.rmtree(temporary, ignore_errors=True)


def _empty(folder: str, names: Sequence[str]) -> list[str]:
    """Ray makes two files for every process, most of which stay empty."""
    return [name for name in names if (path := Path(folder) / name).is_file() and not path.stat().st_size]
