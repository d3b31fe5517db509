"""The cluster files are accepted by Ray's own checks; they and the runbook name what the rest of the repository has."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from ray._private.accelerators import TPUAcceleratorManager
from ray.autoscaler._private.util import prepare_config, validate_config

from deploy.commands import RunOptions, Status
from deploy.config import ClusterConfig, RunConfig, flatten

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))
VENV = "~/telamon/venv/bin/"


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def prepared(path: Path) -> dict[str, Any]:
    return prepare_config(read(path))


def commands(config: dict[str, Any]) -> list[str]:
    return [c for key, group in config.items() if key.endswith("_commands") for c in group]


def requirements(config: dict[str, Any]) -> list[Requirement]:
    """What its pip commands install, a wheel of ours by the name telamon."""
    words = [w for c in commands(config) if f"{VENV}pip install" in c for w in shlex.split(c)]
    named = [re.sub(r"^(\$HOME|~)/telamon/telamon-[^\[]*\.whl", "telamon", w.rstrip(";")) for w in words]
    return [Requirement(w) for w in named if re.match(r"[a-z]", w) and w not in ("pip", "install", "test")]


def test_there_is_one_per_kind_of_cluster():
    assert [path.stem for path in FILES] == ["aws", "gcp", "local"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_ray_accepts(path: Path):
    validate_config(prepared(path))


def test_ray_refuses_what_it_does_not_know():
    # so that the test above means something
    with pytest.raises(Exception, match="file_mount_sync"):
        validate_config({**prepared(FILES[0]), "file_mount_sync": True})


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_shell_commands_parse(path: Path):
    for command in commands(read(path)):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_wheel_is_the_one_that_pip_builds(path: Path):
    wheel = f"telamon-{PROJECT['version']}-py3-none-any.whl"
    config = read(path)
    assert config["file_mounts"][f"~/telamon/{wheel}"] == f"dist/{wheel}"
    assert set(re.findall(r"telamon-[^/\[\s\"]*\.whl", path.read_text())) == {wheel}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_extras_and_versions_are_those_of_the_project(path: Path):
    asked = requirements(read(path))
    extras = {extra for r in asked if r.name == "telamon" for extra in r.extras}
    assert {"service", "cluster"} <= extras <= set(PROJECT["optional-dependencies"])
    pins = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    (ray,) = [r for r in asked if r.name == "ray"]
    assert str(ray.specifier) == f"=={pins['ray']}"
    # `ray job submit`, the dashboard and the metrics of Ray's own
    assert ray.extras == {"default"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_node_asks_for_the_token(path: Path):
    config = prepared(path)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for role in ("head", "worker"):
        (start,) = [c for c in config[f"{role}_start_ray_commands"] if "ray start" in c]
        assert "RAY_AUTH_MODE=token" in start
        assert "--dashboard-host" not in start  # loopback


@pytest.mark.parametrize(("name", "accelerator"), [("aws", "GPU"), ("gcp", "TPU")])
def test_one_kind_of_node_learns_and_any_number_act(name: str, accelerator: str):
    config = prepared(ROOT / "deploy" / "ray" / f"{name}.yaml")
    kinds = config["available_node_types"]
    assert [kind for kind, node in kinds.items() if accelerator in node["resources"]] == ["learner"]
    actors = kinds["actors"]
    assert (actors["min_workers"], list(actors["resources"])) == (0, ["CPU"])
    assert config["max_workers"] == sum(node["max_workers"] for node in kinds.values())


def test_learner_on_gcp_is_one_tpu_machine_with_all_its_chips():
    learner = prepared(ROOT / "deploy" / "ray" / "gcp.yaml")["available_node_types"]["learner"]
    kind = learner["node_config"]["acceleratorType"]
    assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(kind)
    assert kind == f"v6e-{learner['resources']['TPU']}"  # of v6e, the number is of chips
    assert learner["resources"]["TPU"] <= 8  # chips of one machine


def test_local_turns_off_the_autoscaler_that_does_not_start_its_workers():
    local = read(ROOT / "deploy" / "ray" / "local.yaml")
    (start,) = [c for c in local["head_start_ray_commands"] if "ray start" in c]
    assert "RAY_enable_autoscaler_v2=0" in start


RUNBOOK = ROOT / "deploy" / "runbook.md"
FOREIGN = {
    # of ray, pip, docker, timeout and py-spy
    "follow", "foreground", "generate", "no-deps", "no-restart", "no-wait", "object-store-memory", "pid", "resources",
    "shm-size", "submission-id", "wheel-dir", "working-dir", "yes",
}  # fmt: skip


def test_runbook_names_options_that_exist():
    named = set(re.findall(r"(?<![\w-])--([a-z][\w.-]*)", RUNBOOK.read_text()))
    configs = RunOptions(), Status(Path()), ClusterConfig(), RunConfig("tdmpc2", "any:env")
    own = {key for config in configs for key in flatten(asdict(config))}
    assert named - {name.replace("_", "-") for name in own} == FOREIGN
    assert {"actors", "replay-shards", "insecure", "learner-gpus", "resume", "run-dir"} <= named


def test_runbook_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", RUNBOOK.read_text()):
        assert (RUNBOOK.parent / target).exists(), f"the runbook links to {target}"
