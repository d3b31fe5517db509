"""The page on loopback: what it is made of, what is new, and the pictures of its runs, all under a secret path."""

from __future__ import annotations

import errno
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from io import BytesIO
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

from deploy.curves import Curve
from deploy.view import document, rundir
from deploy.view.rundir import Picture
from deploy.view.static import plotly
from deploy.view.tail import Place
from telamon.telemetry import owners

LOOPBACK = "127.0.0.1"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere. Plotly puts styles into the document, hence 'unsafe-inline' of these."""
NEVER, ALWAYS = "no-store", "private, max-age=86400, immutable"
"""Whether a browser may keep an answer. What it keeps has another address once it changes."""
FILES = {"page.css": "text/css", "page.js": "text/javascript"}
HAVE = re.compile(r"(\d{1,18})-([0-9a-f]*)")
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True)
class Answer:
    """What a path holds."""

    kind: str
    body: bytes | Path
    keep: str = NEVER


class Viewer(ThreadingMixIn, TCPServer):
    """Serves the page of `runs` (by name) over `curves` (by task) on loopback. Port 0: a free one.

    Raises AddressInUse naming the owner of a port that is taken, OSError for one that cannot be had.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, runs: Mapping[str, Path], curves: Mapping[str, Curve], port: int) -> None:
        self.runs, self.curves = runs, curves
        self.secret = secrets.token_urlsafe(24)
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise owners.in_use(f"{LOOPBACK}:{port}", "give --port another, or 0 for a free one") from error
            raise OSError(f"cannot listen on {LOOPBACK}:{port} ({error.strerror}); give --port another") from error

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.secret}/"

    def answer(self, path: str, query: str) -> Answer | None:
        """What is at a path, below the secret one; None where nothing is. Paths are looked up, never opened."""
        if path == "":
            return Answer("text/html; charset=utf-8", _asset("page.html"))
        if path in FILES:
            return Answer(f"{FILES[path]}; charset=utf-8", _asset(path))
        if path == "plotly.js":
            return Answer("text/javascript; charset=utf-8", plotly().encode(), ALWAYS)
        if path == "data":
            return Answer("application/json", document.encode(self._data(query)).encode())
        number, _, name = path.partition("/")
        run = {str(i): path for i, path in enumerate(self.runs.values())}.get(number)
        found = {} if run is None else {picture.name: picture.path for picture in rundir.pictures(run)}
        return Answer(rundir.TYPES[found[name].suffix], found[name], ALWAYS) if name in found else None

    def _data(self, query: str) -> dict[str, Any]:
        have = [HAVE.fullmatch(text) for text in parse_qs(query).get("have", [])]
        since = [Place(int(match[1]), match[2]) for match in have if match is not None]
        if len(since) == len(self.runs):
            return document.news(self.runs, since, source)
        return document.first(self.runs, self.curves, source)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def source(number: int, picture: Picture) -> str | None:
    """The address of a run's picture, relative to the page's."""
    return f"{number}/{quote(picture.name)}?{picture.version}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Viewer
    protocol_version = "HTTP/1.1"
    timeout = 60.0
    """Seconds that a connection may stay silent."""

    def do_GET(self) -> None:
        """Answers what is under the secret path, says 404 to everything else, and 400 to what is no address."""
        try:
            url = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        secret, slash, path = unquote(url.path).removeprefix("/").partition("/")
        known = secrets.compare_digest(secret.encode(errors="replace"), self.server.secret.encode())
        found = self.server.answer(path, url.query) if known and slash else None
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            file = BytesIO(found.body) if isinstance(found.body, bytes) else found.body.open("rb")
        except FileNotFoundError:  # just now: the run keeps only its newest
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            self._send(found, file)

    def _send(self, found: Answer, file: BinaryIO) -> None:
        size = file.seek(0, 2)
        begin, end = asked = byte_range(self.headers.get("Range", ""), size) or (0, size)
        if begin >= end and size > 0:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(HTTPStatus.OK if asked == (0, size) else HTTPStatus.PARTIAL_CONTENT)
        if asked != (0, size):
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", found.kind)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Cache-Control", found.keep)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        file.seek(begin)
        shutil.copyfileobj(BytesIO(file.read(end - begin)), self.wfile)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a page asks every two seconds."""


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """The half-open range of bytes that a Range header asks of `size`; empty where there are none such.

    None: it asks for all, or for something that may be ignored (RFC 9110, section 14.2).
    """
    match = RANGE.fullmatch(header.strip())
    if match is None or match[0] == "bytes=-":
        return None
    if match[1] == "":
        return max(0, size - int(match[2])), size
    return int(match[1]), size if match[2] == "" else min(int(match[2]) + 1, size)


def _asset(name: str) -> bytes:
    return (resources.files("deploy.view") / name).read_bytes()
