"""PNG bytes are what another library reads."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from telamon.telemetry import png


def frames(count: int, height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def read(data: bytes) -> tuple[np.ndarray, list[float]]:
    """All frames, and for how many milliseconds each is shown."""
    shown, durations = [], []
    with Image.open(io.BytesIO(data)) as image:
        for i in range(getattr(image, "n_frames", 1)):
            image.seek(i)
            shown.append(np.asarray(image.convert("RGB")))
            durations.append(image.info.get("duration", 0.0))
        assert image.info.get("loop", 0) == 0
    return np.stack(shown), durations


@pytest.mark.parametrize("count", [1, 2, 5])
def test_frames_come_back(count):
    given = frames(count)
    shown, durations = read(png.encode(given, fps=8.0))
    np.testing.assert_array_equal(shown, given)
    if count > 1:
        assert durations == pytest.approx([125.0] * count)


def test_a_still_picture_is_no_animation():
    assert b"acTL" not in png.encode(frames(1), 10.0)


BAD = {
    "one axis too few": frames(1)[0],
    "floats": frames(1).astype(np.float32),
    "one channel": frames(1)[..., :1],
    "no frame": frames(0),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_is_no_picture_is_refused(bad):
    with pytest.raises(ValueError, match=r"a PNG takes uint8 \[N, height, width, 3\]"):
        png.encode(bad, 10.0)
