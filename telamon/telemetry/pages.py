"""Pages that Prometheus reads: what each process serves, whatever it is."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from telamon.telemetry import owners
from telamon.telemetry.histogram import Counted

log = logging.getLogger(__name__)

PATH = "/metrics"
PATIENCE = 60.0
"""Seconds that a connection may stay silent."""


def new_registry() -> CollectorRegistry:
    """A registry with what is told of the process itself: `process_resident_memory_bytes`, ..."""
    # each counter would bring a second series, since when it counts: that of its process
    disable_created_metrics()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


@contextmanager
def serving(
    registry: CollectorRegistry,
    host: str,
    port: int,
    knob: str,
    documents: Mapping[str, Callable[[], str]] = {},  # nobody writes to it
) -> Iterator[str]:
    """Shows the metrics of `registry` at the URL that the block is given, on threads of its own, until the block ends.

    host: a name or address of this host, IPv6 without brackets. port: 0 for a free one.
    knob: what sets the port, for the error's way out.
    documents: path -> makes a text in JSON, which is shown there.
    Raises AddressInUse naming the owner of a port that is taken, OSError for one that this user may not have and for an
    address that is not this host's.
    """
    address = f"{owners.bracketed(host)}:{port}"
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = _server(family)((str(where[0]), port), _handler(registry, documents))
    except OSError as error:
        another = f"give {knob} another port, or 0 for a free one"
        if error.errno == errno.EADDRINUSE:
            raise owners.in_use(address, another) from error
        if error.errno == errno.EACCES:
            raise OSError(f"cannot listen on {address}, a port that the system keeps for root; {another}") from error
        raise OSError(f"cannot listen on {address}; give an address of this host") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics-page", daemon=True)
    thread.start()
    try:
        yield f"http://{owners.bracketed(host)}:{server.server_port}{PATH}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def histogram(name: str, text: str, counted: Counted) -> HistogramMetricFamily:
    """The family of a histogram that was kept elsewhere.

    Where values can be negative it has no `_sum`, nor the `_count` that goes with it: `rate` would take a sum that
    falls for one that began anew. `signs` gives both sums.
    """
    names = [*(str(float(bound)) for bound in counted.bounds), "+Inf"]
    below, buckets = 0, []
    for name_of_bound, count in zip(names, counted.counts, strict=True):
        below += count
        buckets.append((name_of_bound, float(below)))
    return HistogramMetricFamily(name, text, buckets, counted.total)


def signs(name: str, text: str, counted: Counted) -> CounterMetricFamily:
    """The sums of a histogram by the values' sign: two counters whose difference is the sum of all."""
    family = CounterMetricFamily(name, text, labels=["sign"])
    family.add_metric(["positive"], counted.above)
    family.add_metric(["negative"], counted.below)
    return family


def _server(family: int) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = family

        def server_bind(self) -> None:
            # HTTPServer would ask a name server what this host is called, for nobody: seconds where none answers
            TCPServer.server_bind(self)
            self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

        def handle_error(self, request: Any, client_address: Any) -> None:
            # the reader has gone, or a figure cannot be had: then nothing is shown, and Prometheus says that it is down
            log.info("event=page_failed reader=%s reason=%r", client_address[0], str(sys.exception()))

    return Server


def _handler(metrics: CollectorRegistry, documents: Mapping[str, Callable[[], str]]) -> type[MetricsHandler]:
    class Handler(MetricsHandler):
        registry = metrics
        timeout = PATIENCE

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == PATH:
                super().do_GET()
            elif path in documents:
                text = documents[path]().encode()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            else:
                self.send_error(HTTPStatus.NOT_FOUND, f"only {', '.join((PATH, *documents))} can be read here")

    return Handler
