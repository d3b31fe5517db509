"""Where a replay server is reached, who may call it, and the options of both ends of a connection."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

TOKEN_VARIABLE = "TELAMON_TOKEN"
"""The environment variable that holds the token where no file is named."""
TOKEN_CHARACTERS = (16, 1024)
"""Fewest and most characters of a token: one that can be guessed protects nothing, a header has its bound."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""Of one message, either way; frames of arrays are far smaller unless one tick or window is not."""

_KEEPALIVE_SECONDS = 10
_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A host that vanished sends no goodbye: it is asked every ten seconds, and its calls end ten seconds later.
    ("grpc.keepalive_time_ms", 1000 * _KEEPALIVE_SECONDS),
    ("grpc.keepalive_timeout_ms", 1000 * _KEEPALIVE_SECONDS),
    ("grpc.http2.ping_timeout_ms", 1000 * _KEEPALIVE_SECONDS),  # the answer to a ping; by default a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    # Two servers on one port would share its connections at random; the second one is to fail instead.
    ("grpc.so_reuseport", 0),
    # Clients may ask as often as they do above, with and without a call. By default a connection on which nothing else
    # goes on, as that of a writer that waits for credit, ends after two questions that come too soon, which those of a
    # busy host do.
    ("grpc.http2.min_ping_interval_without_data_ms", 500 * _KEEPALIVE_SECONDS),
    ("grpc.http2.max_ping_strikes", 0),
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    # A server that was killed is back within seconds; gRPC itself would wait up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # What the server may send ahead of a reader that is busy; without it loopback TCP is a quarter slower. Not for
    # the server, where many writers could fill its memory.
    ("grpc.http2.lookahead_bytes", MAX_MESSAGE_BYTES),
    # A proxy for web pages knows no replay server.
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True)
class Endpoint:
    """A replay server as its clients know it."""

    address: str
    """`host:port`, `[ipv6]:port` or `unix:/path`."""
    token: str = field(repr=False)
    root_certificate: bytes | None = None
    """PEM; the server's certificate must descend from it. None: no TLS."""


def read_token(file: Path | None, environ: Mapping[str, str]) -> str:
    """The token in `file`, or in the environment variable TELAMON_TOKEN where no file is named.

    White space around it is dropped. Raises PermissionError for a file that others than its owner may open, ValueError
    for no token or one that is too short or long or cannot travel in a header; the token itself is never quoted.
    """
    if file is not None:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                raise PermissionError(
                    f"{file} has mode {mode:04o}, so others than its owner may open it; run chmod 600 {file}"
                )
            token, origin = opened.read(2 * TOKEN_CHARACTERS[1]).decode("latin-1").strip(), str(file)
    elif TOKEN_VARIABLE in environ:
        token, origin = environ[TOKEN_VARIABLE].strip(), f"the environment variable {TOKEN_VARIABLE}"
    else:
        raise ValueError(
            f"there is no token, and every call needs one; name a file of mode 0600 or set {TOKEN_VARIABLE}"
        )
    fewest, most = TOKEN_CHARACTERS
    if not fewest <= len(token) <= most:
        raise ValueError(f"the token in {origin} has {len(token)} characters; it must have {fewest} to {most}")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(f"the token in {origin} must consist of printable ASCII characters without spaces")
    return token


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a client sends with every call."""
    return (("authorization", f"Bearer {token}"),)


def authorised(token: str, sent: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether a call's metadata carries `token`, compared in a time that does not depend on where they differ."""
    expected = f"Bearer {token}".encode()
    values = [value for key, value in sent if key == "authorization"]
    given = values[0] if len(values) == 1 else b""
    return hmac.compare_digest(given.encode() if isinstance(given, str) else given, expected)


def check_address(address: str) -> None:
    """Raises ValueError for what is neither `host:port`, `[ipv6]:port` nor `unix:/path`."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > 107:  # sun_path holds 108 bytes, the last one 0
            raise ValueError(f"{address!r} must be unix: and an absolute path of at most 107 bytes")
        return
    host, _, port = address.rpartition(":")
    if not host or (":" in host and not (host.startswith("[") and host.endswith("]"))) or not port.isdecimal():
        raise ValueError(f"address {address!r} must be host:port, [ipv6]:port or unix:/path")
    if int(port) > 65535:
        raise ValueError(f"address {address!r} has port {port}; ports go up to 65535")


def is_local(address: str) -> bool:
    """Whether an address is reached from this host alone: a unix socket, or loopback.

    Names other than `localhost` are not resolved: they count as not local.
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def open_channel(endpoint: Endpoint) -> grpc.Channel:
    """A channel to a server; it connects when it is first used."""
    check_address(endpoint.address)
    if endpoint.root_certificate is None:
        return grpc.insecure_channel(endpoint.address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(root_certificates=endpoint.root_certificate)
    return grpc.secure_channel(endpoint.address, credentials, options=CHANNEL_OPTIONS)


def read_server_credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """TLS of a server: PEM files of its certificate chain and of its private key.

    Raises PermissionError for a key that others than its owner may open.
    """
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(f"{key} has mode {mode:04o}, so others than its owner may open it; run chmod 600 {key}")
    return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
