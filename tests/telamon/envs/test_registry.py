"""Names: what they load, what they load no sooner than needed, and what is said when they name nothing."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telamon.envs.base import EnvError
from telamon.envs.registry import BACKENDS, find_callable, list_envs, make_env

LIBRARIES = {"dm_control", "mujoco", "gymnasium", "ale_py", "crafter", "gymnax", "envpool"}


def test_no_environment_library_is_loaded_before_it_is_asked_for() -> None:
    code = (
        "import sys; import telamon.envs.registry as r; r.make_env('counting:continuous', 1, 0);"
        f"print([m for m in {sorted(LIBRARIES)} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("counting:continous", "^there is no environment 'counting:continous'; did you mean counting:continuous"),
        ("counting:xyz", "^there is no environment 'counting:xyz'; `telamon envs` lists what there is$"),
        ("discrete", "^'discrete' is neither BACKEND:NAME nor .*; did you mean counting:discrete"),
        ("cuonting:discrete", "^'cuonting:discrete' is neither BACKEND:NAME nor .*did you mean counting:discrete"),
        ("no_such_module:make_env", "^'no_such_module:make_env' is neither BACKEND:NAME nor an importable"),
        ("not a module:make", "^'not a module:make' is neither"),
        ("no/such/file.py:make_env", "^no/such/file.py:make_env: there is no file no/such/file.py in /"),
        (
            "json:no_such",
            "^json:no_such: json has no callable 'no_such'; write a function that returns a gymnasium.Env",
        ),
    ],
)
def test_what_names_nothing_is_refused_in_one_sentence(env_id: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_env(env_id, 1, 0)


@pytest.mark.parametrize("prefix", [p for p, b in BACKENDS.items() if b.extra])
def test_a_missing_library_is_refused_with_the_extra(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS[prefix]
    _without_libraries(monkeypatch)
    message = rf"^{backend.example}: the package \w+ is not installed; run: pip install 'telamon\[{backend.extra}\]'$"
    with pytest.raises(EnvError, match=message):
        make_env(backend.example, 1, 0)


def test_missing_libraries_are_listed_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_libraries(monkeypatch)
    rows = {r.prefix: r for r in list_envs()}
    assert rows["counting"].missing is None
    assert rows["counting"].ids == ("counting:continuous", "counting:discrete", "counting:dict")
    assert "pip install 'telamon[dmc]'" in (rows["dmc"].missing or "")
    assert rows["dmc"].ids == ()


def _without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the core alone."""
    adapters = {b.module for b in BACKENDS.values() if b.extra}
    for name in list(sys.modules):
        if name.partition(".")[0] in LIBRARIES or name in adapters:
            monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_what_is_installed_is_listed() -> None:
    pytest.importorskip("dm_control", reason="dm_control is not installed")
    rows = {r.prefix: r for r in list_envs()}
    assert "dmc:cartpole-swingup" in rows["dmc"].ids
    for row in rows.values():
        assert row.missing or row.example in row.ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"action_repeat": 0}, "env.action_repeat is 0; it must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_env("counting:continuous", **{"num_envs": 1, "seed": 0, **options})


@pytest.mark.parametrize(
    ("env_id", "library", "message"),
    [
        (
            "counting:dict",
            "numpy",
            "it takes no option 'nosuch', only lengths, terminate_every, action_size, ",
        ),
        ("atari:pong", "ale_py", "it takes no option 'nosuch', only size, gray, sticky, actions, noops, limit, "),
        ("crafter:reward", "crafter", "it takes no option 'nosuch', only size"),
        ("dmc:walker-walk", "dm_control", "walk.* got an unexpected keyword argument 'nosuch'"),
        ("dmcpixels:walker-walk", "dm_control", "walk.* got an unexpected keyword argument 'nosuch'"),
        ("gym:Pendulum-v1", "gymnasium", "PendulumEnv.* got an unexpected keyword argument 'nosuch'"),
        ("gymnax:Pendulum-v1", "gymnax", "it takes no option 'nosuch', only image, size, max_steps_in_episode, "),
        ("envpool:Pendulum-v1", "envpool", ".* got an unexpected keyword argument 'nosuch'"),
        ("examples.point_mass_env:make_env", "gymnasium", ".* got an unexpected keyword argument 'nosuch'"),
    ],
)
def test_an_option_that_nobody_takes_is_refused(env_id: str, library: str, message: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    with pytest.raises(EnvError, match=f"^{env_id}:? {message}"):
        make_env(env_id, 1, 0, nosuch=1)


MINE = """
from dataclasses import dataclass
import gymnasium, numpy as np

@dataclass
class Size:
    n: int = 2

def make_env(n=Size().n):
    return gymnasium.wrappers.TimeLimit(gymnasium.make("Pendulum-v1").unwrapped, n)
"""


def test_ones_own_callable_by_module_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    (tmp_path / "sub").mkdir()
    (tmp_path / "telamon_test_mine.py").write_text(MINE)
    (tmp_path / "sub" / "json.py").write_text(MINE)  # named like a module that is in use
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for env_id in ("telamon_test_mine:make_env", "sub/json.py:make_env"):
        env = make_env(env_id, 2, 0, n=3)
        assert (env.spec.id, env.spec.episode_length) == (env_id, 3)
        env.reset()
        rows = [env.step(np.zeros((2, 1), np.float32)) for _ in range(3)]
        assert rows[-1].is_last.all()
    import json

    assert not hasattr(json, "make_env")


def test_a_module_that_lacks_its_own_import_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "telamon_test_needs.py").write_text("import no_such_simulator")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(EnvError, match="telamon_test_needs imports no_such_simulator, which is not installed"):
        find_callable("telamon_test_needs:make_env")
