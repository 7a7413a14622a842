"""New versions are loaded into the spare policy, checked after loading, and swapped in; evaluations pin theirs."""

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch

from services.common import bundle
from services.common.bundle import Manifest, Version
from services.common.errors import ConfigError, DvlaError, InvalidInput, Unavailable
from services.common.security import Security
from services.common.spec import Array
from services.common.telemetry import BUSY, Telemetry
from services.policies.base import Policy
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.raw import to_arrays
from services.policies.registry import build_policy
from services.rollout.worker import loading
from services.rollout.worker.policy_runner import PolicyRunner, Row
from services.rollout.worker.receiving import Receiver

CONFIG = PolicyConfig(family="tiny-oft", state_dim=3, action_dim=2, chunk=2)
Sealed = tuple[Manifest, bundle.Buffer]


def sealed(
    version: Version, config: PolicyConfig = CONFIG, seed: int = 0, metadata: Mapping[str, str] | None = None
) -> Sealed:
    """A version with weights drawn from a seed."""
    arrays, dtypes = to_arrays(build_policy(config, seed=seed).trainable_state())
    described = {"policy": json.dumps(config.to_json()), **(metadata or {})}
    return bundle.bundle("policy", version, arrays, dtypes, described)


def receive(receiver: Receiver, manifest: Manifest, buffer: bundle.Buffer) -> None:
    """What the follower's thread does with a version in shared memory."""
    try:
        receiver.sink.begin(manifest)
        receiver.sink.copy(bundle.as_bytes(buffer, manifest.length))
        receiver.sink.finish()
    finally:
        receiver.sink.abort()


class Setup:
    def __init__(self, spare: bool = True) -> None:
        self.telemetry = Telemetry("rollout", "w")
        self.runner = PolicyRunner(self.telemetry, 8, 1, "cpu")
        self.receiver = Receiver("unix:/none", Security(), "policy", self.runner, self.telemetry, "cpu", spare)

    def live(self) -> Policy:
        assert self.runner._live is not None
        return self.runner._live[1]


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.runner.close()


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for tensor in policy.trainable_state().values()])


async def test_the_first_version_goes_live_and_later_ones_take_turns_in_two_buffers(setup: Setup) -> None:
    policies = []
    for update in range(4):
        receive(setup.receiver, *sealed(Version(1, update), seed=update))
        assert setup.runner.version == (1, update)
        torch.testing.assert_close(weights(setup.live()), weights(build_policy(CONFIG, seed=update)), rtol=0, atol=0)
        policies.append(setup.live())
    assert policies[0] is policies[2]
    assert policies[1] is policies[3]
    assert policies[0] is not policies[1]
    assert not any(parameter.requires_grad for parameter in policies[0].parameters())
    await asyncio.wait_for(setup.receiver.first(), 5)
    metrics = setup.telemetry.metrics()
    assert (metrics["version/epoch"], metrics["version/update"], metrics["weights_applied"]) == (1, 3, 4)
    assert setup.telemetry.lane("receiving").seconds()[BUSY] > 0


async def test_a_spare_in_use_is_not_written_into(setup: Setup) -> None:
    for update in range(2):
        receive(setup.receiver, *sealed(Version(1, update), seed=update))
    spare = setup.receiver._spare
    assert spare is not None
    before = weights(spare)
    setup.runner._calling.acquire()  # a call that began before the last swap still runs
    receiving_thread = threading.Thread(target=receive, args=(setup.receiver, *sealed(Version(1, 2), seed=2)))
    receiving_thread.start()
    receiving_thread.join(0.2)
    assert receiving_thread.is_alive()
    torch.testing.assert_close(weights(spare), before, rtol=0, atol=0)
    setup.runner._calling.release()
    await asyncio.to_thread(receiving_thread.join, 10)
    assert setup.runner.version == (1, 2)


async def test_a_policy_with_other_settings_gets_a_buffer_of_its_own(setup: Setup) -> None:
    receive(setup.receiver, *sealed(Version(1, 0)))
    receive(setup.receiver, *sealed(Version(1, 1)))
    other = PolicyConfig(family="tiny-oft", state_dim=3, action_dim=2, chunk=2, temperature=0.5)
    receive(setup.receiver, *sealed(Version(2, 2), other))
    assert setup.live().spec.config == other.to_json()
    row = Row({"state": np.zeros(3, np.float32)}, "go", "k", "train")
    assert (await setup.runner.act([row]))[0].version == (2, 2)


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ({"policy": "no JSON"}, InvalidInput),
        ({"policy": "[1]"}, InvalidInput),
        ({"policy": json.dumps({"version": 99})}, ConfigError),
        ({"policy": json.dumps(CONFIG.to_json() | {"family": "nonsense"})}, ConfigError),
        ({"policy": json.dumps(CONFIG.to_json() | {"action_dim": 3})}, InvalidInput),
    ],
)
async def test_a_version_that_does_not_fit_leaves_the_live_one_alone(
    setup: Setup, metadata: dict[str, str], error: type[Exception]
) -> None:
    receive(setup.receiver, *sealed(Version(1, 0)))
    live, before = setup.live(), weights(setup.live())
    with pytest.raises(error):
        receive(setup.receiver, *sealed(Version(1, 1), seed=1, metadata=metadata))
    assert setup.runner.version == (1, 0)
    assert setup.live() is live
    torch.testing.assert_close(weights(live), before, rtol=0, atol=0)


