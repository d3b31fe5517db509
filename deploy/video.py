"""Frames to an mp4 file (H.264, playable anywhere)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from telamon.envs.base import BatchedEnv

log = logging.getLogger(__name__)

FOLDER = "videos"
"""Where in a run directory films are."""
FILM = re.compile(r"eval-\d{12}\.mp4")
"""Names of the films of evaluations."""
FPS = 30.0
"""Of the films of evaluations, which have one frame per agent step."""


def check_writable() -> None:
    """Raises ImportError naming the extra to install where no video can be written."""
    try:
        import imageio_ffmpeg  # noqa: F401  # whether it is there is all that is asked
    except ImportError as e:
        raise ImportError("writing a video needs imageio-ffmpeg; install it with: pip install 'telamon[video]'") from e


def check_pictures(make_env: Callable[[], BatchedEnv]) -> None:
    """Draws one picture, before a run relies on it. make_env: gives an environment for this alone, which is closed.

    Raises ValueError where there is none or its library fails, ImportError as `check_writable`, EnvError.
    """
    check_writable()
    env = make_env()
    try:
        env.reset()
        try:
            frame = env.render(0)
            _check(frame, frame.shape, 1)
        except Exception as error:  # whatever a library that draws may raise: it is missing itself, or its display is
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"no picture of {env.spec.id} can be drawn ({reason}); --eval.videos 0 makes no films"
            ) from error
    finally:
        env.close()


def encode(frames: Iterable[np.ndarray]) -> bytes | None:
    """An mp4 file of frames as `write_video` takes them, at FPS. Raises ImportError and ValueError as it does.

    A film is no reason to stop a run: None, and a line in the log, where the disk or ffmpeg fails.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="telamon-film-") as folder:
            path = Path(folder) / "film.mp4"
            write_video(frames, path, FPS)
            return path.read_bytes()
    except OSError as error:
        log.warning("event=film_not_made error=%r", str(error))
        return None


def keep_film(film: bytes, run_dir: Path, step: int, keep: int) -> None:
    """Writes the film of an evaluation at `step` environment steps into RUN/videos, and drops all such films but the
    newest `keep`. Files of other names are left alone. What goes wrong is logged, as in `encode`."""
    folder = run_dir / FOLDER
    path = folder / f"eval-{step:012d}.mp4"
    part = path.with_suffix(".part.mp4")
    try:
        folder.mkdir(exist_ok=True)
        try:
            part.write_bytes(film)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        films = sorted(found for found in folder.iterdir() if FILM.fullmatch(found.name))
        for old in films[:-keep]:
            old.unlink()
    except OSError as error:
        log.warning("event=film_not_kept path=%s bytes=%d error=%r", path, len(film), str(error))


def write_video(frames: Iterable[np.ndarray], path: Path, fps: float) -> int:
    """Writes frames, uint8 [height, width, 3] of one size each, to `path` (*.mp4) at `fps`; returns how many.

    H.264 needs even sizes: an odd last row or column is doubled. The file appears under its name only when it is
    whole. Raises ImportError naming the extra to install, ValueError for a frame (or no frame) that cannot be written,
    OSError with ffmpeg's own words where it fails.
    """
    check_writable()
    import imageio_ffmpeg

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
    # ffmpeg is run from here because the library's own writer does not look at its exit code: on a full disk it would
    # call a torn file a video.
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width + width % 2}x{height + height % 2}", "-r", str(fps)]
    target = ["-c:v", "libx264", "-pix_fmt", "yuv420p", str(part)]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, "-i", "-", *target]
    count = 0
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ffmpeg:
            assert ffmpeg.stdin is not None  # it is a pipe
            with contextlib.suppress(BrokenPipeError):  # it has stopped early; its exit code says so below
                for count, frame in enumerate(chain([first], frames), start=1):
                    _check(frame, first.shape, count)
                    ffmpeg.stdin.write(np.pad(frame, padding, mode="edge").tobytes())
            _, complaint = ffmpeg.communicate()
        if ffmpeg.returncode != 0:
            reason = complaint.decode(errors="replace").strip() or f"exit code {ffmpeg.returncode}"
            raise OSError(f"ffmpeg could not write {path}: {reason}")
        os.replace(part, path)
    finally:
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
