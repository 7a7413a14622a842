"""Store replicas on several nodes, in one process: each node is a folder of shared memory, and can be lost."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from dvla.v1 import store_pb2 as s

from services.common.locality import Vicinity
from services.rollout.store.depot import Depot
from services.rollout.store.machine import RolloutStore
from tests.rollout.store.harness import Clock, Harness, new_store


class Network:
    """Replicas by address, as other replicas reach them."""

    def __init__(self) -> None:
        self.stores: dict[str, RolloutStore] = {}
        self.calls = 0

    async def fetch(self, address: str, run: str, claim: s.Claim) -> AsyncIterator[s.FetchClaimsResponse]:
        self.calls += 1
        async for response in self.stores[address].fetch(s.FetchClaimsRequest(run=run, claims=[claim])):
            yield response


class Site:
    """A node with one replica, and workers that share its memory."""

    def __init__(
        self, url: str, clock: Clock, spec: s.RunSpec, folder: Path, network: Network, strict: bool, size: int = 0
    ) -> None:
        self._url, self._clock, self._folder, self._network, self._strict = url, clock, folder, network, strict
        self._size = size
        self.vicinity = Vicinity("auto", str(folder))
        self._connect()
        self.run = Harness(self.store, clock, spec)

    def _connect(self) -> None:
        self.depot = Depot(str(self._folder), self._strict, self._size)
        address = f"site-{self._folder.name}"
        self.store = new_store(self._url, self._clock, depot=self.depot, others=self._network, address=address)
        self._network.stores[address] = self.store

    async def start(self) -> None:
        await self.store.owners.join()

    def workers(self, *names: str) -> None:
        """These workers run on this node."""
        self.run.near = dict.fromkeys(names, self.vicinity)

    async def crash(self) -> None:
        """The replica dies; its files stay, their locks are free."""
        for arena in self.depot.arenas.values():
            arena.close()
        self.depot.arenas.clear()
        await self.store.close()

    async def restart(self) -> None:
        await self.crash()
        self._connect()
        await self.start()
        self.run.store = self.store

    def lose(self) -> None:
        """The node goes down for good, with its memory."""
        for arena in self.depot.arenas.values():
            arena.close()
        self.depot.arenas.clear()
        for path in self._folder.glob("*.arena"):
            path.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def close(self) -> None:
        for _, lease in self.run.rooms.values():
            lease.close()
        self.vicinity.close()
        await self.store.close()
