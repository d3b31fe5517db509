"""Who waits for whom, in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.metrics import Figures
from actors.worker import WorkerStatus
from deploy import screen
from learner.limiter import Status as LimiterStatus
from learner.limiter import Waits
from learner.loop import LoopStatus
from learner.publish import Published
from learner.worker import LearnerStatus

LIMITS = LimiterStatus(Waits(0.0, 0.0, "none"), 0.0, {}, 1.0, 1.0, 0)
PUBLISHED = Published(0, 0, 0, 0, 0, (0.0, 0.0), {})
LEARNER = LearnerStatus(
    1, "here", (), LoopStatus("training", limiter=LIMITS, seconds={"rows": 5.0}), PUBLISHED, None, ()
)
WORKER = WorkerStatus("actor-0", 1, "here", True, Figures(), None, None, (0.0, 0.0), ())


def test_seconds_of_both_sides():
    workers = [replace(WORKER, figures=Figures(seconds={"replay": s})) for s in (1.0, 3.0)]
    assert screen.waiting(LEARNER, [*workers, WORKER, None]) == {"learner": 5.0, "writers": 2.0}
    assert screen.waiting(None, [None]) == {}


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"learner": 0.6, "writers": 0.1},
         "the learner waits for rows, 60% of the time (the actors for it or the replay: 10%)"),
        ({"learner": 0.0, "writers": 0.7},
         "the actors wait for the learner or the replay, 70% of the time (it for rows: 0%)"),
        ({"learner": 0.04, "writers": -1.0}, "neither side waits for the other"),
        ({}, "neither side waits for the other"),
    ],
)  # fmt: skip
def test_the_side_that_waits_more(shares, said):
    assert screen.waits(LEARNER, shares) == said


def test_before_the_learner_trains():
    assert screen.waits(None, {}) == "everybody waits for the learner, which starts"
    loop = replace(LEARNER.loop, stage="compiling")
    assert screen.waits(replace(LEARNER, loop=loop), {"learner": 1.0}) == "the learner is compiling"
