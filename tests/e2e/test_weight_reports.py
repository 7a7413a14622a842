"""Field reports about weights (S25 to S28), from the learner's lane to the policy that samples."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common import bundle
from services.common.bundle import Manifest, Version
from services.common.client_subscribe import Follower
from services.common.errors import Superseded
from services.common.security import Security
from services.common.telemetry import Telemetry
from services.common.weights_client import WeightPublisher, WeightSubscriber, fetch_once
from services.learner.distribution import Distribution
from services.learner.session import Session
from services.learner.threads import Failures
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.raw import to_arrays
from services.policies.registry import build_policy
from services.rollout.worker.loading import PolicySink
from services.rollout.worker.policy_runner import PolicyRunner, Row
from services.rollout.worker.receiving import Receiver
from tests.weights.hosting import ROOT, Host, check_stamp, stamped

CONFIG = PolicyConfig(family="tiny-oft", state_dim=3, action_dim=2, chunk=2)
V = Version


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        host = Host(Path(name))
        yield host
        host.close()


def memory_of(host: Host) -> str:
    return str(host.server().depot.folder)


class HeadOnly:
    """A policy of which only the last layer is trained and published, as with LoRA."""

    def __init__(self, seed: int) -> None:
        self.policy = build_policy(CONFIG, seed=seed)
        names = list(self.policy.state_dict())
        self.trained = names[-2:]
        for name, parameter in self.policy.named_parameters():
            parameter.requires_grad_(name in self.trained)
        own: Mapping[str, Tensor] = self.policy.state_dict()
        self.policy.trainable_state = lambda: {n: own[n] for n in self.trained}  # type: ignore[method-assign]


def test_s25_a_trained_head_reaches_the_sampler_and_steps_without_effect_raise_an_alarm(host: Host) -> None:
    address = host.start()
    learner, sampler = HeadOnly(0), HeadOnly(0)
    telemetry, session, sealed = Telemetry("learner", "l"), Session(), list[Version]()
    session.grant(1)
    writer = WeightPublisher(address, "policy", folder=memory_of(host))
    lane = Distribution(learner.policy, "policy", writer, session, sealed.append, telemetry, Failures())
    manifests: list[Manifest] = []
    sink = PolicySink(lambda manifest: sampler.policy, lambda manifest, policy: manifests.append(manifest))
    reader = Follower(address, "policy", sink, folder=memory_of(host))
    lane.start()
    reader.start()
    try:
        for update in (1, 2, 3):
            if update < 3:  # the third step moves only what is not published
                with torch.no_grad():
                    for name in learner.trained:
                        learner.policy.state_dict()[name].add_(update)
            lane.offer(V(1, update))
            assert reader.wait(V(1, update), 20) == V(1, update)
            manifest = manifests[-1]
            assert {tensor.name for tensor in manifest.layout.tensors} == set(learner.trained)
            bundle.verify_arrays(manifest, to_arrays(sampler.policy.trainable_state())[0])
            assert lane.wait(V(1, update), 20)
            assert ("weights_unchanged" in telemetry.facts) is (update == 3)
        assert telemetry.metrics()["versions_unchanged"] == 1
    finally:
        reader.close()
        lane.stop(5)


def test_s26_after_a_crash_versions_go_on_and_nothing_is_overwritten(host: Host, tmp_path: Path) -> None:
    address = host.start(durable_folder=str(tmp_path / "disk"))
    seen: list[Version] = []
    reader = WeightSubscriber(address, "policy", lambda manifest, buffer: seen.append(manifest.version))
    reader.start()
    first = WeightPublisher(address, "policy", folder=memory_of(host))
    first.fence(1)
    for update in range(38):
        first.publish(*stamped(1, update, size=50))
    saved = {path.name: path.read_bytes() for path in (tmp_path / "disk" / "policy").glob("1-37.*")}
    host.stop()  # learner and server are gone; the last checkpoint is of update 30
    host.start(durable_folder=str(tmp_path / "disk"))
    second = WeightPublisher(address, "policy", folder=memory_of(host))
    assert second.fence(2) == V(1, 37)
    with pytest.raises(Superseded):
        first.publish(*stamped(1, 38, size=50))  # the old learner was only frozen
    second.publish(*stamped(2, 31, size=50))
    assert reader.wait(V(2, 31), 20) == V(2, 31)
    check_stamp(*fetch_once(address, "policy"))
    assert seen == sorted(set(seen))
    after = {path.name: path.read_bytes() for path in (tmp_path / "disk" / "policy").glob("1-37.*")}
    assert saved == after
    assert saved
    for one in (reader, first, second):
        one.close()


async def test_s27_every_answer_is_one_versions_answer_and_names_it(host: Host) -> None:
    address = host.start()
    versions, rows = 100, 32
    row = Row({"state": np.array([0.1, -0.3, 0.5], np.float32)}, "push", "k", "eval")
    telemetry = Telemetry("rollout", "w")
    runner = PolicyRunner(telemetry, 8, 1, "cpu")
    receiver = Receiver(address, Security(), "policy", runner, telemetry, "cpu", folder=memory_of(host))
    writer = WeightPublisher(address, "policy", folder=memory_of(host))
    described = {"policy": json.dumps(CONFIG.to_json())}
    policies = [build_policy(CONFIG, seed=update).eval() for update in range(versions)]

    def publish() -> None:
        for update in range(versions):
            arrays, dtypes = to_arrays(policies[update].trainable_state())
            writer.publish(*bundle.bundle("policy", V(1, update), arrays, dtypes, described))
            time.sleep(0.01)

    receiver.start()
    publishing = threading.Thread(target=publish)
    publishing.start()
    await asyncio.wait_for(receiver.first(), 20)
    answers: dict[int, list[bytes]] = {}
    while publishing.is_alive() or max(answers) < versions - 1:
        for chunks in await asyncio.gather(*(runner.act([row]) for _ in range(rows))):
            answers.setdefault(chunks[0].version[1], []).append(chunks[0].action.tobytes())
    publishing.join()
    receiver.close()
    runner.close()
    writer.close()
    assert len(answers) > 5
    assert versions - 1 in answers
    for update, found in answers.items():
        own = policies[update]
        inputs = own.preprocess({"state": row.observation["state"][None]}, [row.instruction])
        with torch.inference_mode():
            act = own.act(inputs, "eval", RowNoise(["k"], torch.device("cpu")))
            expected = np.asarray(own.postprocess(act.actions)[0])
        for raw in set(found):
            np.testing.assert_allclose(np.frombuffer(raw, np.float32).reshape(expected.shape), expected, atol=1e-6)


@pytest.mark.slow
def test_s28_a_learner_killed_at_twenty_moments_leaves_only_whole_versions(host: Host) -> None:
    address = host.start(keep=1)
    rng, newest = np.random.default_rng(0), V(0, 0)
    publishing = ROOT / "tests" / "weights" / "publishing.py"
    for epoch in range(1, 21):
        command = [sys.executable, str(publishing), address, str(epoch), memory_of(host)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert child.stdout is not None
        assert child.stdout.readline() == b"fenced\n"
        time.sleep(float(rng.uniform(0.02, 0.25)))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        if host.server().depot.newest("policy") is None:
            continue
        manifest, buffer = fetch_once(address, "policy", folder=memory_of(host))
        check_stamp(manifest, buffer)
        assert manifest.version >= newest
        newest = manifest.version
    assert newest.epoch > 1
    host.stop()
    host.start(keep=1)
    manifest, buffer = fetch_once(address, "policy")
    check_stamp(manifest, buffer)
    assert manifest.version >= newest
