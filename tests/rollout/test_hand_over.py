"""An episode from the worker's hands into the learner's, through a real store: shared memory where both have it."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dvla.v1 import store_pb2 as s

from services.common.flatfile import HEADER_BYTES
from services.common.locality import Vicinity
from services.common.redis_server import RedisServer
from services.common.security import Security
from services.common.spec import Array
from services.learner.client import StoreClient as LearnerClient
from services.learner.source import LeasedGroup
from services.rollout.store import depot as depot_module
from services.rollout.store.config import StoreConfig
from services.rollout.store.keys import extent_of
from services.rollout.store.server import StoreServer
from services.rollout.worker.client_store import StoreClient as WorkerClient
from tests.rollout.store.harness import make_episode, make_spec

pytestmark = pytest.mark.redis
SIZES = {"small": 1000, "large": 3 * 2**20}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depot_module, "WRITER_SECONDS", 0.0)


def trajectory(number: int, size: str) -> dict[str, Array]:
    rows = np.arange(SIZES[size] // 8, dtype=np.int64) + number
    return {"reward": np.array([number, 2], np.float32), "obs/state": rows}


class Scene:
    """One store in `folder`/shm, and clients whose memory is there or elsewhere."""

    def __init__(self, server: StoreServer, address: str, folder: Path, spec: s.RunSpec) -> None:
        self.server, self.address, self.folder, self.spec = server, address, folder, spec
        self._closing: list[Any] = []
        self.epoch = 0

    def vicinity(self, place: str) -> Vicinity | None:
        vicinity = Vicinity("auto", str(self.folder / place)) if place else None
        self._closing += [vicinity] if vicinity else []
        return vicinity

    def worker(self, place: str) -> WorkerClient:
        return WorkerClient(self.address, Security(), self.spec.run, f"w-{place}", self.vicinity(place))

    def learner(self, place: str) -> LearnerClient:
        client = LearnerClient(self.address, Security(), self.spec.run, self.spec.episode_bytes, self.vicinity(place))
        self._closing.append(client)
        return client

    @property
    def used(self) -> int:
        depot = self.server.store.depot
        assert depot
        depot.sweep()
        return sum(arena.capacity - arena.free for arena in depot.arenas.values())

    def close(self) -> None:
        for part in self._closing:
            part.close()


@asynccontextmanager
async def scene(redis_url: str, folder: Path, **settings: Any) -> AsyncIterator[Scene]:
    address = f"unix:{folder}/store.sock"
    shared = str(folder / "shm")
    server = StoreServer(
        StoreConfig(listen=address, redis=redis_url, shared_folder=shared, drain_seconds=0, **settings)
    )
    await server.start()
    made = Scene(server, address, folder, make_spec(group_size=2, episode_bytes=4 * 2**20, groups_per_update=1))
    opened = await asyncio.to_thread(made.learner("").open, made.spec, 0, 0)
    made.epoch = opened.epoch
    yield made
    await asyncio.to_thread(made.close)
    await server.stop()


async def collect(worker: WorkerClient, size: str) -> list[s.Job]:
    """One group, through this worker."""
    jobs = list((await worker.next_jobs((1, 0), 2, 0.0)).jobs)
    for job in jobs:
        assert await worker.append(job, make_episode(float(job.key.member)), trajectory(job.key.member, size))
    return jobs


async def lease(learner: LearnerClient, epoch: int) -> LeasedGroup:
    (group,) = await asyncio.to_thread(learner.lease, epoch, 1, 5.0)
    return group


@pytest.mark.parametrize(
    ("size", "bytes_in", "worker_place", "learner_place"),
    [
        ("small", "auto", "shm", "shm"),
        ("large", "shm", "shm", "elsewhere"),
        ("small", "shm", "elsewhere", "shm"),
        ("large", "auto", "elsewhere", "shm"),
        ("large", "redis", "shm", "shm"),
        ("small", "auto", "", ""),
    ],
)
async def test_what_a_worker_hands_in_is_what_the_learner_reads_wherever_they_run(
    redis_server: RedisServer, tmp_path: Path, size: str, bytes_in: str, worker_place: str, learner_place: str
) -> None:
    async with scene(redis_server.url, tmp_path, bytes_in=bytes_in) as s1:
        worker, learner = s1.worker(worker_place), s1.learner(learner_place)
        jobs = await collect(worker, size)
        near = worker_place == "shm" and bytes_in != "redis"
        assert [job.HasField("reserved") for job in jobs] == [near] * 2
        group = await lease(learner, s1.epoch)
        assert bool(group.claims[0].owner) == (near or bytes_in == "shm")
        members = await asyncio.to_thread(learner.fetch, group)
        for number, member in enumerate(members):
            assert member.trajectory is not None
            for name, array in trajectory(number, size).items():
                np.testing.assert_array_equal(member.trajectory[name], array)
        await worker.close()


async def test_the_learner_reads_where_the_worker_wrote_and_the_room_is_free_after_training(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with scene(redis_server.url, tmp_path, bytes_in="shm") as s1:
        worker, learner = s1.worker("shm"), s1.learner("shm")
        await collect(worker, "large")
        group = await lease(learner, s1.epoch)
        (member, other) = await asyncio.to_thread(learner.fetch, group)
        del other
        assert member.trajectory
        array: Any = member.trajectory["obs/state"]
        depot = s1.server.store.depot
        assert depot
        (arena,) = depot.arenas.values()
        assert not array.flags.writeable
        extent = extent_of(group.claims[0].blob)
        assert extent
        at = extent.offset - HEADER_BYTES + 64  # the reward comes first
        arena._data[at : at + 8].view(np.int64)[0] = 4711
        assert array[0] == 4711, "this is the store's memory, not a copy"
        await asyncio.to_thread(learner.trained, s1.epoch, 1, [group.group])
        await asyncio.to_thread(learner.ack, s1.epoch, 1)
        held = s1.used
        assert held > 2 * 2**20, "a view is still open, so its room is nobody else's"
        assert array[5] == 5
        del array, member
        gc.collect()
        await asyncio.to_thread(learner.trained, s1.epoch, 1, [group.group])  # lets go of what nobody looks at
        assert s1.used == 0
        await worker.close()


async def test_bytes_that_changed_after_they_were_accepted_are_refused(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with scene(redis_server.url, tmp_path) as s1:
        worker, learner = s1.worker("shm"), s1.learner("shm")
        await collect(worker, "small")
        depot = s1.server.store.depot
        assert depot
        (arena,) = depot.arenas.values()
        extent = min((extent for extent, _ in arena.extents()), key=lambda extent: extent.offset)
        arena._data[extent.offset - HEADER_BYTES + 70] ^= 1
        group = await lease(learner, s1.epoch)
        with pytest.raises(Exception, match="do not match their hash"):
            await asyncio.to_thread(learner.fetch, group)
        await worker.close()
