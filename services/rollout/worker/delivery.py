"""Finished episodes on their way to the store: appended in the background, so that sampling goes on meanwhile."""

import asyncio
from typing import Protocol

import structlog
from dvla.v1 import store_pb2

from services.common.errors import DvlaError
from services.common.telemetry import Telemetry
from services.common.trajectory import Trajectory, validate

log = structlog.get_logger()


class StoreLike(Protocol):
    """What deliveries need of the store."""

    async def append(self, job: store_pb2.Job, episode: store_pb2.Episode, trajectory: Trajectory | None) -> bool:
        """Hand over an episode; True if it counts."""

    async def fail(self, job: store_pb2.Job, reason: str) -> None:
        """Report a void one."""


class Deliveries:
    """At most `pending` episodes at a time."""

    def __init__(self, store: StoreLike, telemetry: Telemetry, pending: int) -> None:
        self._store, self._telemetry = store, telemetry
        self._room = asyncio.Semaphore(pending)
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, job: store_pb2.Job, facts: store_pb2.Episode, trajectory: Trajectory) -> None:
        """Hand an episode over; waits only for room. If cancelled, nothing was taken."""
        await self._room.acquire()
        task = asyncio.create_task(self._deliver(job, facts, trajectory))
        self._tasks.add(task)
        task.add_done_callback(self._delivered)

    async def flush(self, seconds: float) -> None:
        """Wait for those on their way, but no longer than this."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _deliver(self, job: store_pb2.Job, facts: store_pb2.Episode, trajectory: Trajectory) -> None:
        evaluate = job.kind == store_pb2.JOB_KIND_EVALUATE
        try:
            validate(trajectory)
            counted = await self._store.append(job, facts, None if evaluate else trajectory)
            self._telemetry.count("episodes_accepted" if counted else "episodes_superseded")
        except DvlaError as error:
            # Ours or the policy's to mend, so it must be seen. The job is given back: its grant would be renewed
            # for as long as this worker lives, and its group would never be complete.
            log.error("episode refused", reason=str(error))
            self._telemetry.count("episodes_refused")
            await self._store.fail(job, f"refused: {error}")

    def _delivered(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            log.error("episode not handed over", exc_info=task.exception())
