from __future__ import annotations

import errno

import grpc
import pytest

from telamon.replay import StreamSuperseded, TickGap
from telamon.rpc.status import INTERNAL_TEXT, MAX_DETAILS, TABLE, DataLoss, error_of, status_of

CODES = [
    (ValueError, "INVALID_ARGUMENT"),
    (UnicodeError, "INVALID_ARGUMENT"),
    (DataLoss, "DATA_LOSS"),
    (PermissionError, "UNAUTHENTICATED"),
    (FileNotFoundError, "NOT_FOUND"),
    (LookupError, "FAILED_PRECONDITION"),
    (TickGap, "OUT_OF_RANGE"),
    (StreamSuperseded, "ABORTED"),
    (OSError, "RESOURCE_EXHAUSTED"),
    (TimeoutError, "DEADLINE_EXCEEDED"),
    (ConnectionError, "UNAVAILABLE"),
    (ConnectionResetError, "UNAVAILABLE"),
]


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_every_error_has_its_code_and_keeps_its_message(kind, code):
    assert status_of(kind("column 'reward' is float64")) == (grpc.StatusCode[code], "column 'reward' is float64")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("secret"), KeyError("secret"), IndexError("secret"), TypeError("secret"), SystemExit("secret")],
)
def test_a_defect_is_internal_and_says_nothing(error):
    assert status_of(error) == (grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "RESOURCE_EXHAUSTED"), (errno.EACCES, "RESOURCE_EXHAUSTED"), (errno.ENOENT, "RESOURCE_EXHAUSTED")],
)
def test_errors_of_the_system(number, code):
    """A file that the server may not open or find is no client without a token, and no table that nobody made."""
    assert status_of(OSError(number, "said by the kernel", "/some/file"))[0] is grpc.StatusCode[code]


def test_a_message_has_a_bound():
    assert len(status_of(ValueError("x" * 100_000))[1]) == MAX_DETAILS


@pytest.mark.parametrize(("kind", "code"), TABLE)
def test_a_client_raises_what_the_server_raised(kind, code):
    error = error_of(code, "one sentence")
    assert type(error) is kind
    assert str(error) == "one sentence"


def test_a_code_of_somebody_else_is_named():
    error = error_of(grpc.StatusCode.UNIMPLEMENTED, "no such method")
    assert type(error) is RuntimeError
    assert str(error) == "UNIMPLEMENTED: no such method"
