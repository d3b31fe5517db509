"""clock.npz: when the reference's clock of the train ratio owes how many updates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from telamon.data import ratio_repeats
from tests.parity.fixture import Fixture
from tests.parity.report import Line, compare


def check(fixture: Fixture) -> Iterator[Line]:
    """One line per clock."""
    for name in fixture.numbered(r"clock(\d+)/"):
        # stored as float32, while the reference has the decimal in double precision
        ratio, prev, updates = float(str(np.float32(fixture[f"{name}ratio"]))), None, []
        for step in fixture[f"{name}step"].tolist():
            repeats, prev = ratio_repeats(ratio, step, prev)
            updates.append(repeats)
        yield compare(f"{name}updates", "exact", updates, fixture[f"{name}updates"])
