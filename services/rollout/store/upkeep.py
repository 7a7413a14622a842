"""What every replica does beside its calls: expire, delete garbage, make room, report. Needs no leader."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from dvla.v1 import store_pb2

from services.common.arena import Extent
from services.common.errors import DvlaError, Exhausted, NotFound
from services.rollout.store.base import StoreBase
from services.rollout.store.blobs import delete_blobs
from services.rollout.store.keys import RUNS_KEY, extent_of
from services.rollout.store.memory import EVICT_SHARE
from services.rollout.store.redis_client import RedisLink

log = structlog.get_logger()

UPLOAD_SECONDS = 600.0
"""An upload that takes longer is taken for abandoned."""
SWEEP_SECONDS = 1.0
SETTLE_SECONDS = 2.0
CLAIM_BYTES = 8 * 1024
"""Room in Redis for the record of an episode whose bytes lie elsewhere."""
_EVICT_GROUPS = 4
_FREED_SECONDS = 0.02


class Upkeep(StoreBase):
    """Sweeps. Several replicas may run them at once: each step is atomic or harmless to repeat."""

    def __init__(self, link: RedisLink, skew_ms: Callable[[], int] = lambda: 0, **places: Any) -> None:
        super().__init__(link, skew_ms, **places)
        self._making_room = asyncio.Lock()

    async def maintain(self) -> None:
        """Sweep all runs for ever; run as a task beside the server."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.owners.join()
                for run in await self.runs():
                    await self.sweep(run)
                    await self._miss_owners(run)
                    if await self.memory.share() >= EVICT_SHARE:
                        await self.make_room(run)
                if self.depot is not None:
                    self.depot.sweep()
                    await self.owners.compare()
            except DvlaError as error:
                log.warning("sweep failed; it is tried again", error=str(error))

    async def runs(self) -> list[str]:
        """Names of the runs that are not over yet."""
        names: Any = await self.link.retrying("listing runs", lambda: self.link.client.smembers(RUNS_KEY))
        return sorted(name.decode() for name in names)

    async def sweep(self, run: str) -> None:
        """Expire grants of silent workers, take abandoned uploads for garbage, delete garbage."""
        mine = sorted(self.depot.arenas) if self.depot else []
        while True:
            try:
                garbage, at_rest, spent = await self.call("sweep", run, int(UPLOAD_SECONDS * 1000), *mine)
            except NotFound:
                return  # named before it was opened
            if self.depot is not None:
                self.depot.release(extent for name in spent if (extent := extent_of(name.decode())))
            if at_rest:
                await self.link.retrying("leaving a run", lambda: self.link.client.srem(RUNS_KEY, run))
            if not garbage and not spent:
                return
            await delete_blobs(self.link, run, [blob.decode() for blob in garbage])

    async def settle(self) -> None:
        """Free, before this replica stops, what runs that are over have left in its arenas."""
        if self.depot is None or not self.depot.arenas:
            return
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                for run in await self.runs():
                    await self.sweep(run)
        except (DvlaError, TimeoutError) as error:
            log.warning("no last sweep; the next replica of this node makes up for it", error=str(error) or "timeout")

    async def _miss_owners(self, run: str) -> None:
        """Bytes in arenas whose node is gone are lost: say so, and have their groups replaced."""
        for arena in await self.owners.arenas(run):
            if await self.owners.gone(arena):
                (groups,) = await self.call("owner_gone", run, arena)
                log.error("an arena is gone with its node", run=run, arena=arena, groups_replaced=groups)

    async def prepare_arena(self, spec: store_pb2.RunSpec) -> None:
        """Have an arena for this run, if this replica may have one. Raises Unsupported if it must and cannot."""
        if self.depot is not None and await self.depot.prepare(spec):
            await self.owners.announce()

    async def allocate(self, spec: store_pb2.RunSpec, length: int, grows: bool) -> Extent:
        """Room for so many bytes, from one more arena if it may grow. Raises Exhausted if there is none."""
        depot = self.depot
        if depot is None:
            raise Exhausted("this replica has no arena")
        try:
            return depot.allocate(length)
        except Exhausted:
            if not grows or not await depot.grow(spec, length):
                raise
        await self.owners.announce()
        return depot.allocate(length)

    async def make_room_in_arena(self, run: str, length: int) -> Extent:
        """Room for so many bytes; under pressure the bytes of dead letters and trained groups go, oldest first.

        Raises Exhausted if there is none.
        """
        depot = self.depot
        if depot is None:
            raise Exhausted("this replica has no arena")
        async with self._making_room:
            while True:
                try:
                    return depot.allocate(length)
                except Exhausted:
                    (evicted,) = await self.call("evict", run, _EVICT_GROUPS)
                    await self.sweep(run)
                    if not evicted:
                        raise
                    log.warning("the arena is full; bytes of trained groups given up", run=run, groups=evicted)

    async def make_room(self, run: str) -> None:
        """Under memory pressure, give up the bytes of dead letters and of trained groups, oldest first."""
        async with self._making_room:
            while await self.memory.share(fresh=True) >= EVICT_SHARE:
                (evicted,) = await self.call("evict", run, _EVICT_GROUPS)
                await self.sweep(run)
                if not evicted:
                    return
                log.warning("memory is short; bytes of trained groups given up", run=run, groups=evicted)
                await asyncio.sleep(_FREED_SECONDS)  # Redis frees them in the background
