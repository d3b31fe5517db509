"""`ray up` for real, on one machine: deploy/ray/local.yaml, two hosts, a training run, Prometheus, `ray down`.

    sudo .venv/bin/python bench/cluster/ray_up.py

The hosts are namespaces (hosts.py). What runs is a copy of deploy/ray/local.yaml in which three things differ:
addresses and key; nothing is downloaded, so each host takes the packages of this Python and installs only the wheel
that `ray up` brought it; and Ray is told how many CPUs it has, so that the actors must go to the second host. Needs
root, this Python with the extras service, cluster and dmc beside ray[default] and setuptools, and from the system
iproute2, util-linux, procps, openssh-server, rsync and prometheus.

Prints a JSON line per step, with its seconds. The exit code is not 0 if anything was not as it should be; then the ends
of the logs come with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from hosts import Hosts, kept_paths, missing_tools

ROOT = Path(__file__).parents[2]
WHEEL = "telamon-0.1.0-py3-none-any.whl"
HEAD, WORKER = "head", "worker"
RUN = "/root/runs/trial"
CPUS = {HEAD: 2, WORKER: 3}
"""The learner and a shard; two rollout workers and the evaluator."""
AGENT = {
    "enc-dim": 32, "mlp-dim": 64, "latent-dim": 32, "num-q": 2, "batch-size": 64, "seed-steps": 500, "iterations": 3,
    "num-samples": 64, "num-elites": 8, "num-pi-trajs": 8,
}  # fmt: skip
"""Small: this rehearses a cluster, not learning."""
LAUNCH = [
    "telamon", "launch", "tdmpc2", "dmc:cartpole-swingup", "--run-dir", RUN, "--insecure", "--actors", "2",
    "--replay-shards", "1", "--steps", "4000", "--eval.every", "2000", "--eval.episodes", "1",
    *(word for name, value in AGENT.items() for word in (f"--agent.{name}", str(value))),
]  # fmt: skip
PARTS = {"learner": HEAD, "shard-0": HEAD, "actor-0": WORKER, "actor-1": WORKER}
"""Whose metrics must be served where."""
DASHBOARD = "http://127.0.0.1:8265"
PROMETHEUS = "127.0.0.1:9090"
SERIES = ("telamon_replay_appended_rows_total", "telamon_learner_updates_total")
"""That must have counted something."""

FETCH = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""

Value = TypeVar("Value")


class Failed(Exception):
    """Something was not as it should be."""


@contextmanager
def step(name: str) -> Iterator[dict[str, Any]]:
    """Times a step; what is put into the dict is printed with it."""
    facts: dict[str, Any] = {}
    began = time.monotonic()
    yield facts
    print(json.dumps({"step": name, "seconds": round(time.monotonic() - began, 1), **facts}), flush=True)


def until(look: Callable[[], Value | None], seconds: float, what: str) -> Value:
    """The first answer that is not None."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise Failed(f"no {what} within {seconds:g} s")
        time.sleep(0.5)
    return found


class Shell:
    """Somebody who is logged in everywhere: runs commands and keeps what they say."""

    def __init__(self, hosts: Hosts, logs: Path) -> None:
        self._hosts, self._logs = hosts, logs
        bin_folder = str(Path(sys.prefix) / "bin")
        self._env = [
            f"PATH={bin_folder}:/usr/sbin:/usr/bin:/sbin:/bin", "RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0",
            "RAY_UP_enable_autoscaler_v2=0", f"RAY_API_SERVER_ADDRESS={DASHBOARD}",
        ]  # fmt: skip

    def begin(self, name: str, *words: str, host: str = "client") -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                self._hosts.command(host, ["env", *self._env, *words]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, name: str, *words: str, seconds: float = 600.0) -> str:
        """What it printed. Raises Failed if it does not end well."""
        process = self.begin(name, *words)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{name} has not ended after {seconds:g} s") from error
        text = (self._logs / f"{name}.log").read_text(errors="replace")
        if code != 0:
            raise Failed(f"{name} ended with {code}")
        return text

    def get(self, url: str, host: str = "client") -> Any:
        """A JSON document; None while nobody answers."""
        token = self._hosts.folder / "client/root/.ray/auth_token"
        words = self._hosts.command(host, [sys.executable, "-c", FETCH, url, token.read_text()])
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None


