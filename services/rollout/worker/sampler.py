"""Lane 1: the sampling loop of one simulator session.

Continuous: a slot whose episode ended takes the next job in the very next turn. Several of these loops run at
the same time, so that inference for one session overlaps the physics of the others.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog
from dvla.v1 import store_pb2

from services.common.errors import DvlaError, InvalidInput
from services.common.spec import Array, FloatArray, SimSpec
from services.rollout.worker.episode import Episode, facts
from services.rollout.worker.policy_runner import Chunk, Row
from services.rollout.worker.turn import Outcome, Reset, Turn

log = structlog.get_logger()


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
        """Hand a finished episode over; waits only if too many are on their way."""

    async def fail(self, job: store_pb2.Job, reason: str) -> None:
        """Report a void episode."""


@dataclass
class Sampler:
    """Drives one session until `draining` is set and its last episode has ended."""

    session: SessionLike
    spec: SimSpec
    desk: Desk
    draining: asyncio.Event
    episodes: dict[int, Episode] = field(default_factory=dict)

    async def run(self) -> None:
        """The loop. An error ends it; the jobs in flight are then reported as void by `abandon`."""
        while self.episodes or not self.draining.is_set():
            slots = sorted(self.episodes)
            chunks, jobs = await asyncio.gather(self._act(slots), self._new_jobs())
            resets = await self._resets(jobs)
            if not slots and not resets:
                continue
            actions = np.stack([chunk.action for chunk in chunks]) if slots else None
            turn = await self.session.advance(resets, slots, actions)
            for slot, observation in turn.started.items():
                self.episodes[slot].observation = observation
            for slot, chunk in zip(slots, chunks, strict=True):
                await self._record(slot, chunk, turn.outcomes[slot])

    async def abandon(self, reason: str) -> None:
        """Give every unfinished episode back."""
        while self.episodes:
            _, episode = self.episodes.popitem()
            await self.desk.fail(episode.job, reason)

    async def _act(self, slots: list[int]) -> list[Chunk]:
        if not slots:
            return []
        return await self.desk.act([_row(self.episodes[slot]) for slot in slots])

    async def _new_jobs(self) -> list[store_pb2.Job]:
        free = self.session.slots - len(self.episodes)
        if not free or self.draining.is_set():
            return []
        return await self.desk.take_jobs(free, busy=bool(self.episodes))

    async def _resets(self, jobs: list[store_pb2.Job]) -> list[Reset]:
        """Give each job a free slot. A job whose start cannot be made is void; the others go on."""
        free = (slot for slot in range(self.session.slots) if slot not in self.episodes)
        starts = await asyncio.gather(*(self.desk.begin(job) for job in jobs), return_exceptions=True)
        resets = []
        for job, start in zip(jobs, starts, strict=True):
            if isinstance(start, BaseException):
                await self.desk.fail(job, f"no start state: {start}")
                if not isinstance(start, DvlaError):
                    raise start
                continue
            slot = next(free)
            self.episodes[slot] = Episode(job, self.spec.task(job.task).instruction, job.end_on_success)
            resets.append(Reset(slot, job.task, start, job.seed, job.end_on_success))
        return resets

    async def _record(self, slot: int, chunk: Chunk, outcome: Outcome) -> None:
        episode = self.episodes[slot]
        if outcome.failure:
            del self.episodes[slot]
            await self.desk.fail(episode.job, outcome.failure)
            return
        episode.add(chunk, outcome)
        if outcome.ended:
            if outcome.truncated and outcome.observation is not None:
                episode.end_at(outcome.observation)
            # Delivered first: if that is cancelled, `abandon` still knows the episode.
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
