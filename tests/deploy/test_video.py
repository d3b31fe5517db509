"""Videos: the frames come back, odd sizes included, and a failure leaves no file."""

import subprocess
import sys

import imageio_ffmpeg
import numpy as np
import pytest

from deploy.video import check_pictures, encode, keep_film, write_video
from telamon.envs import counting


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


def test_a_film_of_an_evaluation_can_be_read_again(tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes(encode([grey(level, 32, 48) for level in (20, 200)]))
    frames, _ = read(path, 32, 48)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), [20, 200], atol=4)


def test_the_newest_films_are_kept_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "videos").mkdir()
    for name in ("best.mp4", "eval-5.mp4"):
        (tmp_path / "videos" / name).write_bytes(b"of somebody")
    for step in (0, 500, 1000, 1500):
        keep_film(b"film", tmp_path, step, keep=2)
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [
        "best.mp4", "eval-000000001000.mp4", "eval-000000001500.mp4", "eval-5.mp4"
    ]  # fmt: skip


def test_a_film_that_cannot_be_kept_is_logged(tmp_path, caplog):
    (tmp_path / "videos").write_text("no folder")
    keep_film(b"film", tmp_path, 7, keep=1)
    assert "event=film_not_kept" in caplog.text
    assert "eval-000000000007.mp4" in caplog.text


def test_a_film_that_cannot_be_made_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "/nowhere/ffmpeg")
    assert encode([grey(20, 32, 48)]) is None
    assert "event=film_not_made" in caplog.text


def test_pictures_are_looked_at_in_an_environment_that_is_closed_again(monkeypatch):
    frames, closed = [grey(20, 32, 48), np.zeros((32, 48), np.uint8)], []
    monkeypatch.setattr(counting.Counting, "render", lambda self: frames.pop(0))
    monkeypatch.setattr(counting.Counting, "close", lambda self: closed.append(self))
    make = lambda: counting.make("continuous", 1, 0, lengths=(5,))
    check_pictures(make)
    with pytest.raises(ValueError, match=r"no picture of counting:continuous .*frame 1 is uint8 \[32, 48\]"):
        check_pictures(make)
    assert len(closed) == 2
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match="pip install"):
        check_pictures(make)
    assert len(closed) == 2  # none was made
