"""A service with one method of each of the four kinds, whose behaviour is a plain function of the request bytes."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import RoleConfig
from services.common.server import RoleServer
from services.common.telemetry import Telemetry

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Behaviour = Callable[[bytes], bytes]


def add_echo(server: grpc.aio.Server, behave: Behaviour) -> None:
    """Serve /echo/<kind>: streams answer each request, or the one request twice, or the last of all."""

    async def unary_unary(request: bytes, context: Any) -> bytes:
        return behave(request)

    async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        yield behave(request)

    async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return [behave(request) async for request in requests][-1]

    async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield behave(request)

    behaviours: tuple[Callable[..., Any], ...] = (unary_unary, unary_stream, stream_unary, stream_stream)
    for kind, behaviour in zip(KINDS, behaviours, strict=True):
        add_method(server, kind, behaviour)


def add_method(server: grpc.aio.Server, kind: str, behaviour: Callable[..., Any]) -> None:
    """Serve /echo/<kind> by this behaviour."""
    handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(behaviour)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))


async def call(channel: grpc.aio.Channel, kind: str, request: bytes = b"x", timeout: float = 10.0) -> list[bytes]:
    """Call a method of the service; the replies."""
    method: Any = getattr(channel, kind)(f"/echo/{kind}")

    async def requests() -> AsyncIterator[bytes]:
        yield request

    argument = requests() if kind.startswith("stream") else request
    if kind.endswith("unary"):
        return [await method(argument, timeout=timeout)]
    return [reply async for reply in method(argument, timeout=timeout)]


def call_sync(channel: grpc.Channel, kind: str, request: bytes = b"x", timeout: float = 10.0) -> list[bytes]:
    """The same on a synchronous channel."""
    method: Any = getattr(channel, kind)(f"/echo/{kind}")

    def requests() -> Iterator[bytes]:
        yield request

    argument = requests() if kind.startswith("stream") else request
    reply = method(argument, timeout=timeout)
    return [reply] if kind.endswith("unary") else list(reply)


async def healthy(channel: grpc.aio.Channel) -> int:
    """The status that the health service answers."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status)


def watch_health(channel: grpc.aio.Channel) -> Any:
    """A call that streams the changes of the health status."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)


@asynccontextmanager
async def serving(config: RoleConfig, behave: Behaviour = bytes) -> AsyncIterator[RoleServer]:
    """A real role server with the echo service, stopped at the end."""
    server = RoleServer(replace(config, drain_seconds=0), Telemetry("echo", "e0"))
    add_echo(server.grpc, behave)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
