"""Who may call a replay server, and where."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from telamon.rpc import security
from telamon.rpc.security import Endpoint
from tests.service import make_certificate
from tests.waiting import SECONDS

TOKEN = "0123456789abcdef"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n")
    return path


def test_token_comes_from_a_file_before_the_environment(token_file):
    environ = {"TELAMON_TOKEN": "another-token-of-the-environment"}
    assert security.read_token(token_file, environ) == TOKEN
    assert security.read_token(None, environ) == environ["TELAMON_TOKEN"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_token_that_others_may_open_is_refused(token_file, mode):
    token_file.chmod(mode)
    with pytest.raises(PermissionError, match=rf"token has mode {mode:04o}.* run chmod 600"):
        security.read_token(token_file, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 characters; it must have 16 to 1024"),
        ("a" * 15, "has 15 characters"),
        ("a" * 1025, "has 1025 characters"),
        ("a" * 16 + "\nb", "printable ASCII characters without spaces"),
        ("a" * 16 + " b", "printable ASCII characters without spaces"),
        ("a" * 16 + "ü", "printable ASCII characters without spaces"),
    ],
)
def test_token_that_cannot_serve_is_refused(token_file, text, message):
    token_file.write_text(text)
    for file, environ in ((token_file, {}), (None, {"TELAMON_TOKEN": text})):
        with pytest.raises(ValueError, match=message) as refusal:
            security.read_token(file, environ)
        assert not text or text not in str(refusal.value)


def test_no_token_at_all_is_refused():
    with pytest.raises(ValueError, match=r"there is no token.* set TELAMON_TOKEN"):
        security.read_token(None, {})


def test_endpoint_does_not_print_its_token():
    assert TOKEN not in repr(Endpoint("localhost:1", TOKEN))


@pytest.mark.parametrize(
    "sent",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", TOKEN),),
        (("authorization", f"bearer {TOKEN}"),),
        (("authorization", f"Bearer {TOKEN}0"),),
        (("authorization", f"Bearer {TOKEN[:-1]}"),),
        (("authorization", f"Bearer {TOKEN}é"),),
        (("authorization-bin", f"Bearer {TOKEN}".encode()),),
        (("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")),
    ],
)
def test_wrong_metadata_is_not_authorised(sent):
    assert not security.authorised(TOKEN, sent)


def test_a_client_of_the_same_token_is_authorised():
    assert security.authorised(TOKEN, (("user-agent", "test"), *security.metadata(TOKEN)))


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:0", True),
        ("127.1.2.3:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("unix:/run/replay.sock", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("10.0.0.7:50051", False),
        ("replay.example.org:50051", False),
    ],
)
def test_addresses(address, local):
    security.check_address(address)
    assert security.is_local(address) is local


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("50051", "must be host:port"),
        (":50051", "must be host:port"),
        ("localhost", "must be host:port"),
        ("localhost:http", "must be host:port"),
        ("::1:50051", "must be host:port"),
        ("localhost:65536", "ports go up to 65535"),
        ("unix:replay.sock", "absolute path"),
        ("unix:/" + "a" * 107, "at most 107 bytes"),
    ],
)
def test_impossible_addresses(address, message):
    with pytest.raises(ValueError, match=message):
        security.check_address(address)


def echo_server(credentials):
    """A started server that answers with what it is sent, and the port that it listens on."""
    server = grpc.server(ThreadPoolExecutor(2), options=security.SERVER_OPTIONS)
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server.add_registered_method_handlers("test.Echo", {"Say": echo})
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, port


def say(endpoint, message=b"hello"):
    with security.open_channel(endpoint) as channel:
        return channel.unary_unary("/test.Echo/Say")(message, timeout=SECONDS)


def test_messages_are_bounded_both_ways():
    server, port = echo_server(None)
    endpoint = Endpoint(f"127.0.0.1:{port}", TOKEN)
    try:
        assert len(say(endpoint, bytes(8 * 2**20))) == 8 * 2**20  # beyond the 4 MB that gRPC allows by itself
        with pytest.raises(grpc.RpcError) as refusal:
            say(endpoint, bytes(security.MAX_MESSAGE_BYTES + 1))
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        server.stop(None).wait()


def test_a_second_server_on_the_same_port_fails():
    server, port = echo_server(None)
    try:
        second = grpc.server(ThreadPoolExecutor(1), options=security.SERVER_OPTIONS)
        with pytest.raises(RuntimeError):
            second.add_insecure_port(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the openssl command")
def test_tls(tmp_path):
    certificate, key = make_certificate(tmp_path)
    key.chmod(0o644)
    with pytest.raises(PermissionError, match=r"key\.pem has mode 0644"):
        security.read_server_credentials(certificate, key)
    key.chmod(0o600)
    server, port = echo_server(security.read_server_credentials(certificate, key))
    try:
        root = certificate.read_bytes()
        assert say(Endpoint(f"localhost:{port}", TOKEN, root)) == b"hello"
        assert say(Endpoint(f"127.0.0.1:{port}", TOKEN, root)) == b"hello"
        with pytest.raises(grpc.RpcError) as refusal:
            say(Endpoint(f"localhost:{port}", TOKEN))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop(None).wait()
