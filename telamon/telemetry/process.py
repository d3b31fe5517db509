"""What Linux tells of a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal


def resident_bytes(pid: int | Literal["self"] = "self") -> int:
    """Memory that a process has in use, pages that it shares included. Raises OSError where it has ended."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
