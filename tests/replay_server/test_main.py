"""The replay server as a process: what it says, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from replay_server.__main__ import FAILED, USAGE, main
from telamon.rpc import security
from telamon.rpc.security import Endpoint
from telamon.rpc.v1 import replay_pb2
from telamon.telemetry import owners
from telamon.telemetry.owners import AddressInUse
from tests.replay_server.plain import Plain, check_windows
from tests.service import TOKEN, Process, make_certificate, serve, serve_open, spawn
from tests.waiting import SECONDS, next_line, until


def refusal(capsys, *options):
    """(exit code, what was said) of a server that does not start."""
    try:
        code = main([*map(str, options)])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert said.out == ""
    return code, " ".join(said.err.replace("│", "").split())


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(security.TOKEN_VARIABLE, TOKEN)


def test_a_process_serves_says_so_and_ends(tmp_path):
    with spawn(tmp_path, "--metrics-port", "0") as process:
        assert process.info["pid"] == process.pid
        assert process.info["tables"] == {}
        assert process.info["tls"] is False
        assert json.loads((tmp_path / "server.json").read_text()) == process.info
        with Plain(process.endpoint) as client:
            client.configure()
            client.append(client.open(), 0, 10)
        with urllib.request.urlopen(process.info["metrics"], timeout=SECONDS) as page:
            assert 'telamon_replay_appended_rows_total{table="main"} 20.0' in page.read().decode()
        assert process.terminate() == (0, "")
    assert not (tmp_path / "server.json").exists()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    for event in ("start", "configure", "open-stream", "drain", "stop"):
        (line,) = [line for line in lines if f" event={event} " in f"{line} "]
        assert line.startswith("time=")
    assert TOKEN not in "".join(lines)


def test_a_killed_process_left_everything_that_it_acknowledged(tmp_path):
    with spawn(tmp_path) as process, Plain(process.endpoint) as client:
        client.configure()
        opened = client.open()
        client.append(opened, 0, 30)
        client.call("Grant", rows=1000)
        process.kill()
    with spawn(tmp_path) as process, Plain(process.endpoint) as client:
        assert process.info["tables"] == {"main": 60}
        again = client.open()
        assert (again.epoch, again.next_tick, again.incarnation) == (2, 30, opened.incarnation)
        assert client.call("Stats").credit == 1000
        assert client.append(again, 30) == 30
        for found in client.sample(50):
            check_windows(found)
        assert process.terminate()[0] == 0  # and gives back what the table has under /dev/shm


PARENT = """
    import os, subprocess, sys
    server = [sys.executable, "-m", "replay_server", "--parent", str(os.getpid()), "--directory"]
    subprocess.Popen([*server, sys.argv[2]]).wait()
"""


def test_it_ends_with_its_parent(tmp_path):
    """As after SIGTERM: what it leaves behind is all beside its rows."""
    with Process(tmp_path, command=("-c", textwrap.dedent(PARENT))) as parent, Plain(parent.endpoint) as client:
        client.configure()
        client.append(client.open(), 0, 30)
        assert parent.info["pid"] != parent.pid
        parent.kill()  # returns with the end of the server, which has the same standard output
    assert not (tmp_path / "server.json").exists()
    assert "event=parent_gone" in (tmp_path / "log.txt").read_text()
    with serve(tmp_path) as endpoint, Plain(endpoint) as client:
        assert client.rows_held() == 60


SLOW_MARK = """
    import sys, time
    from replay_server import __main__, table
    table.Table.mark = lambda self, name: (print("marking", flush=True), time.sleep(3600))
    sys.exit(__main__.main())
