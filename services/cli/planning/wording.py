"""A plan in words: what to do, what it will reach, what holds it, and what its neighbours lose."""

from collections.abc import Iterator

from services.cli.planning.model import Prediction, Use
from services.cli.planning.profile import Profile
from services.cli.planning.search import Plan

_REMEDY = {
    "simulation": "simulation: faster or more simulators would help first",
    "inference": "inference: faster or more rollout workers would help first",
    "learner": "the learner: faster or more training devices would help first",
    "devices": "the devices, which all do everything: only more of them help",
    "weights": "weights on their way: a faster link, fewer trained tensors or more staleness would help first",
    "network": "trajectories on their way to the learner: a faster link or smaller observations would help first",
}


def describe(profile: Profile, plan: Plan) -> Iterator[str]:
    """The lines of `dvla plan`."""
    best = plan.best
    if profile.emulated:
        yield "EMULATED: the profile was made with devices that only wait."
    yield f"{best.rate:,.0f} env steps/s predicted, {best.envs} environments on each simulating device"
    for use in best.uses:
        yield f"  {use.count} x {use.node.name}: {_use(use, best)}"
    if best.relay:
        yield "  a weights relay on every sampling node but the learner's"
    yield f"bottleneck: {_REMEDY[best.bottleneck]}"
    for part, rate in sorted(best.bounds.items(), key=lambda item: item[1]):
        if rate < 1e12:
            yield f"  {part} alone could do {rate:,.0f} env steps/s"
    yield "neighbours:"
    for neighbour in plan.neighbours:
        lost = -100 * plan.loss(neighbour)
        yield f"  {neighbour.change}: {neighbour.prediction.rate:,.0f} env steps/s ({lost:+.1f} %)"
    if not plan.exhaustive:
        yield "(too many devices to try every use: learner ranks fill whole nodes)"


def _use(use: Use, best: Prediction) -> str:
    if best.style == "all":
        return f"{use.learner} devices, each with simulator, policy and learner rank"
    parts = [
        f"{use.learner} for the learner" if use.learner else "",
        f"{use.both} with simulator and policy together" if use.both else "",
        f"{use.sims} for simulators" if use.sims else "",
        f"{use.workers} for policies" if use.workers else "",
    ]
    idle = use.node.devices - use.learner - use.rollout
    return ", ".join([*filter(None, parts), *([f"{idle} idle"] if idle else [])])
