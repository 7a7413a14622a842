"""The conformance kit accepts good simulators and names what is wrong with bad ones."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from services.common.spec import FloatArray, IntArray
from services.sim.check import CHECKS, run_checks
from services.sim.env import Factory
from services.sim.toy import ToySim
from services.sim.vector import ControlStep, Start
from tests.sim.serving import serving


def failures(folder: Path, factory: Factory) -> dict[str, str]:
    with serving(folder, factory, sessions=1) as (service, _):
        findings = list(run_checks(service.address, shared_folder=str(folder)))
    assert [finding.name for finding in findings] == list(CHECKS)
    assert findings[-1].detail == "shm equals grpc" or not findings[-1].ok
    return {finding.name: finding.detail for finding in findings if not finding.ok}


@pytest.mark.parametrize("observation", ["state", "rgb+state"])
def test_a_good_simulator_passes(tmp_path: Path, observation: str) -> None:
    assert not failures(tmp_path, partial(ToySim, 3, observation=observation))


class SlotDependentStarts(ToySim):
    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        super().reset(slots, starts)
        self._point[slots, 0] += np.float32(0.01) * slots.astype(np.float32)


class UnstableStarts(ToySim):
    calls = 0

    def make_start(self, task: str, seed: int) -> bytes:
        self.calls += 1
        return super().make_start(task, seed + self.calls)


class GlobalReset(ToySim):
    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        super().reset(slots, starts)
        self._point[:] = self._point[slots[0]]


class MovesEverybody(ToySim):
    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        self._point += np.float32(0.02)
        return super().step(slots, actions)


class Dice(ToySim):
    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        return super().step(slots, actions + np.random.default_rng().normal(0, 0.2, actions.shape).astype(np.float32))


@pytest.mark.parametrize(
    ("factory", "check", "message"),
    [
        (SlotDependentStarts, "starts", "the same start differs between slot 2 alone and slot 0 of all"),
        (UnstableStarts, "starts", "MakeStart gave other bytes"),
        (GlobalReset, "isolation", "slot 0 with and without a busy neighbour"),
        (MovesEverybody, "isolation", "slot 0 with and without a busy neighbour"),
        (Dice, "determinism", "a replay of the same actions"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, factory: type[ToySim], check: str, message: str) -> None:
    found = failures(tmp_path, partial(factory, 3))
    assert message in found[check]


def test_a_simulator_that_is_not_there() -> None:
    from services.common.errors import Unavailable

    with pytest.raises(Unavailable):
        list(run_checks("unix:/tmp/no-such-simulator.sock"))
