"""Pictures as PNG bytes, moving ones as APNG, with zlib alone: every browser shows both, TensorBoard too."""

from __future__ import annotations

import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode(frames: np.ndarray, fps: float) -> bytes:
    """Frames uint8 [N, height, width, 3] as one PNG that plays them for ever at `fps`; a single one stands still.

    What knows no APNG shows the first frame. Raises ValueError for another shape or dtype.
    (PNG specification, third edition: acTL announces the frames, fcTL precedes each, fdAT holds all but the first.)
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or frames.size == 0:
        raise ValueError(f"frames are {frames.dtype} {list(frames.shape)}; a PNG takes uint8 [N, height, width, 3]")
    count, height, width, _ = frames.shape
    chunks = [_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]  # 8 bits, RGB
    if count > 1:
        chunks.append(_chunk(b"acTL", struct.pack(">II", count, 0)))
    number = 0
    for i, frame in enumerate(frames):
        rows = np.pad(frame.reshape(height, 3 * width), ((0, 0), (1, 0)))  # each row begins with its filter: none
        data = zlib.compress(rows.tobytes())
        if count > 1:
            control = struct.pack(">IIIIIHHBB", number, width, height, 0, 0, 100, round(100 * fps), 0, 0)
            chunks.append(_chunk(b"fcTL", control))
            number += 1
        if i == 0:
            chunks.append(_chunk(b"IDAT", data))
        else:
            chunks.append(_chunk(b"fdAT", struct.pack(">I", number) + data))
            number += 1
    return SIGNATURE + b"".join(chunks) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
