"""Finds the use of an inventory with the highest predicted throughput, and what its neighbours would lose.

Few devices: every use is tried. Many: learner ranks fill whole nodes, kind after kind, in every order of kinds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, groupby, islice, pairwise, permutations, product
from math import comb, prod

from services.cli.planning.inventory import Inventory
from services.cli.planning.model import STYLES, Prediction, Style, device_rates, divide, fits, predict
from services.cli.planning.profile import Profile
from services.common.errors import ConfigError

EXHAUSTIVE = 600
"""Uses of an inventory up to which all are tried, for each style and number of environments."""
ORDERS = 24
"""Orders of kinds of nodes that are tried where not all uses can be."""


@dataclass(frozen=True)
class Neighbour:
    """A choice next to the best one: what is different, and its prediction."""

    change: str
    prediction: Prediction


@dataclass(frozen=True)
class Plan:
    """The best use, its neighbours, and whether every use was tried."""

    best: Prediction
    neighbours: tuple[Neighbour, ...]
    exhaustive: bool

    def loss(self, neighbour: Neighbour) -> float:
        """Share of the best throughput that a neighbour loses."""
        return 1 - neighbour.prediction.rate / self.best.rate


def find_plan(profile: Profile, inventory: Inventory) -> Plan:
    """The plan; raises ConfigError if no use fits into the memory."""
    found: dict[tuple[Style, int, int], Prediction] = {}
    for style in STYLES:
        for envs in env_counts(profile, style):
            if not all(fits(profile, style, envs, node) for node in inventory.nodes):
                continue
            for prediction in _predictions(profile, inventory, style, envs):
                key = (style, envs, prediction.learners)
                if key not in found or prediction.rate > found[key].rate:
                    found[key] = prediction
    if not found:
        raise ConfigError(_nothing(profile, inventory))
    best = max(found.values(), key=_preference)
    neighbours = _neighbours(found, best, env_counts(profile, best.style))
    return Plan(best, tuple(neighbours), _uses(inventory) <= EXHAUSTIVE)


def env_counts(profile: Profile, style: Style) -> list[int]:
    """Numbers of environments of a device: the measured ones and one between each two; apart, two halves of those."""
    sizes = profile.sim.sizes
    between = {(a + b) // 2 for a, b in pairwise(sizes)}
    return sorted({size * (2 if style == "apart" else 1) for size in (*sizes, *between)})


def _preference(prediction: Prediction) -> tuple[float, int, int]:
    """Fastest; of equals the one with fewer environments, whose data are fresher, on fewer nodes."""
    nodes = sum(use.count for use in prediction.uses if use.learner)
    return round(prediction.rate, 6), -prediction.envs, -nodes


def _predictions(profile: Profile, inventory: Inventory, style: Style, envs: int) -> Iterator[Prediction]:
    rates = device_rates(profile, envs)
    for shares in _shares(inventory, style):
        uses = [
            divide(node, count, learner, style, rates)
            for node, share in zip(inventory.nodes, shares, strict=True)
            for learner, count in share
        ]
        prediction = predict(profile, inventory, style, envs, uses, rates)
        if prediction is not None:
            yield prediction


Shares = tuple[tuple[int, int], ...]
"""Of one kind of node: (devices that train, nodes like that), ..."""


def _shares(inventory: Inventory, style: Style) -> Iterator[Sequence[Shares]]:
    """For each kind of node, how many devices train on how many nodes."""
    if style == "all":
        return iter([[((node.devices, node.count),) for node in inventory.nodes]])
    return _all_shares(inventory) if _uses(inventory) <= EXHAUSTIVE else _packed_shares(inventory)


def _uses(inventory: Inventory) -> int:
    """Ways to say how many devices train on which node, nodes of a kind being alike."""
    return prod(comb(node.count + node.devices, node.devices) for node in inventory.nodes)


def _all_shares(inventory: Inventory) -> Iterator[Sequence[Shares]]:
    kinds = [combinations_with_replacement(range(node.devices + 1), node.count) for node in inventory.nodes]
    for combination in product(*kinds):
        yield [tuple((learner, len(list(same))) for learner, same in groupby(counts)) for counts in combination]


def _packed_shares(inventory: Inventory) -> Iterator[Sequence[Shares]]:
    """Learner ranks on as few nodes as possible."""
    for order in islice(permutations(range(len(inventory.nodes))), ORDERS):
        for learners in range(1, inventory.devices):
            left, shares = learners, [((0, node.count),) for node in inventory.nodes]
            for kind in order:
                node = inventory.nodes[kind]
                full, rest = divmod(min(left, node.count * node.devices), node.devices)
                left -= full * node.devices + rest
                parts = ((node.devices, full), (rest, 1 if rest else 0), (0, node.count - full - (1 if rest else 0)))
                shares[kind] = tuple(part for part in parts if part[1])  # type: ignore[assignment]
            yield shares


def _neighbours(
    found: dict[tuple[Style, int, int], Prediction], best: Prediction, counts: list[int]
) -> Iterator[Neighbour]:
    """One step away in each direction: environments, devices that train, style."""
    at = counts.index(best.envs)
    for step in (-1, 1):
        if 0 <= at + step < len(counts):
            same = [p for (style, envs, _), p in found.items() if (style, envs) == (best.style, counts[at + step])]
            if same:
                yield Neighbour(f"{counts[at + step]} environments a device", max(same, key=_preference))
    for step in (-1, 1):
        if best.style != "all" and (other := found.get((best.style, best.envs, best.learners + step))):
            yield Neighbour(f"{best.learners + step} devices for the learner", other)
    for style in STYLES:
        others = [p for (kind, _, _), p in found.items() if kind == style]
        if style != best.style and others:
            yield Neighbour(_NAMES[style], max(others, key=_preference))


_NAMES: dict[Style, str] = {
    "together": "simulator and policy on one device",
    "apart": "simulators and policies on devices of their own",
    "all": "everything on every device",
}


def _nothing(profile: Profile, inventory: Inventory) -> str:
    least = profile.sim_bytes + profile.sim_env_bytes * profile.sim.sizes[0]
    need = max(least, profile.policy_bytes, profile.learner_bytes) / 2**30
    have = min(node.memory for node in inventory.nodes) / 2**30
    if need > have:
        return (
            f"nothing fits: a role needs {need:.2f} GiB and a device has {have:.2f} GiB; use larger devices or a "
            "smaller policy"
        )
    return (
        f"nothing fits on {inventory.devices} devices of {have:.2f} GiB: simulator, policy and learner need devices of "
        "their own, or one with room for all; add devices or memory"
    )
