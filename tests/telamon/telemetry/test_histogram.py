"""Histograms that are kept by hand."""

from __future__ import annotations

from telamon.telemetry.histogram import Histogram


def test_values_are_counted_by_size():
    histogram = Histogram((-1, 0, 10))
    assert histogram.counted == ((-1, 0, 10), (0, 0, 0, 0), 0.0, 0.0)
    before = histogram.counted
    for value in (-5, -1, -0.5, 0, 0.25, 10, 10.5, 1e9):
        histogram.observe(value)
    # a bound belongs to the bucket below it
    assert histogram.counted.counts == (2, 2, 2, 2)
    assert histogram.counted.above == 0.25 + 10 + 10.5 + 1e9
    assert histogram.counted.below == 5 + 1 + 0.5
    assert histogram.counted.total == histogram.counted.above - 6.5
    assert before.counts == (0, 0, 0, 0)
