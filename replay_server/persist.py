"""Marks: states of an embedded replay on disk, restorable after SIGKILL or a power cut at any moment.

A mark NAME is the file mark-NAME.json (the manifest) and the chunk files that it lists. Chunk files are written once,
under new names, and shared by marks: a mark writes anew only the chunks touched since they were last written. Files and
folder are on disk before the manifest gets its final name by a rename, which is the commit point. Whatever no manifest
lists is left over from a mark that never was, and goes at the next one.

A folder belongs to one store. Files are numpy's .npy (one vector of bytes) and JSON; nothing is pickled.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay_server.ring import Ring

_CHUNK_NAME = re.compile(r"chunk-[a-z]+-\d+-(\d+)\.npy")


@dataclass(frozen=True)
class ChunkFile:
    """A chunk of a ring as it lies on disk."""

    group: str
    number: int
    file: str
    nbytes: int
    crc32: int


def save(
    directory: Path,
    name: str,
    ring: Ring,
    chunks: Mapping[tuple[str, int], ChunkFile],
    spec: Mapping[str, Any],
    state: Mapping[str, Any],
) -> dict[tuple[str, int], ChunkFile]:
    """Makes the ring and `state` restorable as mark `name`, in place of an earlier mark of that name.

    chunks: what the last `save` or `load` of this ring returned; empty for a new ring.
    spec, state: JSON values; `spec` must be equal when the mark is loaded.
    Returns the files of all chunks. Raises ValueError for an impossible name, and OSError naming path and bytes when
    the disk does not take a file; the marks that were there are then still there.
    """
    manifest = _manifest(directory, name)
    directory.mkdir(parents=True, exist_ok=True)
    present = _sweep(directory)
    serial = 1 + max((int(found[1]) for file in present if (found := _CHUNK_NAME.fullmatch(file))), default=0)
    due = {(group, int(number)) for group, numbers in ring.touched().items() for number in numbers}
    due |= {key for key, chunk in chunks.items() if chunk.file not in present}
    saved = dict(chunks)
    try:
        for group, number in sorted(due):
            buffer = io.BytesIO()
            np.save(buffer, ring.read_chunk(group, number), allow_pickle=False)
            data = buffer.getvalue()
            file = f"chunk-{group}-{number:06d}-{serial:06d}.npy"
            _write(directory / file, data)
            saved[group, number] = ChunkFile(group, number, file, len(data), zlib.crc32(data))
        body = {
            "spec": spec,
            "state": state,
            "head": ring.head.tolist(),
            "tail": ring.tail.tolist(),
            "chunks": [asdict(saved[key]) for key in sorted(saved)],
        }
        text = _canonical(body)
        _sync_directory(directory)
        temporary = manifest.with_suffix(".tmp")
        _write(temporary, _canonical({"crc32": zlib.crc32(text), "body": body}))
        temporary.rename(manifest)
        _sync_directory(directory)
    finally:
        _sweep(directory)
    return saved


def load(
    directory: Path, name: str, ring: Ring, spec: Mapping[str, Any]
) -> tuple[dict[tuple[str, int], ChunkFile], dict[str, Any]]:
    """Reads mark `name` into a new `ring`. Returns the chunks' files and the `state` that was saved.

    Raises FileNotFoundError naming the mark or chunk file that is missing, and ValueError naming the file that is
    damaged or the entries of `spec` that differ; `ring` is then not to be used.
    """
    manifest = _manifest(directory, name)
    body = _read_manifest(manifest)
    wanted = json.loads(_canonical(spec))
    keys = sorted(key for key in wanted.keys() | body["spec"].keys() if wanted.get(key) != body["spec"].get(key))
    if keys:
        differing = "; ".join(f"{key} was {body['spec'].get(key)} and is {wanted.get(key)}" for key in keys)
        raise ValueError(f"mark {name!r} was made by another replay: {differing}")
    chunks = [ChunkFile(**entry) for entry in body["chunks"]]
    for chunk in chunks:
        path = directory / chunk.file
        if not path.exists():
            raise FileNotFoundError(f"{path}, which mark {name!r} needs, is missing")
        data = path.read_bytes()
        if (len(data), zlib.crc32(data)) != (chunk.nbytes, chunk.crc32):
            raise ValueError(
                f"{path}, which mark {name!r} needs, is damaged: {len(data)} bytes with CRC32 {zlib.crc32(data):08x}, "
                f"written were {chunk.nbytes} with {chunk.crc32:08x}"
            )
        ring.load_chunk(chunk.group, chunk.number, np.load(io.BytesIO(data), allow_pickle=False))
    ring.head[:] = body["head"]
    ring.tail[:] = body["tail"]
    return {(chunk.group, chunk.number): chunk for chunk in chunks}, body["state"]


def names(directory: Path) -> list[str]:
    """The marks in a folder, damaged ones included."""
    return sorted(path.stem.removeprefix("mark-") for path in directory.glob("mark-*.json"))


def capacity(directory: Path, name: str) -> int:
    """Rows per environment of the rings that mark `name` was made of. Raises as `load` does."""
    return _read_manifest(_manifest(directory, name))["spec"]["capacity"]


def forget(directory: Path, name: str) -> None:
    """Drops mark `name` and the chunk files that no other mark lists. Raises FileNotFoundError for an unknown mark."""
    manifest = _manifest(directory, name)
    if not manifest.exists():
        raise FileNotFoundError(f"there is no mark {name!r} in {directory}")
    manifest.unlink()
    # the mark must be gone for good before its chunks go
    _sync_directory(directory)
    _sweep(directory)


def _manifest(directory: Path, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"mark name {name!r} must consist of letters, digits, '_' and '-'; it becomes a file name")
    return directory / f"mark-{name}.json"


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, or ValueError for a file that is not as it was written."""
    if not path.exists():
        raise FileNotFoundError(f"there is no mark file {path}")
    try:
        content = json.loads(path.read_bytes())
        body, crc32 = content["body"], content["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"mark file {path} is damaged: {error}") from error
    if zlib.crc32(_canonical(body)) != crc32:
        raise ValueError(f"mark file {path} is damaged: its checksum does not match")
    return body


def _sweep(directory: Path) -> set[str]:
    """Removes what no mark lists; returns the names of the files that remain."""
    needed = set()
    for path in directory.glob("mark-*.json"):
        needed.add(path.name)
        try:
            needed |= {entry["file"] for entry in _read_manifest(path)["chunks"]}
        except ValueError:
            # A damaged mark cannot be restored, so it needs no chunks. Its manifest stays: `load` says what is wrong.
            continue
    present = {
        path.name for pattern in ("mark-*.json", "mark-*.tmp", "chunk-*.npy") for path in directory.glob(pattern)
    }
    for file in present - needed:
        (directory / file).unlink()
    return present & needed


def _write(path: Path, data: bytes) -> None:
    """Writes a file through to the disk."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"writing {len(data)} bytes failed ({error.strerror})", str(path)) from error


def _sync_directory(directory: Path) -> None:
    """Makes new, renamed and removed names in a folder permanent."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
