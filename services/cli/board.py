"""The figures that a person wants to see of a run right now, computed from the latest samples. No terminal here."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.cli.lanes import LaneShare, seconds_between, shares
from services.cli.samples import Sample, StoreSample
from services.cli.summary import TRAINING

WINDOW_SECONDS = 15.0
"""Span of the speeds and idle shares shown."""
SUCCESS_EPISODES = 64
"""Success is shown over at least so many of the latest episodes."""
NOTES = 5


@dataclass(frozen=True)
class Progress:
    """How far a stage is: `done` of `total` units, and a remark."""

    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Figures:
    """One screen. Rates are per second over the last WINDOW_SECONDS; None means not known (yet).

    success, mean_return: of the latest training episodes. lanes: shares of the four lanes. queues: depth by name.
    """

    run: str
    stage: str
    elapsed: float
    progress: Progress = Progress()
    eta: float | None = None
    success: float | None = None
    mean_return: float | None = None
    trained_rate: float | None = None
    accepted_rate: float | None = None
    update: int = 0
    total_updates: int = 0
    version: tuple[int, int] = (0, 0)
    staleness: float | None = None
    staleness_max: int | None = None
    lanes: Mapping[str, LaneShare] = field(default_factory=dict)
    queues: Mapping[str, float] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    evaluations: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Board:
    """Collects samples, stages and notes from several threads and gives `Figures`."""

    def __init__(self, run: str, roles: tuple[str, ...] = (), elapsed: float = 0.0) -> None:
        self.run = run
        self.roles = roles
        self._lock = threading.Lock()
        self._began = time.monotonic() - elapsed
        self._stage, self._progress = "starting", Progress()
        self._stage_began = time.monotonic()
        self._samples: deque[Sample] = deque()
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._evaluations: dict[str, str] = {}

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def stage(self) -> str:
        """What is being done."""
        with self._lock:
            return self._stage

    def enter(self, stage: str) -> None:
        """A new stage begins."""
        with self._lock:
            self._stage, self._progress, self._stage_began = stage, Progress(), time.monotonic()

    def advance(self, progress: Progress) -> None:
        """The stage got further."""
        with self._lock:
            self._progress = progress

    def note(self, text: str) -> None:
        """Something happened that a person should see."""
        with self._lock:
            self._notes.append(text)

    def evaluated(self, name: str, text: str) -> None:
        """An evaluation is over."""
        with self._lock:
            self._evaluations[name] = text

    def add(self, sample: Sample) -> None:
        """A new sample; older ones are kept as far as the figures need them."""
        with self._lock:
            self._samples.append(sample)
            while len(self._samples) > 2 and self._samples[1].t < sample.t - 4 * WINDOW_SECONDS:
                self._samples.popleft()

    def figures(self) -> Figures:
        """The screen now."""
        with self._lock:
            samples = list(self._samples)
            figures = Figures(
                run=self.run,
                stage=self._stage,
                elapsed=self.elapsed(),
                progress=self._progress,
                evaluations=dict(self._evaluations),
                notes=tuple(self._notes),
            )
            stage_seconds = time.monotonic() - self._stage_began
        return _measured(figures, samples, stage_seconds, self.roles)


def _measured(base: Figures, samples: list[Sample], stage_seconds: float, roles: tuple[str, ...]) -> Figures:
    progress = base.progress
    latest = samples[-1] if samples else None
    if latest is not None and latest.stage == base.stage:
        progress = _progress(latest) or progress
    values = vars(base) | {"progress": progress, "eta": _eta(progress, stage_seconds)}
    if latest is not None:
        recent = [sample for sample in samples if sample.t >= latest.t - WINDOW_SECONDS]
        values |= _from_store(samples, recent) | _from_learner(latest)
        values |= {
            "lanes": shares(seconds_between(recent)) if len(recent) > 1 else {},
            "queues": _queues(latest),
            "restarts": latest.restarts,
            "missing": tuple(name for name in roles if name not in latest.roles),
        }
    return Figures(**values)


def _progress(sample: Sample) -> Progress | None:
    if sample.evaluation is not None:
        done, wins = sample.evaluation.done, sample.evaluation.successes
        remark = f"success {wins / done:.2f}" if done else ""
        return Progress(done, sample.evaluation.total, "episodes", remark)
    if sample.stage == TRAINING and sample.learner is not None:
        return Progress(sample.learner.version[1], sample.learner.total_updates, "updates")
    return None


def _eta(progress: Progress, stage_seconds: float) -> float | None:
    """Seconds to the end of the stage, if it goes on at its mean speed."""
    if not progress.total or progress.done <= 0 or stage_seconds < 1:
        return None
    return stage_seconds * max(0.0, progress.total / progress.done - 1)


def _from_store(samples: list[Sample], recent: list[Sample]) -> dict[str, object]:
    latest = samples[-1].store
    if latest is None:
        return {}
    out: dict[str, object] = {"update": latest.update} | _staleness(latest)
    first = next((sample for sample in recent if sample.store is not None), samples[-1])
    seconds = samples[-1].t - first.t
    if seconds > 0 and first.store is not None:
        out["trained_rate"] = _gained(first.store, latest, "trained_steps") / seconds
        out["accepted_rate"] = _gained(first.store, latest, "accepted_steps") / seconds
    return out | {"success": _success(samples, latest)}


def _success(samples: list[Sample], latest: StoreSample) -> float | None:
    """Success of the latest accepted episodes, at least SUCCESS_EPISODES of them if there are so many."""
    base = StoreSample()
    for sample in reversed(samples):
        if sample.store is not None and _gained(sample.store, latest, "accepted") >= SUCCESS_EPISODES:
            base = sample.store
            break
    episodes = _gained(base, latest, "accepted")
    wins = latest.sums.get("accepted_success", 0.0) - base.sums.get("accepted_success", 0.0)
    return wins / episodes if episodes > 0 else None


def _staleness(store: StoreSample) -> dict[str, object]:
    total = sum(store.staleness)
    if not total:
        return {}
    mean = sum(index * count for index, count in enumerate(store.staleness)) / total
    return {"staleness": mean, "staleness_max": max(i for i, count in enumerate(store.staleness) if count)}


def _from_learner(sample: Sample) -> dict[str, object]:
    learner = sample.learner
    if learner is None:
        return {}
    out: dict[str, object] = {"version": learner.published, "total_updates": learner.total_updates}
    if "return" in learner.metrics:
        out["mean_return"] = learner.metrics["return"]
    return out


def _queues(sample: Sample) -> dict[str, float]:
    queues: dict[str, float] = {}
    if sample.store is not None:
        store = sample.store
        queues = {"jobs": store.granted_jobs, "open groups": store.open_groups}
        queues |= {"complete groups": store.complete_groups, "leased groups": store.leased_groups}
    for role in sample.roles.values():
        for name, value in role.metrics.items():
            if name.startswith("queue/"):
                queues[name.removeprefix("queue/")] = queues.get(name.removeprefix("queue/"), 0.0) + value
    return queues


def _gained(start: StoreSample, end: StoreSample, counter: str) -> int:
    return end.counters.get(counter, 0) - start.counters.get(counter, 0)
