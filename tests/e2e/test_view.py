"""The run page in a real browser: Debian's Chromium without a window, over a real `telamon view`."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deploy import presets, running
from deploy.config import RunConfig, save
from deploy.running import RunStatus
from deploy.video import write_video
from telamon.telemetry import png
from telamon.telemetry.live import Part
from telamon.telemetry.writer import METRICS_FILE, MetricsWriter
from tests.waiting import SECONDS, next_line, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="looks at a page in a browser: apt install chromium"),
]
TASK = "dmc:cartpole-swingup"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
"""Root may not have a sandbox; the others keep the browser from the network, which is not what is looked at."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="drives the browser: pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=1000 * SECONDS)
        yield browser
        browser.close()


@contextmanager
def viewing(*args: str | Path) -> Iterator[str]:
    """The address that `telamon view` prints; Ctrl-C ends it, with exit code 0."""
    command = [sys.executable, "-m", "deploy.cli", "view", *map(str, args)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield next_line(process).strip()
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


@contextmanager
def opened(browser: Browser, url: str, width: int, height: int = 900) -> Iterator[Page]:
    """A page that has drawn. At the end: nothing has failed, and nothing was asked of anybody else."""
    context = browser.new_context(viewport={"width": width, "height": height})
    context.set_default_timeout(1000 * SECONDS)
    page = context.new_page()
    failures: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: failures.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.wait_for_selector("body[data-charts]")
    yield page
    assert failures == []
    assert [address for address in asked if not address.startswith((url, "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it can be read without scrolling sideways"
    context.close()


def drawn(page: Page, chart: str) -> list[dict[str, Any]]:
    """What plotly has drawn: the lines of a chart, by their names, without bands."""
    script = """id => JSON.stringify((document.getElementById(id)?.querySelector('.plot').data ?? [])
        .filter(line => line.hoverinfo !== 'skip').map(({name, x, y}) => ({name, x, y})))"""
    return json.loads(page.evaluate(script, chart))


def make_run(
    run_dir: Path, seed: int, lines: int, losses: Sequence[str] = ("total",), state: str | None = None
) -> Path:
    """A run of `lines` lines of losses, a hundred environment steps apart, and an evaluation for every ten of them."""
    run_dir.mkdir()
    save(presets.apply(RunConfig("tdmpc2", TASK, seed=seed, steps=100 * lines), ["1"]), run_dir)
    with MetricsWriter(run_dir) as writer:
        for line in range(lines):
            if line % 10 == 0:
                writer.write(100 * line, {"eval/return": 800 * (1 - math.exp(-line / 30)) + 20 * seed})
            values = {f"loss/{name}_loss": math.exp(-line / 50) + i for i, name in enumerate(losses)}
            speed = {
                "time/env_steps_per_s": 90 + line % 7,
                "time/learner_batch_ratio": 0.25,
                "time/learner_compute_ratio": 0.75,
            }
            writer.write(100 * line, {**values, **speed})
    if state is not None:
        parts = [Part("learner", "here pid 1", "training", "12 updates")]
        soon = time.time() + 3600  # it does not become stale while a test waits
        status = RunStatus(soon, state, "", actors=1, parts=parts)
        running.write(status, run_dir)
    return run_dir


def add_pictures(run_dir: Path) -> None:
    frames = np.zeros((8, 32, 64, 3), np.uint8)
    frames[:, :, :32] = np.arange(8)[:, None, None, None] * 30
    (run_dir / "report").mkdir()
    for step in (400, 800):
        path = run_dir / "report" / f"openloop-obs-{step:012d}.png"
        path.write_bytes(png.encode(frames[:1], 10.0))
        write_video(frames, path.with_suffix(".mp4"), 10.0)


def test_a_finished_run_a_running_one_and_a_crashed_one(tmp_path, browser):
    finished = make_run(tmp_path / "run-seed1", 1, 100, state="finished")
    add_pictures(finished)
    crashed = make_run(tmp_path / "run-seed2", 2, 40)
    running.write(RunStatus(time.time() - 3600, "running", "", actors=1), crashed)
    with (crashed / METRICS_FILE).open("a") as file:
        file.write('{"step": 4000, "loss/tot')
    live = make_run(tmp_path / "live", 3, 10, ["total", "extra"], state="running")
    save(presets.apply(RunConfig("tdmpc2", TASK, seed=3, steps=9000), ["5"]), live)

    with viewing(finished, crashed, live) as url, opened(browser, url, 1400) as page:
        badges = [badge.inner_text() for badge in page.query_selector_all(".badge")]
        assert badges == ["finished", "crashed", "running"]
        page.get_by_text("and has said nothing since").wait_for()
        names = [line["name"] for line in drawn(page, f"task {TASK}")]
        assert names == [
            "published TD-MPC2, 5M parameters: evaluation, 3 seeds", "run, 2 seeds: evaluation", "live: evaluation",
        ]  # fmt: skip

        # the learning curve of the running one grows, and a metric that is new gets a chart
        with (live / METRICS_FILE).open("a") as file:
            file.write('{"step": 1234, "eval/return": 555.5}\n{"step": 1250, "loss/brand_new": 1.0}\n')
        until(lambda: drawn(page, f"task {TASK}")[-1]["x"][-1] == 1234)
        assert drawn(page, f"task {TASK}")[-1]["y"][-1] == 555.5
        page.get_by_text("1,250 of 9,000").wait_for()
        page.get_by_text("loss/brand_new").wait_for()

        # it is resumed from a checkpoint before that: one line goes on from there
        with MetricsWriter(live, resume_length=0) as writer:
            writer.write(0, {"eval/return": 1.0})
            writer.write(700, {"eval/return": 2.0})
        until(lambda: drawn(page, f"task {TASK}")[-1]["x"] == [0, 700])

        # what the time goes to lies on top of each other
        assert {line["name"]: set(line["y"]) for line in drawn(page, "shares run-seed2: learner")} == {
            "updates": {0.75}, "waits for batches": {0.25},
        }  # fmt: skip

        # the film plays, and can be turned back to the one before
        page.locator("#pictures").scroll_into_view_if_needed()
        page.get_by_text("at 800 environment steps, 2 of 2").wait_for()
        until(lambda: page.evaluate("document.querySelector('video').readyState >= 2"))
        page.locator("#pictures input").fill("0")
        page.get_by_text("at 400 environment steps, 1 of 2").wait_for()

        # what differs between the runs
        heading = page.locator("#settings tbody tr").first.inner_text()
        assert heading.split("\t") == ["steps", "10000", "4000", "9000"]


def test_runs_at_their_start(tmp_path, browser):
    run = tmp_path / "run"
    run.mkdir()
    save(presets.apply(RunConfig("tdmpc2", TASK), ["1"]), run)
    with viewing(run, "--reference", "none") as url, opened(browser, url, 700) as page:
        for sentence in ("No return yet", "No losses yet", "No pictures yet", "No warnings in the logs"):
            page.get_by_text(sentence).wait_for()
        with MetricsWriter(run) as writer:
            writer.write(0, {"eval/return": 1.0})
        until(lambda: [line["y"] for line in drawn(page, f"task {TASK}")] == [[1.0]])


def test_a_page_whose_server_has_gone_says_so(tmp_path, browser):
    run = make_run(tmp_path / "run", 1, 3)
    with viewing(run) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.get_by_text("live, ").wait_for(timeout=1000 * SECONDS)
    page.get_by_text("the server has gone; start telamon view again").wait_for(timeout=1000 * SECONDS)
    context.close()


@pytest.mark.parametrize("width", [1400, 700])
def test_many_long_series_stay_responsive(tmp_path, browser, width, record_property):
    losses = [f"number_{i:02d}" for i in range(20)]
    run = make_run(tmp_path / "run", 1, 1000, losses)
    with viewing(run) as url, opened(browser, url, width, height=9000) as page:
        for loss in losses:
            until(lambda loss=loss: [len(line["x"]) for line in drawn(page, f"metric loss/{loss}_loss")] == [1000])
        page.evaluate("delete document.body.dataset.charts")
        page.locator("#smooth").select_option("20")
        page.wait_for_selector("body[data-charts]")
        script = "['charts', 'milliseconds', 'longest'].map(name => Number(document.body.dataset[name]))"
        redrawn, milliseconds, longest = page.evaluate(script)
        found = f"{redrawn} charts in {milliseconds} ms, the longest in {longest} ms, at a width of {width}"
        record_property("redrawn", found)
        print(found)
        assert redrawn >= 20
        (line,) = drawn(page, "metric loss/number_00_loss")
        assert line["y"][100] == pytest.approx(np.mean([math.exp(-i / 50) for i in range(81, 101)]))


def test_a_file_of_its_own(tmp_path, browser):
    run = make_run(tmp_path / "run", 1, 2500, state="stopped")
    add_pictures(run)
    out = tmp_path / "page.html"
    subprocess.run(
        [sys.executable, "-m", "deploy.cli", "view", str(run), "--out", str(out)], check=True, timeout=10 * SECONDS
    )
    shutil.rmtree(run)
    with opened(browser, out.as_uri(), 1400) as page:
        assert page.locator(".badge").inner_text() == "stopped"
        assert drawn(page, f"task {TASK}")[-1]["x"] == list(range(0, 250_000, 1000))
        page.get_by_text("4 metrics of run (up to 2,500 points)").wait_for()
        page.locator("#pictures").scroll_into_view_if_needed()
        until(lambda: page.evaluate("document.querySelector('video').readyState >= 2"))
