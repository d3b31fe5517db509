"""docs/metrics.md is what the pages show, and whoever asks for a metric asks for one that there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import Gauge, generate_latest

from deploy import catalog
from deploy.discovery import ROLES
from telamon.telemetry import pages
from tests.waiting import SECONDS

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\w:])telamon_\w+(?![\w:])")
"""Of a metric, or of what its name begins with; names of recording rules have a colon."""
ASKING = sorted(
    path
    for folder in ("docs", "deploy/prometheus", "deploy/grafana", "deploy/runbook.md", "README.md")
    for path in ([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*"))
    if path.suffix in (".md", ".yml", ".yaml", ".json")
)
"""Files whose readers, or who themselves, ask for metrics."""
EVERY = [(role, family) for role, found in catalog.catalogue().items() for family in found]


def test_the_document_is_made_anew():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == catalog.render(), "run python -m deploy.catalog > docs/metrics.md"


def test_every_role_has_a_page():
    assert {role for role, _ in EVERY} == {*ROLES} - {"train"}  # which is all of them on one page


@pytest.mark.parametrize(("role", "family"), EVERY, ids=[family.name for _, family in EVERY])
def test_a_family_says_what_it_is(role, family):
    assert family.name.startswith(f"telamon_{role}_")
    assert family.samples, "no sample: its labels are unknown"
    assert family.help.endswith(".")
    assert family.unit
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert "telamon" not in family.labels
    assert not {"run", "role", "part", "instance", "job"} & family.labels.keys(), "these are labels of the target"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus, which CI installs")
@pytest.mark.parametrize("role", catalog.SAMPLES)
def test_prometheus_has_nothing_against_a_page(role):
    registry = pages.new_registry()
    catalog.SAMPLES[role](registry)
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")


def test_no_two_pages_share_a_name():
    names = [family.name for _, family in EVERY]
    assert len(names) == len(set(names))


def test_a_name_without_a_unit_is_refused():
    (family,) = catalog.families(lambda registry: Gauge("telamon_learner_speed", "Of what.", registry=registry))
    with pytest.raises(ValueError, match=r"telamon_learner_speed ends in 'speed', which is no unit"):
        assert family.unit


@pytest.mark.parametrize("path", ASKING, ids=[str(path.relative_to(ROOT)) for path in ASKING])
def test_what_is_asked_for_exists(path):
    known = catalog.names() | {family.name for _, family in EVERY}
    asked = set(NAME.findall(path.read_text()))
    unknown = {
        name for name in asked - known if not (name.endswith("_") and any(other.startswith(name) for other in known))
    }
    assert not unknown
