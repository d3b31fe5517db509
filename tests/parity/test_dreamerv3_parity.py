"""The DreamerV3 golden files pass; with one altered number of any kind they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parity import dreamerv3, dreamerv3_blocks, dreamerv3_nets, dreamerv3_update
from tests.parity.__main__ import check, main
from tests.parity.fixture import Fixture, Refused, arrays, load
from tests.parity.report import Line, compare

GOLDEN = Path(__file__).parents[1] / "golden"
LATEST, PAPER = GOLDEN / "dreamerv3", GOLDEN / "dreamerv3_paper"
CASES = ("vec_cont", "vec_disc", "img_cont", "dict_mixed")
FILES = {
    LATEST / "blocks.npz": 65,
    LATEST / "replay_trace.npz": 7,
    LATEST / "clock.npz": 5,
    **{LATEST / f"net_{case}.npz": None for case in (*CASES, "img_strided")},
    **{LATEST / f"train_{case}.npz": None for case in CASES},
    PAPER / "train_vec_cont.npz": None,
    PAPER / "train_vec_disc.npz": None,
}


def altered(value: np.ndarray) -> np.ndarray:
    """One number in the middle moved by a hundredth of the largest; a flag or an index by one."""
    value = value.copy()
    middle = tuple(n // 2 for n in value.shape)
    if value.dtype.kind in "biu":
        value[middle] = value[middle] ^ 1
    else:
        value[middle] += 0.01 * max(np.abs(value).max(), 1e-2)
    return value


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_files_agree_and_nothing_in_them_is_left_out(path, capsys):
    assert main([str(path)]) == 0
    assert "unsupported" not in capsys.readouterr().out
