"""Frames to an mp4 file (H.264, playable anywhere)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np


def write_video(frames: Iterable[np.ndarray], path: Path, fps: float) -> int:
    """Writes frames, uint8 [height, width, 3] of one size each, to `path` (*.mp4) at `fps`; returns how many.

    H.264 needs even sizes: an odd last row or column is doubled. The file appears under its name only when it is
    whole. Raises ImportError naming the extra to install, ValueError for a frame (or no frame) that cannot be written.
    """
    try:
        import imageio_ffmpeg
    except ImportError as e:
        raise ImportError("writing a video needs imageio-ffmpeg; install it with: pip install 'telamon[video]'") from e
    if path.suffix != ".mp4":
        raise ValueError(f"a video is written as .mp4, not as {path.name!r}; end its name in .mp4")
    if fps <= 0:
        raise ValueError(f"a video cannot run at {fps} frames per second; fps must be above 0")
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ValueError(f"there is no frame to write to {path.name}; record at least one")
    _check(first, first.shape, 1)
    height, width, _ = first.shape
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.mp4")
    sink = imageio_ffmpeg.write_frames(
        str(part), (width + width % 2, height + height % 2), fps=fps, macro_block_size=1, ffmpeg_log_level="error"
    )
    count = 0
    try:
        sink.send(None)
        for count, frame in enumerate(chain([first], frames), start=1):
            _check(frame, first.shape, count)
            sink.send(np.pad(frame, padding, mode="edge"))
        sink.close()
        os.replace(part, path)
    finally:
        sink.close()
        part.unlink(missing_ok=True)
    return count


def _check(frame: np.ndarray, shape: tuple[int, ...], number: int) -> None:
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3 or frame.size == 0:
        raise ValueError(
            f"frame {number} is {frame.dtype} {list(frame.shape)}; a video's frames are uint8 [height, width, 3]"
        )
    if frame.shape != shape:
        raise ValueError(
            f"frame {number} is {list(frame.shape)} and the first was {list(shape)}; a video's frames have one size"
        )
