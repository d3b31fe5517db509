"""The run page: what it is told, what it is served, the file that needs nothing else. tests/e2e looks at it."""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import numpy as np
import pytest

from actors import collector
from deploy import local, presets, running
from deploy.cli import main
from deploy.config import ClusterConfig, RunConfig, save, save_cluster
from deploy.running import RunStatus
from deploy.view import document, rundir, server, static, tail
from deploy.view.server import Viewer, byte_range
from deploy.view.tail import Place
from learner import loop
from telamon.telemetry.live import Part
from telamon.telemetry.writer import METRICS_FILE, MetricsWriter

TASK = "dmc:cartpole-swingup"
PNG = b"\x89PNG of a kind"
NOWHERE = lambda number, picture: None


def make_run(run_dir: Path, seed: int = 1, steps: int = 3, task: str = TASK, **changed) -> Path:
    """A run of `steps` lines, a thousand environment steps apart."""
    run_dir.mkdir(parents=True)
    save(replace(presets.apply(RunConfig("tdmpc2", task, seed=seed), ["1"]), **changed), run_dir)
    with MetricsWriter(run_dir) as writer:
        for step in range(steps):
            writer.write(1000 * step, {"eval/return": 10.0 * step + seed, "loss/total_loss": 1 / (1 + step)})
    return run_dir


@contextmanager
def served(*run_dirs: Path, reference: str | None = "none") -> Iterator[Viewer]:
    runs = rundir.distinct(run_dirs)
    with Viewer(runs, document.references(document.readable(runs), reference), 0) as viewer:
        thread = threading.Thread(target=viewer.serve_forever, args=[0.01])
        thread.start()
        try:
            yield viewer
        finally:
            viewer.shutdown()
            thread.join()


