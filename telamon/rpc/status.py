"""Exceptions as gRPC status codes and back: one table for servicer and client.

What a code asks of a client is said in proto/telamon/rpc/v1/replay.proto.
"""

from __future__ import annotations

import grpc

from telamon.replay import StreamSuperseded, TickGap

INTERNAL_TEXT = "the server failed at this call; its log says how"
"""All that a client learns of a defect of the server."""

MAX_DETAILS = 600
"""Characters of a message, each at most 12 bytes on the wire. Messages travel as HTTP/2 metadata, of which gRPC refuses
what is above 8 KiB: at random first, above 16 KiB always."""


class DataLoss(ValueError):
    """A mark is damaged; the message says what can be saved."""


TABLE: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (DataLoss, grpc.StatusCode.DATA_LOSS),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (TickGap, grpc.StatusCode.OUT_OF_RANGE),
    (StreamSuperseded, grpc.StatusCode.ABORTED),
    (LookupError, grpc.StatusCode.FAILED_PRECONDITION),
    (PermissionError, grpc.StatusCode.UNAUTHENTICATED),
    (FileNotFoundError, grpc.StatusCode.NOT_FOUND),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ConnectionError, grpc.StatusCode.UNAVAILABLE),
    (OSError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
"""In order: the first row that an exception is an instance of, and that a code equals, decides."""

_DEFECTS = (KeyError, IndexError)
"""Subclasses of LookupError that nobody raises on purpose."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """(code, message) that a server answers with. INTERNAL and a fixed text for whatever the table does not know."""
    if not isinstance(error, _DEFECTS):
        for kind, code in TABLE:
            if isinstance(error, kind) and not _from_the_system(error, kind):
                return code, str(error)[:MAX_DETAILS]
    return grpc.StatusCode.INTERNAL, INTERNAL_TEXT


def error_of(code: grpc.StatusCode, details: str) -> Exception:
    """The exception that a client raises for a code; RuntimeError for those that the table does not know."""
    for kind, known in TABLE:
        if known is code:
            return kind(details)
    return RuntimeError(f"{code.name}: {details}")


def _from_the_system(error: BaseException, kind: type[Exception]) -> bool:
    """Whether the server may not open, or does not find, some file of its own: no matter of the client's."""
    return kind in (PermissionError, FileNotFoundError) and isinstance(error, OSError) and error.errno is not None
