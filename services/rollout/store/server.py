"""One store process, wired: Redis, state machine, servicer, upkeep."""

import asyncio

import structlog
from dvla.v1 import store_pb2, store_pb2_grpc

from services.common.errors import DvlaError, NotFound
from services.common.server import RoleServer, until_stopped
from services.common.telemetry import Telemetry
from services.rollout.store.client_owner import ReplicaClient
from services.rollout.store.config import StoreConfig
from services.rollout.store.depot import Depot
from services.rollout.store.machine import RolloutStore
from services.rollout.store.redis_client import RedisLink
from services.rollout.store.servicer import StoreServicer

log = structlog.get_logger()

REPORT_SECONDS = 2.0
ALARM_SHARE = 0.01
"""Share of jobs that fail for good above which the status carries an alarm."""
ALARM_JOBS = 100
"""Fewer jobs than this are taken for so many: one failure is no alarm."""


class StoreServer:
    """`start` it, run `work` until it shall end, then `stop` it."""

    def __init__(self, config: StoreConfig) -> None:
        self.telemetry = Telemetry("store", config.replica("store"))
        self._link = RedisLink(
            config.redis, config.redis_password(), config.redis_patience_seconds, tls=config.redis_tls()
        )
        depot = None
        if config.bytes_in != "redis":
            depot = Depot(config.shared_folder, config.bytes_in == "shm", config.arena_bytes)
        self._others = ReplicaClient(config.security())
        self.store = RolloutStore(self._link, depot=depot, others=self._others, address=config.reachable())
        self._server = RoleServer(config, self.telemetry)
        store_pb2_grpc.add_StoreServiceServicer_to_server(StoreServicer(self.store), self._server.grpc)

    async def start(self) -> None:
        """Refuse an unfit Redis, then serve."""
        await self._link.check()
        await self.store.owners.join()
        await self._server.start()

    async def work(self) -> None:
        """Wake waiters, sweep and report, until cancelled or until one of the three fails."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.store.wakeups.listen())
            tasks.create_task(self.store.maintain())
            tasks.create_task(self._report_for_ever())

    async def stop(self) -> None:
        """Answer long polls, drain, disconnect."""
        self.store.stop_waiting()
        await self._server.stop()
        await self._others.close()
        await self.store.close()

    async def report(self) -> None:
        """Bring metrics and facts up to date."""
        try:
            for run in await self.store.runs():
                await self._report_run(run)
            self.telemetry.facts["redis"] = f"{self._link.address}: connected"
            self._report_arenas()
        except DvlaError as error:
            self.telemetry.facts["redis"] = str(error)

    async def _report_for_ever(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(REPORT_SECONDS)

    def _report_arenas(self) -> None:
        depot = self.store.depot
        if depot is not None and depot.arenas:
            size = sum(arena.capacity for arena in depot.arenas.values())
            free = sum(arena.free for arena in depot.arenas.values())
            self.telemetry.update({"arena_bytes": float(size), "arena_used_bytes": float(size - free)})
            self.telemetry.facts["arena"] = ", ".join(depot.arenas)

    async def _report_run(self, run: str) -> None:
        try:
            stats = await self.store.get_stats(store_pb2.GetStatsRequest(run=run))
        except NotFound:
            return
        gauges = ("update", "open_groups", "complete_groups", "leased_groups", "granted_jobs", "workers", "bytes")
        self.telemetry.update({f"{run}/{name}": float(getattr(stats, name)) for name in gauges})
        self.telemetry.update({f"{run}/{name}": float(value) for name, value in stats.counters.items()})
        self.telemetry.update({"redis_used_bytes": stats.redis_used, "redis_limit_bytes": stats.redis_limit})
        self._alarm(run, stats.counters["accepted"], stats.counters["zeroed"] + stats.counters["discarded_failed"])

    def _alarm(self, run: str, accepted: int, given_up: int) -> None:
        fact = f"{run}/alarm"
        if given_up <= ALARM_SHARE * max(accepted + given_up, ALARM_JOBS):
            self.telemetry.facts.pop(fact, None)
            return
        if fact not in self.telemetry.facts:
            log.error("many jobs were given up", run=run, given_up=given_up, accepted=accepted)
        self.telemetry.facts[fact] = f"{given_up} jobs were given up after repeated failures, {accepted} were accepted"


async def serve(config: StoreConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    server = StoreServer(config)
    try:
        await server.start()
        await until_stopped(server.work())
    finally:
        await server.stop()
