"""Debian's Prometheus with the shipped configuration, its rules tried by promtool and against a real launch.

Alerts wait for minutes, so most of them fire in promtool's tests alone (deploy/prometheus/tests.yml). Two are made to
fire here, with their waiting time taken away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from bench.chaos_launch import PATIENCE, Run, kill, pid_of, tiny, works
from deploy.grafana import check
from deploy.grafana.check import Sample
from tests.waiting import SECONDS, until

SHIPPED = Path(__file__).parents[2] / "deploy" / "prometheus"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed; CI installs Debian's"),
]


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=SHIPPED, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_configuration_and_rules():
    promtool("check", "config", "--lint-fatal", "prometheus.yml")
    promtool("check", "rules", "--lint-fatal", "rules.yml", "alerts.yml")


def test_alerts_fire_when_they_should_and_at_no_other_time():
    promtool("test", "rules", "tests.yml")


def test_what_the_document_says_of_promtool_is_right():
    text = (SHIPPED.parents[1] / "docs" / "monitoring.md").read_text()
    commands = re.findall(r"^promtool .*", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=SHIPPED.parents[1], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


# a real launch


def soon(condition: Callable[[], object]) -> None:
    """Waits until `condition()` holds, and asks about once a second: the machine has other things to do."""
    until(lambda: condition() or time.sleep(1), PATIENCE)


class Prometheus:
    """A server that is asked questions."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=SECONDS) as reply:
            return json.load(reply)["data"]

    def ask(self, expr: str) -> list[Sample]:
        return check.ask(self.url, expr)

    def targets(self, job: str, run: Path) -> list[dict[str, Any]]:
        found = self.get("targets", state="active")["activeTargets"]
        return [one for one in found if one["scrapePool"] == job and one["labels"]["run"] == label(run)]


def label(run_dir: Path) -> str:
    """What `run` says of a run."""
    return str(run_dir.resolve())


