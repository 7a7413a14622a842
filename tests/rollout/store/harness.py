"""One run in a store, with short names for what workers, learner and time do to it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np
import xxhash
from dvla.v1 import common_pb2 as c
from dvla.v1 import store_pb2 as s

from services.common.arena import Extent, Lease
from services.common.errors import Unsupported
from services.common.locality import Vicinity
from services.rollout.store.machine import RolloutStore
from services.rollout.store.redis_client import RedisLink

GRANT_SECONDS = 1000.0


class Clock:
    """Time that the store adds to Redis TIME."""

    def __init__(self) -> None:
        self.skew_ms = 0

    def __call__(self) -> int:
        return self.skew_ms

    def forward(self, seconds: float) -> None:
        self.skew_ms += int(seconds * 1000)


def make_spec(run: str = "", **changes: Any) -> s.RunSpec:
    """A small run: groups of 2, 2 groups an update, staleness 1."""
    tasks = changes.pop("tasks", {"Push": 1.0})
    fields: dict[str, Any] = {
        "run": run or f"run-{uuid4().hex[:12]}",
        "group_size": 2,
        "groups_per_update": 2,
        "staleness": 1,
        "total_updates": 100,
        "seed_base": 1000,
        "max_attempts": 2,
        "on_failure": "zero",
        "model": "policy",
        "score": "success",
        "end_on_success": True,
        "grant_seconds": GRANT_SECONDS,
    } | changes
    return s.RunSpec(tasks=[s.TaskShare(task=name, weight=weight) for name, weight in tasks.items()], **fields)


def version(update: int, epoch: int = 1) -> c.Version:
    return c.Version(epoch=epoch, update=update)


def make_episode(score: float = 1.0, update: int = 0, steps: int = 5, epoch: int = 1) -> s.Episode:
    return s.Episode(
        oldest=version(update, epoch), newest=version(update, epoch), steps=steps, score=score, success_once=score > 0
    )


def make_payload(data: bytes, inline: bool = True) -> c.Payload:
    tensors = [c.TensorMeta(name="reward", dtype="uint8", shape=[len(data)], offset=0)]
    payload = c.Payload(tensors=tensors, length=len(data), xxh3=xxhash.xxh3_64_intdigest(data))
    if inline:
        payload.inline = data
    else:
        payload.frames = -(-len(data) // 2**20)
    return payload


async def cut(data: bytes, size: int = 2**20) -> AsyncIterator[c.Frame]:
    for offset in range(0, len(data), size):
        yield c.Frame(offset=offset, data=data[offset : offset + size])


def name(job: s.Job) -> tuple[int, int, int]:
    return job.key.group, job.key.member, job.key.attempt


class Harness:
    """Drives one run through a store; `epoch` is that of the last `open`."""

    def __init__(self, store: RolloutStore, clock: Clock, spec: s.RunSpec) -> None:
        self.store, self.clock, self.spec, self.run = store, clock, spec, spec.run
        self.epoch = 0
        self.cursor = "0-0"
        self.near: dict[str, Vicinity] = {}  # workers that share memory with the replica
        self.rooms: dict[tuple[int, int, int], tuple[Extent, Lease]] = {}

    async def open(self, floor: int = 0, resume: int = 0) -> s.OpenRunResponse:
        reply = await self.store.open_run(s.OpenRunRequest(spec=self.spec, floor_epoch=floor, resume_update=resume))
        self.epoch = reply.epoch
        return reply

    async def next_jobs(
        self,
        count: int = 1,
        update: int | None = 0,
        worker: str = "w0",
        call_id: str = "",
        wait: float = 0.0,
        size: int = 0,
    ) -> s.NextJobsResponse:
        held = None if update is None else version(update)
        request = s.NextJobsRequest(run=self.run, worker=worker, version=held, count=count, wait_seconds=wait)
        request.episode_bytes = size
        if worker in self.near:
            request.locality.CopyFrom(self.near[worker].locality())
        reply = await self.store.next_jobs(request, call_id)
        for job in reply.jobs:
            self.enter(job, worker)
        return reply

    def enter(self, job: s.Job, worker: str) -> None:
        """Lock the room that came with a job."""
        extent = Extent.of(job.reserved)
        known = self.rooms.get(name(job))
        if job.HasField("reserved") and not (known and known[0] == extent):
            peer = self.near[worker].peer
            assert peer
            self.leave(job)
            self.rooms[name(job)] = extent, peer.write(extent)

    def leave(self, job: s.Job) -> None:
        """Unlock it."""
        if name(job) in self.rooms:
            self.rooms.pop(name(job))[1].close()

    async def jobs(self, count: int = 1, update: int | None = 0, worker: str = "w0") -> list[s.Job]:
        return list((await self.next_jobs(count, update, worker)).jobs)

    async def renew(self, worker: str) -> int:
        return (await self.store.renew(s.RenewRequest(run=self.run, worker=worker))).grants

    async def set_start(self, group: int, start: bytes) -> bytes:
        return (await self.store.set_start(s.SetStartRequest(run=self.run, group=group, start=start))).start

    async def close(self, complete: bool = False) -> None:
        await self.store.close_run(s.CloseRunRequest(run=self.run, epoch=self.epoch, complete=complete))

    async def append(
        self, job: s.Job, score: float = 1.0, update: int = 0, steps: int = 5, data: bytes = b""
    ) -> s.AppendResponse:
        data = data or repr(name(job)).encode()
        if name(job) in self.rooms and not job.evaluation:
            try:
                return await self.append_in_place(job, make_episode(score, update, steps), data)
            except Unsupported:
                self.leave(job)  # this replica is not the one that granted it
        if job.evaluation:
            begin = s.AppendBegin(key=job.key, evaluation=job.evaluation, episode=make_episode(score, update, steps))
        else:
            begin = s.AppendBegin(
                key=job.key, episode=make_episode(score, update, steps), payload=make_payload(data, len(data) <= 2**18)
            )
        return await self.store.append(begin, cut(data))

    async def append_in_place(self, job: s.Job, episode: s.Episode, data: bytes) -> s.AppendResponse:
        extent, lease = self.rooms[name(job)]
        lease.view[: len(data)] = np.frombuffer(data, np.uint8)
        payload = make_payload(data)
        payload.shm.CopyFrom(replace(extent, length=len(data)).message())
        return await self.store.append(s.AppendBegin(key=job.key, episode=episode, payload=payload), cut(b""))

    async def fail(self, job: s.Job, reason: str = "a value is not finite") -> None:
        await self.store.fail_job(s.FailJobRequest(key=job.key, evaluation=job.evaluation, reason=reason))

    async def give_back(self, job: s.Job, reason: str = "the simulator died") -> None:
        cause = s.FAIL_CAUSE_OUTSIDE
        await self.store.fail_job(s.FailJobRequest(key=job.key, evaluation=job.evaluation, reason=reason, cause=cause))

    async def fill(self, groups: int, update: int = 0) -> list[int]:
        """Complete so many new groups; member scores differ. Returns their numbers."""
        jobs = await self.jobs(groups * self.spec.group_size, update)
        for job in jobs:
            await self.append(job, float(job.key.member), update)
        return sorted({job.key.group for job in jobs})

    async def lease(self, count: int = 100, epoch: int = 0, wait: float = 0.0) -> list[s.Group]:
        request = s.LeaseRequest(run=self.run, epoch=epoch or self.epoch, count=count, wait_seconds=wait)
        return list((await self.store.lease(request)).groups)

    async def lease_from_cursor(self) -> list[int]:
        """Groups after those that the last call of this method got."""
        request = s.LeaseRequest(run=self.run, epoch=self.epoch, count=100, cursor=self.cursor)
        response = await self.store.lease(request)
        self.cursor = response.cursor
        return [group.group for group in response.groups]

    async def lease_again(self) -> list[s.Group]:
        """Everything that was leased and not acked, from the start."""
        request = s.LeaseRequest(run=self.run, epoch=self.epoch, count=1000, cursor="0-0")
        return list((await self.store.lease(request)).groups)

    async def leased(self, count: int = 100) -> list[int]:
        return [group.group for group in await self.lease(count)]

    async def trained(self, update: int, groups: Sequence[int], epoch: int = 0) -> None:
        request = s.TrainedRequest(run=self.run, epoch=epoch or self.epoch, update=update, groups=groups)
        await self.store.trained(request)

    async def ack(self, update: int, epoch: int = 0) -> list[int]:
        request = s.AckRequest(run=self.run, epoch=epoch or self.epoch, checkpoint_update=update)
        return list((await self.store.ack(request)).groups)

    async def nack(self, group: int, reason: str = "bad shape", epoch: int = 0, discard: bool = False) -> None:
        epoch = epoch or self.epoch
        await self.store.nack(s.NackRequest(run=self.run, epoch=epoch, group=group, reason=reason, discard=discard))

    async def letters(self) -> list[s.DeadLetter]:
        return list((await self.store.list_dead(s.ListDeadRequest(run=self.run, limit=100))).letters)

    async def replay(self, letter: str) -> int:
        return (await self.store.replay_dead(s.ReplayDeadRequest(run=self.run, id=letter))).group

    async def stats(self) -> s.GetStatsResponse:
        return await self.store.get_stats(s.GetStatsRequest(run=self.run))

    async def counter(self, counter: str) -> int:
        return int((await self.stats()).counters[counter])

    async def fetch(self, claims: Sequence[s.Claim]) -> list[bytes]:
        """The bytes of each claim."""
        out: list[bytearray] = []
        async for message in self.store.fetch(s.FetchClaimsRequest(run=self.run, claims=claims)):
            if message.WhichOneof("message") == "begin":
                out.append(bytearray(message.begin.inline))
            else:
                assert message.frame.offset == len(out[-1])
                out[-1] += message.frame.data
        return [bytes(data) for data in out]

    async def blobs(self) -> set[str]:
        """Names of all blobs that have a chunk in this Redis."""
        keys: Any = await self.store.link.client.keys("dvla:blob:*")
        return {key.decode().split(":")[2] for key in keys}


def new_store(url: str, clock: Clock, patience: float = 10.0, **places: Any) -> RolloutStore:
    return RolloutStore(RedisLink(url, patience=patience), clock, **places)
