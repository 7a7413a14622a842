"""Serves a simulator: `run(config)` for the sim role, `serve(factory)` for a simulator of your own."""

import asyncio
from functools import partial

import structlog

from services.common.errors import ConfigError
from services.common.server import RoleServer, run_role, until_stopped
from services.common.telemetry import Telemetry
from services.sim.config import SimConfig, build_sim
from services.sim.env import Factory
from services.sim.host import Host, HostConfig
from services.sim.servicer import SimServicer, add_to_server
from services.sim.sharing import Sharing

log = structlog.get_logger()


def run(config: SimConfig) -> None:
    """Run the sim role until SIGTERM."""
    run_role(lambda: serve_async(partial(build_sim, config), config), config)


def serve(factory: Factory, listen: str = "127.0.0.1:7431", sessions: int = 2, processes: int = 0) -> None:
    """Serve a simulator of your own until SIGTERM or Ctrl-C.

    factory: makes one `VectorSim`; called once per session. With processes > 0 it must be importable (a class or a
    function of a module) and the call must stand under `if __name__ == "__main__":`.
    """
    if processes > sessions:
        raise ConfigError(f"processes = {processes} for sessions = {sessions}; use at most {sessions}")
    config = SimConfig(listen=listen, sim="custom:serve", sessions=sessions, processes=processes)
    run_role(lambda: serve_async(factory, config), config)


async def serve_async(factory: Factory, config: SimConfig) -> None:
    """The whole service: NOT_SERVING until an environment is up and whenever none is."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    telemetry = Telemetry("sim", config.replica("sim"))
    host = Host(
        factory,
        HostConfig(config.sessions, config.processes, config.step_timeout, config.start_timeout),
        on_change=lambda: _notify(loop, changed),
    )
    for env in host.envs:
        telemetry.lanes[env.name] = env.lane
    server = RoleServer(config, telemetry)
    sharing = Sharing(config.transport, config.shared_folder, config.sessions)
    servicer = SimServicer(host, telemetry, sharing)
    add_to_server(servicer, server.grpc)
    try:
        await server.start(serving=False)
        host.start()
        await until_stopped(_follow(host, server, telemetry, changed, sharing), _fatal(host))
    finally:
        servicer.drain()
        await server.stop()
        await asyncio.to_thread(host.close)
        sharing.close()


def _notify(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    loop.call_soon_threadsafe(changed.set)


async def _follow(
    host: Host, server: RoleServer, telemetry: Telemetry, changed: asyncio.Event, sharing: Sharing
) -> None:
    """Keep health and status in step with the environments; the first one that is up says how large an arena is."""
    while True:
        if host.serving:
            sharing.prepare(host.describe())
            telemetry.facts["shared_memory"] = sharing.facts()
        await server.serving(host.serving)
        up = sum(env.ready for env in host.envs)
        telemetry.gauge("environments_up", up)
        telemetry.gauge("environment_restarts", host.restarts)
        telemetry.facts["environments"] = f"{up} of {len(host.envs)} up, {host.sessions} sessions"
        log.info("environments", up=up, of=len(host.envs))
        await changed.wait()
        changed.clear()


async def _fatal(host: Host) -> None:
    raise await asyncio.wrap_future(host.failed)