def build_wheel(folder: Path) -> None:
    """dist/ below `folder`, from a copy of the sources: building leaves traces beside them."""
    source = folder / "source"
    names = ["pyproject.toml", "README.md", "LICENSE", "NOTICE"]
    packages = ["telamon", "replay_server", "actors", "learner", "deploy"]
    source.mkdir()
    for name in names:
        shutil.copy(ROOT / name, source / name)
    for name in packages:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist", source], check=True
    )


def cluster_file(local: Mapping[str, Any], hosts: Hosts) -> dict[str, Any]:
    """deploy/ray/local.yaml for these hosts."""
    config = dict(local)
    config["provider"] |= {"head_ip": hosts.addresses[HEAD], "worker_ips": [hosts.addresses[WORKER]]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.folder / "key")}
    config["setup_commands"] = [
        f"mkdir -p ~/telamon && ln -sfn {sys.prefix} ~/telamon/venv",
        f"~/telamon/venv/bin/pip install --quiet --no-index --no-deps --target ~/telamon/site ~/telamon/{WHEEL}",
        # Ray would start its workers at nice 15, which is last of all on a machine that does other things too.
        "echo 'export PYTHONPATH=$HOME/telamon/site RAY_worker_niceness=0' >> ~/.bashrc",
        config["setup_commands"][-1],  # PATH
    ]
    config["head_setup_commands"] = []
    for host, key in ((HEAD, "head_start_ray_commands"), (WORKER, "worker_start_ray_commands")):
        bounds = f"ray start --num-cpus={CPUS[host]} --object-store-memory=300000000 --"
        config[key] = [command.replace("ray start --", bounds) for command in config[key]]
    return config


def prometheus_file() -> dict[str, Any]:
    """For a Prometheus on the head, where the run and Ray write down what there is to scrape."""
    jobs = {"telamon": f"{RUN}/prometheus/targets.json", "ray": "/tmp/ray/prom_metrics_service_discovery.json"}
    return {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": name, "file_sd_configs": [{"files": [path], "refresh_interval": "1s"}]}
            for name, path in jobs.items()
        ],
    }


def targets(shell: Shell) -> dict[tuple[str, str], tuple[str, str]] | None:
    """(job, part or address) -> (address of its host, health)."""
    found = shell.get(f"http://{PROMETHEUS}/api/v1/targets?state=active", HEAD)
    if found is None:
        return None
    listed = [(t["labels"], t["health"]) for t in found["data"]["activeTargets"]]
    return {
        (labels["job"], labels.get("part", labels["instance"])): (labels["instance"].rpartition(":")[0], health)
        for labels, health in listed
    }


def check_targets(shell: Shell, hosts: Hosts) -> dict[str, int] | None:
    """How many are up, by job, once all that must be are; None before."""
    found = targets(shell) or {}
    ours = {part: (hosts.addresses[host], "up") for part, host in PARTS.items()}
    if any(found.get(("telamon", part)) != expected for part, expected in ours.items()):
        return None
    rays = {place for (job, _), place in found.items() if job == "ray"}
    if not {(address, "up") for address in hosts.addresses.values()} <= rays:
        return None
    ups = [job for (job, _), (_, health) in found.items() if health == "up"]
    return {job: ups.count(job) for job in sorted(set(ups))}


def series(shell: Shell) -> dict[str, float] | None:
    """The sums of SERIES, once all are above 0."""
    sums = {}
    for name in SERIES:
        found = shell.get(f"http://{PROMETHEUS}/api/v1/query?query=sum({name})", HEAD)
        values = [] if found is None else found["data"]["result"]
        sums[name] = float(values[0]["value"][1]) if values else 0.0
    return sums if min(sums.values()) > 0 else None


