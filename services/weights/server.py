"""One weights process, wired: depot, servicer and, with an upstream, a relay."""

import asyncio
from pathlib import Path

from services.common.flatfile import shared_folder
from services.common.server import RoleServer, until_stopped
from services.common.telemetry import Telemetry
from services.weights.config import GIB, WeightsConfig
from services.weights.depot import Depot
from services.weights.durable import Archive
from services.weights.files import FilePool
from services.weights.relay import Relay
from services.weights.servicer import WeightsServicer, add_to_server

TEND_SECONDS = 2.0


class WeightsServer:
    """`start` it, run `tend` and `relay` until it shall end, then `stop` it."""

    def __init__(self, config: WeightsConfig) -> None:
        name = config.replica("weights")
        self.telemetry = Telemetry("weights", name)
        self._server = RoleServer(config, self.telemetry)
        archive = Archive(Path(config.durable_folder)) if config.durable_folder else None
        pool = FilePool(shared_folder(config.shared_folder), int(config.budget_gib * GIB), config.max_files)
        self.depot = Depot(config.keep, pool, archive, config.delta_rule)
        self._servicer = WeightsServicer(self.depot, self.telemetry, relay=bool(config.upstream))
        self._relay = (
            Relay(config.upstream, self.depot, name=name, security=config.security(), folder=config.shared_folder)
            if config.upstream
            else None
        )
        add_to_server(self._servicer, self._server.grpc)

    async def start(self) -> None:
        """Bring back what is on disk, then serve."""
        await asyncio.to_thread(self.depot.restore)
        await self._server.start()

    async def tend(self) -> None:
        """Retire versions whose holds are over and keep the status up to date."""
        while True:
            locked = self.depot.tend()
            self.telemetry.facts["locked"] = "; ".join(locked) or "none"
            versions = self.depot.versions()
            self.telemetry.gauge("versions", len(versions))
            self.telemetry.gauge("bytes", self.depot.reserved())
            self.telemetry.gauge("delta_bytes", self.depot.deltas.size())
            for model in {info.model for info in versions}:
                self.telemetry.facts[f"newest/{model}"] = str(self.depot.newest(model))
                self.telemetry.facts[f"durable/{model}"] = str(self.depot.durable(model))
            for model, status in (self._relay.status() if self._relay else {}).items():
                self.telemetry.facts[f"upstream/{model}"] = (
                    f"{status.applied} of {status.newest}, {status.errors} errors {status.last_error}".rstrip()
                )
            await asyncio.sleep(TEND_SECONDS)

    async def relay(self) -> None:
        """Follow the upstream server; for the root, wait for ever."""
        if self._relay is None:
            await asyncio.Event().wait()
        else:
            await asyncio.to_thread(self._relay.run)

    async def stop(self) -> None:
        """Drain, then remove the shared files."""
        if self._relay:
            self._relay.stop()
        self._servicer.close()
        await self._server.stop()
        await asyncio.to_thread(self.depot.close)


async def serve(config: WeightsConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    server = WeightsServer(config)
    try:
        await server.start()
        await until_stopped(server.tend(), server.relay())
    finally:
        await server.stop()
