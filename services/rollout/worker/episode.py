"""One episode being recorded: chunk after chunk, with the version that computed each."""

from dataclasses import dataclass, field

import numpy as np
from dvla.v1 import store_pb2

from services.common.spec import Array, FloatArray
from services.common.trajectory import Trajectory, instruction_array
from services.rollout.worker.policy_runner import Chunk
from services.rollout.worker.turn import Outcome


@dataclass
class Episode:
    """An episode in a slot. `observation` is what the next policy call reads, one row without batch dimension."""

    job: store_pb2.Job
    instruction: str
    end_on_success: bool
    observation: dict[str, Array] = field(default_factory=dict)
    _rows: dict[str, list[Array]] = field(default_factory=dict)
    _final: dict[str, Array] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """Chunks recorded so far."""
        return len(self._rows.get("reward", ()))

    def noise_key(self) -> str:
        """Key of the next chunk's randomness: the job for training, the start state for evaluation; never the
        batch position, so that results do not depend on how slots are spread (DESIGN 7)."""
        key, job = self.job.key, self.job
        if job.kind == store_pb2.JOB_KIND_EVALUATE:
            return f"evaluate/{job.task}/{job.seed}/{self.chunks}"
        return f"{key.run}/{key.group}/{key.member}/{key.attempt}/{self.chunks}"

    def add(self, chunk: Chunk, outcome: Outcome) -> None:
        """Record one executed chunk."""
        for name, value in self.observation.items():
            self._row("obs/" + name, value)
        for name, value in chunk.record.items():
            self._row("record/" + name, value)
        if chunk.value is not None:
            self._row("value", np.float32(chunk.value))
        self._row("action", chunk.action)
        self._row("log_prob", chunk.log_prob)
        self._row("version", np.asarray(chunk.version, np.int64))
        self._row("executed_action", outcome.executed_action)
        self._row("reward", outcome.reward)
        self._row("success", outcome.success)
        self._row("executed", np.int32(outcome.executed))

    def end_at(self, observation: dict[str, Array]) -> None:
        """Keep the observation at the end, for bootstrapping."""
        self._final = observation

    def _row(self, name: str, value: Array | np.generic) -> None:
        self._rows.setdefault(name, []).append(np.asarray(value))

    def trajectory(self, outcome: Outcome) -> Trajectory:
        """All rows, as `services.common.trajectory` lays them out."""
        arrays: Trajectory = {name: np.stack(rows) for name, rows in self._rows.items()}
        arrays["instruction"] = instruction_array(self.instruction)
        arrays["ends"] = np.array([outcome.terminated, outcome.truncated])
        for name, value in self._final.items():
            arrays["final_obs/" + name] = value[None]
        return arrays


def facts(trajectory: Trajectory, score_rule: str, backend: str, worker: str) -> store_pb2.Episode:
    """What the store needs to know of an episode.

    Score: 1 if it ever succeeded, the sum of rewards, or the sum of their changes, which is the last one.
    """
    success: Array = trajectory["success"]
    reward: FloatArray = trajectory["reward"].astype(np.float32)
    last = int(trajectory["executed"][-1]) - 1
    once, reward_sum = bool(success.any()), float(reward.sum(dtype=np.float64))
    scores = {"success": float(once), "sum": reward_sum, "differential": float(reward[-1, last])}
    versions = sorted((int(epoch), int(update)) for epoch, update in trajectory["version"])
    episode = store_pb2.Episode(
        steps=int(trajectory["executed"].sum()),
        score=scores[score_rule],
        reward_sum=reward_sum,
        success_once=once,
        success_at_end=bool(success[-1, last]),
        terminated=bool(trajectory["ends"][0]),
        truncated=bool(trajectory["ends"][1]),
        backend=backend,
        worker=worker,
    )
    episode.oldest.epoch, episode.oldest.update = versions[0]
    episode.newest.epoch, episode.newest.update = versions[-1]
    return episode
