"""The metrics writer: what it writes is what is read, and a resumed run's record has no seam."""

import json
import logging
import math
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from telamon.telemetry.writer import METRICS_FILE, MetricsWriter, read_metrics, series


def events(run_dir):
    """All TensorBoard events in the order in which TensorBoard reads them."""
    out = []
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            out.append(Event.FromString(data[12 : 12 + size]))
            data = data[12 + size + 4 :]
    return out


def shown(run_dir):
    """{tag: [(step, value)]} after hiding what start events hide, as TensorBoard does."""
    kept = []
    for event in events(run_dir):
        if event.session_log.status == SessionLog.START:
            kept = [e for e in kept if e.step < event.step]
        kept.append(event)
    out = {}
    for event in kept:
        for value in event.summary.value:
            out.setdefault(value.tag, []).append((event.step, value.simple_value))
    return out


def test_reads_back_what_was_written_bit_for_bit(tmp_path):
    loss = np.float32(0.1)
    with MetricsWriter(tmp_path) as writer:
        writer.write(500, {"train/return": 1 / 3})
        writer.write(1000, {"loss/total_loss": loss, "train/return": 2})
    rows = read_metrics(tmp_path)
    assert rows == [
        {"step": 500, "train/return": 1 / 3},
        {"step": 1000, "loss/total_loss": float(loss), "train/return": 2.0},
    ]
    steps, values = series(rows, "train/return")
    np.testing.assert_array_equal(steps, [500, 1000])
    np.testing.assert_array_equal(values, [1 / 3, 2.0])


def test_tensorboard_holds_the_same_points(tmp_path):
    with MetricsWriter(tmp_path, clock=lambda: 12.5) as writer:
        writer.write(500, {"train/return": 1.5, "loss/total_loss": 2.5})
        writer.write(1000, {"train/return": 3.5})
    assert shown(tmp_path) == {"train/return": [(500, 1.5), (1000, 3.5)], "loss/total_loss": [(500, 2.5)]}
    assert {e.wall_time for e in events(tmp_path) if e.summary.value} == {12.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path, value):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss/total_loss": value})
    assert json.loads((tmp_path / METRICS_FILE).read_text())["loss/total_loss"] is None
    assert math.isnan(read_metrics(tmp_path)[0]["loss/total_loss"])
    np.testing.assert_equal(shown(tmp_path)["loss/total_loss"], [(1, value)])


def test_resume_cuts_back_to_the_checkpoint_exactly(tmp_path):
    """A run that dies after its checkpoint and goes on leaves the record of one that never died."""
    lines = [(1000, {"train/return": 1.0}), (2000, {"train/return": 2.0}), (2000, {"eval/return": 2.5})]
    lost = [(2000, {"eval/video": 7.0}), (3000, {"train/return": 3.0})]
    after = [(2000, {"eval/return": 9.0}), (3000, {"train/return": 3.0}), (4000, {"train/return": 4.0})]

    with MetricsWriter(tmp_path) as writer:
        for line in lines:
            writer.write(*line)
        length = writer.length
        for line in lost:
            writer.write(*line)
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 3500, "train/re')

    with MetricsWriter(tmp_path, resume_length=length) as writer:
        assert writer.length == length
        for line in after:
            writer.write(*line)
    assert read_metrics(tmp_path) == [{"step": step, **metrics} for step, metrics in lines + after]
    assert shown(tmp_path) == {
        "train/return": [(1000, 1.0), (2000, 2.0), (3000, 3.0), (4000, 4.0)],
        "eval/return": [(2000, 2.5), (2000, 9.0)],
    }


def test_resume_before_the_first_line_starts_over(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1000, {"train/return": 1.0})
    with MetricsWriter(tmp_path, resume_length=0) as writer:
        writer.write(500, {"train/return": 5.0})
    assert read_metrics(tmp_path) == [{"step": 500, "train/return": 5.0}]
    assert shown(tmp_path) == {"train/return": [(500, 5.0)]}


def test_resume_of_a_run_that_died_before_it_opened_the_file(tmp_path):
    with MetricsWriter(tmp_path, resume_length=0) as writer:
        writer.write(500, {"train/return": 5.0})
    assert read_metrics(tmp_path) == [{"step": 500, "train/return": 5.0}]


def test_length_means_on_disk(tmp_path):
    """A checkpoint names the length, so what it counts must outlive a kill, TensorBoard's copy included."""
    writer = MetricsWriter(tmp_path)
    writer.write(1000, {"train/return": 1.0})
    assert writer.length == (tmp_path / METRICS_FILE).stat().st_size > 0
    assert shown(tmp_path) == {"train/return": [(1000, 1.0)]}
    writer.close()


def test_events_reach_the_disk_within_the_flush_time(tmp_path):
    now = [0.0]
    writer = MetricsWriter(tmp_path, clock=lambda: now[0])
    writer.write(1, {"a": 1.0})
    assert shown(tmp_path) == {}
    now[0] = 5.0
    writer.write(2, {"a": 2.0})
    assert shown(tmp_path) == {"a": [(1, 1.0), (2, 2.0)]}
    writer.close()


def test_a_new_run_does_not_write_over_an_old_one(tmp_path):
    MetricsWriter(tmp_path).close()
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl holds the metrics of an earlier run; resume it"):
        MetricsWriter(tmp_path)


@pytest.mark.parametrize("off", [1, -1, -1000], ids=["beyond the end", "inside a line", "negative"])
def test_a_length_that_is_no_line_end_is_refused_and_nothing_is_cut(tmp_path, off):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1.0})
        length = writer.length
    with pytest.raises(ValueError, match=rf"has {length} bytes and cannot be cut back to {length + off}"):
        MetricsWriter(tmp_path, resume_length=length + off)
    assert (tmp_path / METRICS_FILE).stat().st_size == length


def test_steps_must_not_go_back_also_after_a_resume(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1000, {"a": 1.0})
        with pytest.raises(ValueError, match="at step 999 would follow those at step 1000"):
            writer.write(999, {"a": 1.0})
        length = writer.length
    with (
        MetricsWriter(tmp_path, resume_length=length) as writer,
        pytest.raises(ValueError, match="at step 999 would follow those at step 1000"),
    ):
        writer.write(999, {"a": 1.0})


def test_a_metric_cannot_be_named_like_the_axis(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="which names the x-axis"):
        writer.write(1, {"step": 2.0})


def test_reader_skips_a_half_written_last_line_with_a_warning(tmp_path, caplog):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1.0})
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 2, "a')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0}]
    assert "event=half_written_line_skipped" in caplog.text


@pytest.mark.parametrize("damage", [b"\x00\x00\x00", b"12", b'{"step": 1'])
def test_reader_names_a_damaged_line(tmp_path, damage):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
        read_metrics(tmp_path)


def test_reader_says_where_it_looked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no metrics\.jsonl"):
        read_metrics(tmp_path)


def test_pictures_go_to_tensorboard_alone(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write_image(30, "report/camera", b"a picture", (48, 64))
    assert read_metrics(tmp_path) == []
    (found,) = [(e.step, v) for e in events(tmp_path) for v in e.summary.value]
    step, value = found
    assert (step, value.tag) == (30, "report/camera")
    image = value.image
    assert (image.height, image.width, image.colorspace, image.encoded_image_string) == (48, 64, 3, b"a picture")