async def test_hashes_are_checked_on_what_was_loaded(setup: Setup) -> None:
    receive(setup.receiver, *sealed(Version(1, 0)))
    manifest, buffer = sealed(Version(1, 1), seed=1)
    damaged = bundle.as_bytes(buffer, manifest.length).copy()
    damaged[manifest.layout.tensors[-1].offset] ^= 1
    with pytest.raises(InvalidInput, match="has hash"):
        receive(setup.receiver, manifest, damaged)
    assert setup.runner.version == (1, 0)
    receive(setup.receiver, manifest, buffer)
    assert setup.runner.version == (1, 1)


async def test_without_a_spare_policy_sampling_pauses_for_the_copy_only() -> None:
    setup = Setup(spare=False)
    try:
        receive(setup.receiver, *sealed(Version(1, 0)))
        live = setup.live()
        for update in (1, 2):
            receive(setup.receiver, *sealed(Version(1, update), seed=update))
            torch.testing.assert_close(weights(live), weights(build_policy(CONFIG, seed=update)), rtol=0, atol=0)
        setup.runner._calling.acquire()  # a policy call runs
        writer = threading.Thread(target=receive, args=(setup.receiver, *sealed(Version(1, 3), seed=3)))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        torch.testing.assert_close(weights(live), weights(build_policy(CONFIG, seed=2)), rtol=0, atol=0)
        setup.runner._calling.release()
        await asyncio.to_thread(writer.join, 10)
        assert setup.live() is live
        assert setup.runner.version == (1, 3)
    finally:
        setup.runner.close()


