"""Idle shares of the four lanes over a span of samples, replicas summed and restarts survived."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.cli.samples import BUSY, RoleSample, Sample

LANES = ("sampling", "receiving", "training", "distribution")
"""The four swimlanes, in the order of the report."""

SIMULATION, INFERENCE = "simulation", "inference"
"""What stands behind the sampling lane: the environments of all simulators, and the policy calls of all workers."""
_ENVIRONMENT = "env-"

LaneSeconds = dict[str, dict[str, float]]
"""lane -> state -> seconds."""


@dataclass(frozen=True)
class LaneShare:
    """How a lane spent its time: shares of the whole that sum to 1 (all 0 if it was never seen)."""

    busy: float
    idle: Mapping[str, float]

    @property
    def idle_share(self) -> float:
        """Idle for whatever reason."""
        return sum(self.idle.values())


def seconds_between(samples: Iterable[Sample]) -> LaneSeconds:
    """Seconds that each lane spent in each state from the first to the last sample."""
    out: LaneSeconds = {}
    last: dict[str, RoleSample] = {}
    for index, sample in enumerate(samples):
        for name, role in sample.roles.items():
            before = last.get(name)
            last[name] = role
            if before is None and index == 0:
                continue
            restarted = before is None or before.pid != role.pid
            for lane, states in role.lanes.items():
                earlier = {} if restarted or before is None else before.lanes.get(lane, {})
                _add(out.setdefault(SIMULATION if lane.startswith(_ENVIRONMENT) else lane, {}), states, earlier)
    return out


def add_up(spans: Iterable[LaneSeconds]) -> LaneSeconds:
    """Several spans as one."""
    out: LaneSeconds = {}
    for span in spans:
        for lane, states in span.items():
            _add(out.setdefault(lane, {}), states, {})
    return out


def shares(seconds: LaneSeconds) -> dict[str, LaneShare]:
    """Seconds as shares, for the four lanes, and for simulation and inference where they were seen."""
    out = {}
    for lane in (*LANES, *(name for name in (SIMULATION, INFERENCE) if name in seconds)):
        states = seconds.get(lane, {})
        total = sum(states.values())
        idle = {state: value / total for state, value in sorted(states.items()) if state != BUSY and total}
        out[lane] = LaneShare(states.get(BUSY, 0.0) / total if total else 0.0, idle)
    return out


def series(samples: Sequence[Sample], points: int = 120) -> list[tuple[float, dict[str, LaneShare]]]:
    """Shares over time: (t, shares) of at most `points` consecutive spans."""
    stride = max(1, len(samples) // points)
    marks = samples[::stride]
    return [(b.t, shares(seconds_between((a, b)))) for a, b in itertools.pairwise(marks)]


def _add(total: dict[str, float], states: Mapping[str, float], earlier: Mapping[str, float]) -> None:
    for state, value in states.items():
        total[state] = total.get(state, 0.0) + max(0.0, value - earlier.get(state, 0.0))
