"""Videos: the frames come back, odd sizes included, and a failure leaves no file."""

import subprocess
import sys

import imageio_ffmpeg
import numpy as np
import pytest

from deploy.video import write_video


def read(path, height, width):
    """Frames uint8 [N, height, width, 3] and what ffmpeg says of the file."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3), done.stderr.decode()


def grey(level, height, width):
    return np.full((height, width, 3), level, np.uint8)


@pytest.mark.parametrize(("height", "width", "padded"), [(48, 64, (48, 64)), (47, 63, (48, 64))])
def test_frames_come_back_in_order(tmp_path, height, width, padded):
    path = tmp_path / "videos" / "a.mp4"
    levels = [20, 80, 140, 200]
    assert write_video((grey(level, height, width) for level in levels), path, fps=25) == 4
    frames, facts = read(path, *padded)
    assert "yuv420p" in facts
    assert f"{padded[1]}x{padded[0]}" in facts
    assert "25 fps" in facts
    assert len(frames) == len(levels)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), levels, atol=4)
    assert np.ptp(frames, axis=(1, 2, 3)).max() <= 8  # the doubled edge is no black bar
    assert [p.name for p in path.parent.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "no frame to write to a.mp4"),
        ([grey(1, 8, 8).astype(np.float32)], r"frame 1 is float32 \[8, 8, 3\]; a video's frames are uint8"),
        ([grey(1, 8, 8), grey(1, 8, 10)], r"frame 2 is \[8, 10, 3\] and the first was \[8, 8, 3\]"),
        ([grey(1, 8, 8), grey(1, 8, 8)[0]], r"frame 2 is uint8 \[8, 3\]"),
    ],
)
def test_frames_that_make_no_video_are_refused_and_leave_no_file(tmp_path, frames, message):
    with pytest.raises(ValueError, match=message):
        write_video(frames, tmp_path / "a.mp4", fps=10)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_make_no_video_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"written as \.mp4, not as 'a\.gif'"):
        write_video([grey(1, 8, 8)], tmp_path / "a.gif", fps=10)
    with pytest.raises(ValueError, match="cannot run at 0 frames per second"):
        write_video([grey(1, 8, 8)], tmp_path / "a.mp4", fps=0)


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=r"pip install 'telamon\[video\]'"):
        write_video([grey(1, 8, 8)], tmp_path / "a.mp4", fps=10)


def test_a_failing_ffmpeg_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    script = tmp_path / "ffmpeg"
    script.write_text("#!/bin/sh\necho 'No space left on device' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(script))
    many = (grey(1, 512, 512) for _ in range(4))  # more than a pipe holds: writing to it fails too
    with pytest.raises(OSError, match=r"could not write .*a\.mp4: No space left on device"):
        write_video(many, tmp_path / "out" / "a.mp4", fps=10)
    assert list((tmp_path / "out").iterdir()) == []
