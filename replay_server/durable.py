"""Small files that are whole or absent after SIGKILL or a power cut at any moment, and copies of sparse ones."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any


def canonical(value: object) -> bytes:
    """JSON with one spelling."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def write_through(path: Path, data: bytes, sync: bool = True) -> None:
    """Writes a file through to the disk; without `sync` that is left to `sync_file`.

    Raises OSError naming path and bytes.
    """
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"writing {len(data)} bytes failed ({error.strerror})", str(path)) from error


def sync_directory(directory: Path) -> None:
    """Makes new, renamed and removed names in a folder permanent."""
    sync_file(directory)


def sync_file(path: Path) -> None:
    """Brings what was written to a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, body: object) -> int:
    """Puts `body` with its checksum in place of the file, atomically; returns the checksum. Raises as `write_through`.

    The temporary file has the suffix .tmp.
    """
    crc32 = zlib.crc32(canonical(body))
    temporary = path.with_suffix(".tmp")
    write_through(temporary, canonical({"crc32": crc32, "body": body}))
    temporary.rename(path)
    sync_directory(path.parent)
    return crc32


def read_json(path: Path, what: str) -> tuple[Any, int]:
    """(body, checksum) of a file of `write_json`. what: "mark file" and the like, for messages.

    Raises FileNotFoundError, or ValueError for a file that is not as it was written.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no {what} {path}")
    try:
        content = json.loads(path.read_bytes())
        body, crc32 = content["body"], content["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{what} {path} is damaged: {error}") from error
    if zlib.crc32(canonical(body)) != crc32:
        raise ValueError(f"{what} {path} is damaged: its checksum does not match")
    return body, crc32


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a file through to the disk, holes as holes. Raises OSError naming path and bytes."""
    with source.open("rb") as read, target.open("wb") as written:
        size, at = os.fstat(read.fileno()).st_size, 0
        try:
            written.truncate(size)
            while at < size:
                try:
                    begin = os.lseek(read.fileno(), at, os.SEEK_DATA)
                except OSError:  # ENXIO: there is no data behind `at`
                    break
                end = os.lseek(read.fileno(), begin, os.SEEK_HOLE)
                os.lseek(read.fileno(), begin, os.SEEK_SET)
                os.lseek(written.fileno(), begin, os.SEEK_SET)
                while begin < end:
                    begin += os.sendfile(written.fileno(), read.fileno(), begin, min(end - begin, 1 << 30))
                at = end
            os.fsync(written.fileno())
        except OSError as error:
            raise OSError(error.errno, f"writing {size} bytes failed ({error.strerror})", str(target)) from error
