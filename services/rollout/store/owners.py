"""Who owns which arena, in Redis; what becomes of bytes whose node is gone; and extents that no claim knows.

A replica renews the address of its arenas every few seconds. An arena without one for a while is gone with its node.
"""

import time
from collections.abc import AsyncIterator
from typing import Any, Protocol
from uuid import uuid4

import structlog
from dvla.v1 import store_pb2

from services.common.arena import Extent
from services.rollout.store.depot import Depot
from services.rollout.store.keys import STORE_KEY, address_key, extent_of, held_key, owners_key, tenants_key
from services.rollout.store.redis_client import RedisLink

log = structlog.get_logger()

ADDRESS_SECONDS = 15
"""Life of an address that is not renewed."""
GONE_SECONDS = 15.0
"""Time without an address after which an arena is gone. Counted by each replica, as Redis may have been away."""
COMPARE_SECONDS = 60.0
"""Time between comparisons of extents with claims. One that no claim knows in two of them is freed."""


class OtherReplicas(Protocol):
    """Where the bytes of other nodes come from."""

    def fetch(self, address: str, run: str, claim: store_pb2.Claim) -> AsyncIterator[store_pb2.FetchClaimsResponse]:
        """A claim's bytes, as the replica at this address sends them."""


class Owners:
    """The owners of all arenas as this replica sees them. address: where others reach it."""

    def __init__(self, link: RedisLink, depot: Depot | None, address: str) -> None:
        self._link, self._depot, self._address = link, depot, address
        self._missing: dict[str, float] = {}
        self._tenants: set[tuple[str, str]] = set()
        self._loose: set[Extent] = set()
        self._compared = time.monotonic()

    async def join(self) -> None:
        """Adopt what dead replicas of this node left, and say where the own arenas are."""
        if self._depot is None:
            return
        client = self._link.client
        await self._link.retrying("naming the store", lambda: client.set(STORE_KEY, uuid4().hex[:12], nx=True))
        store: Any = await self._link.retrying("naming the store", lambda: client.get(STORE_KEY))
        self._depot.adopt(store.decode())
        await self.announce()

    async def announce(self) -> None:
        """Say, for a while, where the own arenas are."""
        for arena in list(self._depot.arenas) if self._depot else ():
            await self._renew(address_key(arena))

    async def _renew(self, key: str) -> None:
        client = self._link.client
        await self._link.retrying("an address", lambda: client.set(key, self._address, ex=ADDRESS_SECONDS))

    async def address(self, arena: str) -> str:
        """The address of an arena's owner, empty if there is none now."""
        value: Any = await self._link.retrying("an address", lambda: self._link.client.get(address_key(arena)))
        return value.decode() if value else ""

    async def gone(self, arena: str) -> bool:
        """Whether an arena has had no owner for so long that its node must be gone."""
        if (self._depot and arena in self._depot.arenas) or await self.address(arena):
            self._missing.pop(arena, None)
            return False
        return time.monotonic() - self._missing.setdefault(arena, time.monotonic()) >= GONE_SECONDS

    async def arenas(self, run: str) -> list[str]:
        """Arenas in which a run has bytes."""
        names: Any = await self._link.retrying("arenas", lambda: self._link.client.smembers(owners_key(run)))
        return sorted(name.decode() for name in names)

    async def tenant(self, arena: str, run: str) -> None:
        """This run is going to have bytes in this arena of ours: its claims count when extents are compared."""
        if (arena, run) not in self._tenants:
            await self._link.retrying("naming a run", lambda: self._link.client.sadd(tenants_key(arena), run))
            self._tenants.add((arena, run))

    async def compare(self) -> None:
        """Free extents that no claim knows: of an append that ended between arena and Redis, or of a replaced Redis."""
        if self._depot is None or time.monotonic() - self._compared < COMPARE_SECONDS:
            return
        self._compared = time.monotonic()
        loose = self._depot.sealed()
        for arena in self._depot.arenas:
            loose -= await self._known(arena)
        lost = loose & self._loose
        if lost:
            log.warning("extents that no claim knows are freed", extents=len(lost))
            self._depot.release(lost)
        self._loose = loose - lost

    async def _known(self, arena: str) -> set[Extent]:
        client, known = self._link.client, set[Extent]()
        runs: Any = await self._link.retrying("runs of an arena", lambda: client.smembers(tenants_key(arena)))
        for run in runs:
            known |= await self._held(held_key(run.decode(), arena))
        return known

    async def _held(self, key: str) -> set[Extent]:
        names: Any = await self._link.retrying("extents of a run", lambda: self._link.client.smembers(key))
        return {extent for name in names if (extent := extent_of(name.decode()))}
