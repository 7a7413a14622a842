"""Lane 1: the sampling loop of one simulator session.

Continuous: a slot whose episode ended takes the next job in the very next turn. Several of these loops run at
the same time, so that inference for one session overlaps the physics of the others.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import structlog
from dvla.v1 import store_pb2

from services.common.errors import DvlaError, InvalidInput, Unavailable
from services.common.spec import Array, FloatArray, SimSpec
from services.rollout.worker.episode import Episode, facts
from services.rollout.worker.policy_runner import Chunk, Row
from services.rollout.worker.turn import Outcome, Reset, Turn

log = structlog.get_logger()

ANSWER_SECONDS = 3.0
"""How long an interrupted loop waits for the answer to its last request for jobs."""


class SessionLike(Protocol):
    """What the loop needs of a simulator session."""

    slots: int

    async def advance(self, resets: list[Reset], slots: list[int], actions: FloatArray | None) -> Turn:
        """One turn."""


class Desk(Protocol):
    """What the loop needs of the rest of the worker: jobs, actions, and somewhere to hand episodes to."""

    async def take_jobs(self, count: int, busy: bool) -> list[store_pb2.Job]:
        """Up to `count` jobs; with `busy` do not wait for the first."""

    async def begin(self, job: store_pb2.Job) -> bytes:
        """The start state of a job."""

    async def act(self, rows: list[Row]) -> list[Chunk]:
        """One chunk per row."""

    async def deliver(self, episode: Episode, outcome: Outcome) -> None:
        """Hand a finished episode over; waits only if too many are on their way. If cancelled, nothing was taken."""

    async def fail(self, job: store_pb2.Job, reason: str, outside: bool = False) -> None:
        """Report a void episode; outside: not for a fault of the job's. Reporting it twice is harmless."""


@dataclass
class Sampler:
    """Drives one session until `draining` is set and its last episode has ended.

    episodes: by slot. jobs: granted, but not in a slot yet. Every job granted is in one of the two until it has been
    delivered or reported, so that none is forgotten, wherever the loop is interrupted.
    """

    session: SessionLike
    spec: SimSpec
    desk: Desk
    draining: asyncio.Event
    final_observation: bool = False
    episodes: dict[int, Episode] = field(default_factory=dict)
    jobs: list[store_pb2.Job] = field(default_factory=list)

    async def run(self) -> None:
        """The loop. An error ends it; the jobs in flight are then reported as void by `abandon`."""
        while self.episodes or not self.draining.is_set():
            slots = sorted(self.episodes)
            chunks = await self._act_and_take_jobs(slots)
            resets = await self._resets()
            if not slots and not resets:
                continue
            actions = np.stack([chunk.action for chunk in chunks]) if slots else None
            turn = await self.session.advance(resets, slots, actions)
            for slot, observation in turn.started.items():
                self.episodes[slot].observation = observation
            for slot, chunk in zip(slots, chunks, strict=True):
                await self._record(slot, chunk, turn.outcomes[slot])

    async def abandon(self, reason: str) -> None:
        """Give back every job that is not finished, all at the same time; one failure does not keep the others."""
        jobs = [episode.job for episode in self.episodes.values()] + self.jobs
        failures = await asyncio.gather(
            *(self.desk.fail(job, reason, outside=True) for job in jobs), return_exceptions=True
        )
        self.episodes.clear()
        self.jobs.clear()
        for failure in failures:
            if isinstance(failure, BaseException):
                raise failure

    async def _act_and_take_jobs(self, slots: list[int]) -> list[Chunk]:
        """At the same time; waits for both even if one fails, so that no granted job comes too late to be noticed."""
        chunks, problem = await asyncio.gather(self._act(slots), self._take_jobs(), return_exceptions=True)
        for outcome in (chunks, problem):
            if isinstance(outcome, BaseException):
                raise outcome
        return cast(list[Chunk], chunks)

    async def _act(self, slots: list[int]) -> list[Chunk]:
        if not slots:
            return []
        return await self.desk.act([_row(self.episodes[slot]) for slot in slots])

    async def _take_jobs(self) -> None:
        free = self.session.slots - len(self.episodes)
        if not free or self.draining.is_set():
            return
        asking = asyncio.ensure_future(self.desk.take_jobs(free, busy=bool(self.episodes)))
        try:
            self.jobs.extend(await asyncio.shield(asking))
        except asyncio.CancelledError:
            # Some may have been granted already: hear which, so that they can be given back.
            await asyncio.wait([asking], timeout=ANSWER_SECONDS)
            if not asking.cancel() and not asking.cancelled() and not asking.exception():
                self.jobs.extend(asking.result())
            raise

    async def _resets(self) -> list[Reset]:
        """Give each new job a free slot. A job that cannot begin is void; the others go on."""
        free = (slot for slot in range(self.session.slots) if slot not in self.episodes)
        begun = await asyncio.gather(*(self._begin(job) for job in self.jobs), return_exceptions=True)
        resets = []
        for job, start in zip(list(self.jobs), begun, strict=True):
            if isinstance(start, bytes):
                slot = next(free)
                self.episodes[slot] = Episode(job, self.spec.task(job.task).instruction, job.end_on_success)
                resets.append(Reset(slot, job.task, start, job.seed, job.end_on_success))
            elif isinstance(start, DvlaError) and not isinstance(start, Unavailable):
                await self.desk.fail(job, f"cannot begin: {start}")
            else:
                raise start  # a simulator that is gone would fail every job of the run, one after another
            self.jobs.remove(job)
        return resets

    async def _begin(self, job: store_pb2.Job) -> bytes:
        self.spec.task(job.task)
        return await self.desk.begin(job)

    async def _record(self, slot: int, chunk: Chunk, outcome: Outcome) -> None:
        episode = self.episodes[slot]
        # An episode is forgotten last: if a call is cancelled, `abandon` still knows it.
        if outcome.failure:
            await self.desk.fail(episode.job, outcome.failure)
            del self.episodes[slot]
            return
        episode.add(chunk, outcome)
        if outcome.ended:
            if self.final_observation and outcome.truncated and outcome.observation is not None:
                episode.end_at(outcome.observation)
            await self.desk.deliver(episode, outcome)
            del self.episodes[slot]
        elif outcome.observation is None:
            raise InvalidInput(f"simulator sent no observation for slot {slot}, whose episode goes on")
        else:
            episode.observation = outcome.observation


def _row(episode: Episode) -> Row:
    evaluate = episode.job.kind == store_pb2.JOB_KIND_EVALUATE
    version = episode.job.version
    return Row(
        observation=episode.observation,
        instruction=episode.instruction,
        noise_key=episode.noise_key(),
        mode="eval" if evaluate else "train",
        pin=(version.epoch, version.update) if evaluate else None,
    )


def finished(
    episode: Episode, outcome: Outcome, score_rule: str, backend: str, worker: str
) -> tuple[store_pb2.Episode, dict[str, Array]]:
    """Facts and trajectory of a finished episode."""
    trajectory = episode.trajectory(outcome)
    return facts(trajectory, score_rule, backend, worker), trajectory
