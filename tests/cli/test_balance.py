"""The balance climbs to the best split of a plant that it only sees through samples, and then keeps still."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli import balancing
from services.cli.balance import Balance, Split
from services.cli.balancing import Balancer
from services.cli.child import ChildSpec
from services.cli.processes import Processes
from services.cli.recipe import load_recipe
from services.cli.runfolder import RunFolder
from services.cli.samples import RoleSample, Sample, StoreSample
from services.cli.session import Session

ROOT = Path(__file__).parents[2]


class Plant:
    """A run whose lanes follow from its split: simulators and workers of a given speed, a learner of another.

    crowding: share of its speed that the learner loses for each simulator.
    """

    def __init__(self, sim: float, worker: float, learner: float, crowding: float = 0.0) -> None:
        self.sim, self.worker, self.learner, self.crowding = sim, worker, learner, crowding
        self.t, self.steps = 0.0, 0.0
        self.seconds: dict[str, dict[str, dict[str, float]]] = {}

    def rates(self, split: Split) -> tuple[float, float, float]:
        learner = self.learner * max(0.1, 1 - self.crowding * split.sims)
        return split.sims * self.sim, split.rollouts * self.worker, learner

    def rate(self, split: Split) -> float:
        return min(self.rates(split))

    def advance(self, split: Split) -> Sample:
        simulation, inference, learner = self.rates(split)
        rate = self.rate(split)
        self.t, self.steps = self.t + 1.0, self.steps + rate
        sampling = min(simulation, inference)
        self._spend("rollout-0", "sampling", min(1.0, rate / sampling), "admission")
        self._spend("rollout-0", "inference", rate / inference, "rows")
        self._spend("sim-0", "env-0", rate / simulation, "client")
        self._spend("learner", "training", rate / learner, "lease")
        roles = {
            who: RoleSample(who.split("-")[0], 1, {lane: dict(states) for lane, states in lanes.items()})
            for who, lanes in self.seconds.items()
        }
        store = StoreSample(update=int(self.steps // 100), counters={"trained_steps": int(self.steps // 100) * 100})
        return Sample(self.t, "training", roles, store)

    def _spend(self, who: str, lane: str, busy: float, reason: str) -> None:
        states = self.seconds.setdefault(who, {}).setdefault(lane, {"busy": 0.0, reason: 0.0})
        states["busy"] += busy
        states[reason] += 1 - busy


def play(plant: Plant, balance: Balance, seconds: int) -> list[Split]:
    """The splits that were in force, one for each change."""
    splits = [balance.split]
    for _ in range(seconds):
        change = balance.look(plant.advance(splits[-1]))
        if change is not None:
            assert change.reason
            splits.append(change.split)
    return splits


@settings(max_examples=25, deadline=None)
@given(st.floats(60, 400), st.floats(60, 400), st.floats(100, 900), st.integers(1, 4), st.integers(1, 2))
def test_a_wrong_split_recovers_nine_tenths_of_the_best(
    sim: float, worker: float, learner: float, sims: int, rollouts: int
) -> None:
    plant, most = Plant(sim, worker, learner), Split(6, 6)
    splits = play(plant, Balance(Split(sims, rollouts), most), 900)
    best = max(plant.rate(Split(s, r)) for s in range(1, 7) for r in range(1, 7))
    assert plant.rate(splits[-1]) >= 0.85 * best, splits  # a lane 85 % busy counts as full
    assert all(1 <= split.sims <= 6 and 1 <= split.rollouts <= 6 for split in splits)
    assert len(splits) < 25, "it comes to rest"


def test_a_change_that_does_not_help_is_taken_back() -> None:
    plant = Plant(sim=100, worker=1000, learner=210, crowding=0.3)
    balance = Balance(Split(1, 1), Split(8, 2))
    splits = play(plant, balance, 300)
    assert [split.sims for split in splits[:3]] == [1, 2, 1]
    assert len(splits) == 3, "not tried again soon"


def test_simulators_that_only_take_cores_are_stopped() -> None:
    plant = Plant(sim=200, worker=2000, learner=300, crowding=0.1)
    assert play(plant, Balance(Split(6, 1), Split(8, 2)), 600)[-1].sims < 4


@pytest.mark.parametrize("stage", ["starting", "evaluation before"])
def test_only_training_counts(stage: str) -> None:
    plant, balance = Plant(100, 1000, 1000), Balance(Split(1, 1), Split(8, 2))
    assert not any(balance.look(replace(plant.advance(Split(1, 1)), stage=stage)) for _ in range(100))
    assert balance.look(None) is None


class FakeSession:
    """Notes what it is told to do."""

    def __init__(self) -> None:
        self.latest: Sample | None = None
        self.done: list[str] = []

    def tell(self, text: str) -> None:
        self.done.append(text)

    def start(self, specs: list[ChildSpec]) -> None:
        self.done += [f"start {spec.name}" for spec in specs]

    def stop(self, names: list[str]) -> None:
        self.done += [f"stop {name}" for name in names]

    def follow(self, name: str, address: str) -> None:
        self.done.append(f"follow {name}")

    def forget(self, name: str) -> None:
        self.done.append(f"forget {name}")


def balancer(tmp_path: Path, *overrides: str) -> tuple[Balancer, FakeSession]:
    recipe = load_recipe(ROOT / "recipes" / "toy.toml", overrides)
    run, session = RunFolder(tmp_path / "run"), FakeSession()
    run.create()
    processes = Processes(recipe, run, tmp_path)
    processes.write_sims()
    return Balancer(processes, cast(Session, session)), session


def test_a_simulator_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, session = balancer(tmp_path, "run.balance=true", "run.most_sims=3", "run.most_rollouts=1")
    plant = Plant(sim=100, worker=1000, learner=210, crowding=0.3)
    while len(session.done) < 3:
        session.latest = plant.advance(Split(len(found.processes.sims), 1))
        found.step()
    assert session.done[0].startswith("balance: 2 simulators and 1 rollout workers from now on (simulation)")
    assert session.done[1:] == ["start sim-1", "follow sim-1"]
    assert len(found.processes.sims_file.read_text().split()) == 2
    for _ in range(100):
        session.latest = plant.advance(Split(1, 1))
        found.step()
    assert len(session.done) == 3, "nothing is judged before it is up"
    plant.seconds["sim-1"] = {}
    del session.done[:]
    monkeypatch.setattr(balancing, "DRAIN_SECONDS", 0.0)
    while len(session.done) < 3:
        session.latest = plant.advance(Split(len(found.processes.sims), 1))
        found.step()
    assert session.done[1:] == ["forget sim-1", "stop sim-1"]
    assert found.processes.sims_file.read_text().split() == [found.processes.address("sim-0")]
    assert any("file:" in part for part in found.processes.rollout()[0].command)


def test_nothing_happens_unless_it_is_on(tmp_path: Path) -> None:
    found, session = balancer(tmp_path)
    plant = Plant(sim=100, worker=1000, learner=1000)
    for _ in range(200):
        session.latest = plant.advance(Split(1, 1))
        found.step()
    assert not session.done
    assert not any("file:" in part for part in found.processes.rollout()[0].command)
