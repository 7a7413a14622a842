"""Checkpoints coalesce: training offers states, a slow disk takes the newest, and only durable ones are reported."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from services.common.bundle import Version
from services.common.errors import DvlaError
from services.common.telemetry import Telemetry
from services.learner import checkpointer
from services.learner.checkpoint import LearnerState, random_state, read_checkpoint, write_checkpoint
from services.learner.checkpointer import Checkpointer, Written
from services.learner.lineage import Lineage
from services.learner.session import Consumed
from services.learner.threads import Failures
from services.policies.base import Policy
from tests.learner.data import same_weights, small_policy, weights_of


def state_of(update: int) -> Callable[[Policy], LearnerState]:
    def capture(policy: Policy) -> LearnerState:
        return LearnerState(
            "test", Version(1, update), policy, {}, random_state("cpu"), Lineage(), Consumed(), {"updates": update}
        )

    return capture


def test_a_slow_disk_holds_up_nobody_and_gets_the_newest_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, durable, telemetry = small_policy(), list[Version](), Telemetry("learner", "test")
    began, go_on = threading.Event(), threading.Event()

    def slow(root: Path, state: LearnerState) -> Path:
        began.set()
        assert go_on.wait(60)
        return write_checkpoint(root, state)

    monkeypatch.setattr(checkpointer, "write_checkpoint", slow)
    writer = Checkpointer(tmp_path, 5, policy, None, durable.append, telemetry, Failures())
    writer.start()
    waiters: dict[int, Future[Written]] = {}
    kept = {}
    for update in range(1, 6):
        with torch.no_grad():
            next(policy.parameters()).add_(1.0)
        kept[update] = weights_of(policy)
        waiters[update] = Future()
        writer.offer(state_of(update), (waiters[update],))  # returns though the disk hangs
        assert began.wait(60)
    assert not writer.wait(0.0)
    assert durable == []
    go_on.set()
    assert writer.wait(60)
    assert durable == [Version(1, 1), Version(1, 5)]
    assert telemetry.metrics()["checkpoints_coalesced"] == 3
    for update, waiter in waiters.items():
        assert waiter.result(timeout=60)[0] == Version(1, 1 if update == 1 else 5)
    for update in (1, 5):
        saved = read_checkpoint(tmp_path / f"1-{update}")
        assert same_weights(weights_of(saved.policy), kept[update])
        assert saved.totals == {"updates": update}
    assert writer.stop(60)


def test_a_refusing_disk_is_reported_and_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("a file is in the way")
    durable: list[Version] = []
    writer = Checkpointer(root, 2, small_policy(), None, durable.append, Telemetry("learner", "test"), Failures())
    writer.start()
    waiter: Future[Written] = Future()
    writer.offer(state_of(1), (waiter,))
    with pytest.raises(DvlaError, match="checkpoint 1-1 cannot be written"):
        waiter.result(timeout=60)
    assert writer.wait(60)
    assert durable == []
    root.unlink()
    writer.offer(state_of(2))
    assert writer.wait(60)
    assert durable == [Version(1, 2)]
    assert writer.failure is None
    assert writer.stop(60)
