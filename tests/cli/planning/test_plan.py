"""The planner finds what brute force finds, is quick for a thousand devices, and refuses bad input in one line."""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli.planning import search
from services.cli.planning.inventory import GIB, Inventory, LinkSection, NodeSection, inventory_of, read_inventory
from services.cli.planning.model import STYLES, Prediction, Use, device_rates, fits, predict
from services.cli.planning.profile import FORMAT, Curve, Profile, profile_of, read_profile
from services.cli.planning.search import env_counts, find_plan
from services.common.errors import ConfigError

curves = st.tuples(st.floats(1e-3, 0.05), st.floats(1e-5, 5e-3)).map(
    lambda cost: Curve((4, 32), (cost[0] + 4 * cost[1], cost[0] + 32 * cost[1]))
)
profiles = st.builds(
    Profile,
    name=st.just("p"),
    chunk=st.integers(1, 8),
    sim=curves,
    inference=curves,
    train_seconds=st.floats(1e-5, 0.05),
    update_steps=st.floats(100, 10_000),
    optimiser_steps=st.integers(1, 8).map(float),
    publish_seconds=st.floats(0, 20),
    weight_bytes=st.floats(0, 1e10),
    trajectory_bytes=st.floats(0, 1e6),
    sim_env_bytes=st.floats(0, 2e9),
    policy_bytes=st.floats(0, 1.5e10),
    learner_bytes=st.floats(0, 3e10),
)
shapes = st.sampled_from([[(1, 1)], [(1, 4)], [(2, 2)], [(3, 1)], [(1, 2), (1, 1)], [(1, 2), (2, 1)]])
"""(nodes, devices of each) by kind: few enough for brute force."""
nodes = st.tuples(shapes, st.sampled_from([(16.0, 1.0), (40.0, 1.0)]), st.sampled_from([(40.0, 1.0), (30.0, 2.5)])).map(
    lambda drawn: [(*shape, *kind) for shape, kind in zip(drawn[0], drawn[1:], strict=False)]
)


def inventory(kinds: list[tuple[int, int, float, float]]) -> Inventory:
    made = [
        NodeSection(name=f"n{i}", count=count, gpus=gpus, memory_gb=memory, speed=speed)
        for i, (count, gpus, memory, speed) in enumerate(kinds)
    ]
    return Inventory(tuple(made), LinkSection(between_gbit=10, within_gbit=200))


def brute_force(profile: Profile, there: Inventory) -> Iterator[Prediction]:
    """Every role for every device of every node, one node after the other: nothing is known to be alike or best."""
    each = [node for node in there.nodes for _ in range(node.count)]
    for style in STYLES:
        for envs in env_counts(profile, style):
            if not all(fits(profile, style, envs, node) for node in there.nodes):
                continue
            rates = device_rates(profile, envs)
            for uses in itertools.product(*(ways(node, style) for node in each)):
                prediction = predict(profile, there, style, envs, uses, rates)
                if prediction is not None:
                    yield prediction


def ways(node: NodeSection, style: str) -> list[Use]:
    total = node.devices
    if style == "all":
        return [Use(node, 1, learner=total, both=total)]
    if style == "together":
        return [Use(node, 1, learner, both=total - learner) for learner in range(total + 1)]
    return [
        Use(node, 1, learner, sims=sims, workers=total - learner - sims)
        for learner in range(total + 1)
        for sims in range(total - learner + 1)
    ]


@settings(max_examples=25, deadline=None)
@given(profiles, nodes)
def test_the_plan_is_what_brute_force_finds(profile: Profile, kinds: list[tuple[int, int, float, float]]) -> None:
    there = inventory(kinds)
    rates = [prediction.rate for prediction in brute_force(profile, there)]
    if not rates:
        with pytest.raises(ConfigError, match="nothing fits"):
            find_plan(profile, there)
        return
    plan = find_plan(profile, there)
    assert plan.exhaustive
    assert plan.best.rate == pytest.approx(max(rates))
    assert plan.best.rate == min(plan.best.bounds.values()) == plan.best.bounds[plan.best.bottleneck]
    assert all(plan.loss(neighbour) >= -1e-9 for neighbour in plan.neighbours)


@settings(max_examples=8, deadline=None)
@given(profiles, st.integers(2, 3), st.integers(2, 3))
def test_whole_nodes_for_the_learner_are_nearly_as_good(profile: Profile, count: int, gpus: int) -> None:
    there = inventory([(count, gpus, 200.0, 1.0)])
    best = find_plan(profile, there).best.rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "EXHAUSTIVE", 0)
        packed = find_plan(profile, there)
    assert not packed.exhaustive
    assert 0.5 * best <= packed.best.rate <= best * (1 + 1e-9)


