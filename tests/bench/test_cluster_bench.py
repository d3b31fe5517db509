import argparse
import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from bench import cluster
from bench.cluster import Look, polling, shares, sizes

SCRIPT = Path(cluster.__file__)


def test_bytes_of_agents_by_hand():
    lines = {line["agent"]: line for line in islice(sizes(argparse.Namespace()), 3)}
    planner = lines["TD-MPC2 preset 5, vector"]
    # 24 numbers, 6 actions and a reward of 4 bytes, 3 flags; a window has 4 of them, int32 env_id and int64 first_row
    assert (planner["row_bytes"], planner["window_bytes"]) == (31 * 4 + 3, 4 * (31 * 4 + 3) + 12)
    assert planner["write_back_bytes"] == 0
    assert planner["snapshot_bytes"] == planner["parameter_bytes"]  # it plans with all of them
    dreamer = lines["DreamerV3 size12m, image"]
    # deter of 2,048 numbers of 4 bytes, 32 classes of one byte
    assert dreamer["latent_bytes"] == 2048 * 4 + 32
    assert dreamer["row_bytes"] == 64 * 64 * 3 + 7 * 4 + 3 + dreamer["latent_bytes"]
    assert dreamer["write_back_bytes"] == 16 * 64 * (dreamer["latent_bytes"] + 12)
    assert dreamer["snapshot_bytes"] < dreamer["parameter_bytes"]  # it decodes nothing


def test_the_difference_of_two_looks_is_what_was_done_between_them():
    before = Look(1.0, Counter({("rows", ""): 5, ("wait", "rows"): 1.0}), Counter({"learner": 2.0}))
    after = Look(3.0, Counter({("rows", ""): 12, ("wait", "rows"): 1.5}), Counter({"learner": 2.5, "ray": 1.0}))
    done = after.since(before)
    assert (done.seconds, done["rows"], done.values["wait", "rows"]) == (2.0, 7, 0.5)
    assert done.cpu == {"learner": 0.5, "ray": 1.0}
    assert before["rows"] == 5


def test_shares_leave_out_what_took_no_time():
    assert shares({"acting": 3.0, "replay": 1.0, "idle": 0.0}) == {"acting": 0.75, "replay": 0.25}


def test_a_pool_of_workers_that_are_well_takes_time():
    assert polling(20) > 0


@pytest.mark.slow
@pytest.mark.ray
def test_a_line_for_each_number_of_workers():
    command = [sys.executable, str(SCRIPT), "host", "--seconds", "0.5", "--workers", "1", "2"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["workers"] for line in lines] == [1, 2]
    for line in lines:
        assert 0 < line["env_steps_per_second"] < line["rows_per_second"]
        assert line["bytes_per_row"] > 0
        assert line["cpu_us_per_row"]["workers"] > 0
