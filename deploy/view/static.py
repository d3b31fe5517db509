"""The page as one file that needs nothing else: for a report, an e-mail, an archive."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from deploy.curves import Curve
from deploy.files import replace_text
from deploy.view import document
from deploy.view.rundir import TYPES, Picture

EMBEDDED_BYTES = 32 * 2**20
"""Most bytes of pictures and films that a file holds, the newest of each run first; what is left out, it names."""


def plotly() -> str:
    """The charting library. Raises ImportError naming the extra to install."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as e:
        raise ImportError("the run page needs plotly; install it with: pip install 'telamon[view]'") from e
    return str(get_plotlyjs())


def write(runs: Mapping[str, Path], curves: Mapping[str, Curve], out: Path) -> None:
    """Writes the page of `runs` (by name) over `curves` (by task) to `out`, complete or not at all.

    Raises OSError, and ValueError where no run can be read.
    """
    text = page(runs, curves, EMBEDDED_BYTES)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, text)


def page(runs: Mapping[str, Path], curves: Mapping[str, Curve], room: int) -> str:
    """The page with everything in it. room: bytes of pictures. Raises ValueError where no run can be read."""
    data = document.first(runs, curves, _embedded(room))
    if all("problem" in run for run in data["runs"]):
        raise ValueError(data["runs"][0]["problem"])
    files = resources.files("deploy.view")
    html, style, script = ((files / name).read_text() for name in ("page.html", "page.css", "page.js"))
    library = plotly()
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in (library, script))
    charset = '<meta charset="utf-8">'
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; media-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="plotly.js"></script>': f"<script>{library}</script>\n"
        f'<script type="application/json" id="data">{document.encode(data)}</script>',
        '<script type="module" src="page.js"></script>': f'<script type="module">{script}</script>',
    }
    for place, text in parts.items():
        before, found, after = html.partition(place)
        assert found, f"page.html lacks {place}"
        html = before + text + after
    return html


def _embedded(room: int) -> document.Source:
    """Sources with the content in them, while there is room."""

    def source(number: int, picture: Picture) -> str | None:
        nonlocal room
        if picture.size > room:
            return None
        room -= picture.size
        return f"data:{TYPES[picture.path.suffix]};base64,{base64.b64encode(picture.path.read_bytes()).decode()}"

    return source


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
