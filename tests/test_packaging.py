"""What is shipped: the listed packages, the pinned versions, and a wheel that works away from the checkout."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
TOP_LEVEL = sorted({name.partition(".")[0] for name in PACKAGES})

canonical = lambda name: re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Distribution -> exact version in constraints.txt that holds for this Python."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found = {}
    for requirement in map(Requirement, filter(None, lines)):
        if requirement.marker is None or requirement.marker.evaluate():
            (pin,) = requirement.specifier
            assert pin.operator == "=="
            assert requirement.name not in found, f"{requirement.name} is pinned twice"
            found[requirement.name] = pin.version
    return found


def test_every_package_is_listed():
    # A package that is not listed works from the checkout and is missing from the wheel.
    found = {".".join(p.parent.relative_to(ROOT).parts) for top in TOP_LEVEL for p in (ROOT / top).rglob("__init__.py")}
    assert sorted(PACKAGES) == sorted(found)


def test_every_requirement_is_pinned_inside_its_range():
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *(r for group in extras.values() for r in group)]
    pinned = pins()
    for requirement in map(Requirement, declared):
        version = pinned.get(canonical(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"constraints.txt pins {version}, not {requirement}"


def test_pins_are_closed():
    # What a pinned distribution that is installed here asks for is pinned too: nothing moves by itself.
    pinned = pins()
    installed = {canonical(d.name): d for d in importlib.metadata.distributions()}
    for name in pinned.keys() & installed.keys():
        for requirement in map(Requirement, installed[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonical(requirement.name) in pinned, f"{name} needs {requirement.name}, which has no pin"


@pytest.mark.slow
def test_wheel_works_away_from_the_checkout(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    site = tmp_path / "site"
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("telamon-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)

    shipped = {p.name for p in site.iterdir()} - {"bin", "__pycache__"}
    assert sorted(p for p in shipped if not p.endswith(".dist-info")) == TOP_LEVEL
    curves = {p.name for p in (ROOT / "deploy" / "curves").iterdir()}
    assert curves
    assert {p.name for p in (site / "deploy" / "curves").iterdir()} == curves

    code = """
import importlib, importlib.metadata, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    print(importlib.import_module(name).__file__)
entry, = importlib.metadata.distribution("telamon").entry_points
print(sys.modules[entry.load().__module__].__file__)
"""
    run = [sys.executable, "-c", code, site, *PACKAGES]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert len(files) == len(PACKAGES) + 1
    assert [f for f in files if not f.startswith(str(site))] == []
