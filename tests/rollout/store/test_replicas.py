"""Random histories of two replicas on two nodes, each with an arena: together they behave as one without any."""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from dvla.v1 import store_pb2 as s

from services.common.arena import Extent
from services.common.redis_server import RedisServer
from tests.rollout.store.harness import Harness
from tests.rollout.store.sites import Network, Site
from tests.rollout.store.test_state_machine import StoreHistory, run_histories


class ReplicatedHistory(StoreHistory):
    """The same on two nodes with a replica each: every call goes to either of them. Worker w0 shares memory with the
    first, w1 with the second, w2 with none; replicas and workers die, and arenas are adopted."""

    def connect(self) -> None:
        self.folder = TemporaryDirectory(prefix="dvla-")
        self.network = Network()
        self.chance = Random(self.spec.total_updates)
        self.sites = tuple(
            Site(self.url, self.clock, self.spec, Path(self.folder.name) / name, self.network, strict=False)
            for name in ("one", "two")
        )
        self.sites[0].workers("w0")
        self.sites[1].workers("w1")
        for site in self.sites:
            self.do(site.start())

    @property
    def run(self) -> Harness:
        site = self.chance.choice(self.sites)
        site.run.epoch = self.model.epoch
        return site.run

    def take(self, worker: str, count: int, behind: int) -> None:
        super().take(worker, count, behind)
        if self.chance.random() < 0.1:  # the worker dies: the kernel frees its locks, and a sweep its rooms
            for site in self.sites:
                for job, _ in self.jobs:
                    site.run.leave(job)
                site.depot.sweep()

    def append_one(self, job: s.Job, weights: int, score: float) -> None:
        super().append_one(job, weights, score)
        for site in self.sites:  # it was answered
            site.run.leave(job)

    def store_restarts(self, chance: Random) -> None:
        self.do(chance.choice(self.sites).restart())

    def drive_to_the_end(self) -> None:
        super().drive_to_the_end()
        for site in self.sites:
            self.do(self.check_extents(site))

    async def check_extents(self, site: Site) -> None:
        """Each extent is a claim's, and each claim has its extent."""
        known: set[Extent] = set()
        await site.store.sweep(self.spec.run)
        for arena in site.depot.arenas:
            known |= await site.store.owners._known(arena)
        assert site.depot.sealed() == known

    def disconnect(self) -> None:
        for site in self.sites:
            self.do(site.close())
        self.folder.cleanup()


@pytest.mark.redis
def test_replicas_with_arenas_of_their_own_behave_as_one(redis_server: RedisServer) -> None:
    class Here(ReplicatedHistory):
        url = redis_server.url

    run_histories(Here, 6)
