"""What was observed of a run at one moment, as plain data: one line of `samples.jsonl`.

t           seconds since the run began, pauses between resumes left out
stage       what the launcher was doing: evaluation before, training, ...
roles       by child name: {role, pid, lanes: {lane: {state: seconds}}, metrics}; missing if it did not answer
store       counters and gauges of the run (`GetStats`), or null
learner     progress (`GetProgress`), or null
evaluation  {name, total, done, successes}, or null
restarts    restarts by child name
launch      counts the launchers of the run: a resumed one has the next number
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BUSY = "busy"


@dataclass(frozen=True)
class RoleSample:
    """Status of one process. lanes: lane -> state -> seconds since it started; state "busy" or an idle reason."""

    role: str
    pid: int
    lanes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoreSample:
    """Statistics of the rollout store; see GetStatsResponse in store.proto for the names."""

    update: int = 0
    open_groups: int = 0
    complete_groups: int = 0
    leased_groups: int = 0
    granted_jobs: int = 0
    workers: int = 0
    bytes: int = 0
    redis_used: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()


@dataclass(frozen=True)
class LearnerSample:
    """Progress of the learner. Versions are (epoch, update)."""

    state: str = ""
    version: tuple[int, int] = (0, 0)
    published: tuple[int, int] = (0, 0)
    checkpoint: tuple[int, int] = (0, 0)
    total_updates: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationSample:
    """An evaluation under way."""

    name: str
    total: int
    done: int
    successes: int


@dataclass(frozen=True)
class Sample:
    """One observation of a run."""

    t: float
    stage: str
    roles: Mapping[str, RoleSample] = field(default_factory=dict)
    store: StoreSample | None = None
    learner: LearnerSample | None = None
    evaluation: EvaluationSample | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    launch: int = 1

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Sample":
        """The inverse."""
        data: dict[str, Any] = json.loads(line)
        store, learner, evaluation = data["store"], data["learner"], data["evaluation"]
        return cls(
            t=data["t"],
            stage=data["stage"],
            roles={name: RoleSample(**role) for name, role in data["roles"].items()},
            store=StoreSample(**store | {"staleness": tuple(store["staleness"])}) if store else None,
            learner=LearnerSample(**learner | {k: tuple(learner[k]) for k in _VERSIONS}) if learner else None,
            evaluation=EvaluationSample(**evaluation) if evaluation else None,
            restarts=data["restarts"],
            launch=data["launch"],
        )


_VERSIONS = ("version", "published", "checkpoint")


def read_samples(path: Path) -> Iterator[Sample]:
    """All samples of a file. A last line that was cut off by a crash is left out."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield Sample.from_json(line)
