"""What a replay server takes from its command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from telamon.rpc import security


@dataclass(frozen=True)
class ServerConfig:
    """One replay server: one directory of tables, one address."""

    directory: Path
    """Where the tables' files live; one server at a time. Made if missing."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT, [IPV6]:PORT or unix:/PATH; port 0 takes a free one, which the server prints."""
    token_file: Path | None = None
    """File of mode 0600 with the token that every call must carry; None: the environment variable TELAMON_TOKEN."""
    tls_certificate: Path | None = None
    """PEM file of the server's certificate chain; needs --tls-key."""
    tls_key: Path | None = None
    """PEM file, of mode 0600, of the certificate's private key."""
    insecure: bool = False
    """Serve other hosts without TLS: token and rows can be read on the way."""
    memory_limit: float | None = None
    """GiB that all tables together may take when full; None: the memory that this process may use."""
    flush_every: float | None = None
    """Seconds between marks named `flush` of every table, which outlive the machine; None: none are made."""
    metrics_port: int | None = None
    """Port of the Prometheus metrics, which need no token; 0 takes a free one, None: no metrics."""
    metrics_host: str = "127.0.0.1"
    """Name or address of this host, IPv6 without brackets, where they are shown."""
    max_calls: int = 512
    """Calls in progress at once, which is also threads; a client has up to three streams and a call."""
    drain_seconds: float = 10.0
    """How long requests in progress may go on after SIGTERM or SIGINT."""
    parent: int | None = None
    """Process that starts this one: the server ends, as after SIGTERM, once that has gone. None: it is on its own."""

    def __post_init__(self) -> None:
        security.check_address(self.listen)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both --tls-certificate and --tls-key")
        if not (security.is_local(self.listen) or self.tls_certificate or self.insecure):
            raise ValueError(
                f"listening on {self.listen} without TLS shows token and rows to the network; "
                "give --tls-certificate and --tls-key, or say --insecure"
            )
        bounds = {
            "memory_limit": (self.memory_limit, 0.0, True),
            "flush_every": (self.flush_every, 0.0, True),
            "max_calls": (self.max_calls, 1, False),
            "drain_seconds": (self.drain_seconds, 0.0, False),
        }
        for name, (value, least, above) in bounds.items():
            # written so that NaN is refused
            if value is not None and not (value > least if above else value >= least):
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} {value} must be {'above' if above else 'at least'} {least:g}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"--metrics-port {self.metrics_port} must be 0 to 65535")

    @property
    def host(self) -> str:
        """The host that is listened on, without brackets; loopback for a unix socket."""
        return "127.0.0.1" if self.listen.startswith("unix:") else self.listen.rpartition(":")[0].strip("[]")
