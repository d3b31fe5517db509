"""From an environment's name to a batch of it. Loads an environment library only when one of its names is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from telamon.envs.base import BatchedEnv, EnvError, OnError, UnknownEnv


@dataclass(frozen=True)
class Backend:
    """A module with `make(name, num_envs, seed, *, action_repeat, on_error, **kwargs)` and `task_names()`."""

    module: str
    extra: str | None
    """The pip extra that installs the library it needs; None for none."""
    example: str


BACKENDS = {
    "dmc": Backend("telamon.envs.dmc", "dmc", "dmc:cartpole-swingup"),
    "dmcpixels": Backend("telamon.envs.dmcpixels", "dmc", "dmcpixels:walker-walk"),
    "atari": Backend("telamon.envs.atari", "atari", "atari:pong"),
    "gym": Backend("telamon.envs.gym", "gym", "gym:Pendulum-v1"),
    "crafter": Backend("telamon.envs.crafter", "crafter", "crafter:reward"),
    "gymnax": Backend("telamon.envs.jax", "jaxenvs", "gymnax:Pendulum-v1"),
    "envpool": Backend("telamon.envs.envpool", "envpool", "envpool:CartpoleSwingup-v1"),
    "counting": Backend("telamon.envs.counting", None, "counting:continuous"),
}


MAKE_OPTIONS = ("action_repeat", "on_error")
"""Of every backend, and not options of the environment."""


def make_env(
    env_id: str,
    num_envs: int,
    seed: int,
    *,
    action_repeat: int | None = None,
    on_error: OnError = "stop",
    **kwargs: Any,
) -> BatchedEnv:
    """A batch of `num_envs` environments that advance in lockstep.

    env_id: BACKEND:NAME, or PACKAGE.MODULE:CALLABLE or PATH.py:CALLABLE for a callable that returns a gymnasium.Env.
    seed: each environment's own seed follows from it and the environment's index.
    action_repeat: None for the backend's usual one (2 for dm_control tasks, 4 for `atari`, else 1).
    kwargs: options, whatever the backend or the environment itself takes.

    Raises EnvError for an unknown name, a library that is not installed, or an environment that cannot work.
    """
    for name, value, low in (("num_envs", num_envs, 1), ("seed", seed, 0), ("env.action_repeat", action_repeat, 1)):
        if value is not None and value < low:
            raise ValueError(f"{name} is {value}; it must be at least {low}")
    prefix, _, name = env_id.partition(":")
    options = {"action_repeat": action_repeat, "on_error": on_error, **kwargs}
    try:
        if prefix in BACKENDS:
            make = load(prefix).make
            _refuse_unknown(make, kwargs)
            return make(name, num_envs, seed, **options)
        factory = find_callable(env_id)
        return load("gym").make_own(factory, env_id, num_envs, seed, **options)
    except UnknownEnv as error:
        raise EnvError(_unknown(env_id)) from error
    except EnvError as error:
        if env_id in str(error):
            raise
        raise EnvError(f"{env_id}: {error}") from error


def _refuse_unknown(make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuses an option that a backend does not take; one that passes the rest on says so itself."""
    taken = inspect.signature(make).parameters
    unknown = next((name for name in options if name not in taken), None)
    if unknown is not None and all(p.kind is not p.VAR_KEYWORD for p in taken.values()):
        own = [name for name, p in taken.items() if p.kind is p.KEYWORD_ONLY and name not in MAKE_OPTIONS]
        raise EnvError(f"it takes no option {unknown!r}, only {', '.join(own)}")


def load(prefix: str) -> ModuleType:
    """The module of a backend. Raises EnvError naming the pip extra where its library is missing."""
    backend = BACKENDS[prefix]
    try:
        return importlib.import_module(backend.module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("telamon"):
            raise
        raise EnvError(
            f"the package {error.name} is not installed; run: pip install 'telamon[{backend.extra}]'"
        ) from error


def find_callable(env_id: str) -> Callable[..., Any]:
    """The callable that PACKAGE.MODULE:CALLABLE or PATH.py:CALLABLE names. Raises EnvError; UnknownEnv for neither.

    Modules are looked for in the working directory too, as `python -m` does.
    """
    target, _, attribute = env_id.rpartition(":")
    is_path = target.endswith(".py")
    if not attribute or not (is_path or all(part.isidentifier() for part in target.split("."))):
        raise UnknownEnv(env_id)
    module = _import_file(Path(target)) if is_path else _import_module(target, env_id)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise EnvError(f"{target} has no callable {attribute!r}; write a function that returns a gymnasium.Env")
    return factory


def _import_file(path: Path) -> ModuleType:
    name = f"_env_file_{path.stem}"  # not the stem alone: a file may be called like a module that is in use
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise EnvError(f"there is no file {path} in {Path.cwd()}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    spec.loader.exec_module(module)
    return module


def _import_module(name: str, env_id: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise EnvError(f"{name} imports {error.name}, which is not installed") from error
        raise UnknownEnv(env_id) from error


def _unknown(env_id: str) -> str:
    """One sentence with near names for an id that names nothing."""
    prefix, colon, name = env_id.partition(":")
    if prefix in BACKENDS:
        names = {n.lower(): n for n in load(prefix).task_names()}
        near = [f"{prefix}:{names[n]}" for n in difflib.get_close_matches(name.lower(), names, 3, 0.5)]
        told = f"there is no environment {env_id!r}"
    else:
        wanted = name if colon else prefix
        near = [i for row in list_envs() for i in row.ids if i.partition(":")[2] == wanted]
        told = f"{env_id!r} is neither BACKEND:NAME nor an importable PACKAGE.MODULE:CALLABLE"
    return f"{told}; " + (f"did you mean {', '.join(near)}?" if near else "`telamon envs` lists what there is")


@dataclass(frozen=True)
class Listing:
    """One backend, for `telamon envs`."""

    prefix: str
    missing: str | None
    """What to do where the backend's library is not installed; None where it is."""
    example: str
    ids: tuple[str, ...]
    """Every id of the backend that can be listed; empty where the library is missing."""


def list_envs() -> list[Listing]:
    """All backends and their environments. Loads every installed environment library."""
    rows = []
    for prefix, backend in BACKENDS.items():
        try:
            ids, missing = tuple(f"{prefix}:{n}" for n in load(prefix).task_names()), None
        except EnvError as error:
            ids, missing = (), str(error)
        rows.append(Listing(prefix, missing, backend.example, ids))
    return rows
