"""A role that does nothing but serve: run as a process of its own by the tests of the server's life."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from services.common.config import RoleConfig, role_app, run_app
from services.common.errors import ConfigError, DvlaError
from services.common.server import RoleServer, run_role, until_stopped
from services.common.telemetry import Telemetry
from tests.common.echo import add_method


@dataclass(frozen=True, kw_only=True)
class ToyConfig(RoleConfig):
    """Settings of the toy role."""

    background: str = "sleep"
    """What the background task does: sleep, end, or raise an error: failed, misconfigured or bug."""


async def background(what: str) -> None:
    if what == "sleep":
        await asyncio.sleep(3600)
    await asyncio.sleep(0.05)
    if what == "failed":
        raise DvlaError("the disk is full; free some space")
    if what == "misconfigured":
        raise ConfigError("model = 'x' is unknown; choose y")
    if what == "bug":
        raise ZeroDivisionError("a bug")


async def slow(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"started"
    await asyncio.sleep(float(request))
    yield b"finished"


async def serve(config: ToyConfig) -> None:
    server = RoleServer(config, Telemetry("toy", config.replica("toy")))
    add_method(server.grpc, "unary_stream", slow)
    await server.start()
    print("serving", flush=True)
    try:
        await until_stopped(background(config.background))
    finally:
        await server.stop()
    print("drained", flush=True)


def run(config: ToyConfig) -> None:
    run_role(lambda: serve(config), config)


app = role_app("toy", ToyConfig, run, "A toy.")

if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
