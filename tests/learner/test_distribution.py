"""Lane 4: a flat copy, versions that coalesce, a server that goes away or forgets."""

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from services.common.bundle import Version, as_bytes
from services.common.errors import Superseded
from services.common.staging import Stage
from services.common.telemetry import Telemetry
from services.learner import distribution
from services.learner.distribution import Distribution
from services.learner.session import Session
from services.learner.snapshot import Staging, gather_home, layout_of
from services.learner.threads import Failures
from services.policies.base import Policy
from tests.learner.data import FAMILIES, small_policy
from tests.learner.fake_weights import FakeWeights


class Lane:
    """A distribution lane over a fake weight plane."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.weights, self.session = policy, FakeWeights(), Session()
        self.session.grant(1)
        self.failures, self.sealed = Failures(), list[Version]()
        self.telemetry = Telemetry("learner", "test")
        self.lane = Distribution(
            policy, "policy", self.weights, self.session, self.sealed.append, self.telemetry, self.failures
        )
        self.lane.start()

    def paint(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.fill_(value)

    def value_of(self, version: Version) -> set[float]:
        names = [name for name, _ in self.policy.named_parameters()]
        arrays = self.weights.arrays(version)
        return {float(value) for name in names for value in set(arrays[name].reshape(-1).tolist())}


@pytest.fixture
def make_lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lane]]:
    monkeypatch.setattr(distribution, "ENSURE_SECONDS", 0.05)
    lanes: list[Lane] = []

    def make(family: str = "tiny-oft") -> Lane:
        lanes.append(Lane(small_policy(family)))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.weights.gate.set()
        lane.lane.stop(5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_holds_every_tensor_as_it_was_at_the_offer(make_lane: Callable[..., Lane], family: str) -> None:
    lane = make_lane(family)
    state = {name: tensor.clone() for name, tensor in lane.policy.trainable_state().items()}
    lane.weights.gate.clear()
    lane.lane.offer(Version(1, 1))
    lane.paint(9.0)  # training goes on while the version waits
    lane.weights.gate.set()
    assert lane.lane.wait(Version(1, 1), 10)
    arrays = lane.weights.arrays(Version(1, 1))
    assert arrays.keys() == state.keys()
    assert all(arrays[name].tobytes() == tensor.numpy().tobytes() for name, tensor in state.items())
    manifest = lane.weights.sealed[Version(1, 1)][0]
    assert json.loads(manifest.metadata["policy"]) == lane.policy.spec.config
    assert lane.sealed == [Version(1, 1)]


def test_versions_coalesce_while_one_is_being_published(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane()
    lane.weights.gate.clear()
    lane.paint(1.0)
    lane.lane.offer(Version(1, 1))
    while not lane.weights.publishes:
        time.sleep(0.005)
    for update in (2, 3, 4):
        lane.paint(float(update))
        lane.lane.offer(Version(1, update))
    lane.weights.gate.set()
    assert lane.lane.wait(Version(1, 4), 10)
    assert list(lane.weights.sealed) == [Version(1, 1), Version(1, 4)]
    assert lane.value_of(Version(1, 1)) == {1.0}
    assert lane.value_of(Version(1, 4)) == {4.0}
    assert lane.telemetry.metrics()["versions_coalesced"] == 2


def test_offers_are_never_torn(make_lane: Callable[..., Lane]) -> None:
    """Versions offered as fast as possible, published meanwhile: each holds one moment's weights."""
    lane = make_lane()
    for update in range(1, 60):
        lane.paint(float(update))
        lane.lane.offer(Version(1, update))
    assert lane.lane.wait(Version(1, 59), 10)
    for version in lane.weights.sealed:
        assert lane.value_of(version) == {float(version.update)}


