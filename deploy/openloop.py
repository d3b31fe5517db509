"""What a world model foresaw against what came, as pictures: files in the run directory, and TensorBoard.

Images become a film, `openloop-KEY-STEP.mp4` (extra `video`), and a strip of its frames, `.png`; vectors become curves,
`.png` (extra `plot`). Axes: N windows, T rows.
"""

from __future__ import annotations

import colorsys
import io
import math
import re
from pathlib import Path

import numpy as np

from deploy.video import write_video
from telamon.agents.base import Report
from telamon.telemetry import png
from telamon.telemetry.writer import MetricsWriter

FPS = 10.0
"""Rows per second of a film."""
LEAST_SIDE = 64
"""Smaller pictures are enlarged to about this many pixels."""
BORDER = 2
OBSERVED, FORESEEN = (0, 190, 70), (60, 60, 60)
"""Colours of the frame around each window: the model still observes, or it does not."""
STRIP_WINDOWS = 3
PLOT_WINDOWS = 3
PLOT_ELEMENTS = 8


def show(found: Report, step: int, directory: Path, writer: MetricsWriter, keep: int) -> set[str]:
    """Writes the pictures of a report; returns, a sentence each, what could not be made.

    step: environment steps. directory: where files go; made where there is something to write, and the newest `keep` of
    each kind and key stay. What TensorBoard gets is called `report/KEY`.
    """
    observed = int(found.observed)
    unable: set[str] = set()
    for key, pair in found.open_loop.items():
        truth, prediction = np.asarray(pair.truth), np.asarray(pair.prediction)
        name = "".join(c if c.isalnum() or c in "_." else "-" for c in key)
        path = directory / f"openloop-{name}-{step:012d}.png"
        directory.mkdir(parents=True, exist_ok=True)
        try:
            if truth.ndim == 5:
                windows = columns(truth, prediction, observed)
                frames = film(windows)
                writer.write_image(step, f"report/{key}", png.encode(frames, FPS), frames.shape[1:3])
                path.write_bytes(png.encode(strip(windows[:STRIP_WINDOWS])[None], FPS))
                write_video(frames, path.with_suffix(".mp4"), FPS)
            else:
                picture, size = curves(key, truth, prediction, observed)
                writer.write_image(step, f"report/{key}", picture, size)
                path.write_bytes(picture)
        except (ImportError, OSError) as error:  # a picture is no reason to stop a run
            unable.add(str(error))
        _drop(directory, f"openloop-{name}", keep)
    return unable


def columns(truth: np.ndarray, prediction: np.ndarray, observed: int) -> np.ndarray:
    """Truth, prediction and error of images below each other, in a frame that says whether the model observes.

    truth, prediction: uint8 [N, T, h, w, c]. Returns uint8 [N, T, H, W, 3]. An error of 0 is grey.
    """
    truth, prediction = rgb(truth), rgb(prediction)
    error = ((prediction.astype(np.int16) - truth + 255) // 2).astype(np.uint8)
    stacked = np.concatenate([truth, prediction, error], axis=2)
    factor = max(1, round(LEAST_SIDE / min(truth.shape[2:4])))
    stacked = stacked.repeat(factor, axis=2).repeat(factor, axis=3)
    n, t, height, width, _ = stacked.shape
    framed = np.empty((n, t, height + 2 * BORDER, width + 2 * BORDER, 3), np.uint8)
    framed[:, :observed], framed[:, observed:] = OBSERVED, FORESEEN
    framed[:, :, BORDER:-BORDER, BORDER:-BORDER] = stacked
    return framed


def film(windows: np.ndarray) -> np.ndarray:
    """Windows [N, T, H, W, 3] side by side: frames [T, H, N * W, 3]."""
    n, t, height, width, _ = windows.shape
    return windows.transpose(1, 2, 0, 3, 4).reshape(t, height, n * width, 3)


def strip(windows: np.ndarray) -> np.ndarray:
    """Windows [N, T, H, W, 3] below each other, time to the right: one picture [N * H, T * W, 3]."""
    n, t, height, width, _ = windows.shape
    return windows.transpose(0, 2, 1, 3, 4).reshape(n * height, t * width, 3)


def rgb(images: np.ndarray) -> np.ndarray:
    """uint8 [..., c] as uint8 [..., 3]: three channels as they are, one as grey, others each in a colour of its own."""
    channels = images.shape[-1]
    if channels == 3:
        return images
    if channels == 1:
        return images.repeat(3, -1)
    palette = np.array([colorsys.hsv_to_rgb(i / channels, 1, 1) for i in range(channels)])
    return (images[..., None] * palette).max(-2).astype(np.uint8)


def curves(key: str, truth: np.ndarray, prediction: np.ndarray, observed: int) -> tuple[bytes, tuple[int, int]]:
    """The first elements of a vector over time, as a PNG and its (height, width).

    truth, prediction: float32 [N, T, size], in the environment's own units. Raises ImportError naming the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("a report's curves need matplotlib; install it with: pip install 'telamon[plot]'") from e
    size = truth.shape[-1]
    lines, windows = min(size, PLOT_ELEMENTS), min(len(truth), PLOT_WINDOWS)
    figure = Figure(figsize=(3.4 * windows, 1.2 * lines + 1), dpi=80, layout="constrained")
    grid = figure.subplots(lines, windows, squeeze=False, sharex=True, sharey="row")
    for (element, window), axes in np.ndenumerate(grid):
        axes.plot(truth[window, :, element], color="0.5", label="truth")
        axes.plot(prediction[window, :, element], color="C0", linestyle="--", label="prediction")
        axes.axvline(observed - 0.5, color="C2", linewidth=1, label="foreseen from here on")
        axes.tick_params(labelsize="small")
        if window == 0:
            axes.set_ylabel(f"[{element}]" if size > 1 else key, fontsize="small")
        if element == lines - 1:
            axes.set_xlabel("row of the window", fontsize="small")
    of_all = f", elements 0 to {lines - 1} of {size}" if size > lines else ""
    figure.suptitle(f"{key}{of_all}, {windows} windows", fontsize="medium")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    width, height = (math.floor(inches * 80) for inches in figure.get_size_inches())
    return file.getvalue(), (height, width)


def _drop(directory: Path, stem: str, keep: int) -> None:
    """Removes all but the newest `keep` files of a stem, by ending."""
    for ending in ("png", "mp4"):
        pattern = re.compile(rf"{re.escape(stem)}-\d+\.{ending}")
        for old in sorted(p for p in directory.iterdir() if pattern.fullmatch(p.name))[:-keep]:
            old.unlink()
