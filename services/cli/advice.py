"""One line: what holds a run back and what to change, from how the lanes spent their time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.cli.lanes import INFERENCE, SIMULATION, LaneShare
from services.cli.summary import Summary

NOTICEABLE = 0.15
"""Idle shares below this are not worth a change."""
FULL = 0.85
"""A lane this busy is a bottleneck."""

Bottleneck = Literal[
    "unknown",
    "restarts",
    "simulators",
    "memory",
    "weights",
    "learner",
    "staleness",
    "turns",
    "simulation",
    "inference",
    "overlap",
    "publishing",
    "nothing",
]


@dataclass(frozen=True)
class Diagnosis:
    """What holds a run back, and the sentence that says what to change."""

    bottleneck: Bottleneck
    text: str


def advice(summary: Summary, cores: int, mode: str = "async") -> str:
    """The bottleneck and the remedy in words."""
    return diagnose(summary, cores, mode).text


def diagnose(summary: Summary, cores: int, mode: str = "async") -> Diagnosis:
    """The first of the causes that explains what the lanes waited for. mode: the run's, async or sync."""
    if not summary.lanes or not summary.updates:
        return Diagnosis("unknown", "Too little training to say what holds it back.")
    failures = sum(summary.restarts.values())
    if failures >= 3:
        text = f"Roles were restarted {failures} times: look into logs/ first, everything else comes after that."
        return Diagnosis("restarts", text)
    sampling, training = _lane(summary.lanes, "sampling"), _lane(summary.lanes, "training")
    return (
        _starved_sampler(sampling)
        or (_turns(sampling, training) if mode == "sync" else None)
        or _weights(summary.lanes, sampling)
        or _admission(sampling, training)
        or _episodes(summary.lanes, training, cores)
        or _publishing(training)
        or _balance(sampling, training)
    )


def _starved_sampler(sampling: LaneShare) -> Diagnosis | None:
    """The workers could not work at all."""
    if (share := sampling.idle.get("sim", 0.0)) > NOTICEABLE:
        return Diagnosis(
            "simulators",
            f"Workers had no simulator {_percent(share)} of the time: start more simulators (run.sims) or give them "
            "more sessions (sim.sessions), and look into the simulators' logs.",
        )
    if (share := sampling.idle.get("memory", 0.0)) > NOTICEABLE:
        return Diagnosis(
            "memory",
            f"The store was full {_percent(share)} of the time: give it more memory, or make trajectories smaller.",
        )
    return None


def _turns(sampling: LaneShare, training: LaneShare) -> Diagnosis:
    gain = (sampling.busy + training.busy) / max(sampling.busy, training.busy, 1e-9)
    return Diagnosis(
        "turns",
        f"Lanes take turns: sampling was busy {_percent(sampling.busy)} of the time, the learner "
        f'{_percent(training.busy)}. run.mode = "async" lets them overlap: up to {gain:.2f} times as fast.',
    )


def _weights(lanes: Mapping[str, LaneShare], sampling: LaneShare) -> Diagnosis | None:
    share = sampling.idle.get("weights", 0.0)
    if share <= max(NOTICEABLE, sampling.idle.get("admission", 0.0)):
        return None
    receiving, distribution = _lane(lanes, "receiving").busy, _lane(lanes, "distribution").busy
    where = (
        f"loading them took the workers {_percent(receiving)} of the time; a relay on their node or a smaller policy "
        "makes it faster"
        if receiving >= distribution
        else f"publishing took {_percent(distribution)} of the time; deltas or a smaller policy make it faster"
    )
    return Diagnosis(
        "weights",
        f"New weights come too late: sampling waited {_percent(share)} of the time for them ({where}). "
        "Raise learner.staleness to hide it.",
    )


def _admission(sampling: LaneShare, training: LaneShare) -> Diagnosis | None:
    share = sampling.idle.get("admission", 0.0)
    if share <= NOTICEABLE:
        return None
    if training.busy > sampling.busy:
        return Diagnosis(
            "learner",
            f"The learner holds it back: it was busy {_percent(training.busy)} of the time while sampling waited "
            f"{_percent(share)} for admission. Give the learner a faster device, fewer epochs or a smaller policy; "
            "fewer simulators would do as well.",
        )
    return Diagnosis(
        "staleness",
        f"Admission holds it back: sampling waited {_percent(share)} of the time for it while the learner was busy "
        f"{_percent(training.busy)}. Raise learner.staleness (in a short run much of it is the end, when all episodes "
        "are granted).",
    )


def _episodes(lanes: Mapping[str, LaneShare], training: LaneShare, cores: int) -> Diagnosis | None:
    """The learner waits for episodes: simulation, inference, or neither of them full."""
    share = training.idle.get("lease", 0.0)
    if share <= NOTICEABLE or share < training.idle_share / 2:
        return None
    simulation, inference = _lane(lanes, SIMULATION).busy, _lane(lanes, INFERENCE).busy
    waited = f"the learner waited {_percent(share)} of the time for episodes"
    if inference > simulation and inference > FULL:
        return Diagnosis(
            "inference",
            f"Inference holds it back: {waited}, and inference was busy {_percent(inference)} of it, simulation "
            f"{_percent(simulation)}. Add rollout workers (run.rollouts), give them a faster device, or act in longer "
            "chunks.",
        )
    if simulation and max(simulation, inference) < FULL - NOTICEABLE:
        return Diagnosis(
            "overlap",
            f"Simulation and inference wait for each other: {waited}, yet simulation was busy {_percent(simulation)} "
            f"and inference {_percent(inference)}. Keep more sessions in flight (rollout.sessions_per_sim with "
            "sim.sessions), or more slots (sim.slots).",
        )
    return Diagnosis(
        "simulation",
        f"Simulation holds it back: {waited}"
        + (f", and simulation was busy {_percent(simulation)} of it" if simulation else "")
        + f". Add simulators (run.sims; this machine has {cores} cores), use a cheaper control mode or observation, "
        "or put the simulators on other machines.",
    )


def _publishing(training: LaneShare) -> Diagnosis | None:
    parts = {reason: training.idle.get(reason, 0.0) for reason in ("snapshot", "publish", "checkpoint")}
    if sum(parts.values()) <= NOTICEABLE:
        return None
    worst = max(parts, key=lambda reason: parts[reason])
    remedy = {
        "snapshot": "publish fewer tensors (train an adapter or the head only)",
        "publish": "publish fewer tensors, or let versions travel as deltas",
        "checkpoint": "write checkpoints less often (learner.checkpoint_updates)",
    }
    return Diagnosis(
        "publishing",
        f"The learner stood still {_percent(sum(parts.values()))} of the time around its updates, most of it for the "
        f"{worst}: {remedy[worst]}.",
    )


def _balance(sampling: LaneShare, training: LaneShare) -> Diagnosis:
    if training.busy > FULL and sampling.busy > FULL:
        text = "Nothing waits: simulation and training are both full. Only more or faster devices make it faster."
    else:
        text = "Well balanced: no lane waited long enough to be worth a change."
    return Diagnosis("nothing", text)


def _lane(lanes: Mapping[str, LaneShare], name: str) -> LaneShare:
    return lanes.get(name, LaneShare(0.0, {}))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
