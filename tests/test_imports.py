"""What each part loads (docs/design.md, "Who may import whom"). Import-linter sees our imports, these tests all."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import replay_server
import telamon.agents

ROOT = Path(__file__).parents[1]
PACKAGES = ("telamon", "replay_server", "actors", "learner", "deploy")

BARE = ("jax", "flax", "optax", "numpy", "ml_dtypes")
"""All that a bare accelerator machine offers, with what these bring along."""


def modules(package) -> list[str]:
    return [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


def python(code: str, *arguments: str) -> str:
    """Standard output of `code` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def distributions_behind(names: tuple[str, ...]) -> set[str]:
    """The distributions that installing `names` brings, themselves included."""
    found: set[tuple[str, str]] = set()
    todo = [(canonical(name), "") for name in names]  # (distribution, one of its extras or "")
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(canonical(requirement.name), e) for e in ("", *requirement.extras)]
    return {name for name, _ in found}


@pytest.mark.parametrize("module", [*modules(replay_server), "telamon.data", "telamon.replay"])
def test_replay_loads_neither_jax_nor_ray(module):
    loaded = python("import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)", module)
    assert module in loaded.split()
    assert not {"jax", "jaxlib", "ray"} & set(loaded.split())


WITHOUT = """
import importlib, importlib.abc, sys
refused, modules = (a.split(",") for a in sys.argv[1:])

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not installed on a bare machine", name=name)

sys.meta_path.insert(0, Refuse())
for module in modules:
    importlib.import_module(module)
"""


def import_on_a_bare_machine(*names: str) -> None:
    """Imports modules in a process without the distributions that this one has and a bare machine lacks."""
    bare = distributions_behind(BARE)
    owners = importlib.metadata.packages_distributions()
    refused = {m for m, owned_by in owners.items() if not bare & set(map(canonical, owned_by))}
    python(WITHOUT, ",".join((refused | set(PACKAGES)) - {"telamon", "learner"}), ",".join(names))


def test_agents_import_on_a_bare_machine():
    # planned: telamon.device_replay
    shared = ("telamon.keys", "telamon.distributional", "telamon.normalizers", "telamon.networks")
    import_on_a_bare_machine(*shared, *modules(telamon.agents), "learner.mesh", "learner.update")


def test_a_bare_machine_lacks_the_rest():
    # The test above proves nothing unless what it takes away is really gone.
    with pytest.raises(AssertionError, match="tyro is not installed on a bare machine"):
        import_on_a_bare_machine("tyro")


def test_every_init_is_empty():
    inits = [p for package in PACKAGES for p in (ROOT / package).rglob("__init__.py")]
    assert len(inits) >= len(PACKAGES)
    assert [str(p.relative_to(ROOT)) for p in inits if p.stat().st_size] == []


def test_proto_is_no_package():
    # Ray's dependencies install a package of this name (proto-plus), which ours would shadow.
    assert list(ROOT.glob("proto/**/__init__.py")) == []