async def test_weights_loaded_in_place_never_act_under_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after the copy takes its time; a call that comes in meanwhile must wait for the new name."""
    setup = Setup(spare=False)
    row = Row({"state": np.zeros(3, np.float32)}, "go", "k", "eval")
    try:
        expected = {}
        for update in (0, 1):
            receive(setup.receiver, *sealed(Version(1, update), seed=update))
            expected[update] = (await setup.runner.act([row]))[0].action
        copied, go_on = threading.Event(), threading.Event()

        def slow(array: Array) -> int:
            copied.set()
            assert go_on.wait(20)
            return bundle.digest(array)

        monkeypatch.setattr("services.rollout.worker.loading.digest", slow)
        monkeypatch.setattr("services.common.client_fetch.PATIENCE_SECONDS", 0.1)
        writer = threading.Thread(target=receive, args=(setup.receiver, *sealed(Version(1, 2), seed=0)))
        writer.start()
        assert await asyncio.to_thread(copied.wait, 20)
        acting = asyncio.create_task(setup.runner.act([row]))
        pinning = asyncio.create_task(setup.receiver.pin((1, 1)))
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.to_thread(writer.join, 20)
        [chunk] = await acting
        assert chunk.version == (1, 2)
        np.testing.assert_array_equal(chunk.action, expected[0])
        with pytest.raises(Unavailable):  # overwritten here, so only the server could have it
            await pinning
    finally:
        setup.runner.close()


async def test_a_policy_damaged_in_place_is_not_used_until_the_next_whole_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(spare=False)
    row = Row({"state": np.zeros(3, np.float32)}, "go", "k", "train")
    try:
        receive(setup.receiver, *sealed(Version(1, 0)))
        manifest, buffer = sealed(Version(1, 1), seed=1)
        wrong = bundle.as_bytes(buffer, manifest.length).copy()
        wrong[manifest.layout.tensors[0].offset] ^= 1
        with pytest.raises(InvalidInput, match="has hash"):
            receive(setup.receiver, manifest, wrong)
        assert (await setup.runner.act([row]))[0].version == (1, 0)  # refused before it touched the policy
        with monkeypatch.context() as patch:
            patch.setattr(loading, "verify", lambda manifest, source: None)
            with pytest.raises(InvalidInput, match="damaged while it was loaded"):
                receive(setup.receiver, manifest, wrong)
        with pytest.raises(DvlaError, match="weights are damaged"):
            await setup.runner.act([row])
        receive(setup.receiver, manifest, buffer)
        assert (await setup.runner.act([row]))[0].version == (1, 1)
    finally:
        setup.runner.close()


async def test_frames_fill_the_policy_tensor_by_tensor() -> None:
    for spare in (True, False):
        own = Setup(spare)
        manifest, buffer = sealed(Version(1, 1), seed=1)
        flat = bundle.as_bytes(buffer, manifest.length)
        own.receiver.sink.begin(manifest)
        for start in range(0, manifest.length, 1000):
            own.receiver.sink.write(start, flat[start : start + 1000])
        own.receiver.sink.finish()
        own.receiver.sink.abort()
        torch.testing.assert_close(weights(own.live()), weights(build_policy(CONFIG, seed=1)), rtol=0, atol=0)
        own.runner.close()


async def test_an_evaluation_of_the_live_version_keeps_a_copy_of_it(setup: Setup) -> None:
    receive(setup.receiver, *sealed(Version(1, 0)))
    await setup.receiver.pin((1, 0))
    await setup.receiver.pin((1, 0))
    for update in (1, 2, 3):
        receive(setup.receiver, *sealed(Version(1, update), seed=update))
    pinned = setup.runner._pinned[(1, 0)]
    torch.testing.assert_close(weights(pinned), weights(build_policy(CONFIG, seed=0)), rtol=0, atol=0)


async def test_a_copy_is_never_of_two_versions(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a version is copied for an evaluation, two newer ones come in; the second would be written into it."""
    receive(setup.receiver, *sealed(Version(1, 0), seed=0))
    copying, go_on = threading.Event(), threading.Event()
    live = setup.live()

    def slow(memo: dict[int, object]) -> Policy:
        copying.set()
        assert go_on.wait(10)
        monkeypatch.undo()
        return copy.deepcopy(live)

    monkeypatch.setattr(live, "__deepcopy__", slow, raising=False)
    pinning = asyncio.create_task(setup.receiver.pin((1, 0)))
    await asyncio.to_thread(copying.wait, 10)

    def newer() -> None:
        for update in (1, 2):
            receive(setup.receiver, *sealed(Version(1, update), seed=update))

    writer = threading.Thread(target=newer)
    writer.start()
    writer.join(0.2)
    go_on.set()
    await pinning
    await asyncio.to_thread(writer.join, 10)
    assert setup.runner.version == (1, 2)
    torch.testing.assert_close(
        weights(setup.runner._pinned[(1, 0)]), weights(build_policy(CONFIG, seed=0)), rtol=0, atol=0
    )


def scored(policy: Policy, device: str = "cpu") -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """A function of the policy's weights alone, log-probabilities [B, C, D] of fixed actions, and its value now."""
    inputs = policy.preprocess({"state": np.eye(3, dtype=np.float32)}, ["go"] * 3)
    record = policy.act(inputs, "train", RowNoise(["0", "1", "2"], device)).record
    return lambda: policy.evaluate(inputs, record).log_prob.detach(), policy.evaluate(inputs, record).log_prob.detach()


@pytest.mark.parametrize("spare", [True, False])
async def test_a_compiled_policy_computes_with_the_weights_that_were_loaded(spare: bool) -> None:
    setup = Setup(spare)
    try:
        for update in (0, 1):
            receive(setup.receiver, *sealed(Version(1, update)))
        live = setup.live()
        score, before = scored(live)
        compiled = torch.compile(score, backend="aot_eager")
        torch.testing.assert_close(compiled(), before, rtol=1e-6, atol=1e-6)
        for update in (2, 3):  # with a spare policy, every second version comes to this one
            receive(setup.receiver, *sealed(Version(1, update), seed=update))
        assert setup.live() is live
        after = compiled()
        torch.testing.assert_close(after, score(), rtol=1e-6, atol=1e-6)
        assert (after - before).abs().max() > 0.1
    finally:
        setup.runner.close()


@pytest.mark.gpu
async def test_a_captured_graph_computes_with_the_weights_that_were_loaded() -> None:
    telemetry = Telemetry("rollout", "w")
    runner = PolicyRunner(telemetry, 8, 1, "cuda")
    receiver = Receiver("unix:/none", Security(), "policy", runner, telemetry, "cuda", False)
    try:
        receive(receiver, *sealed(Version(1, 0)))
        assert runner._live is not None
        score, before = scored(runner._live[1], "cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), torch.no_grad():
            score()  # warm-up, as capturing asks for
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            output = score()
        receive(receiver, *sealed(Version(1, 1), seed=1))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(output, score(), rtol=1e-5, atol=1e-5)
        assert (output - before).abs().max() > 0.1
    finally:
        runner.close()