@contextmanager
def serving(config: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with a configuration, in a copy of the shipped folder where `targets` lie."""
    (folder / "used.yml").write_text(config)
    for _ in range(5):  # the port may be taken in between
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            ["prometheus", "--config.file", "used.yml", "--storage.tsdb.path", f"data-{port}", "--log.level", "warn",
             "--web.listen-address", f"127.0.0.1:{port}"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        server = Prometheus(f"http://127.0.0.1:{port}")
        try:
            until(lambda server=server, process=process: is_ready(server) or process.poll() is not None)
            if process.poll() is None:
                yield server
                return
        finally:
            process.kill()
            process.wait()
    raise AssertionError("Prometheus has not started")


def is_ready(server: Prometheus) -> bool:
    try:
        with urlopen(f"{server.url}/-/ready", timeout=SECONDS):
            return True
    except (URLError, ConnectionError):
        return False


def faster(config: str) -> str:
    """The shipped configuration, for a short run."""
    return config.replace("interval: 15s", "interval: 5s")


def by_http(config: str, port: int) -> str:
    """The shipped configuration with its second way to find the pages, a comment, in place of the first."""
    found = yaml.safe_load(re.sub(r"^  # (- job_name|  \w+_configs)", r"  \1", config, flags=re.MULTILINE))
    found["scrape_configs"] = [job for job in found["scrape_configs"] if job["job_name"] != "telamon"]
    return yaml.safe_dump(found).replace(":9400/", f":{port}/")


def environment(folder: Path) -> dict[str, str]:
    """Of a command whose compiled programs need not be fast."""
    return {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    }


OFTEN = ["--steps", "1000000000", "--eval.every", "200", "--eval.episodes", "2", "--checkpoint.every", "200",
         "--report.every", "200"]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run of one process, of TD-MPC2."""
    folder = tmp_path_factory.mktemp("alone")
    telamon = [sys.executable, "-m", "deploy.cli", "train", "tdmpc2", "counting:continuous"]
    options = [*tiny(), "--agent.buffer-size", "200000", *OFTEN, "--metrics-port", "0", "--run-dir", f"{folder}/run"]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen([*telamon, *options], env=environment(folder), stdout=out, stderr=out)
    try:
        yield folder / "run"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def run(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A launch of DreamerV3, which writes latents back."""
    folder = tmp_path_factory.mktemp("launch")
    options = ["dreamerv3", "gym:CartPole-v1", "--preset", "debug", *OFTEN, "--actors", "2", "--restarts", "1000"]
    launched = Run(folder / "run", options, environment(folder))
    launched.start()
    try:
        launched.until(works)
        yield launched
    finally:
        assert launched.process is not None
        launched.process.kill()
        launched.process.wait()


@pytest.fixture(scope="module")
def folder(alone: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped files with a link to each run, as docs/monitoring.md says; alerts of two minutes do not wait."""
    copy = tmp_path_factory.mktemp("prometheus") / "shipped"
    shutil.copytree(SHIPPED, copy, ignore=shutil.ignore_patterns("targets"))
    (copy / "targets").mkdir()
    for name, path in (("one", alone), ("two", run.run_dir)):
        (copy / "targets" / f"{name}.json").symlink_to(path / "prometheus" / "targets.json")
    alerts = copy / "alerts.yml"
    alerts.write_text(alerts.read_text().replace("for: 2m", "for: 0s"))
    return copy


@pytest.fixture(scope="module")
def prometheus(folder: Path) -> Iterator[Prometheus]:
    with serving(faster((SHIPPED / "prometheus.yml").read_text()), folder) as server:
        yield server


def expected(run: Run) -> dict[str, str]:
    """Part -> role."""
    roles = {"driver": "driver", "learner": "learner", "evaluator": "evaluator", "shard-0": "replay"}
    return roles | {"actor-0": "actor", "actor-1": "actor"}


def all_up(server: Prometheus, job: str, run: Run) -> Callable[[], bool]:
    def reached() -> bool:
        found = server.targets(job, run.run_dir)
        return {one["labels"]["part"] for one in found if one["health"] == "up"} == set(expected(run))

    return reached


def firing(server: Prometheus, alert: str) -> list[Sample]:
    """alert: its name, or a regular expression of names."""
    return server.ask(f'ALERTS{{alertname=~"{alert}", alertstate="firing"}}')


@pytest.mark.e2e
@pytest.mark.ray
def test_every_part_is_found_and_said_who_it_is(run, prometheus):
    soon(all_up(prometheus, "telamon", run))
    for target in prometheus.targets("telamon", run.run_dir):
        part = target["labels"]["part"]
        assert target["labels"] == {
            "job": "telamon", "instance": part, "part": part, "role": expected(run)[part],
            "run": label(run.run_dir),
        }  # fmt: skip


@pytest.mark.e2e
@pytest.mark.ray
def test_every_panel_rule_and_alert_finds_its_series(alone, run, prometheus):
    told: list[str] = ["nothing was asked"]

    def nothing_is_missing() -> bool:
        try:
            told[:] = [line for path in (run.run_dir, alone) for line in check.check(prometheus.url, label(path))[1]]
        except ValueError as error:  # it has not seen the driver yet
            told[:] = [str(error)]
        return not told

    try:
        soon(nothing_is_missing)
    except AssertionError as error:
        raise AssertionError("\n".join(told)) from error
    for group in prometheus.get("rules")["groups"]:
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
    speeds = prometheus.ask("run:telamon_actor_env_steps:rate1m")
    assert sorted(sample.labels["run"] for sample in speeds) == sorted(label(path) for path in (run.run_dir, alone))
    others = "TelamonTargetDown|TelamonRunGone|TelamonDiskNearlyFull"  # a busy machine, a full one
    assert not [sample for sample in firing(prometheus, ".*") if not re.fullmatch(others, sample.labels["alertname"])]


@pytest.mark.e2e
@pytest.mark.ray
def test_the_driver_tells_prometheus_of_all_parts(run, folder):
    (page,) = [
        group["targets"][0]
        for group in json.loads((run.run_dir / "prometheus" / "targets.json").read_text())
        if group["labels"]["role"] == "driver"
    ]
    config = by_http(faster((SHIPPED / "prometheus.yml").read_text()), int(page.rpartition(":")[2]))
    with serving(config, folder) as server:
        soon(all_up(server, "telamon-http", run))
        assert {one["labels"]["job"] for one in server.targets("telamon-http", run.run_dir)} == {"telamon"}
        assert not server.targets("telamon", run.run_dir)


@pytest.mark.e2e
@pytest.mark.ray
def test_an_actor_that_is_started_again_adds_no_series(run, prometheus):
    began = 'max_over_time(process_start_time_seconds{part="actor-0"}[1h])'  # of the newest
    soon(lambda: prometheus.ask(began))
    (before,) = prometheus.ask(began)
    kill(run, "actor-0")
    soon(lambda: prometheus.ask(began)[0].value > before.value)
    soon(lambda: prometheus.ask('telamon_driver_restarts_total{kind="actor"} > 0'))
    for name in ("telamon_actor_ticks_total", "process_start_time_seconds"):
        series = prometheus.get("series", **{"match[]": f'{name}{{role="actor"}}'})
        assert sorted(one["instance"] for one in series) == ["actor-0", "actor-1"]


@pytest.mark.e2e
@pytest.mark.ray
def test_somebody_is_told_of_a_part_that_hangs_and_of_a_run_that_is_gone(run, prometheus):
    soon(all_up(prometheus, "telamon", run))
    hangs = pid_of(run.until(works), "actor-1")
    assert hangs is not None
    os.kill(hangs, signal.SIGSTOP)
    try:
        what = label(run.run_dir), "actor-1"
        told = lambda: [(s.labels["run"], s.labels["part"]) for s in firing(prometheus, "TelamonTargetDown")]
        soon(lambda: what in told())
    finally:
        os.kill(hangs, signal.SIGCONT)
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    gone = label(run.run_dir)
    soon(lambda: any(sample.labels["run"] == gone for sample in firing(prometheus, "TelamonRunGone")))
