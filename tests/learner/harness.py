"""A learner in this process against a store over real gRPC, and a way to let it die at any outward step."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from dvla.v1 import store_pb2

from services.common.bundle import Manifest, Version
from services.common.errors import DvlaError
from services.common.security import Security
from services.common.staging import Stage
from services.common.telemetry import Telemetry
from services.learner import checkpointer, client, threads
from services.learner.assembly import build_loop
from services.learner.checkpoint import LearnerState, write_checkpoint
from services.learner.client import StoreClient
from services.learner.config import LearnerConfig
from services.learner.episodes import Member
from services.learner.loop import TrainingLoop
from services.learner.progress import Progress
from services.learner.source import LeasedGroup, Opened, StoreStats
from services.policies.checkpoint import save_checkpoint
from tests.learner.data import make_member, small_config, small_policy
from tests.learner.fake_store import FakeStore
from tests.learner.fake_weights import FakeWeights

T = TypeVar("T")


class Crash(BaseException):
    """The process is dead."""


class Life:
    """Dies before or after the n-th outward step of a kind: from then on nothing gets out any more."""

    def __init__(self, kind: str = "", nth: int = 0, after: bool = False) -> None:
        self._kind, self._nth, self._after = kind, nth, after
        self._lock = threading.Lock()
        self._dead = False
        self._steps: Counter[str] = Counter()

    def outward(self, kind: str, step: Callable[[], T]) -> T:
        """Do a step that others can see."""
        with self._lock:
            if self._dead:
                raise Crash
            self._steps[kind] += 1
            mine = (kind, self._steps[kind]) == (self._kind, self._nth)
            self._dead = mine
        if mine and not self._after:
            raise Crash
        try:
            return step()
        finally:
            if mine:
                raise Crash


class MortalStore:
    """A store client whose changes of state are outward steps."""

    def __init__(self, client: StoreClient, life: Life) -> None:
        self._client, self._life = client, life

    def open(self, spec: store_pb2.RunSpec, floor: int, resume_update: int) -> Opened:
        return self._life.outward("open", lambda: self._client.open(spec, floor, resume_update))

    def lease(self, epoch: int, count: int, wait_seconds: float) -> list[LeasedGroup]:
        return self._life.outward("lease", lambda: self._client.lease(epoch, count, 0.05))

    def fetch(self, group: LeasedGroup) -> list[Member]:
        return self._client.fetch(group)

    def trained(self, epoch: int, update: int, groups: Sequence[int]) -> None:
        self._life.outward("trained", lambda: self._client.trained(epoch, update, groups))

    def ack(self, epoch: int, checkpoint_update: int) -> int:
        return self._life.outward("ack", lambda: self._client.ack(epoch, checkpoint_update))

    def nack(self, epoch: int, group: int, reason: str, discard: bool = False) -> None:
        self._life.outward("nack", lambda: self._client.nack(epoch, group, reason, discard))

    def stats(self) -> StoreStats:
        return self._client.stats()

    def close_run(self, epoch: int) -> None:
        self._life.outward("close", lambda: self._client.close_run(epoch))


class MortalPublisher:
    """A publisher whose calls are outward steps."""

    def __init__(self, weights: FakeWeights, life: Life) -> None:
        self._weights, self._life = weights, life

    def fence(self, epoch: int) -> Version | None:
        return self._life.outward("fence", lambda: self._weights.fence(epoch))

    def stage(self, length: int) -> Stage | None:
        return self._weights.stage(length)

    def publish(self, manifest: Manifest, data: Stage) -> Version:
        return self._life.outward("publish", lambda: self._weights.publish(manifest, data))

    def ensure(self) -> bool:
        return self._weights.ensure()

    def close(self) -> None:
        """Nothing to close."""


class Bench:
    """One run's surroundings. `learner` makes a new learner process, so to speak; `log` is what they trained."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, family: str = "tiny-oft", **settings: Any
    ) -> None:
        self.folder = folder
        self.policy = small_policy(family)
        save_checkpoint(folder / "init", self.policy)
        self.config: LearnerConfig = small_config(folder, **settings)
        self.made: dict[int, list[Member]] = {}
        self.store = FakeStore(f"unix:{folder}/store", self.produce)  # type: ignore[abstract]
        self.store.start()
        self.weights = FakeWeights()
        self.log: list[tuple[int, list[int]]] = []
        self.published: list[tuple[int, Version | None]] = []
        self.telemetry = Telemetry("learner", "test")
        self.progress = Progress()
        self.ended = ""
        self.error: DvlaError | None = None
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(threads, "RETRY_SECONDS", (0.02, 0.05))
        monkeypatch.setattr(client, "CALL_SECONDS", 60.0)  # a machine that is busy with other tests is no fault

    def produce(self, group: int) -> list[Member]:
        """Members with unequal scores, the same for the same number."""
        if group not in self.made:
            number = group % (1 << 24)
            scores = [float((number + i) % 3 == 0) for i in range(self.config.group_size)]
            self.made[group] = [make_member(self.policy, f"{number}-{i}", score) for i, score in enumerate(scores)]
        return self.made[group]

    def learner(self, life: Life | None = None, stop_after: int = 0) -> TrainingLoop:
        """A learner, not run yet. stop_after: updates of its own after which it is asked to stop."""
        life = life or Life()
        store = StoreClient(self.store.address, Security(), self.config.run, self.config.episode_bytes)
        self.telemetry, self.progress = Telemetry("learner", "test"), Progress()
        progress = self.progress

        def write(root: Path, state: LearnerState) -> Path:
            return life.outward("checkpoint", lambda: write_checkpoint(root, state))

        self._monkeypatch.setattr(checkpointer, "write_checkpoint", write)
        loop = build_loop(
            self.config, MortalStore(store, life), MortalPublisher(self.weights, life), progress, self.telemetry
        )
        updater, done = loop._updater, 0
        original = updater.run

        def run(batch: Any, update: int) -> dict[str, float]:
            nonlocal done
            self.log.append((update + 1, batch.group_numbers))
            self.published.append((update, self.weights.newest))
            metrics = original(batch, update)
            done += 1
            if stop_after and done >= stop_after:
                progress.stopping.set()
            return metrics

        updater.run = run  # type: ignore[method-assign]
        return loop

    def run(self, life: Life | None = None, stop_after: int = 0) -> bool:
        """Run a learner to its end; False if it died."""
        floor = self.weights.newest.epoch if self.weights.newest else 0
        try:
            self.learner(life, stop_after).run(floor)
        except Crash:
            return False
        self.ended = str(self.progress.state)
        return True

    def surviving(self) -> dict[int, list[int]]:
        """Groups by update in the surviving history: what was trained last under each number."""
        return {update: sorted(groups) for update, groups in sorted(self.log, key=lambda entry: entry[0])}

    def assert_exactly_once(self) -> None:
        """Each group made exactly one update, all updates were made, and the store says the same."""
        history = self.surviving()
        groups = [group for update in history.values() for group in update]
        assert len(groups) == len(set(groups)), history
        assert sorted(history) == list(range(1, self.config.updates + 1))
        assert self.store.history() == history
