"""Channels with the options that every client here uses, and errors mapped back to the domain's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from services.common import errors
from services.common.interceptors import ERRORS, SyncToken, async_token
from services.common.security import Security

MESSAGE_LIMIT = 16 * 1024 * 1024
CALL_SECONDS = 10.0
"""Deadline of a small unary call."""

OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    # A server tolerates a ping every 10 s (see server.py); more often would earn a GOAWAY.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Planes never share a connection, so channels with equal arguments must not share one either.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, security: Security | None = None) -> grpc.Channel:
    """A synchronous channel, for threads. `address`: "unix:/path" or "host:port"."""
    security = security or Security()
    credentials = None if address.startswith("unix:") else security.channel_credentials()
    channel = (
        grpc.secure_channel(address, credentials, OPTIONS) if credentials else grpc.insecure_channel(address, OPTIONS)
    )
    return grpc.intercept_channel(channel, SyncToken(security.token)) if security.token else channel


def open_async_channel(address: str, security: Security | None = None) -> grpc.aio.Channel:
    """An asyncio channel; create it inside the running loop."""
    security = security or Security()
    credentials = None if address.startswith("unix:") else security.channel_credentials()
    extra = async_token(security.token) if security.token else None
    if credentials:
        return grpc.aio.secure_channel(address, credentials, OPTIONS, interceptors=extra)
    return grpc.aio.insecure_channel(address, OPTIONS, interceptors=extra)


@contextmanager
def translated(peer: str) -> Iterator[None]:
    """Raise the domain's error for a failed call; the text names the peer."""
    try:
        yield
    except grpc.RpcError as error:
        code = error.code() if hasattr(error, "code") else None
        details = error.details() if hasattr(error, "details") else str(error)
        kind = ERRORS.get(code, errors.DvlaError) if code is not None else errors.DvlaError
        if "message larger than max" in (details or ""):
            kind = errors.InvalidInput  # gRPC calls it RESOURCE_EXHAUSTED, but repeating it would never help
        elif details == "Internal error from Core":
            # The peer ended the call while asyncio's side of gRPC was writing: it has lost the peer's own status, and
            # only asking again tells what that was.
            kind = errors.Unavailable
        raise kind(f"{peer}: {details or code}") from error
