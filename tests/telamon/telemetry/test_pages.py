"""Pages that Prometheus reads."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
import urllib.request
from urllib.error import HTTPError

import psutil
import pytest
from prometheus_client import Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from telamon.telemetry import owners, pages
from telamon.telemetry.histogram import Histogram
from telamon.telemetry.owners import AddressInUse
from tests.waiting import SECONDS, until


def read(url):
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return answer.read().decode()


def samples(text):
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_a_page_shows_its_registry_until_its_block_ends():
    registry = pages.new_registry()
    gauge = Gauge("telamon_test_things", "Things.", registry=registry)
    Counter("telamon_test_calls", "Calls.", registry=registry)
    with pages.serving(registry, "127.0.0.1", 0, "--knob") as url:
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/metrics")
        for value in (3, 4):
            gauge.set(value)
            found = {name: v for name, v in samples(read(url)).items() if name.startswith("telamon")}
            assert found == {"telamon_test_things": value, "telamon_test_calls_total": 0}
    with pytest.raises(OSError):
        read(url)


def test_every_page_tells_of_its_process():
    with pages.serving(pages.new_registry(), "127.0.0.1", 0, "--knob") as url:
        found = samples(read(url))
    assert found["process_resident_memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert found["process_cpu_seconds_total"] > 0
    assert 0 < found["process_start_time_seconds"] < time.time()
    assert found["process_open_fds"] > 2


def test_documents_are_made_when_somebody_looks():
    targets = [1]
    with pages.serving(
        pages.new_registry(), "127.0.0.1", 0, "--knob", {"/targets": lambda: json.dumps(targets)}
    ) as url:
        at = url.replace("/metrics", "/targets?some=thing")
        for n in (2, 3):
            targets.append(n)
            with urllib.request.urlopen(at, timeout=SECONDS) as answer:
                assert answer.headers["Content-Type"] == "application/json"
                assert json.load(answer) == targets
        assert "process_open_fds" in read(url)
        with pytest.raises(HTTPError, match="only /metrics, /targets can be read here") as refused:
            read(url.replace("/metrics", "/secrets"))
        assert refused.value.code == 404
        refused.value.close()


def test_what_cannot_be_shown_is_logged_and_the_page_goes_on(caplog):
    caplog.set_level(logging.INFO, "telamon.telemetry.pages")

    def fails():
        raise RuntimeError("no figures today")

    with pages.serving(pages.new_registry(), "127.0.0.1", 0, "--knob", {"/targets": fails}) as url:
        with pytest.raises(OSError):
            read(url.replace("/metrics", "/targets"))
        until(lambda: "event=page_failed reader=127.0.0.1 reason='no figures today'" in caplog.text)
        assert read(url)


def test_a_silent_reader_keeps_nobody_waiting():
    with pages.serving(pages.new_registry(), "127.0.0.1", 0, "--knob") as url:
        port = int(url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)):
            assert read(url)


def test_a_page_may_be_on_ipv6():
    with pages.serving(pages.new_registry(), "::1", 0, "--knob") as url:
        assert url.startswith("http://[::1]:")
        assert read(url)


def test_a_taken_port_names_its_owner_and_the_way_out(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = lambda: pages.serving(pages.new_registry(), "127.0.0.1", port, "--cluster.metrics-port")
        command = " ".join(psutil.Process().cmdline())[: owners.COMMAND_CHARACTERS]
        with pytest.raises(AddressInUse) as told, shown():
            pass
        way_out = "stop it, or give --cluster.metrics-port another port, or 0 for a free one"
        assert str(told.value) == f"127.0.0.1:{port} is in use by process {os.getpid()} ({command}); {way_out}"
        monkeypatch.setattr(owners, "owner", lambda inodes: None)
        with pytest.raises(AddressInUse, match="is in use by another user's process; stop it"), shown():
            pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_must_be_of_this_host(host):
    with (
        pytest.raises(OSError, match=rf"cannot listen on {host}:0; give an address of this host"),
        pages.serving(pages.new_registry(), host, 0, "--knob"),
    ):
        pass


def test_a_port_of_the_system_is_refused_with_the_way_out(monkeypatch):
    def bind(server, address):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", bind)
    reason = "a port that the system keeps for root; give --metrics-port another port, or 0 for a free one"
    with (
        pytest.raises(OSError, match=f"^cannot listen on 127.0.0.1:80, {reason}$"),
        pages.serving(pages.new_registry(), "127.0.0.1", 80, "--metrics-port"),
    ):
        pass


def test_a_histogram_that_was_kept_elsewhere():
    kept = Histogram((1, 2.5))
    for value in (0.5, 1, 2, 7):
        kept.observe(value)
    family = pages.histogram("telamon_test_seconds", "Some.", kept.counted)
    found = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert found == {
        ("telamon_test_seconds_bucket", "1.0"): 2,
        ("telamon_test_seconds_bucket", "2.5"): 3,
        ("telamon_test_seconds_bucket", "+Inf"): 4,
        ("telamon_test_seconds_count", None): 4,
        ("telamon_test_seconds_sum", None): 10.5,
    }


def test_a_histogram_of_either_sign_has_no_sum():
    kept = Histogram((-1, 0, 1))
    kept.observe(-3)
    family = pages.histogram("telamon_test_return", "Some.", kept.counted)
    assert [(s.labels["le"], s.value) for s in family.samples] == [("-1.0", 1), ("0.0", 1), ("1.0", 1), ("+Inf", 1)]
    kept.observe(5)
    kept.observe(0.5)
    sums = pages.signs("telamon_test_sums", "Some.", kept.counted).samples
    assert [(s.name, s.labels, s.value) for s in sums] == [
        ("telamon_test_sums_total", {"sign": "positive"}, 5.5),
        ("telamon_test_sums_total", {"sign": "negative"}, 3.0),
    ]