def get(viewer: Viewer, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and content of a path below the secret one; one that begins with / is the whole path."""
    url = urlsplit(viewer.url)
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
    try:
        connection.request("GET", path if path.startswith("/") else url.path + path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def data(viewer: Viewer, have: Sequence[str] = ()) -> dict:
    status, _, content = get(viewer, f"data?{'&'.join(f'have={place}' for place in have)}")
    assert status == 200
    return json.loads(content)


def place(told: dict) -> str:
    return f"{told['metrics']['place']['offset']}-{told['metrics']['place']['seal']}"


# tail


def test_a_reader_gets_what_is_new(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    first = tail.read(run, Place())
    assert first.whole
    assert first.series["eval/return"] == ([0, 1000], [1.0, 11.0])
    assert first.place.offset == (run / METRICS_FILE).stat().st_size
    nothing = tail.read(run, first.place)
    assert (nothing.whole, nothing.series, nothing.place) == (False, {}, first.place)
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"step": 2000, "eval/return": null, "new": 1}\n{"step": 3000, "eval/re')
    second = tail.read(run, first.place)
    assert not second.whole
    assert second.series == {"eval/return": ([2000], [None]), "new": ([2000], [1])}
    assert tail.read(run, second.place).series == {}, "the half line is not there yet"
    with (run / METRICS_FILE).open("a") as file:
        file.write('turn": 7}\n')
    assert tail.read(run, second.place).series == {"eval/return": ([3000], [7])}


def test_a_resumed_run_goes_on_on_one_axis(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with MetricsWriter(run) as writer:
        writer.write(1000, {"loss": 1})
        kept = writer.length
        writer.write(2000, {"loss": 2})
        writer.write(3000, {"loss": 3})
    seen = tail.read(run, Place())
    for last in (2500, 6000):  # shorter than what was read, and then longer
        with MetricsWriter(run, resume_length=kept) as writer:
            for step in range(1500, last, 500):
                writer.write(step, {"loss": -step})
        again = tail.read(run, seen.place)
        assert again.whole
        steps, values = again.series["loss"]
        assert steps == [1000, *range(1500, last, 500)]
        assert values == [1, *range(-1500, -last, -500)]
        assert tail.read(run, again.place).series == {}


def test_what_was_cut_off_is_noticed_beyond_the_sealed_bytes(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    line = '{"step": 1, "x": 1}\n'
    (run / METRICS_FILE).write_text(line * (2 * tail.SEAL_BYTES // len(line)))
    seen = tail.read(run, Place())
    with (run / METRICS_FILE).open("a") as file:
        file.write(line)
    more = tail.read(run, seen.place)
    assert (more.whole, more.series) == (False, {"x": ([1], [1])})
    (run / METRICS_FILE).write_text(line.replace('"x": 1', '"x": 2') * (3 * tail.SEAL_BYTES // len(line)))
    assert tail.read(run, more.place).whole


def test_a_run_without_metrics_has_none_yet(tmp_path):
    found = tail.read(tmp_path, Place())
    assert (found.whole, found.series, found.place) == (True, {}, Place())


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"loss": 1}', '{"step": null}', '{"step": 1e999}', '{"step": 2, "loss": "low"}',
     '{"step": 2, "loss": [1]}', "[" * 100_000, ""],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line):
    first = '{"step": 1, "loss": 1}\n'
    (tmp_path / METRICS_FILE).write_text(f"{first}{line}\n{first}")
    with pytest.raises(ValueError, match=rf"metrics\.jsonl was damaged .* at byte {len(first)} "):
        tail.read(tmp_path, Place())


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "null", "1" * 400])
def test_a_value_that_is_not_finite_is_a_gap(tmp_path, value):
    lines = [f'{{"step": {step}, "loss": {value if step == 7 else step}}}\n' for step in range(50)]
    (tmp_path / METRICS_FILE).write_text("".join(lines))
    steps, values = tail.read(tmp_path, Place()).series["loss"]
    assert (steps, values) == (list(range(50)), [*map(float, range(7)), None, *map(float, range(8, 50))])
    _, values = tail.read(tmp_path, Place(), points=10).series["loss"]
    assert (values[0], values[-1]) == (0, 49), "it is no extreme"
    assert None not in values


@pytest.mark.parametrize("count", [10, 101, 5000, 12_345])
def test_thinning_keeps_extremes(count):
    values = np.random.default_rng(0).normal(size=count).tolist()
    values[count // 3] = 100.0
    values[count // 2] = -100.0
    values[0] = None
    kept = tail.thin(values, 100)
    assert len(kept) <= (count if count <= 100 else 100)
    assert kept == sorted(set(kept))
    assert {count // 3, count // 2} <= set(kept)
    width = math.ceil(count / 50)
    assert max(np.diff(kept)) <= 2 * width, "no stretch is left out"


def test_a_piece_says_what_it_left_out(tmp_path):
    run = make_run(tmp_path / "run", steps=50)
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"step": 90000, "rare": 1}\n')
    found = tail.read(run, Place(), points=20)
    assert found.thinned == {"eval/return": 50, "loss/total_loss": 50}
    steps, values = found.series["eval/return"]
    assert len(steps) == len(values) <= 20
    assert (values[0], values[-1]) == (1.0, 491.0)


# run directories


def test_names_tell_runs_apart(tmp_path):
    a, b, c = (tmp_path / name for name in ("x/run", "y/run", "z"))
    assert rundir.distinct([a]) == {"run": a}
    assert rundir.distinct([a, b, a]) == {"x/run": a, "y/run": b}
    assert list(rundir.distinct([a, c])) == ["run", "z"]
    with pytest.raises(ValueError, match="no run to view"):
        rundir.distinct([])


def test_how_a_run_stands(tmp_path):
    assert rundir.standing(tmp_path) == {"state": "unknown", "says": "", "parts": []}
    parts = [Part("learner", "here pid 1", "training", "12 updates")]
    status = RunStatus(time.time(), "running", "5 of 10 env steps", actors=2, parts=parts, waits="nobody")
    running.write(status, tmp_path)
    found = rundir.standing(tmp_path)
    assert (found["state"], found["says"]) == ("running", "Waits: nobody")
    assert found["parts"] == [{"name": "learner", "where": "here pid 1", "now": "training", "numbers": "12 updates"}]
    for state in ("starting", "running", "stopping"):
        running.write(replace(status, state=state, seconds=time.time() - 3600), tmp_path)
        found = rundir.standing(tmp_path)
        assert found["state"] == "crashed"
        assert re.fullmatch(rf"It was {state} 3,6\d\d s ago and has said nothing since\.", found["says"])
        assert found["parts"] == []
    for state in ("finished", "stopped", "failed"):
        running.write(replace(status, state=state, seconds=0.0), tmp_path)
        assert rundir.standing(tmp_path)["state"] == state
    (tmp_path / running.STATUS_FILE).write_text("[")
    assert "status.json is damaged" in rundir.standing(tmp_path)["says"]


def test_warnings_of_a_run_and_of_its_parts(tmp_path):
    event = "time=2026-11-30T12:00:{:02d}.000Z level={} logger=deploy.local event={}\n".format
    (tmp_path / "log.txt").write_text(
        "a line cut in the mid" + event(0, "INFO", "start") + event(2, "WARNING", "<b>") + "  a traceback\n"
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "actor-0.log").write_text(event(1, "ERROR", "one") + event(3, "ERROR", "three"))
    found = rundir.warnings(tmp_path)
    assert [(w.part, w.level, w.text) for w in found] == [
        ("actor-0", "ERROR", "event=three"),
        ("log", "WARNING", "event=<b>"),
        ("actor-0", "ERROR", "event=one"),
    ]
    (tmp_path / "log.txt").write_text("".join(event(i % 60, "WARNING", i) for i in range(5000)))
    assert len(rundir.warnings(tmp_path)) == rundir.MOST_WARNINGS


def test_pictures_are_whole_files_of_two_folders(tmp_path):
    for name in ("report/openloop-obs-000000000400.png", "report/openloop-obs-000000002000.png",
                 "report/openloop-obs-000000002000.mp4", "report/openloop-obs-000000002400.part.mp4",
                 "report/notes.txt", "videos/best.mp4", "checkpoints/secret.png", "top.png"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "videos/link.png").symlink_to(tmp_path / "top.png")
    (tmp_path / "videos/folder.png").mkdir()
    os.mkfifo(tmp_path / "videos/pipe.png")
    found = rundir.pictures(tmp_path)
    assert [(p.title, p.step, p.name) for p in found] == [
        ("openloop-obs", 2000, "report/openloop-obs-000000002000.mp4"),
        ("openloop-obs", 2000, "report/openloop-obs-000000002000.png"),
        ("openloop-obs", 400, "report/openloop-obs-000000000400.png"),
        ("best", None, "videos/best.mp4"),
    ]


@pytest.mark.parametrize("folder", rundir.FOLDERS)
@pytest.mark.parametrize("inside", [True, False])
def test_links_in_a_run_are_not_followed_but_the_run_may_be_one(tmp_path, folder, inside):
    run = make_run(tmp_path / "stored" / "run")
    elsewhere = (run if inside else tmp_path) / "checkpoints"
    elsewhere.mkdir()
    (elsewhere / "secret.png").write_bytes(PNG)
    (run / folder).symlink_to(elsewhere)
    other = run / next(name for name in rundir.FOLDERS if name != folder)
    other.mkdir()
    (other / "own.png").write_bytes(PNG)
    (tmp_path / "linked").symlink_to(tmp_path / "stored")
    with served(tmp_path / "linked" / "run") as viewer:
        (told,) = data(viewer)["runs"][0]["pictures"]
        assert told["name"] == f"{other.name}/own.png"
        assert get(viewer, told["source"])[0] == 200
        assert get(viewer, f"0/{folder}/secret.png")[0] == 404


# documents


def test_seeds_of_one_experiment_are_one_group(tmp_path):
    runs = [make_run(tmp_path / f"a{seed}", seed) for seed in (1, 2)]
    runs.append(
        make_run(tmp_path / "b1", agent=replace(presets.apply(RunConfig("tdmpc2", TASK), ["1"]).agent, lr=1e-5))
    )
    told = document.first(rundir.distinct(runs), {}, NOWHERE)
    assert [(run["name"], run["group"], run["seed"]) for run in told["runs"]] == [
        ("a1", 0, 1),
        ("a2", 0, 2),
        ("b1", 1, 1),
    ]
    differing = {line["key"]: line["values"] for line in told["settings"] if line["differs"]}
    assert differing == {"seed": ["1", "2", "1"], "agent.lr": ["0.0003", "0.0003", "1e-05"]}


def test_settings_of_a_launch_stand_beside_the_others(tmp_path):
    launched, alone = make_run(tmp_path / "launched"), make_run(tmp_path / "local", seed=2)
    save_cluster(ClusterConfig(actors=7), launched)
    told = document.first(rundir.distinct([launched, alone]), {}, NOWHERE)
    lines = {line["key"]: line for line in told["settings"]}
    assert lines["cluster.actors"] == {"key": "cluster.actors", "values": ["7", None], "differs": True}
    assert not lines["task"]["differs"]


def test_the_published_curve_is_chosen_by_algorithm_and_task():
    tdmpc2, elsewhere = RunConfig("tdmpc2", TASK), RunConfig("tdmpc2", "gym:Pendulum-v1")
    choose = lambda asked, *configs: {t: c.label for t, c in document.references(configs, asked).items()}
    assert choose(None, tdmpc2, elsewhere) == {TASK: "published TD-MPC2, 5M parameters"}
    assert choose("tdmpc2-size1", elsewhere, tdmpc2) == {TASK: "official TD-MPC2 code, 1M parameters"}
    assert choose("none", tdmpc2) == choose(None, elsewhere) == {}
    with pytest.raises(ValueError, match="no reference 'dreamer'; known references are tdmpc2, "):
        document.references([tdmpc2], "dreamer")
    with pytest.raises(ValueError, match="'tdmpc2-size1' has no curve for gym:Pendulum-v1"):
        document.references([elsewhere], "tdmpc2-size1")


def test_a_run_that_cannot_be_read_says_why_and_the_others_are_shown(tmp_path):
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", seed=2)
    runs = rundir.distinct([bad, good])
    with (bad / METRICS_FILE).open("a") as file:
        file.write("?\n")
    told = document.first(runs, {}, NOWHERE)["runs"]
    assert "was damaged" in told[0]["problem"]
    assert "metrics" not in told[0]
    assert told[1]["metrics"]["series"]["eval/return"][1] == [1.0, 11.0, 21.0]
    (bad / "config.yaml").unlink()
    assert "holds no config.yaml" in document.first(runs, {}, NOWHERE)["runs"][0]["problem"]
    assert [config.seed for config in document.readable(runs)] == [1]
    (good / "config.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=f"{bad} is no run directory"):
        document.readable(runs)


@pytest.mark.parametrize("damage", [{"seconds": "abc"}, {"numbers": {"train/return": None}}, {"parts": 3},
                                    {"parts": [{"name": 3, "where": "", "now": ""}]}])  # fmt: skip
def test_a_damaged_status_is_told_beside_the_curves(tmp_path, damage):
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", seed=2)
    for run in (good, bad):
        running.write(RunStatus(time.time(), "finished", "", actors=0), run)
    values = json.loads((bad / running.STATUS_FILE).read_text())
    (bad / running.STATUS_FILE).write_text(json.dumps({**values, **damage}))
    with served(bad, good) as viewer:
        told = data(viewer)["runs"]
    assert [run["standing"]["state"] for run in told] == ["unknown", "finished"]
    assert "status.json is damaged" in told[0]["standing"]["says"]
    assert [len(run["metrics"]["series"]["eval/return"][0]) for run in told] == [3, 3]


def test_metrics_are_read_once(tmp_path, monkeypatch):
    reads = []
    read = tail.read
    monkeypatch.setattr(tail, "read", lambda *args: reads.append(args) or read(*args))
    run = make_run(tmp_path / "run")
    assert command(run, "--out", tmp_path / "page.html", monkeypatch=monkeypatch) == 0
    assert len(reads) == 1
    with served(run) as viewer:
        data(viewer)
    assert len(reads) == 2


# the server


def test_the_page_gets_everything_and_then_what_is_new(tmp_path):
    runs = [make_run(tmp_path / "a1"), make_run(tmp_path / "a2", seed=2)]
    with served(*runs, reference=None) as viewer:
        told = data(viewer)
        assert [run["metrics"]["whole"] for run in told["runs"]] == [True, True]
        assert told["points"] == tail.POINTS
        curve = told["references"][TASK]
        assert (curve["metric"], len(curve["values"])) == ("eval/return", 3)
        assert all(len(row) == len(curve["steps"]) for row in curve["values"])
        with (runs[1] / METRICS_FILE).open("a") as file:
            file.write('{"step": 9000, "eval/return": 5.0}\n')
        news = data(viewer, [place(run) for run in told["runs"]])
        assert "references" not in news
        assert [run["metrics"]["series"] for run in news["runs"]] == [{}, {"eval/return": [[9000], [5.0]]}]
        assert [run["metrics"]["whole"] for run in news["runs"]] == [False, False]
        with MetricsWriter(runs[0], resume_length=0) as writer:
            writer.write(7, {"eval/return": 3.0})
        news = data(viewer, [place(run) for run in news["runs"]])
        assert news["runs"][0]["metrics"] | {"place": None} == {
            "place": None, "whole": True, "series": {"eval/return": [[7], [3.0]]}, "thinned": {},
        }  # fmt: skip


def test_nothing_is_served_without_the_secret(tmp_path):
    with served(make_run(tmp_path / "run")) as viewer:
        assert get(viewer, "")[0] == 200
        secret = urlsplit(viewer.url).path.strip("/")
        assert len(secret) >= 32
        for path in ("/", "/data", "/favicon.ico", f"/{secret}", f"/{secret[:-1]}/", f"/{secret}x/",
                     "/%C3%A9/", f"/x/{secret}/"):  # fmt: skip
            status, _, content = get(viewer, path)
            assert status == 404, path
            assert secret.encode() not in content
    with served(make_run(tmp_path / "other")) as viewer:
        assert secret not in viewer.url


@pytest.mark.parametrize(
    ("address", "status"),
    [("x", 404), ("*", 404), ("//", 404), ("http://x", 404), ("http://[", 400), ("http://[/SECRET/", 400),
     ("/SECRET/" + "9" * 5000 + "/a.png", 404), ("/SECRET/%D9%A0/a.png", 404), ("http://x/SECRET/", 200)],
)  # fmt: skip
def test_what_is_no_address_is_answered_and_nothing_is_printed(tmp_path, capfd, address, status):
    with served(make_run(tmp_path / "run")) as viewer:
        with socket.create_connection(viewer.server_address, timeout=60) as connection:
            request = f"GET {address.replace('SECRET', viewer.secret)} HTTP/1.1\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        assert answer.split()[1:2] == [str(status).encode()]
        assert get(viewer, "")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_only_pictures_of_runs_are_served(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "report").mkdir()
    (run / "report" / "a b-000001.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "report" / "link.png").symlink_to(tmp_path / "secret.png")
    with served(run) as viewer:
        (told,) = data(viewer)["runs"][0]["pictures"]
        status, headers, content = get(viewer, told["source"])
        assert (status, headers["Content-Type"], content) == (200, "image/png", PNG)
        for path in ("0/config.yaml", "0/report/../config.yaml", "0/report/../../secret.png", "0/report/link.png",
                     "0/report/%2e%2e/%2e%2e/secret.png", "0/..%2f..%2fsecret.png", "0//etc/passwd",
                     "1/report/link.png", "-1/report/a%20b-000001.png", "0/report/", "0/report", "0",
                     "../data", "page.html", "server.py"):  # fmt: skip
            assert get(viewer, path)[0] == 404, path


def test_headers_keep_the_page_to_itself(tmp_path):
    run = make_run(tmp_path / "run")
    with served(run) as viewer:
        for path, kind, keep in (("", "text/html", "no-store"), ("page.js", "text/javascript", "no-store"),
                                 ("page.css", "text/css", "no-store"), ("plotly.js", "text/javascript", "immutable"),
                                 ("data", "application/json", "no-store")):  # fmt: skip
            status, headers, content = get(viewer, path)
            assert status == 200
            assert headers["Content-Type"].startswith(kind)
            assert keep in headers["Cache-Control"]
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "http" not in headers["Content-Security-Policy"]
            assert headers["Referrer-Policy"] == "no-referrer"
            assert content


def test_parts_of_a_film_are_served(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "videos").mkdir()
    film = bytes(range(200))
    (run / "videos" / "best.mp4").write_bytes(film)
    with served(run) as viewer:
        (told,) = data(viewer)["runs"][0]["pictures"]
        status, headers, content = get(viewer, told["source"], Range="bytes=10-19")
        assert (status, headers["Content-Range"], content) == (206, "bytes 10-19/200", film[10:20])
        assert headers["Content-Length"] == "10"
        status, headers, content = get(viewer, told["source"], Range="bytes=500-")
        assert (status, headers["Content-Range"], content) == (416, "bytes */200", b"")
        assert get(viewer, told["source"], Range="lines=1-2")[::2] == (200, film)


@pytest.mark.parametrize(
    ("header", "found"),
    [("", None), ("bytes=0-", (0, 100)), ("bytes=5-9", (5, 10)), ("bytes=90-500", (90, 100)), ("bytes=-10", (90, 100)),
     ("bytes=-500", (0, 100)), ("bytes=-", None), ("bytes=1-2,4-5", None), ("lines=1-2", None),
     ("bytes=100-", (100, 100)), ("bytes=9-5", (9, 6))],
)  # fmt: skip
def test_byte_ranges(header, found):
    assert byte_range(header, 100) == found


def test_a_taken_port_names_its_owner():
    with socket.socket() as taken:
        taken.bind((server.LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} is in use by process {os.getpid()} .* --port"):
            Viewer({}, {}, port)


# the file


def test_a_file_needs_nothing_else(tmp_path):
    run = make_run(tmp_path / "<run> & co")
    (run / "report").mkdir()
    (run / "report" / "openloop-obs-000001.png").write_bytes(PNG)
    (run / "report" / "openloop-obs-000002.png").write_bytes(PNG * 2)
    (run / "log.txt").write_text("time=now level=WARNING logger=x event=</script><script>alert()</script>\n")
    runs = rundir.distinct([run])
    page = static.page(runs, document.references(document.readable(runs), None), room=len(PNG) * 2)
    own = page.replace(static.plotly(), "")
    assert len(own) < len(page) - 10**6
    assert re.findall(r"\bhttps?:|url\(|@import|\bimport\(|\ssrc=|<link(?! rel=\"icon\" href=\"data:,\")", own) == []
    assert own.count("</script>") == 3, "nothing that a run says ends a script"
    told = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', own, re.DOTALL)[1])
    newest, oldest = told["runs"][0]["pictures"]
    assert base64.b64decode(newest["source"].removeprefix("data:image/png;base64,")) == PNG * 2
    assert oldest["source"] is None, "there was room for one"
    assert told["runs"][0]["metrics"]["series"]["eval/return"][0] == [0, 1000, 2000]
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', own)[1]
    assert "default-src 'none'" in policy
    assert "unsafe-inline'; img-src" in policy
    assert "connect-src" not in policy


def test_the_page_has_words_for_all_that_time_goes_to():
    script = (Path(static.__file__).parent / "page.js").read_text()
    table = re.search(r"const DOING = \{(.*?)\n\};", script, re.DOTALL)[1]
    words = set(re.findall(r"^  (\w+): \[", table, re.MULTILINE))
    assert {*get_args(collector.Doing), *get_args(loop.Doing), *get_args(local.Doing)} == words


# the command


def command(*args: str | Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["telamon", "view", *map(str, args)])
    with pytest.raises(SystemExit) as exit:
        main()
    return int(exit.value.code or 0)


def test_the_command_writes_a_file(tmp_path, monkeypatch, capsys):
    out = tmp_path / "pages" / "page.html"
    assert command(make_run(tmp_path / "run"), "--out", out, monkeypatch=monkeypatch) == 0
    assert "wrote" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")
    assert os.listdir(out.parent) == ["page.html"]


def test_the_command_serves_until_it_is_interrupted(tmp_path, monkeypatch, capsys):
    def interrupted(self: Viewer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Viewer, "serve_forever", interrupted)
    assert command(make_run(tmp_path / "run"), monkeypatch=monkeypatch) == 0
    assert re.search(r"http://127\.0\.0\.1:\d+/\S{32,}/\nCtrl-C ends it", capsys.readouterr().out)


def test_the_command_refuses_in_a_sentence(tmp_path, monkeypatch, capsys):
    assert command(tmp_path, monkeypatch=monkeypatch) == 1
    assert capsys.readouterr().err == f"telamon: {tmp_path} is no run directory: it holds no config.yaml\n"
    assert command(monkeypatch=monkeypatch) == 1
    assert "name at least one run directory" in capsys.readouterr().err
    run = make_run(tmp_path / "run")
    assert command(run, "--reference", "best", monkeypatch=monkeypatch) == 1
    assert "there is no reference 'best'" in capsys.readouterr().err
    with (run / METRICS_FILE).open("a") as file:
        file.write("{}\n")
    assert command(run, "--out", tmp_path / "pages" / "page.html", monkeypatch=monkeypatch) == 1
    assert "metrics.jsonl was damaged after it was written" in capsys.readouterr().err
    assert not (tmp_path / "pages").exists()


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_has_bounds(tmp_path, monkeypatch, capsys, port):
    assert command(make_run(tmp_path / "run"), "--port", port, monkeypatch=monkeypatch) == 2
    assert f"port={port} must be from 0 to 65535" in " ".join(capsys.readouterr().err.split())


def test_the_command_shows_runs_beside_one_that_cannot_be_read(tmp_path, monkeypatch):
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", seed=2)
    (bad / "config.yaml").unlink()
    out = tmp_path / "page.html"
    assert command(bad, good, "--out", out, monkeypatch=monkeypatch) == 0
    page = out.read_text()
    assert "holds no config.yaml" in page
    assert '"eval/return":[[0,1000,2000],' in page
