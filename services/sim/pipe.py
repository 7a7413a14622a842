"""Messages between the service and an environment process: a small JSON header and raw bytes. No pickle."""

import json
import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from services.common import errors
from services.common.errors import DvlaError

Header = dict[str, Any]
Part = bytes | memoryview


def send(connection: Connection, header: Header, parts: Sequence[Part] = ()) -> None:
    """Send a header and its byte strings."""
    connection.send_bytes(json.dumps(header | {"parts": len(parts)}).encode())
    for part in parts:
        connection.send_bytes(part)


def receive(connection: Connection) -> tuple[Header, list[Part]]:
    """The next message; raises EOFError or OSError if the other side is gone."""
    header: Header = json.loads(connection.recv_bytes())
    return header, [connection.recv_bytes() for _ in range(header["parts"])]


def bound(connection: Connection, seconds: float) -> None:
    """No read or write of a started message may block longer, even if the other side is frozen (OSError then)."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def error_header(error: Exception) -> Header:
    """An error as a header."""
    if isinstance(error, DvlaError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "DvlaError", "text": f"the simulator failed: {type(error).__name__}: {error}"}


def raise_error(header: Header) -> None:
    """Raise the error that a header carries, if any."""
    if "error" in header:
        kind = getattr(errors, header["error"], DvlaError)
        raise kind(header["text"])
