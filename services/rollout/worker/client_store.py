"""Client of the rollout store: jobs in, episodes out. Every call is safe to repeat, so an outage only delays."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import structlog
from dvla.v1 import common_pb2, store_pb2, store_pb2_grpc

from services.common import codec
from services.common.channels import CALL_SECONDS, open_async_channel, translated
from services.common.errors import Exhausted, NotFound, Superseded, Unavailable, Unsupported
from services.common.locality import Vicinity
from services.common.security import Security
from services.common.spec import Array
from services.rollout.worker.rooms import Rooms

log = structlog.get_logger()

RETRY_SECONDS = (0.1, 0.3, 1.0, 2.0)
WAIT_SECONDS = 0.5
BULK_SECONDS = 60.0

T = TypeVar("T")


class StoreClient:
    """The store as one worker sees it."""

    def __init__(
        self, address: str, security: Security, run: str, worker: str, vicinity: Vicinity | None = None
    ) -> None:
        self.run, self.worker = run, worker
        self._rooms = Rooms(vicinity)
        self._address = address
        self._channel = open_async_channel(address, security)
        self._stub = store_pb2_grpc.StoreServiceStub(self._channel)

    async def run_spec(self) -> store_pb2.RunSpec:
        """The run's spec; waits until a learner has opened it."""
        waited = 0
        while True:
            try:
                with translated(f"store {self._address}"):
                    request = store_pb2.GetRunRequest(run=self.run)
                    return (await self._stub.GetRun(request, timeout=CALL_SECONDS)).spec
            except (NotFound, Unavailable) as error:
                if waited % 20 == 0:
                    log.info("waiting for the run", run=self.run, reason=str(error))
                waited += 1
                await asyncio.sleep(WAIT_SECONDS)

    async def next_jobs(
        self, version: tuple[int, int] | None, count: int, wait_seconds: float, request_id: str = ""
    ) -> store_pb2.NextJobsResponse:
        """Up to `count` jobs for a worker that holds `version`. Raises Unavailable while the store is away: call
        again with the same request_id, so that jobs granted in a lost reply come after all."""
        request = store_pb2.NextJobsRequest(
            run=self.run, worker=self.worker, count=count, wait_seconds=wait_seconds, request_id=request_id
        )
        if version is not None:
            request.version.epoch, request.version.update = version
        self._rooms.introduce(request)
        with translated(f"store {self._address}"):
            reply = await self._stub.NextJobs(request, timeout=CALL_SECONDS + wait_seconds)
        for job in reply.jobs:
            self._rooms.open(job)
        return reply

    async def renew(self) -> int:
        """Keep this worker's grants; returns how many it holds."""
        with translated(f"store {self._address}"):
            request = store_pb2.RenewRequest(run=self.run, worker=self.worker)
            return (await self._stub.Renew(request, timeout=CALL_SECONDS)).grants

    async def set_start(self, group: int, start: bytes) -> bytes:
        """Store a group's start state; returns the one that counts."""
        request = store_pb2.SetStartRequest(run=self.run, group=group, start=start)
        return (await self._retried(lambda: self._stub.SetStart(request, timeout=CALL_SECONDS))).start

    async def append(
        self, job: store_pb2.Job, episode: store_pb2.Episode, trajectory: Mapping[str, Array] | None
    ) -> bool:
        """Hand over a finished episode; True if it counts, False if it came too late. Waits out full stores."""
        begin = store_pb2.AppendBegin(key=job.key, evaluation=job.evaluation, episode=episode)
        try:
            if trajectory is None or not await self._append_in_place(job, begin, trajectory):
                await self._append(begin, trajectory)
        except (Superseded, NotFound) as error:
            log.info("episode superseded", group=job.key.group, member=job.key.member, reason=str(error))
            return False
        finally:
            self._rooms.close(job)
        return True

    async def _append_in_place(
        self, job: store_pb2.Job, begin: store_pb2.AppendBegin, trajectory: Mapping[str, Array]
    ) -> bool:
        """Write the episode into the job's room in the store's arena; False if there is none (any more)."""
        payload = self._rooms.write(job, trajectory)
        if payload is None:
            return False
        begin.payload.CopyFrom(payload)
        try:
            await self._append(begin, None)
        except Unsupported as error:
            log.info("room not accepted; the episode goes by grpc", group=job.key.group, reason=str(error))
            return False
        return True

    async def _append(self, begin: store_pb2.AppendBegin, trajectory: Mapping[str, Array] | None) -> None:
        """The call. trajectory: what is to be sent with it."""
        rest = memoryview(b"")
        if trajectory is not None:
            payload, rest = codec.encode(trajectory, hashed=True)
            begin.payload.CopyFrom(payload)

        async def messages() -> AsyncIterator[store_pb2.AppendRequest]:
            yield store_pb2.AppendRequest(begin=begin)
            for frame in codec.frames(rest):
                yield store_pb2.AppendRequest(frame=frame)

        await self._retried(lambda: self._stub.Append(messages(), timeout=BULK_SECONDS))

    async def fail(self, job: store_pb2.Job, reason: str, outside: bool = False) -> None:
        """Report a void episode, so that its job is granted again at once. outside: it was not the job's fault."""
        self._rooms.close(job)
        cause = store_pb2.FAIL_CAUSE_OUTSIDE if outside else store_pb2.FAIL_CAUSE_JOB
        request = store_pb2.FailJobRequest(key=job.key, evaluation=job.evaluation, reason=reason, cause=cause)
        try:
            await self._retried(lambda: self._stub.FailJob(request, timeout=CALL_SECONDS))
        except (Superseded, NotFound):
            log.debug("failed job was superseded already", group=job.key.group)

    async def close(self) -> None:
        """Close the channel; room of jobs that are not finished goes back."""
        self._rooms.close_all()
        await self._channel.close()

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        attempt = 0
        while True:
            try:
                with translated(f"store {self._address}"):
                    return await call()
            except (Unavailable, Exhausted) as error:
                delay = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                if attempt in (0, 3) or attempt % 20 == 0:
                    log.warning("store call waits", attempt=attempt, reason=str(error))
                attempt += 1
                await asyncio.sleep(delay)


def version_of(message: common_pb2.Version) -> tuple[int, int]:
    """A version message as (epoch, update)."""
    return message.epoch, message.update