def trial(folder: Path, stack: ExitStack) -> None:
    logs = folder / "logs"
    logs.mkdir()
    with step("wheel"):
        build_wheel(folder)
        shutil.copy(ROOT / "constraints.txt", folder)
    with step("hosts") as facts:
        hosts = stack.enter_context(
            Hosts(folder, [HEAD, WORKER], kept_paths([Path(sys.prefix), Path(sys.base_prefix)]))
        )
        facts |= hosts.addresses
    shell = Shell(hosts, logs)
    local = yaml.safe_load((ROOT / "deploy" / "ray" / "local.yaml").read_text())
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster_file(local, hosts), width=10_000))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus_file()))

    shell.run("token", "ray", "get-auth-token", "--generate")
    with step("ray up"):
        shell.run("up", "ray", "up", "--yes", "--no-config-cache", "cluster.yaml")
    with step("worker joins") as facts:
        count = "import ray; ray.init(log_to_driver=False); print('nodes', sum(n['Alive'] for n in ray.nodes()))"
        wait = f'until python -c "{count}" | tee /dev/stderr | grep -q "nodes 2"; do sleep 1; done'
        shell.run("nodes", "ray", "exec", "cluster.yaml", wait, seconds=300)
        facts["nodes"] = 2
    with step("way to the dashboard"):
        shell.begin("dashboard", "ray", "dashboard", "cluster.yaml")
        until(lambda: shell.get(f"{DASHBOARD}/api/version") or None, 120, "dashboard")

    began = time.monotonic()
    job = shell.begin("job", "ray", "job", "submit", "--", *LAUNCH)
    run = folder / HEAD / RUN.lstrip("/")

    def while_it_runs(look: Callable[[], Value | None]) -> Callable[[], Value | None]:
        def looks() -> Value | None:
            if job.poll() is not None:
                raise Failed(f"the job has ended with {job.returncode}, too early")
            return look()

        return looks

    with step("job submit to targets"):
        until(while_it_runs(lambda: (run / "prometheus/targets.json").exists() or None), 300, "targets.json")
    with step("prometheus sees both hosts") as facts:
        shell.begin(
            "prometheus", shutil.which("prometheus") or "prometheus", "--config.file=prometheus.yml",
            f"--web.listen-address={PROMETHEUS}", "--storage.tsdb.path=/tmp/tsdb",
            host=HEAD,
        )  # fmt: skip
        facts["up"] = until(while_it_runs(lambda: check_targets(shell, hosts)), 300, "all targets up")
    with step("series have counted") as facts:
        facts |= until(while_it_runs(lambda: series(shell)), 900, "rows and updates in Prometheus")
    with step("job ends") as facts:
        facts["code"] = code = job.wait(1800)
        if code != 0:
            raise Failed(f"the job has ended with {code}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        facts["job_seconds"] = round(time.monotonic() - began, 1)
        facts["env_steps"] = max(line["step"] for line in lines)
        facts["evaluations"] = [round(line["eval/return"], 1) for line in lines if "eval/return" in line]
        facts["updates"] = max(line.get("counters/updates", 0) for line in lines)
        facts["train_ratio"] = [line["cluster/train_ratio"] for line in lines if "cluster/train_ratio" in line][-1:]
        if not facts["evaluations"] or not facts["updates"]:
            raise Failed(f"the run has neither learned nor evaluated: {facts}")
    with step("ray down") as facts:
        shell.run("down", "ray", "down", "--yes", "cluster.yaml")
        facts["left_on_head"] = left = [args for args in hosts.processes(HEAD) if "ray" in args]
        if left:
            raise Failed(f"ray down has left on the head: {left}")


def say_logs(folder: Path) -> None:
    """The ends of what everybody said, to stderr."""
    found = [*folder.glob("logs/*.log"), *folder.glob(f"{HEAD}/{RUN.lstrip('/')}/logs/*.log"), *folder.glob("*/log")]
    for path in found:
        lines = path.read_text(errors="replace").splitlines()[-40:]
        print(f"--- {path.relative_to(folder)}", *lines, sep="\n", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.parse_args(arguments)
    if os.geteuid() != 0:
        sys.exit("namespaces need root")
    if missing := [*missing_tools(), *([] if shutil.which("prometheus") else ["prometheus"])]:
        sys.exit(f"not installed: {', '.join(missing)}")
    # Hosts have a /tmp and a /root of their own, so this is elsewhere. Sockets want a short path.
    folder = Path(tempfile.mkdtemp(prefix="ray-up-", dir="/var/tmp"))
    folder.chmod(0o755)
    print(json.dumps({"bench": "ray_up", "cpus": os.cpu_count(), "load": os.getloadavg()[0]}), flush=True)
    try:
        with step("all"), ExitStack() as stack:
            try:
                trial(folder, stack)
            except BaseException:
                say_logs(folder)
                raise
    except (Failed, subprocess.SubprocessError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
