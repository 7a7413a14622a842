"""Jobs: granted to workers under the admission rule, kept alive, failed; and the start states of their groups."""

from collections.abc import Iterable
from typing import Any

from dvla.v1 import common_pb2, store_pb2

from services.common.arena import Extent
from services.common.errors import Exhausted, InvalidInput
from services.common.seeds import TRAINING, training_seed
from services.rollout.store.base import request_id
from services.rollout.store.keys import check_name, check_worker
from services.rollout.store.upkeep import CLAIM_BYTES, Upkeep
from services.rollout.store.validate import MAX_JOBS, MAX_START_BYTES


class JobCalls(Upkeep):
    """Calls of rollout workers about jobs."""

    async def next_jobs(self, request: store_pb2.NextJobsRequest, call_id: str = "") -> store_pb2.NextJobsResponse:
        """Grant jobs, or wait for some, or say why there are none.

        call_id: the caller's id of this call. A worker that repeats a call whose reply it lost gives the same id
        and gets the same jobs; otherwise jobs that it does not know of are held until their lifetime is over.
        """
        run, worker = check_name("run", request.run), check_worker(request.worker)
        wanted = max(1, min(request.count, MAX_JOBS))
        held = request.version.update if request.HasField("version") else -1
        call_id = call_id or request_id()

        async def look() -> tuple[bool, store_pb2.NextJobsResponse]:
            spec = await self.spec(run)
            near = self.depot is not None and self.depot.near(request.locality)
            rooms = await self._rooms(run, spec, wanted, request.episode_bytes) if near else []
            most, short = wanted, await self.memory.full(CLAIM_BYTES if rooms else spec.episode_bytes)
            if near and self.depot is not None and self.depot.strict:
                most, short = max(1, len(rooms)), short or not rooms
            try:
                response = _granted(run, await self.call("next_jobs", run, worker, held, most, call_id, int(short)))
                if near:
                    self._reserve(run, response.jobs, rooms)
            finally:
                if self.depot is not None:
                    self.depot.release(rooms)
            return bool(response.jobs) or response.idle_reason == "finished", response

        return await self.wakeups.poll(run, "jobs", request.wait_seconds, look)

    async def _rooms(self, run: str, spec: store_pb2.RunSpec, wanted: int, largest: int) -> list[Extent]:
        """Room in the arena for the largest episode, as often as wanted or as there is. largest: 0 if not known."""
        depot, rooms = self.depot, list[Extent]()
        length = min(largest or spec.episode_bytes, spec.episode_bytes)
        if depot is None or not length:
            return rooms
        await self.prepare_arena(spec)
        try:
            while depot.arenas and len(rooms) < wanted:
                if depot.strict:
                    rooms.append(await self.make_room_in_arena(run, length))
                else:
                    rooms.append(await self.allocate(spec, length, grows=largest > 0))
        except Exhausted:
            return rooms
        return rooms

    def _reserve(self, run: str, jobs: Iterable[store_pb2.Job], rooms: list[Extent]) -> None:
        """Give each job its room. A repeated request gets the same ones."""
        for job in jobs:
            if self.depot is None or job.kind != store_pb2.JOB_KIND_TRAIN:
                continue
            key = (run, *unit_of(job.key, job.evaluation), job.key.attempt)
            extent = self.depot.reserved(key) or (rooms.pop() if rooms else None)
            if extent is not None:
                self.depot.reserve(key, extent)
                job.reserved.CopyFrom(extent.message())

    async def renew(self, request: store_pb2.RenewRequest) -> store_pb2.RenewResponse:
        """Keep a worker's grants alive."""
        (grants,) = await self.call("renew", check_name("run", request.run), check_worker(request.worker))
        return store_pb2.RenewResponse(grants=grants)

    async def set_start(self, request: store_pb2.SetStartRequest) -> store_pb2.SetStartResponse:
        """Store a group's start state once; answers the one that counts."""
        run = check_name("run", request.run)
        if not 1 <= len(request.start) <= MAX_START_BYTES:
            raise InvalidInput(f"start state of {len(request.start)} bytes; expected 1 to {MAX_START_BYTES}")
        (start,) = await self.call("set_start", run, request.group, request.start)
        return store_pb2.SetStartResponse(start=start)

    async def fail_job(self, request: store_pb2.FailJobRequest) -> store_pb2.FailJobResponse:
        """A job's episode is void: the next attempt follows, or after the limit zero, discard or a failed result.

        What was not the job's fault has a limit of its own, far away.
        """
        unit, member = unit_of(request.key, request.evaluation)
        run, reason = check_name("run", request.key.run), request.reason[:1000] or "no reason given"
        outside = request.cause == store_pb2.FAIL_CAUSE_OUTSIDE
        if self.depot is not None:
            self.depot.forget((run, unit, member, request.key.attempt))
        await self.call("fail_job", run, unit, member, request.key.attempt, reason, int(outside))
        return store_pb2.FailJobResponse()


def unit_of(key: common_pb2.JobKey, evaluation: str) -> tuple[str, int]:
    """The scripts' names of a job: its unit and its member in it."""
    if evaluation:
        return f"e:{check_name('evaluation', evaluation)}", key.group
    return f"g:{key.group}", key.member


def _granted(run: str, reply: list[Any]) -> store_pb2.NextJobsResponse:
    reason, index, live, update, seed_base, end_on_success, jobs = reply
    return store_pb2.NextJobsResponse(
        jobs=[_job(run, job, int(seed_base), end_on_success == b"1") for job in jobs],
        idle_reason="" if jobs else reason.decode(),
        index=index,
        live_workers=live,
        update=int(update),
    )


def _job(run: str, job: list[bytes], seed_base: int, end_on_success: bool) -> store_pb2.Job:
    unit, member, attempt, task, start, seed, version = job
    kind, _, name = unit.decode().partition(":")
    if kind == "g":
        return store_pb2.Job(
            key=common_pb2.JobKey(run=run, group=int(name), member=int(member), attempt=int(attempt)),
            kind=store_pb2.JOB_KIND_TRAIN,
            task=task.decode(),
            seed=seed_of(seed_base, int(name)),
            start=start,
            end_on_success=end_on_success,
        )
    epoch, update = map(int, version.split(b"/"))
    return store_pb2.Job(
        key=common_pb2.JobKey(run=run, group=int(member), member=0, attempt=int(attempt)),
        kind=store_pb2.JOB_KIND_EVALUATE,
        task=task.decode(),
        seed=int(seed),
        evaluation=name,
        version=common_pb2.Version(epoch=epoch, update=update),
        end_on_success=False,
    )


def seed_of(seed_base: int, group: int) -> int:
    """Seed of a group's start state: always one of the training range, so never one of an evaluation."""
    return training_seed(seed_base, group % len(TRAINING))
