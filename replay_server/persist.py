"""Marks: states of a replay on disk, restorable after SIGKILL or a power cut at any moment.

A mark NAME is the file mark-NAME.json (the manifest) and the chunk files that it lists. Chunk files are written once,
under new names, and shared by marks: a mark writes anew only the chunks touched since they were last written. Files and
folder are on disk before the manifest gets its final name by a rename, which is the commit point. Whatever no manifest
lists is left over from a mark that never was, and goes at the next one.

A folder belongs to one store. Files are numpy's .npy (one vector of bytes) and JSON; nothing is pickled.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay_server import durable
from replay_server.ring import Chunk, Ring

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
    chunks: Mapping[Chunk, ChunkFile],
    spec: Mapping[str, Any],
    state: Callable[[], Mapping[str, Any]],
    lock: Callable[[], AbstractContextManager[object]],
) -> dict[Chunk, ChunkFile]:
    """Makes the ring and `state` restorable as mark `name`, in place of an earlier mark of that name.

    chunks: what the last `save` or `load` of this ring returned; empty for a new ring.
    spec, state: JSON values; `spec` must be equal when the mark is loaded.
    lock: gives what whoever changes ring or state holds. Chunks are copied under it one by one while others go on, and
    only those that were touched meanwhile, and the state, under one hold of it.
    Returns the files of all chunks. Raises ValueError for an impossible name, and OSError naming path and bytes when
    the disk does not take a file; the marks that were there are then still there.
    """
    manifest = _manifest(directory, name)
    directory.mkdir(parents=True, exist_ok=True)
    present = _sweep(directory)
    serial = 1 + max((int(found[1]) for file in present if (found := _CHUNK_NAME.fullmatch(file))), default=0)
    missing = {key for key, chunk in chunks.items() if chunk.file not in present}
    saved, taken = dict(chunks), set[Chunk]()

    def write(due: set[Chunk], sync: bool = True) -> list[Path]:
        written = []
        for group, number in sorted(due):
            with lock():
                copied = ring.take_chunk((group, number))
            taken.add((group, number))
            buffer = io.BytesIO()
            np.save(buffer, copied, allow_pickle=False)
            data = buffer.getvalue()
            file = f"chunk-{group}-{number:06d}-{serial:06d}.npy"
            durable.write_through(directory / file, data, sync)
            saved[group, number] = ChunkFile(group, number, file, len(data), zlib.crc32(data))
            written.append(directory / file)
        return written

    try:
        write(ring.touched() | missing)
        write(ring.touched())  # the first pass may have taken long, this one takes as long as what came meanwhile
        with lock():
            unsynced = write(ring.touched(), sync=False)
            body = {
                "spec": spec,
                "state": state(),
                "head": ring.head.tolist(),
                "tail": ring.tail.tolist(),
                "chunks": [asdict(saved[key]) for key in sorted(saved)],
            }
        for path in unsynced:  # no others wait for the disk
            durable.sync_file(path)
        durable.sync_directory(directory)
        durable.write_json(manifest, body)
    except BaseException:
        ring.touch(taken)
        raise
    finally:
        _sweep(directory)
    return saved


def load(
    directory: Path, name: str, ring: Ring, spec: Mapping[str, Any]
) -> tuple[dict[Chunk, ChunkFile], dict[str, Any]]:
    """Reads mark `name` into a new `ring`. Returns the chunks' files and the `state` that was saved.

    Raises FileNotFoundError naming the mark or chunk file that is missing, and ValueError naming the file that is
    damaged or the entries of `spec` that differ; `ring` is then not to be used.
    """
    body, _ = _read(directory, name)
    wanted = json.loads(durable.canonical(spec))
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
        ring.load_chunk((chunk.group, chunk.number), np.load(io.BytesIO(data), allow_pickle=False))
    ring.head[:] = body["head"]
    ring.tail[:] = body["tail"]
    return {(chunk.group, chunk.number): chunk for chunk in chunks}, body["state"]


def names(directory: Path) -> list[str]:
    """The marks in a folder, damaged ones included."""
    return sorted(path.stem.removeprefix("mark-") for path in directory.glob("mark-*.json"))


def capacity(directory: Path, name: str) -> int:
    """Rows per environment of the rings that mark `name` was made of. Raises as `load` does."""
    return _read(directory, name)[0]["spec"]["capacity"]


def fingerprint(directory: Path, name: str) -> int:
    """A checksum that another mark of the same name would not have. Raises as `load` does."""
    return _read(directory, name)[1]


def chunk_files(directory: Path, name: str) -> dict[Chunk, ChunkFile]:
    """Where the chunks of mark `name` lie. Raises as `load` does for a manifest."""
    chunks = [ChunkFile(**entry) for entry in _read(directory, name)[0]["chunks"]]
    return {(chunk.group, chunk.number): chunk for chunk in chunks}


def newest_first(directory: Path) -> list[str]:
    """Names of all marks by the time they were made."""
    return sorted(names(directory), key=lambda name: _manifest(directory, name).stat().st_mtime_ns, reverse=True)


def forget(directory: Path, name: str) -> None:
    """Drops mark `name` and the chunk files that no other mark lists. Raises FileNotFoundError for an unknown mark."""
    manifest = _manifest(directory, name)
    if not manifest.exists():
        raise FileNotFoundError(f"there is no mark {name!r} in {directory}")
    manifest.unlink()
    # the mark must be gone for good before its chunks go
    durable.sync_directory(directory)
    _sweep(directory)


def _manifest(directory: Path, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ValueError(f"mark name {name!r} must be 1 to 64 letters, digits, '_' and '-'; it becomes a file name")
    return directory / f"mark-{name}.json"


def _read(directory: Path, name: str) -> tuple[dict[str, Any], int]:
    """(body, checksum) of a manifest. Raises FileNotFoundError or ValueError."""
    body, crc32 = durable.read_json(_manifest(directory, name), "mark file")
    return body, crc32


def _sweep(directory: Path) -> set[str]:
    """Removes what no mark lists; returns the names of the files that remain."""
    needed = set()
    for path in directory.glob("mark-*.json"):
        needed.add(path.name)
        try:
            needed |= {entry["file"] for entry in durable.read_json(path, "mark file")[0]["chunks"]}
        except ValueError:
            # A damaged mark cannot be restored, so it needs no chunks. Its manifest stays: `load` says what is wrong.
            continue
    present = {
        path.name for pattern in ("mark-*.json", "mark-*.tmp", "chunk-*.npy") for path in directory.glob(pattern)
    }
    for file in present - needed:
        (directory / file).unlink()
    return present & needed
