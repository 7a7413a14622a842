"""A simulator service in a thread of the test, over a real Unix socket."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.server import RoleServer
from services.common.telemetry import Telemetry
from services.sim.client import SimClient
from services.sim.config import SimConfig
from services.sim.env import Factory
from services.sim.host import Host, HostConfig
from services.sim.servicer import SimServicer, add_to_server
from services.sim.sharing import Sharing


class Service:
    """A running service. address: unix:/path."""

    def __init__(self, address: str, factory: Factory, config: HostConfig, silence: float, transport: str) -> None:
        self.address = address
        self.telemetry = Telemetry("sim", "sim-test")
        self.host = Host(factory, config)
        self.sharing = Sharing(transport, str(Path(address.removeprefix("unix:")).parent), config.sessions)
        self._silence = silence
        self._up, self._down = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        server = RoleServer(SimConfig(listen=self.address, drain_seconds=0.5), self.telemetry)
        self.servicer = SimServicer(self.host, self.telemetry, self.sharing, self._silence)
        add_to_server(self.servicer, server.grpc)
        await server.start()
        self.host.start()
        while not (self.host.serving or self.host.failed.done()):
            await asyncio.sleep(0.01)
        self._up.set()
        await self._down.wait()
        await server.stop()
        await asyncio.to_thread(self.host.close)
        self.sharing.close()

    def call(self, function: object) -> None:
        """Run a function in the service's loop."""
        self._loop.call_soon_threadsafe(function)  # type: ignore[arg-type]

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(150)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._down.set)
        self._thread.join(30)
        self._loop.close()


@contextmanager
def serving(
    folder: Path,
    factory: Factory,
    sessions: int = 2,
    processes: int = 0,
    silence: float = 15.0,
    transport: str = "auto",
) -> Iterator[tuple[Service, SimClient]]:
    service = Service(f"unix:{folder}/sim.sock", factory, HostConfig(sessions, processes), silence, transport)
    service.start()
    client = SimClient(service.address)
    try:
        yield service, client
    finally:
        client.close()
        service.stop()
