"""Compares the product with golden files: `python -m tests.parity FILE.npz [...]`.

Prints one line per quantity (largest error, tolerance, verdict) and what a file holds that is not checked.
Exit status: 0 all quantities of all files agree; 1 a quantity differs; 2 a file cannot be checked (and none differs).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import jax

from tests.parity import blocks, clock, dreamerv3_blocks, dreamerv3_nets, dreamerv3_update, plan, replay, update
from tests.parity.fixture import Fixture, Refused, load
from tests.parity.report import Line

SCHEMES = (
    (re.compile(r"u\d+/"), update.check),
    (re.compile(r"c\d+/"), plan.check),
    (re.compile(rf"({'|'.join(blocks.GROUPS)})/"), blocks.check),
    (re.compile(rf"({'|'.join(dreamerv3_blocks.GROUPS)})/"), dreamerv3_blocks.check),
    (re.compile(r"out/"), dreamerv3_nets.check),
    (re.compile(r"(loss/u|opt/)\d+/"), dreamerv3_update.check),
    (re.compile(r"sample/rowid"), replay.check),
    (re.compile(r"clock\d+/"), clock.check),
)
"""What a key looks like -> the check of all keys like it."""


def check(fixture: Fixture) -> list[Line]:
    """Prints and returns every line of one file. Raises Refused where nothing in it can be checked."""
    lines: list[Line] = []
    if fixture.get("cfg/multitask"):
        raise Refused(f"{fixture.path} is multi-task, which is not supported yet: {', '.join(fixture.unread)}")
    for pattern, scheme in SCHEMES:
        if any(pattern.match(key) for key in fixture):
            for line in scheme(fixture):
                print(line, flush=True)
                lines.append(line)
    if not lines:
        raise Refused(f"{fixture.path} holds nothing that is supported: {', '.join(fixture.unread) or 'it is empty'}")
    for group, count in fixture.unread.items():
        print(f"  {group:<36} unsupported, {count} arrays not checked")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Checks the files named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.parity", description="Compares the product with golden files."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.npz")
    statuses = []
    for path in parser.parse_args(arguments).files:
        print(path, flush=True)
        try:
            with jax.default_matmul_precision("highest"):
                lines = check(load(path))
        except Refused as refusal:
            print(f"refused: {refusal}", file=sys.stderr, flush=True)
            statuses.append(2)
            continue
        failed = sum(not line.passed for line in lines)
        print(f"  {len(lines)} quantities, {failed} failed")
        statuses.append(1 if failed else 0)
    return 1 if 1 in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
