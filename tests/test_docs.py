"""What the documents show is what the code does: their code blocks are run, their examples are the files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from deploy import local
from deploy.config import CheckpointConfig, EvalConfig, RunConfig
from telamon.agents.tdmpc2.config import TDMPC2Config

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_readme_shows_the_example_environment_as_it_is():
    assert (ROOT / "examples/point_mass_env.py").read_text().strip() in [
        b.strip() for b in blocks("README.md", "python")
    ]


def test_readme_shows_the_command_of_make_train():
    command = re.search(r"^TRAIN \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command is not None
    assert command[1].removeprefix(".venv/bin/") in [b.strip() for b in blocks("README.md", "")]


@pytest.mark.parametrize(
    "document",
    ["README.md", "deploy/runbook.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))],
)
def test_links_lead_somewhere(document: str):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"


def test_guide_loads_a_checkpoint_and_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    agent = TDMPC2Config(
        enc_dim=8, mlp_dim=8, latent_dim=8, num_samples=8, num_elites=4, num_pi_trajs=2, iterations=2, batch_size=4,
        seed_steps=100,
    )  # fmt: skip
    config = RunConfig(
        "tdmpc2", str(ROOT / "examples/point_mass_env.py:make_env"), steps=105, agent=agent,
        eval=EvalConfig(every=0), checkpoint=CheckpointConfig(every=1000),
    )  # fmt: skip
    local.train(config, tmp_path / "runs/my-run", resume=False, console=Console(quiet=True))
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in blocks("docs/guide.md", "python") if "load_agent" in b]
    assert len([line for line in block.splitlines() if line.strip()]) <= 12  # the guide promises few lines
    names: dict = {}
    exec(block, names)
    assert names["action"].shape == (1, 2)
    assert np.isfinite(names["action"]).all()
