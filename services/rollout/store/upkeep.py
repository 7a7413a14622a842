"""What every replica does beside its calls: expire, delete garbage, make room, report. Needs no leader."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from services.common.errors import DvlaError, NotFound
from services.rollout.store.base import StoreBase
from services.rollout.store.blobs import delete_blobs
from services.rollout.store.keys import RUNS_KEY
from services.rollout.store.memory import EVICT_SHARE
from services.rollout.store.redis_client import RedisLink

log = structlog.get_logger()

UPLOAD_SECONDS = 600.0
"""An upload that takes longer is taken for abandoned."""
SWEEP_SECONDS = 1.0
_EVICT_GROUPS = 4
_FREED_SECONDS = 0.02


class Upkeep(StoreBase):
    """Sweeps. Several replicas may run them at once: each step is atomic or harmless to repeat."""

    def __init__(self, link: RedisLink, skew_ms: Callable[[], int] = lambda: 0) -> None:
        super().__init__(link, skew_ms)
        self._making_room = asyncio.Lock()

    async def maintain(self) -> None:
        """Sweep all runs for ever; run as a task beside the server."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                for run in await self.runs():
                    await self.sweep(run)
                    if await self.memory.share() >= EVICT_SHARE:
                        await self.make_room(run)
            except DvlaError as error:
                log.warning("sweep failed; it is tried again", error=str(error))

    async def runs(self) -> list[str]:
        """Names of the runs that are not over yet."""
        names: Any = await self.link.retrying("listing runs", lambda: self.link.client.smembers(RUNS_KEY))
        return sorted(name.decode() for name in names)

    async def sweep(self, run: str) -> None:
        """Expire grants of silent workers, take abandoned uploads for garbage, delete garbage."""
        while True:
            try:
                garbage, at_rest = await self.call("sweep", run, int(UPLOAD_SECONDS * 1000))
            except NotFound:
                return  # named before it was opened
            if at_rest:
                await self.link.retrying("leaving a run", lambda: self.link.client.srem(RUNS_KEY, run))
            if not garbage:
                return
            await delete_blobs(self.link, run, [blob.decode() for blob in garbage])

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