"""


def in_a_mark(directory, *options):
    """A server that has a row, and is in a mark that takes an hour."""
    process = Process(directory, *options, command=("-c", textwrap.dedent(SLOW_MARK)))
    client = Plain(process.endpoint)
    client.configure()
    client.append(client.open(), 0)
    call = client.stub.Mark.future(replay_pb2.MarkRequest(table="main", name="slow"), **client.options)
    assert next_line(process.popen) == "marking\n"
    return process, client, call


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path, number):
    process, client, _ = in_a_mark(tmp_path, "--drain-seconds", "3600")
    with process, client:
        process.popen.send_signal(number)
        until(lambda: "event=drain" in (tmp_path / "log.txt").read_text())
        with pytest.raises(subprocess.TimeoutExpired):
            process.popen.wait(0.5)
        process.popen.send_signal(number)
        assert process.popen.wait(SECONDS) == 128 + number
    with spawn(tmp_path) as again:  # what it left under /dev/shm goes with a proper end
        assert again.terminate()[0] == 0


def test_a_request_that_does_not_end_is_given_up(tmp_path):
    process, client, call = in_a_mark(tmp_path, "--drain-seconds", "0.3")
    with process, client:
        code, said = process.terminate()
        assert code == 0
        assert "event=not-closed" in said
        assert call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with serve_open(tmp_path) as served:
        assert served.tables.get("main").stats().rows == 2


@pytest.mark.slow  # imports JAX before it becomes a process without
def test_command_telamon_replay(tmp_path):
    with Process(tmp_path, command=("-m", "deploy.cli", "replay")) as process:
        assert process.info["pid"] == process.pid
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "jaxlib" not in loaded
        assert process.terminate()[0] == 0


# addresses


def test_unix_socket(tmp_path):
    path = tmp_path / "s"
    with serve(tmp_path / "server", listen=f"unix:{path}") as endpoint, Plain(endpoint) as client:
        assert endpoint.address == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        client.configure()
        client.append(client.open(), 0, 10)
        assert client.rows_held() == 20
    assert not path.exists()


def test_unix_socket_of_a_killed_server_is_taken_over(tmp_path):
    address = f"unix:{tmp_path / 's'}"
    with spawn(tmp_path / "server", "--listen", address) as process:
        process.kill()
    assert (tmp_path / "s").exists()
    with serve(tmp_path / "server", listen=address) as endpoint, Plain(endpoint) as client:
        client.configure()


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0", "unix:{}"])
def test_an_address_in_use_names_its_owner(tmp_path, capfd, listen):
    with serve(tmp_path / "first", listen=listen.format(tmp_path / "s")) as endpoint:
        code, said = refusal(capfd, "--directory", tmp_path / "second", "--listen", endpoint.address)
        assert code == USAGE
        # and nothing before it: gRPC would write lines of its own
        assert said.startswith(f"telamon replay: {endpoint.address} is in use by process {os.getpid()} (")
        with Plain(endpoint) as client:  # which goes on
            client.configure()


def test_a_name_is_in_use_where_one_of_its_addresses_is(tmp_path):
    """Loopback has two; a server that got the other one would be found by some clients and not by others."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=f"{listen} is in use"), serve(tmp_path, listen=listen):
            pass


def test_metrics_are_shown_on_a_host_of_their_own(tmp_path, capsys):
    with serve_open(tmp_path / "first", listen="0.0.0.0:0", insecure=True, metrics_port=0) as served:
        assert served.info["metrics"].startswith("http://127.0.0.1:")
    with serve_open(tmp_path / "first", metrics_host="::1", metrics_port=0) as served:
        assert served.info["metrics"].startswith("http://[::1]:")
        with urllib.request.urlopen(served.info["metrics"], timeout=SECONDS) as page:
            assert "telamon_replay_connections 0.0" in page.read().decode()
    options = ("--metrics-port", 0, "--metrics-host", "192.0.2.1")
    code, said = refusal(capsys, "--directory", tmp_path / "second", *options)
    assert code == FAILED
    assert said == "telamon replay: cannot listen on 192.0.2.1:0; give an address of this host"


