"""A golden file (tests/golden/README.md): its arrays, what has been read of them, and the agent that it describes."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.agents.tdmpc2.networks import Params
from telamon.data import ActionSpec, ArraySpec, EnvSpec
from telamon.interop.tdmpc2 import from_reference

OBS = "obs"
"""Key of the one observation vector of a golden file's environment."""

IMMATERIAL = {"compile", "steps", "num_channels", "multitask", "task_dim"}
"""Settings of the reference that no single-task number with vector observations depends on."""


jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False})
"""`jax.jit` that takes a third of the time to compile, by far the largest part of a check."""


class Refused(Exception):
    """A file that cannot be checked; the message is one plain sentence."""


class Fixture(Mapping[str, np.ndarray]):
    """Flat arrays by key. Remembers which were read, so that nothing in a file goes unmentioned."""

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray]):
        self.path = path
        self.read: set[str] = set()
        self._arrays = dict(arrays)

    def __getitem__(self, key: str) -> np.ndarray:
        if key not in self._arrays:
            raise Refused(f"{self.path} holds no {key!r}, without which its other arrays cannot be checked")
        self.read.add(key)
        return self._arrays[key]

    def get(self, key: str, default: object = None) -> object:
        """As of any Mapping, except that a missing key is no refusal here."""
        return self[key] if key in self else default

    def __contains__(self, key: object) -> bool:
        return key in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """{rest of the key: array} of all keys that begin with `prefix`."""
        return {key.removeprefix(prefix): self[key] for key in self if key.startswith(prefix)}

    def numbered(self, pattern: str) -> list[str]:
        """Prefixes such as `u1/`, `u2/`, in numerical order; `pattern` has one group, the number."""
        found = {int(m[1]): m[0] for m in (re.match(pattern, key) for key in self) if m}
        return [found[i] for i in sorted(found)]

    def params(self, prefix: str) -> Params:
        """Our tree of the reference's parameters under `prefix`."""
        named = self.under(prefix)
        if not named:
            raise Refused(f"{self.path} holds nothing under {prefix!r}, without which the rest cannot be checked")
        try:
            return from_reference(named)
        except ValueError as error:
            raise Refused(f"{self.path}: {error}") from error

    @property
    def unread(self) -> dict[str, int]:
        """{group: number of arrays} of all that was not read."""
        groups: dict[str, int] = {}
        for key in self._arrays.keys() - self.read:
            depth = 2 if re.match(r"(cfg|u\d+|c\d+|config|data|in|out|inter)/", key) else 1
            group = "/".join(key.split("/")[:depth]) + ("/*" if key.count("/") >= depth else "")
            groups[group] = groups.get(group, 0) + 1
        return dict(sorted(groups.items()))


def load(path: Path) -> Fixture:
    """All arrays of a file, with those of NAME_opt.npz where that lies beside it.

    Raises Refused for what is no .npz file of numbers.
    """
    beside = path.with_name(f"{path.stem}_opt.npz")
    return Fixture(path, arrays(path) | (arrays(beside) if beside.is_file() else {}))


def arrays(path: Path) -> dict[str, np.ndarray]:
    """{key: array}. Raises Refused for what is no .npz file of numbers."""
    if not path.is_file():
        raise Refused(f"{path} does not exist or is no file")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (AttributeError, EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise Refused(f"{path} is no .npz file of plain numbers ({error})") from error


def agent(fixture: Fixture, recipe: Literal["paper", "latest"]) -> TDMPC2:
    """The agent that the file's `cfg/*` describes. Raises Refused for settings that it cannot have."""
    settings: dict[str, object] = {"recipe": recipe}
    for field in fields(TDMPC2Config):
        if (key := f"cfg/{field.name}") in fixture:
            value = fixture[key].item()
            settings[field.name] = float(value) if isinstance(field.default, float) else value
    fixture.read |= {f"cfg/{name}" for name in IMMATERIAL} & fixture.keys()
    if settings.get("dropout"):
        raise Refused(f"{fixture.path} has cfg/dropout={settings['dropout']}: masks are not recorded, so it must be 0")
    size = lambda key: int(fixture[f"cfg/{key}"])
    env = EnvSpec(
        id="golden",
        obs=((OBS, ArraySpec((size("obs_dim"),))),),
        action=ActionSpec((size("action_dim"),)),
        episode_length=size("episode_length"),
    )
    try:
        return TDMPC2(TDMPC2Config(**settings), env)  # type: ignore[arg-type]  # values come from the file
    except ValueError as error:
        raise Refused(f"{fixture.path}: {error}") from error
