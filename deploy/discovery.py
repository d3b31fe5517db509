"""Where Prometheus finds the pages of a run: a file in the run directory, and the same text over HTTP.

Every target has four labels: `run` (the path of the run directory, which no two runs of a machine share), `role`,
`part` and `instance`. The last one is the part's name and no address: a part that is started again, on another port,
goes on with its series.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from deploy.files import replace_text

TARGETS_FILE = Path("prometheus") / "targets.json"
PATH = "/targets"
"""Of the text on the page of the driver."""
ROLES = ("driver", "learner", "actor", "evaluator", "replay", "train")
"""`train` is a run of one process."""


class Target(NamedTuple):
    """A page."""

    role: str
    part: str
    """`learner`, `actor-3`, `shard-0`, ..."""
    url: str


def to_json(run_dir: Path, targets: Iterable[Target]) -> str:
    """The list that Prometheus reads (file_sd and http_sd have one format)."""
    groups = [
        {
            "targets": [urlsplit(target.url).netloc],
            "labels": {"run": str(run_dir), "role": target.role, "part": target.part, "instance": target.part},
        }
        for target in targets
    ]
    return json.dumps(groups, indent=1)


class Targets:
    """The pages that a run has now. run_dir: absolute."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: tuple[Target, ...] | None = None
        """None: the file may be of a process that was killed."""
        self._text = to_json(run_dir, ())

    def update(self, targets: Iterable[Target]) -> None:
        """Replaces them, and the file where that is news."""
        found = tuple(sorted(targets))
        if found == self._known:
            return
        self._text = to_json(self._run_dir, found)
        path = self._run_dir / TARGETS_FILE
        path.parent.mkdir(exist_ok=True)
        replace_text(path, self._text)
        self._known = found  # now, so that what the disk did not take is tried again

    def text(self) -> str:
        """What the file says."""
        return self._text

    def url(self, part: str) -> str | None:
        """The page of a part; None where it has none."""
        return next((target.url for target in self._known or () if target.part == part), None)

    def counts(self) -> Mapping[str, int]:
        """Role -> pages."""
        return Counter(target.role for target in self._known or ())
