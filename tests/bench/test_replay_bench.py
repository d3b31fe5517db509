import json

import pytest

from bench.replay import DIRECTION, parser, ring, session

SMALL = ["--clients", "1", "--envs", "2", "--held", "1", "--seconds", "0.001"]


def lines_of(rows, path, *options):
    parsed = parser().parse_args([*SMALL, *options])
    lines = [json.loads(json.dumps(line)) for line in session(rows, path, parsed.clients, parsed)]
    assert all((line["rows"], line["path"]) == (rows, path) for line in lines)
    return lines


def check(line):
    tasks = [task for task in DIRECTION if f"{task}_p50_ms" in line]
    assert tasks
    assert all(0 < line[f"{task}_p50_ms"] <= line[f"{task}_p99_ms"] for task in tasks)
    assert line["share"] > 0
    assert line["limit_gb_per_second"] > 0


def test_embedded_lines_have_rates_percentiles_and_shares():
    lines = lines_of("tdmpc2", "embedded")
    assert [line["case"] for line in lines] == ["insert", "sample", "sample while inserting"]
    for line in lines:
        check(line)
        assert line["limit"] == "memcpy"
    windows = lines[1]["windows_per_second"] * lines[1]["bytes_per_window"] / 1e9
    assert windows == pytest.approx(lines[1]["gb_per_second"], rel=0.1)


def test_the_peers_items_are_compared_with_the_peer():
    insert, sample, _ = lines_of("items", "embedded")
    assert insert["goal_rows_per_second"] == 50_000
    assert sample["times_peer"] == pytest.approx(sample["gb_per_second"] / 1.8, abs=0.01)


@pytest.mark.slow  # processes of a server, of the bare stream and of two clients, for each path
@pytest.mark.parametrize("path", ["shared", "tcp"])
def test_a_served_table_is_measured_with_its_memory(path):
    *lines, memory = lines_of("dreamerv3", path)
    assert [line["case"] for line in lines] == [
        "insert",
        "sample",
        "write-back",
        "insert-acknowledged",
        "sample while inserting",
    ]
    for line in lines:
        check(line)
    assert ("share_of_exchange" in lines[1]) == (path == "tcp")
    assert memory["case"] == "memory"
    # all pages of a full table are there: its latents in /dev/shm, the other columns in files
    assert memory["dev_shm_mb"] >= 0.9 * memory["predicted_mb"] * 8224 / memory["bytes_per_row"]
    assert memory["rss_mb"] > memory["predicted_mb"]


@pytest.mark.slow
def test_a_ring_is_found_again():
    made, filled, opened = ring(20_000, 16)
    assert [line["case"] for line in (made, filled, opened)] == [
        "ring made",
        "ring filled",
        "ring opened after SIGKILL",
    ]
    assert opened["rows_found"] == 20_000
    assert filled["files_mb"] >= 0.9 * filled["predicted_mb"]
