"""Predicted env steps per second of one way to use an inventory: the least of what its parts can do.

Lanes overlap, so the slowest part sets the pace. The model knows four ways for a part to be slow: rollout (simulation
and inference), training (with the reduction of gradients), weights on their way, and trajectories on their way.
Sim and rollout worker are always on one node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.cli.planning.inventory import Inventory, NodeSection
from services.cli.planning.profile import Profile

Style = Literal["together", "apart", "all"]
"""together: a simulator and its policy share a device, the learner has others. apart: simulators, policies and learner
each have devices of their own. all: every device does everything."""
STYLES: tuple[Style, ...] = ("together", "apart", "all")


@dataclass(frozen=True)
class Use:
    """What `count` nodes of a kind do: devices of each for the learner, simulators, workers, or both together."""

    node: NodeSection
    count: int
    learner: int = 0
    sims: int = 0
    workers: int = 0
    both: int = 0

    @property
    def rollout(self) -> int:
        """Devices of each that sample."""
        return self.sims + self.workers + self.both

    @property
    def processes(self) -> int:
        """Rollout workers of each."""
        return self.workers + self.both


@dataclass(frozen=True)
class Prediction:
    """rate: env steps per second. bounds: what each part could do alone. relay: whether nodes get relays."""

    style: Style
    envs: int
    uses: tuple[Use, ...]
    rate: float
    bounds: Mapping[str, float] = field(default_factory=dict)
    relay: bool = False

    @property
    def bottleneck(self) -> str:
        """The part that sets the pace."""
        return min(self.bounds, key=lambda part: self.bounds[part])

    @property
    def learners(self) -> int:
        """Devices that train."""
        return sum(use.count * use.learner for use in self.uses)


def device_rates(profile: Profile, envs: int) -> dict[str, float]:
    """Env steps per second of one device of speed 1 with `envs` environments, by what it does.

    Apart, a simulator's environments are two sessions, so that one is stepped while the other waits for actions.
    """
    half, chunk = envs / 2, profile.chunk
    sim, act = chunk * profile.sim.at(envs), profile.inference.at(envs)
    rates = {
        "together": envs * chunk / (sim + act),
        "all": envs * chunk / (sim + act + envs * chunk * profile.train_seconds),
    }
    if envs % 2 == 0:
        rates["sims"] = half / profile.sim.at(envs // 2)
        rates["workers"] = half * chunk / profile.inference.at(envs // 2)
    return rates


def fits(profile: Profile, style: Style, envs: int, node: NodeSection) -> bool:
    """Whether the memory of each device suffices for what it may hold."""
    sim = profile.sim_bytes + profile.sim_env_bytes * envs
    if style == "all":
        return sim + profile.policy_bytes + profile.row_bytes * envs + profile.learner_bytes <= node.memory
    act = profile.policy_bytes + profile.row_bytes * (envs if style == "together" else envs // 2)
    return max(sim + act if style == "together" else max(sim, act), profile.learner_bytes) <= node.memory


def divide(node: NodeSection, count: int, learner: int, style: Style, rates: Mapping[str, float]) -> Use:
    """The best use of a node whose `learner` devices train; those that cannot sample stay idle."""
    rest = node.devices - learner
    if style == "all":
        return Use(node, count, learner=node.devices, both=node.devices)
    if style == "together":
        return Use(node, count, learner, both=rest)
    if rest < 2:
        return Use(node, count, learner)
    best = max(range(1, rest), key=lambda sims: min(sims * rates["sims"], (rest - sims) * rates["workers"]))
    return Use(node, count, learner, sims=best, workers=rest - best)


def predict(
    profile: Profile,
    inventory: Inventory,
    style: Style,
    envs: int,
    uses: Sequence[Use],
    rates: Mapping[str, float] | None = None,
) -> Prediction | None:
    """The prediction; None where nobody trains or nobody samples. rates: `device_rates`, if they are known."""
    uses = [use for use in uses if use.count]
    learners = sum(use.count * use.learner for use in uses)
    if not learners or not any(use.rollout for use in uses):
        return None
    rates = rates or device_rates(profile, envs)
    if style == "all":
        bounds = _shared(profile, inventory, uses, rates["all"])
    else:
        bounds = _rollout(uses, rates, profile, envs) | {"learner": _learner(profile, inventory, uses)}
    weights, relay = _weights(profile, inventory, uses)
    bounds |= {"weights": weights, "network": _network(profile, inventory, uses)}
    return Prediction(style, envs, tuple(uses), min(bounds.values()), bounds, relay)


def _rollout(uses: Sequence[Use], rates: Mapping[str, float], profile: Profile, envs: int) -> dict[str, float]:
    """Named by what takes more of its time, simulation or inference."""
    total, sims, workers = 0.0, 0.0, 0.0
    for use in uses:
        speed = use.count * use.node.speed
        if use.both:
            total += speed * use.both * rates["together"]
        elif use.rollout:
            sims, workers = sims + speed * use.sims * rates["sims"], workers + speed * use.workers * rates["workers"]
            total += speed * min(use.sims * rates["sims"], use.workers * rates["workers"])
    simulates = profile.chunk * profile.sim.at(envs) >= profile.inference.at(envs) if not sims else sims <= workers
    return {"simulation" if simulates else "inference": total}


def _learner(profile: Profile, inventory: Inventory, uses: Sequence[Use]) -> float:
    """Ranks get equal shares, so the slowest sets the pace."""
    learners = sum(use.count * use.learner for use in uses)
    slowest = min(use.node.speed for use in uses if use.learner)
    work = profile.update_steps * profile.train_seconds / (learners * slowest)
    return profile.update_steps / (work + _reduction(profile, inventory, uses, learners))


def _shared(profile: Profile, inventory: Inventory, uses: Sequence[Use], rate: float) -> dict[str, float]:
    speed = sum(use.count * use.learner * use.node.speed for use in uses) * (1 - inventory.links.interference)
    learners = sum(use.count * use.learner for use in uses)
    seconds = profile.update_steps / (speed * rate) + _reduction(profile, inventory, uses, learners)
    return {"devices": profile.update_steps / seconds}


def _reduction(profile: Profile, inventory: Inventory, uses: Sequence[Use], learners: int) -> float:
    """Seconds of an update that the ring reduction of gradients takes."""
    spread = sum(use.count for use in uses if use.learner) > 1
    link = inventory.links.between if spread else inventory.links.within
    return profile.optimiser_steps * 2 * profile.weight_bytes * (learners - 1) / learners / link


def _weights(profile: Profile, inventory: Inventory, uses: Sequence[Use]) -> tuple[float, bool]:
    """Updates come no faster than versions arrive; and whether a relay on each node brings them sooner."""
    elsewhere = [(use.count, use.processes) for use in uses if use.rollout and not use.learner]
    with_learner = [(use.count, use.processes) for use in uses if use.rollout and use.learner]
    if with_learner:  # the root stands on one of these
        count, processes = with_learner[0]
        with_learner[0] = (count - 1, processes)
    nodes = sum(count for count, _ in [*elsewhere, *with_learner])
    readers = sum(count * processes for count, processes in [*elsewhere, *with_learner])
    relay = readers > nodes
    seconds = profile.publish_seconds + profile.weight_bytes * nodes / inventory.links.between
    return (profile.update_steps * max(1, profile.staleness) / seconds if seconds else float("inf")), relay


def _network(profile: Profile, inventory: Inventory, uses: Sequence[Use]) -> float:
    """Each learner node takes an equal share of all trajectories, of which those made there do not travel."""
    homes = sum(use.count for use in uses if use.learner)
    sampling = sum(use.count * use.rollout for use in uses)
    local = sum(use.count * use.rollout for use in uses if use.learner) / sampling / homes
    remote = profile.trajectory_bytes * (1 - local)
    return inventory.links.between * homes / remote if remote > 0 else float("inf")