def test_a_server_that_is_away_gets_the_version_later(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane()
    lane.weights.away = 1
    lane.lane.offer(Version(1, 1))
    assert lane.lane.wait(Version(1, 1), 10)
    lane.failures.check()


def test_a_server_that_lost_everything_gets_it_again(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane()
    lane.paint(7.0)
    lane.lane.offer(Version(1, 1))
    assert lane.lane.wait(Version(1, 1), 10)
    lane.paint(8.0)
    lane.weights.sealed.clear()
    deadline = time.monotonic() + 10
    while not lane.weights.sealed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lane.value_of(Version(1, 1)) == {7.0}


def test_a_fenced_learner_fails(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane()
    lane.weights.fenced = 2
    lane.lane.offer(Version(1, 1))
    assert lane.lane.stop(10)
    with pytest.raises(Superseded):
        lane.failures.check()


def test_a_version_of_a_reopened_run_is_left_out_silently(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane()
    lane.session.grant(3)
    lane.weights.fenced = 3
    lane.lane.offer(Version(1, 1))
    lane.lane.offer(Version(3, 1))
    assert lane.lane.wait(Version(3, 1), 10)
    lane.failures.check()


def test_bfloat16_and_tied_tensors_keep_their_bits() -> None:
    policy = small_policy("tiny-oft", dtype="bfloat16")
    policy.extra = torch.nn.Linear(2, 2)
    policy.twin = policy.extra  # tied: one tensor, two names
    layout = layout_of(policy)
    assert layout.tied == {"twin.weight": "extra.weight", "twin.bias": "extra.bias"}
    staging = Staging(layout, torch.device("cpu"), Stage(None, layout.length))
    state = policy.trainable_state()
    staging.fill(state)
    flat = torch.from_numpy(as_bytes(staging.settle(), layout.length))
    for tensor in layout.tensors:
        part = flat[tensor.offset : tensor.offset + tensor.length].view(getattr(torch, tensor.dtype))
        assert torch.equal(part.view(tensor.shape), state[tensor.name])


def test_steps_that_change_no_published_tensor_raise_an_alarm(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane()
    for update, value in ((1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)):
        lane.paint(value)
        lane.lane.offer(Version(1, update))
        assert lane.lane.wait(Version(1, update), 10)
        alarmed = "weights_unchanged" in lane.telemetry.facts
        assert alarmed is (update in (2, 3))
    assert lane.telemetry.metrics()["versions_unchanged"] == 2
    lane.session.grant(2)
    lane.lane.offer(Version(2, 4))  # the run was opened again: no step in between
    assert lane.lane.wait(Version(2, 4), 10)
    assert lane.telemetry.metrics()["versions_unchanged"] == 2


def test_while_readers_hold_all_files_versions_coalesce_and_training_goes_on(
    make_lane: Callable[..., Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = make_lane()
    held = threading.Event()
    stage = lane.weights.stage
    monkeypatch.setattr(lane.weights, "stage", lambda length: None if held.is_set() else stage(length))
    held.set()
    for update in (1, 2, 3):
        lane.paint(float(update))
        lane.lane.offer(Version(1, update))
        time.sleep(0.05)
    assert lane.weights.newest is None
    assert "slow readers" in lane.telemetry.facts["weights"]
    held.clear()
    assert lane.lane.wait(Version(1, 3), 10)
    assert lane.value_of(Version(1, 3)) == {3.0}
    assert list(lane.weights.sealed) == [Version(1, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_laid_side_by_side_are_the_same_parameters(family: str) -> None:
    policy = small_policy(family, dtype="bfloat16")
    policy.extra = torch.nn.Linear(3, 3)
    policy.twin = policy.extra
    parameters = list(policy.parameters())
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    layout = layout_of(policy)
    home = gather_home(policy, layout)
    assert home is not None
    assert all(a is b for a, b in zip(parameters, policy.parameters(), strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    optimiser = torch.optim.AdamW(policy.parameters(), lr=0.1, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    stages = [Stage(None, layout.length) for _ in range(2)]
    flat, single = (
        Staging(layout, torch.device("cpu"), stages[0], home),
        Staging(layout, torch.device("cpu"), stages[1]),
    )
    for staging in (flat, single):
        staging.fill(policy.trainable_state())
    assert stages[0].buffer.tobytes() == stages[1].buffer.tobytes()
    with torch.no_grad():  # somebody moves a tensor away: it is found where it is now
        policy.extra.weight.data = policy.extra.weight + 1
    for staging in (flat, single):
        staging.fill(policy.trainable_state())
    assert stages[0].buffer.tobytes() == stages[1].buffer.tobytes()


def test_stop_publishes_what_is_offered(make_lane: Callable[..., Lane]) -> None:
    lane = make_lane()
    lane.weights.gate.clear()
    lane.lane.offer(Version(1, 1))
    threading.Timer(0.1, lane.weights.gate.set).start()
    assert lane.lane.stop(10)
    assert lane.weights.newest == Version(1, 1)
