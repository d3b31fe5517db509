"""Pictures of what was foreseen: what is where in them, and what becomes of those that cannot be made."""

from __future__ import annotations

import io
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from deploy import openloop
from deploy.openloop import BORDER, FORESEEN, OBSERVED
from telamon.agents.base import OpenLoop, Report
from telamon.telemetry.writer import MetricsWriter


def images(channels: int = 3, n: int = 2, t: int = 4, side: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Truth is 10 * (window + 1), the prediction 4 * t above it, everywhere."""
    level = np.arange(1, n + 1)[:, None] * 10 + np.zeros((1, t), int)
    fill = lambda x: np.broadcast_to(x[..., None, None, None], (n, t, side, side, channels)).astype(np.uint8)
    return fill(level), fill(level + 4 * np.arange(t))


def report(**open_loop: tuple[np.ndarray, np.ndarray]) -> Report:
    pairs = {key: OpenLoop(jnp.asarray(a), jnp.asarray(b)) for key, (a, b) in open_loop.items()}
    return Report({}, pairs, jnp.int32(2))


def test_truth_prediction_and_error_lie_below_each_other():
    columns = openloop.columns(*images(), observed=2)
    assert columns.shape == (2, 4, 3 * 64 + 2 * BORDER, 64 + 2 * BORDER, 3)
    inner = columns[:, :, BORDER:-BORDER, BORDER:-BORDER]
    for window in range(2):
        for t in range(4):
            truth, prediction, error = np.split(inner[window, t], 3)
            assert (truth == 10 * (window + 1)).all()
            assert (prediction == 10 * (window + 1) + 4 * t).all()
            assert (error == 127 + 2 * t).all()


def test_errors_of_all_sizes_fit():
    black, white = np.zeros((1, 1, 64, 64, 3), np.uint8), np.full((1, 1, 64, 64, 3), 255, np.uint8)
    for truth, prediction, error in ((black, white, 255), (white, black, 0), (white, white, 127)):
        assert (openloop.columns(truth, prediction, 0)[0, 0, 130, 3:60] == error).all()


def test_a_frame_says_while_the_model_observes():
    columns = openloop.columns(*images(), observed=2)
    for t, colour in enumerate((OBSERVED, OBSERVED, FORESEEN, FORESEEN)):
        for edge in (columns[:, t, 0], columns[:, t, -1], columns[:, t, :, 0], columns[:, t, :, -1]):
            assert (edge == colour).all()


def test_a_film_shows_the_windows_side_by_side_and_a_strip_the_time():
    columns = openloop.columns(*images(), observed=2)
    _, _, height, width, _ = columns.shape
    film, strip = openloop.film(columns), openloop.strip(columns)
    assert film.shape == (4, height, 2 * width, 3)
    assert strip.shape == (2 * height, 4 * width, 3)
    for window in range(2):
        for t in range(4):
            np.testing.assert_array_equal(film[t, :, window * width : (window + 1) * width], columns[window, t])
            rows = strip[window * height : (window + 1) * height]
            np.testing.assert_array_equal(rows[:, t * width : (t + 1) * width], columns[window, t])


@pytest.mark.parametrize(("side", "shown"), [(10, 60), (40, 80), (48, 48), (64, 64), (96, 96)])
def test_small_pictures_are_enlarged(side, shown):
    assert openloop.columns(*images(side=side), observed=2).shape[3] == shown + 2 * BORDER


def test_any_number_of_channels_becomes_colours():
    three = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    np.testing.assert_array_equal(openloop.rgb(three), three)
    grey = openloop.rgb(three[..., :1])
    np.testing.assert_array_equal(grey, np.repeat(three[..., :1], 3, -1))
    seven = openloop.rgb(np.eye(7, dtype=np.uint8) * 255)  # each channel alone
    assert seven.shape == (7, 3)
    assert len({tuple(colour) for colour in seven}) == 7
    assert (seven.max(1) == 255).all()


@pytest.fixture
def writer(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        yield writer


def files(tmp_path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "report").iterdir())


def test_images_become_a_film_and_a_strip(tmp_path, writer):
    found = report(**{"camera/left": images()})
    assert openloop.show(found, 1200, tmp_path / "report", writer, keep=2) == set()
    assert files(tmp_path) == ["openloop-camera-left-000000001200.mp4", "openloop-camera-left-000000001200.png"]
    strip = np.asarray(Image.open(tmp_path / "report" / files(tmp_path)[1]))
    np.testing.assert_array_equal(strip, openloop.strip(openloop.columns(*images(), observed=2)))


def test_vectors_become_curves(tmp_path, writer):
    truth = np.random.default_rng(0).normal(size=(4, 6, 11)).astype(np.float32)
    assert openloop.show(report(speed=(truth, truth + 1)), 1200, tmp_path / "report", writer, keep=2) == set()
    assert files(tmp_path) == ["openloop-speed-000000001200.png"]
    picture, size = openloop.curves("speed", truth, truth + 1, 2)
    assert Image.open(io.BytesIO(picture)).size == size[::-1]


def test_the_newest_of_each_key_stay(tmp_path, writer):
    for step in (5, 10, 15):
        openloop.show(report(a=images(), ab=images()), step, tmp_path / "report", writer, keep=2)
    kept = [f"openloop-{key}-{step:012d}.{end}" for key in ("a", "ab") for step in (10, 15) for end in ("mp4", "png")]
    assert files(tmp_path) == kept


def test_without_extras_the_strip_remains(tmp_path, writer, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    vector = np.zeros((2, 4, 3), np.float32)
    unable = openloop.show(report(a=images(), b=(vector, vector)), 5, tmp_path / "report", writer, keep=2)
    assert files(tmp_path) == ["openloop-a-000000000005.png"]
    assert {text.rpartition("pip install ")[2] for text in unable} == {"'telamon[video]'", "'telamon[plot]'"}


def test_an_agent_that_foresees_nothing_leaves_no_folder(tmp_path, writer):
    assert openloop.show(report(), 5, tmp_path / "report", writer, keep=2) == set()
    assert not (tmp_path / "report").exists()
