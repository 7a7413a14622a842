"""A scripted simulator session and desk that check whose data they are given, and small builders."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from dvla.v1 import common_pb2, store_pb2

from services.common.errors import Unavailable
from services.common.spec import ActionSpec, Array, FloatArray, SimSpec, TaskSpec, TensorSpec
from services.common.trajectory import validate
from services.rollout.worker.episode import Episode
from services.rollout.worker.policy_runner import Chunk, Row
from services.rollout.worker.sampler import finished
from services.rollout.worker.turn import Outcome, Reset, Turn

CHUNK, DIM = 3, 2
SPEC = SimSpec(
    observation=(TensorSpec("state", "float32", (2,)),),
    action=ActionSpec(DIM, (-1.0, -1.0), (1.0, 1.0)),
    tasks=(TaskSpec("reach", "go there", 100),),
    starts="state",
    backend="toy",
)


def make_job(
    number: int, attempt: int = 1, task: str = "reach", evaluate: bool = False, start: bytes = b""
) -> store_pb2.Job:
    """Job `number` of a run, or episode `number` of an evaluation of version (1, 5)."""
    job = store_pb2.Job(
        key=common_pb2.JobKey(run="r", group=number, member=number % 3, attempt=attempt),
        kind=store_pb2.JOB_KIND_EVALUATE if evaluate else store_pb2.JOB_KIND_TRAIN,
        task=task,
        seed=1000 + number,
        start=start,
        end_on_success=not evaluate,
    )
    if evaluate:
        job.evaluation = "e"
        job.version.epoch, job.version.update = 1, 5
    return job


def make_chunk(mark: float = 0.0, version: tuple[int, int] = (1, 1)) -> Chunk:
    """A chunk whose every action is `mark`."""
    action = np.full((CHUNK, DIM), mark, np.float32)
    return Chunk(action, np.zeros((CHUNK, DIM), np.float32), {"tokens": np.array([int(mark)])}, None, version)


def make_outcome(
    executed: int = CHUNK,
    terminated: bool = False,
    truncated: bool = False,
    failure: str = "",
    success: Sequence[int] = (),
    reward: Sequence[float] = (),
    state: tuple[float, float] | None = (0.0, 0.0),
    action: FloatArray | None = None,
) -> Outcome:
    """An outcome; success: the steps with success; reward: of the first steps."""
    rewards = np.zeros(CHUNK, np.float32)
    rewards[: len(reward)] = reward
    return Outcome(
        executed=executed,
        reward=rewards,
        success=np.isin(np.arange(CHUNK), list(success)),
        executed_action=np.zeros((CHUNK, DIM), np.float32) if action is None else action.copy(),
        terminated=terminated,
        truncated=truncated,
        failure=failure,
        observation=None if state is None else {"state": np.array(state, np.float32)},
    )


@dataclass
class Script:
    """How the episode of a job goes: chunks until its end, and how that is: "success", "limit" or "failure"."""

    chunks: int = 1
    end: str = "limit"


@dataclass
class ScriptedSession:
    """Plays `scripts` by job number. Observations are (job number, chunk); actions must carry the job number."""

    slots: int
    scripts: dict[int, Script]
    rng: random.Random
    fail_at: int = -1
    """Turn that raises Unavailable."""
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    _playing: dict[int, tuple[int, int]] = field(default_factory=dict)

    async def advance(self, resets: list[Reset], slots: list[int], actions: FloatArray | None) -> Turn:
        assert resets or slots
        assert not {reset.slot for reset in resets} & set(slots)
        await pause(self.rng)
        if len(self.turns) == self.fail_at:
            raise Unavailable("the simulator died")
        self.turns.append(([reset.slot for reset in resets], list(slots)))
        outcomes = {}
        for row, slot in enumerate(slots):
            assert actions is not None
            outcomes[slot] = self._step(slot, actions[row])
        started = {}
        for reset in resets:
            assert reset.slot not in self._playing, "reset of a slot whose episode goes on"
            number = int(reset.start)
            assert reset.seed == 1000 + number
            self._playing[reset.slot] = number, 0
            started[reset.slot] = self._observe(reset.slot)
        return Turn(started, outcomes)

    def _step(self, slot: int, action: FloatArray) -> Outcome:
        number, done = self._playing[slot]
        assert (action == number).all(), "an action for another job"
        script = self.scripts[number]
        if done + 1 < script.chunks:
            self._playing[slot] = number, done + 1
            return make_outcome(state=(number, done + 1), action=action)
        del self._playing[slot]
        return make_outcome(
            executed=1 + number % CHUNK,
            terminated=script.end == "success",
            truncated=script.end == "limit",
            failure="the robot fell" if script.end == "failure" else "",
            success=[number % CHUNK] if script.end == "success" else (),
            state=None if script.end == "success" else (number, done + 1),
            action=action,
        )

    def _observe(self, slot: int) -> dict[str, Array]:
        return {"state": np.array(self._playing[slot], np.float32)}


@dataclass
class ScriptedDesk:
    """Grants jobs from a list and notes what became of them."""

    jobs: list[store_pb2.Job]
    rng: random.Random
    draining: asyncio.Event
    begin_errors: dict[int, Exception] = field(default_factory=dict)
    act_fails_at: int = -1
    granted: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    given_back: int = 0  # those of the failed that were not the job's fault
    asked: list[tuple[int, bool]] = field(default_factory=list)
    final_observations: dict[int, Array | None] = field(default_factory=dict)
    _acts: int = 0

    async def take_jobs(self, count: int, busy: bool) -> list[store_pb2.Job]:
        self.asked.append((count, busy))
        await pause(self.rng)
        if not self.jobs and not busy:
            self.draining.set()
        jobs = [self.jobs.pop(0) for _ in range(min(self.rng.randint(1, count), len(self.jobs)))]
        self.granted += [job.key.group for job in jobs]
        await pause(self.rng)  # granted, and the answer is on its way
        return jobs

    async def begin(self, job: store_pb2.Job) -> bytes:
        await pause(self.rng)
        if job.key.group in self.begin_errors:
            raise self.begin_errors[job.key.group]
        return str(job.key.group).encode()

    async def act(self, rows: list[Row]) -> list[Chunk]:
        await pause(self.rng)
        self._acts += 1
        if self._acts == self.act_fails_at:
            raise Unavailable("inference died")
        for row in rows:
            number, chunk = (int(value) for value in row.observation["state"])
            assert row.instruction == "go there"
            assert row.noise_key == f"r/{number}/{number % 3}/1/{chunk}", "randomness of another job or chunk"
        return [make_chunk(row.observation["state"][0], (1, self._acts)) for row in rows]

    async def deliver(self, episode: Episode, outcome: Outcome) -> None:
        await pause(self.rng)
        number = episode.job.key.group
        facts, trajectory = finished(episode, outcome, "success", "toy x2", "w")
        validate(trajectory)
        chunks = len(trajectory["reward"])
        np.testing.assert_array_equal(trajectory["obs/state"], [(number, chunk) for chunk in range(chunks)])
        assert (trajectory["action"] == number).all()
        assert (trajectory["record/tokens"] == number).all()
        assert facts.oldest.update < facts.newest.update or chunks == 1
        self.final_observations[number] = trajectory.get("final_obs/state")
        self.delivered.append(number)

    async def fail(self, job: store_pb2.Job, reason: str, outside: bool = False) -> None:
        assert reason
        await pause(self.rng)
        self.failed.append(job.key.group)
        self.given_back += outside


async def pause(rng: random.Random) -> None:
    """Give way a random number of times."""
    for _ in range(rng.randint(0, 3)):
        await asyncio.sleep(0)
