"""One line: what holds a run back and what to change. A simple rule on the idle shares of the lanes."""

from collections.abc import Mapping

from services.cli.lanes import LaneShare
from services.cli.summary import Summary

NOTICEABLE = 0.15
"""Idle shares below this are not worth a change."""
FULL = 0.85
"""A lane this busy is a bottleneck."""


def advice(summary: Summary, cores: int) -> str:
    """The bottleneck and the remedy."""
    if not summary.lanes or not summary.updates:
        return "Too little training to say what holds it back."
    sampling = _lane(summary.lanes, "sampling")
    training = _lane(summary.lanes, "training")
    failures = sum(summary.restarts.values())
    if failures >= 3:
        return f"Roles were restarted {failures} times: look into logs/ first, everything else comes after that."
    if sampling.idle.get("weights", 0.0) > NOTICEABLE:
        return (
            f"Sampling waited {_percent(sampling.idle['weights'])} of the time for newer weights: "
            "raise learner.staleness, or make publishing faster (see the distribution lane)."
        )
    if sampling.idle.get("admission", 0.0) > NOTICEABLE and training.busy > sampling.busy:
        return (
            f"The learner holds it back: it was busy {_percent(training.busy)} of the time while sampling waited "
            f"{_percent(sampling.idle['admission'])} for admission. Give the learner a faster device, fewer epochs or "
            "a smaller policy; fewer simulators would do as well."
        )
    if sampling.idle.get("admission", 0.0) > NOTICEABLE:
        return (
            f"Admission holds it back: sampling waited {_percent(sampling.idle['admission'])} of the time for it while "
            f'the learner was busy {_percent(training.busy)}. Raise learner.staleness, or use run.mode = "async" (in a '
            "short run much of it is the end, when all episodes are granted)."
        )
    if training.idle_share > NOTICEABLE and sampling.busy > training.busy:
        return (
            f"Simulation holds it back: the learner waited {_percent(training.idle_share)} of the time for episodes. "
            f"Add simulators (run.sims; this machine has {cores} cores), use a cheaper control mode or observation, "
            "or put the simulators on other machines."
        )
    if training.busy > FULL and sampling.busy > FULL:
        return "Nothing waits: simulation and training are both full. Only more or faster devices make it faster."
    return "Well balanced: no lane waited long enough to be worth a change."


def _lane(lanes: Mapping[str, LaneShare], name: str) -> LaneShare:
    return lanes.get(name, LaneShare(0.0, {}))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