def test_metrics_port_in_use_names_its_owner(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refusal(capsys, "--directory", tmp_path, "--metrics-port", port)
    assert code == USAGE
    assert f"127.0.0.1:{port} is in use by process {os.getpid()} (" in said
    assert said.endswith("); stop it, or give --metrics-port another port, or 0 for a free one")


def test_an_owner_that_cannot_be_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(owners, "owner", lambda inodes: None)
    with serve(tmp_path / "first") as endpoint:
        code, said = refusal(capsys, "--directory", tmp_path / "second", "--listen", endpoint.address)
    assert code == USAGE
    way_out = "stop it, or give --listen another address, or port 0 for a free one"
    assert f"{endpoint.address} is in use by another user's process; {way_out}" in said


@pytest.mark.parametrize(
    ("listen", "way_out"),
    [("192.0.2.1:0", "give an address of this host"), ("unix:/nowhere/s", "there is no folder /nowhere")],
)
def test_an_address_that_is_not_here(tmp_path, capfd, listen, way_out):
    code, said = refusal(capfd, "--directory", tmp_path, "--listen", listen, "--insecure")
    assert code == FAILED
    assert said == f"telamon replay: cannot listen on {listen}; {way_out}"


def test_a_folder_that_is_served(tmp_path, capsys):
    with serve(tmp_path):
        code, said = refusal(capsys, "--directory", tmp_path)
    assert code == FAILED
    assert f"process {os.getpid()} already serves this folder" in said


# what is refused before anything is touched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "0.0.0.0:0"], "without TLS shows token and rows to the network"),
        (["--listen", "[::]:0"], "say --insecure"),
        (["--listen", "127.0.0.1"], "must be host:port"),
        (["--listen", "unix:relative"], "absolute path"),
        (["--tls-key", "key.pem"], "needs both --tls-certificate and --tls-key"),
        (["--max-calls", "0"], "--max-calls 0 must be at least 1"),
        (["--flush-every", "0"], "--flush-every 0.0 must be above 0"),
        (["--flush-every", "nan"], "--flush-every nan must be above 0"),
        (["--memory-limit", "-1"], "--memory-limit -1.0 must be above 0"),
        (["--drain-seconds", "-1"], "--drain-seconds -1.0 must be at least 0"),
        (["--metrics-port", "65536"], "--metrics-port 65536 must be 0 to 65535"),
        (["--token-file", "missing"], "missing: No such file or directory"),
    ],
)
def test_impossible_options(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    code, said = refusal(capsys, "--directory", tmp_path / "server", *options)
    assert code in (USAGE, FAILED)
    assert message in said
    assert not (tmp_path / "server").exists()


def test_no_token_and_a_token_that_others_can_read(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(security.TOKEN_VARIABLE)
    code, said = refusal(capsys, "--directory", tmp_path / "server")
    assert (code, "there is no token" in said) == (USAGE, True)
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o640)
    code, said = refusal(capsys, "--directory", tmp_path / "server", "--token-file", file)
    assert (code, "chmod 600" in said, TOKEN in said) == (USAGE, True, False)
    assert not (tmp_path / "server").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the openssl command")
def test_tls(tmp_path):
    certificate, key = make_certificate(tmp_path)
    with serve_open(tmp_path / "server", listen="0.0.0.0:0", tls_certificate=certificate, tls_key=key) as served:
        assert served.info["tls"] is True
        port = served.info["address"].rpartition(":")[2]
        with Plain(Endpoint(f"localhost:{port}", TOKEN, certificate.read_bytes())) as client:
            client.configure()
            client.append(client.open(), 0, 10)
            assert client.rows_held() == 20


# marks now and then


def test_flush_marks(tmp_path):
    with serve(tmp_path, flush_every=0.05) as endpoint, Plain(endpoint) as client:
        client.configure()
        client.append(client.open(), 0, 10)
        until(lambda: list(client.call("ListMarks").names) == ["flush"])


def test_a_flush_that_fails_is_told_and_not_the_last(tmp_path, caplog, monkeypatch):
    with serve_open(tmp_path, flush_every=0.02) as served, Plain(Endpoint(served.info["address"], TOKEN)) as client:
        client.configure()
        times = []

        def full(name):
            times.append(name)
            raise OSError(28, "No space left on device", "/somewhere")

        monkeypatch.setattr(served.tables.get("main"), "mark", full)
        until(lambda: len(times) >= 2)
    assert "event=flush-failed table=main" in caplog.text


# who listens


def test_owner_is_found_by_what_it_holds():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"anything:{listening.getsockname()[1]}"
        inodes = owners.listeners(address)
        assert inodes == {str(os.fstat(listening.fileno()).st_ino)}
        found = owners.owner(inodes)
    assert found is not None
    assert found.pid == os.getpid()
    assert Path(sys.executable).name in found.command or "pytest" in found.command
    assert owners.listeners(address) == set()
    assert owners.owner({"0"}) is None


def test_owner_where_there_is_no_proc(tmp_path):
    assert owners.listeners("127.0.0.1:1", tmp_path) == set()
    assert owners.listeners("unix:/somewhere", tmp_path) is None
    assert owners.owner({"1"}, tmp_path) is None


# clients that say nothing any more

SILENT = """
    import sys, threading
    from telamon.rpc.security import Endpoint
    from tests.replay_server.plain import Plain

    client = Plain(Endpoint(sys.argv[1], sys.argv[2]))
    client.options["timeout"] = None
    client.configure()
    call = client.stub.Sample(iter(threading.Event().wait, True), **client.options)
    print("open", flush=True)
    threading.Event().wait()
"""


@pytest.mark.slow  # it takes the twenty seconds that the server waits
def test_a_client_whose_host_vanished_is_noticed(tmp_path):
    """A stopped process answers as little as a host that is gone; one that is only idle keeps its call."""
    with serve_open(tmp_path) as served:
        arguments = [sys.executable, "-c", textwrap.dedent(SILENT), served.info["address"], TOKEN]
        stopped, idle = (subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2))
        try:
            for process in (stopped, idle):
                assert next_line(process) == "open\n"
            value = lambda: served.counts.registry.get_sample_value("telamon_replay_open_calls", {"method": "Sample"})
            until(lambda: value() == 2)
            stopped.send_signal(signal.SIGSTOP)
            until(lambda: value() == 1, 3 * SECONDS)
            time.sleep(1)
            assert value() == 1
        finally:
            for process in (stopped, idle):
                process.kill()
                process.communicate()
