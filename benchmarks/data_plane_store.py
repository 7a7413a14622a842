"""The rollout store measured: durable hand-over of whole trajectories, and what they cost in Redis.

    python -m benchmarks.data_plane_store [--quick] [--json FILE]

A store process over a private Redis (appendonly yes, appendfsync everysec). A worker keeps eight appends in flight, a
learner leases, records updates and acks, so that the store is in its steady state: only the training is left out.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import redis
from dvla.v1 import common_pb2, store_pb2
from redis.asyncio import Redis

from benchmarks.common import Report, end_in_order, machine, ratio
from services.common.locality import Vicinity
from services.common.redis_server import RedisServer
from services.common.security import Security
from services.common.server import configure_logging
from services.learner.client import StoreClient as LearnerClient
from services.rollout.worker.client_store import StoreClient as WorkerClient

MEGABYTE = 2**20
IN_FLIGHT = 8
GROUP, BATCH, STALENESS = 8, 2, 2
READY_SECONDS = 60.0


@dataclass
class Bench:
    """A store over a Redis of its own. bytes_in: "shm" or "redis"."""

    folder: Path
    bytes_in: str
    server: RedisServer
    process: "subprocess.Popen[bytes] | None" = None
    names: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    @property
    def address(self) -> str:
        """Of the store."""
        return f"unix:{self.folder}/store.sock"

    @property
    def shared(self) -> str:
        """The folder of the arena, on tmpfs."""
        return f"/dev/shm/dvla-bench-{self.folder.name}"

    def spec(self, updates: int) -> store_pb2.RunSpec:
        """A new run of this many updates."""
        return store_pb2.RunSpec(
            run=f"bench-{next(self.names)}",
            group_size=GROUP,
            groups_per_update=BATCH,
            staleness=STALENESS,
            total_updates=updates,
            tasks=[store_pb2.TaskShare(task="reach", weight=1.0)],
            max_attempts=2,
            on_failure="zero",
            episode_bytes=MEGABYTE + 4096,
            model="policy",
            score="success",
            grant_seconds=60.0,
        )

    def used(self) -> int:
        """Redis memory in bytes."""
        with redis.Redis(unix_socket_path=str(self.server.socket.resolve())) as client:
            return int(client.info("memory")["used_memory"])


@contextmanager
def bench(bytes_in: str) -> Iterator[Bench]:
    """Redis and store, up; both end with the block."""
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        made = Bench(Path(name), bytes_in, RedisServer(Path(name) / "redis"))
        made.server.start()
        flags = ("--listen", made.address, "--redis", made.server.url, "--bytes-in", bytes_in)
        command = [sys.executable, "-m", "services.rollout.store", *flags, "--shared-folder", made.shared]
        made.process = process = subprocess.Popen([*command, "--log-level", "warning"], cwd=Path(__file__).parents[1])
        try:
            wait_for(made.address)
            yield made
        finally:
            process.terminate()
            process.wait(20)
            made.server.stop()
            for path in Path(made.shared).glob("*") if Path(made.shared).exists() else ():
                path.unlink()


def wait_for(address: str) -> None:
    """Until somebody listens."""
    deadline = time.monotonic() + READY_SECONDS
    path = Path(address.removeprefix("unix:"))
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at {address}")
        time.sleep(0.05)


class Learner(threading.Thread):
    """Leases, records and acks as fast as it can; `update` is where it is."""

    def __init__(self, made: Bench, spec: store_pb2.RunSpec) -> None:
        super().__init__(daemon=True)
        self._client = LearnerClient(made.address, Security(), spec.run, spec.episode_bytes)
        self._total, self.update = spec.total_updates, 0
        self.epoch = self._client.open(spec, 0, 0).epoch

    def run(self) -> None:
        """Until the last update."""
        groups: list[int] = []
        while self.update < self._total:
            groups += [leased.group for leased in self._client.lease(self.epoch, BATCH, 5.0)]
            while len(groups) >= BATCH:
                self._client.trained(self.epoch, self.update + 1, groups[:BATCH])
                self.update, groups = self.update + 1, groups[BATCH:]
                if self.update % 4 == 0:
                    self._client.ack(self.epoch, self.update)
        self._client.ack(self.epoch, self.update)
        self._client.close()


async def append_to_lease(made: Bench, updates: int) -> float:
    """Trajectories of 1 MB a second, from the first request for a job until the learner has leased the last one."""
    spec = made.spec(updates)
    learner = Learner(made, spec)
    vicinity = Vicinity("auto", made.shared) if made.bytes_in == "shm" else None
    worker = WorkerClient(made.address, Security(), spec.run, "w", vicinity)
    data = {"obs/state": np.random.default_rng(0).integers(0, 255, MEGABYTE, np.uint8)}
    version = common_pb2.Version(epoch=1)
    episode = store_pb2.Episode(oldest=version, newest=version, steps=10, score=1.0)
    learner.start()
    began = time.perf_counter()

    waiting: asyncio.Queue[store_pb2.Job] = asyncio.Queue(IN_FLIGHT)

    async def ask() -> None:
        while learner.update < updates:
            for job in (await worker.next_jobs((1, learner.update), IN_FLIGHT, 0.2)).jobs:
                await waiting.put(job)

    async def lane() -> None:
        while True:
            await worker.append(await waiting.get(), episode, data)

    lanes = [asyncio.create_task(lane()) for _ in range(IN_FLIGHT)]
    await ask()
    for task in lanes:
        task.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    await asyncio.to_thread(learner.join)
    seconds = time.perf_counter() - began
    await worker.close()
    if vicinity:
        vicinity.close()
    return updates * BATCH * GROUP / seconds


async def bare_redis(made: Bench, count: int) -> float:
    """Chunks of 1 MB a second that redis-py writes, and deletes later, with as many in flight."""
    client = Redis.from_url(made.server.url, socket_read_size=MEGABYTE)
    data, left = bytes(np.random.default_rng(0).integers(0, 255, MEGABYTE, np.uint8)), iter(range(count))
    began = time.perf_counter()

    async def lane() -> None:
        for number in left:
            await client.set(f"bare:{number}", data)

    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    seconds = time.perf_counter() - began
    await client.unlink(*(f"bare:{number}" for number in range(count)))
    await client.aclose()
    return count / seconds


async def memory_per_byte(made: Bench) -> float:
    """Redis memory for each byte that waits in the store."""
    spec = made.spec(100)
    learner = Learner(made, spec)
    before = made.used()
    vicinity = Vicinity("auto", made.shared) if made.bytes_in == "shm" else None
    worker = WorkerClient(made.address, Security(), spec.run, "w", vicinity)
    version = common_pb2.Version(epoch=learner.epoch)
    episode = store_pb2.Episode(oldest=version, newest=version, steps=10, score=1.0)
    data = {"obs/state": np.random.default_rng(1).integers(0, 255, MEGABYTE, np.uint8)}
    count = 0
    for job in (await worker.next_jobs((1, 0), GROUP * BATCH * (STALENESS + 1), 1.0)).jobs:
        await worker.append(job, episode, data)
        count += 1
    used = made.used() - before
    await worker.close()
    if vicinity:
        vicinity.close()
    return used / (count * MEGABYTE)


def store(report: Report, rounds: int, count: int) -> None:
    """All rows. count: trajectories of a round, about."""
    updates = max(4, count // (GROUP * BATCH))
    note = f"{IN_FLIGHT} in flight, groups of {GROUP}"
    with bench("shm") as made:
        rates = [asyncio.run(append_to_lease(made, updates)) for _ in range(rounds)]
        met = median(rates) >= 1000
        report.add("append to lease, 1 MB, co-located, AOF everysec", rates, "per s", ">= 1,000", met, note)
        share = asyncio.run(memory_per_byte(made))
        report.add("Redis memory per queued byte, co-located", share, "", "< 0.01", share < 0.01)
    with bench("redis") as made:
        ours, bare = [], []
        for _ in range(rounds):
            bare.append(asyncio.run(bare_redis(made, updates * GROUP * BATCH)))
            ours.append(asyncio.run(append_to_lease(made, updates)))
        report.add("append to lease, 1 MB, blobs in Redis", ours, "per s", note=note)
        report.add("bare redis-py, the same chunks", bare, "per s", note=f"{IN_FLIGHT} in flight")
        shares = ratio(ours, bare)
        report.add("store / bare redis-py", shares, "", ">= 0.8", median(shares) >= 0.8)
        share = asyncio.run(memory_per_byte(made))
        report.add("Redis memory per queued byte, blobs", share, "", "< 1.3", share < 1.3)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within a minute: fewer trajectories in each round")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    given = parser.parse_args()
    end_in_order()
    configure_logging("warning")
    print(machine())
    report = Report("rollout store")
    store(report, 5 if given.quick else 7, 128 if given.quick else 2000)
    report.write(given.json)


if __name__ == "__main__":
    main()