def example(**changes: Any) -> Profile:
    values: dict[str, Any] = {
        "name": "example",
        "chunk": 8,
        "sim": Curve((8, 64, 384), (0.02, 0.05, 0.2)),
        "inference": Curve((1, 64, 384), (0.1, 0.4, 2.0)),
        "train_seconds": 0.002,
        "update_steps": 20_000,
        "weight_bytes": 6e9,
        "trajectory_bytes": 5_000,
        "learner_bytes": 60 * GIB,
        "policy_bytes": 10 * GIB,
        "sim_env_bytes": 0.05 * GIB,
    }
    return Profile(**(values | changes))


def test_a_thousand_devices_take_seconds() -> None:
    there = Inventory((NodeSection(name="h", count=125, gpus=8, memory_gb=141),))
    began = time.process_time()
    plan = find_plan(example(), there)
    assert time.process_time() - began < 30  # a bound on work, far above what it takes
    assert sum(use.count for use in plan.best.uses) == 125
    assert not plan.exhaustive


def test_more_of_the_slow_part_is_what_the_plan_gives() -> None:
    there = Inventory((NodeSection(name="h", count=2, gpus=8, memory_gb=141),))
    cheap = find_plan(example(train_seconds=0.0005), there).best
    dear = find_plan(example(train_seconds=0.01), there).best
    assert cheap.learners < dear.learners
    assert find_plan(example(publish_seconds=10_000.0), there).best.bottleneck == "weights"
    assert find_plan(example(trajectory_bytes=1e9), there).best.bottleneck == "network"


def test_memory_limits_the_environments() -> None:
    small = Inventory((NodeSection(name="h", count=1, gpus=8, memory_gb=61),))
    large = Inventory((NodeSection(name="h", count=1, gpus=8, memory_gb=141),))
    profile = example(sim_env_bytes=0.3 * GIB, train_seconds=1e-5)
    assert find_plan(profile, small).best.envs < find_plan(profile, large).best.envs


def test_a_device_alone_does_everything() -> None:
    there = Inventory((NodeSection(name="one", gpus=1, memory_gb=141),))
    best = find_plan(example(), there).best
    assert (best.style, best.learners) == ("all", 1)
    assert device_rates(example(), best.envs)["all"] > best.rate, "sharing costs something"


GOOD = {
    "format": FORMAT,
    "recipe": "toy",
    "chunk": 4,
    "sim": {"envs": [1, 8], "step_seconds": [0.001, 0.004]},
    "inference": {"rows": [1, 8], "call_seconds": [0.002, 0.004]},
    "learner": {"seconds_per_step": 0.001, "steps_per_update": 500},
    "publish": {"seconds": 0.01, "bytes": 1000},
    "edges": {"trajectory_bytes_per_step": 100},
}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "its format is no"),
        ([], "its format is no"),
        (without("sim"), "'sim' is missing"),
        (GOOD | {"chunk": 0}, "chunk = 0; expected more than 0"),
        (GOOD | {"sim": {"envs": [8, 1], "step_seconds": [1, 2]}}, "expected rising sizes"),
        (GOOD | {"sim": {"envs": [1], "step_seconds": [0]}}, "expected seconds above 0"),
        (GOOD | {"sim": 5}, "not subscriptable"),
        (GOOD | {"publish": {"seconds": -1, "bytes": 1}}, "publish_seconds = -1.0; expected 0 or more"),
        (GOOD | {"learner": {"seconds_per_step": "x", "steps_per_update": 1}}, "could not convert"),
    ],
)
def test_a_bad_profile_is_one_line(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        read_profile(path)
    assert message in str(error.value)
    assert "p.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one [[nodes]]"),
        ("nodes = 3", "write [[nodes]]"),
        ("[[nodes]]\nname='a'\nmemory_gb=4", "expected one of them"),
        ("[[nodes]]\nname='a'\ngpus=1\ncores=2\nmemory_gb=4", "expected one of them"),
        ("[[nodes]]\nname='a'\ngpus=1", "memory_gb is missing"),
        ("[[nodes]]\nname='a'\ngpsu=1\nmemory_gb=1", "did you mean 'gpus'"),
        ("[[nodes]]\nname='a'\ngpus=1\nmemory_gb=1\n[[nodes]]\nname='a'\ngpus=1\nmemory_gb=1", "a name of its own"),
        ("[links]\nbetween_gbit=0\n[[nodes]]\nname='a'\ngpus=1\nmemory_gb=1", "expected more than 0"),
        ("[[nodes]", "cannot be read"),
        ("[[nodes]]\nname='a'\ngpus=1\nmemory_gb=1\ncount=200000", "expected at most"),
    ],
)
def test_a_bad_inventory_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "i.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_inventory(path)
    assert message in str(error.value)
    assert "i.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_good_pair_is_read() -> None:
    there = inventory_of({"nodes": [{"name": "a", "cores": 4, "memory_gb": 8}]})
    assert there.nodes[0].memory == 2 * GIB
    assert profile_of(GOOD).sim.at(4) == pytest.approx(0.001 + 0.003 * 3 / 7)
    assert profile_of(GOOD).sim.at(16) == pytest.approx(0.004 + 0.003 * 8 / 7)
    assert find_plan(profile_of(GOOD), there).best.rate > 0
