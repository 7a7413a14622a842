"""Lane 2: new weights are fetched and verified into a spare policy while lane 1 goes on, then swapped in whole."""

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from services.common.bundle import Manifest, Version
from services.common.client_fetch import Source
from services.common.client_subscribe import Follower
from services.common.security import Security
from services.common.telemetry import BUSY, Telemetry
from services.policies.base import Policy
from services.policies.config import PolicyConfig
from services.policies.registry import build_policy
from services.rollout.worker.loading import InPlaceSink, PolicySink, described
from services.rollout.worker.policy_runner import PolicyRunner, VersionKey

log = structlog.get_logger()


class Receiver:
    """Keeps a runner at the newest version of one model, and loads versions that an evaluation pins."""

    def __init__(
        self,
        address: str,
        security: Security,
        model: str,
        runner: PolicyRunner,
        telemetry: Telemetry,
        device: str,
        spare: bool = True,
        folder: str = "",
    ) -> None:
        self._address, self._security, self._model, self._folder = address, security, model, folder
        self._runner, self._telemetry, self._device = runner, telemetry, device
        self._lane = telemetry.lane("receiving", "weights")
        self._spare: Policy | None = None
        self._live: tuple[VersionKey, Policy] | None = None
        self._first = threading.Event()
        self._writing = threading.Lock()
        self._pinning = asyncio.Lock()
        self.sink = (
            PolicySink(self._take_spare, self._deliver, self._loading)
            if spare
            else InPlaceSink(self._take_live, self._deliver, self._pause, runner.poison)
        )
        self._follower = Follower(address, model, self.sink, reader=telemetry.name, security=security, folder=folder)

    def start(self) -> None:
        """Begin to watch, in a thread of its own."""
        self._follower.start()

    async def first(self) -> None:
        """Wait until the first version is live."""
        while not self._first.is_set():
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Stop watching."""
        self._follower.close()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        with self._lane.during(BUSY), self._writing:
            yield

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Nobody samples with the live policy, and nobody copies it."""
        with self._loading(), self._runner.paused():
            yield

    def _take_spare(self, manifest: Manifest) -> Policy:
        """The policy that no call uses any more."""
        spare = self._spare
        if spare is None or spare.spec.config != described(manifest):
            spare = self._build(manifest)
        self._runner.settle()
        return spare

    def _take_live(self, manifest: Manifest) -> Policy:
        """The policy that samples; nobody does before the first version."""
        if self._live is None or self._live[1].spec.config != described(manifest):
            self._live = ((0, 0), self._build(manifest))
        return self._live[1]

    def _deliver(self, manifest: Manifest, policy: Policy) -> None:
        """A version is in this policy, verified: sample with it from the next call on."""
        version = (manifest.version.epoch, manifest.version.update)
        self._live = (version, policy)
        replaced = self._runner.swap(version, policy)
        self._spare = None if replaced is policy else replaced
        self._telemetry.gauge("version/epoch", version[0])
        self._telemetry.gauge("version/update", version[1])
        self._telemetry.count("weights_applied")
        self._report()
        self._first.set()
        log.info("weights live", version=str(manifest.version))

    def _report(self) -> None:
        """How far behind, and what the last fetch took."""
        status = self._follower.status
        if status.newest is not None and status.applied is not None:
            same = status.newest.epoch == status.applied.epoch
            behind = status.newest.update - status.applied.update if same else 1
            self._telemetry.gauge("weights/versions_behind", max(0, behind))
        self._telemetry.gauge("weights/fetch_seconds", status.seconds)
        self._telemetry.facts["weights_transport"] = f"{status.transport} from {status.address}"

    async def pin(self, version: VersionKey) -> None:
        """Have exactly this version ready for evaluation; raises NotFound if it is retired."""
        async with self._pinning:
            if not self._runner.is_pinned(version):
                self._runner.pin(version, await asyncio.to_thread(self._load, version))

    def _load(self, version: VersionKey) -> Policy:
        with self._writing:  # or two newer versions could come in and write into what is being copied
            if self._live is not None and self._live[0] == version:
                return copy.deepcopy(self._live[1])
        loaded: list[Policy] = []
        source = Source(self._address, self._model, self._security, self._folder)
        try:
            source.fetch(Version(*version), PolicySink(self._build, lambda manifest, policy: loaded.append(policy)))
        finally:
            source.close()
        return loaded[0]

    def _build(self, manifest: Manifest) -> Policy:
        policy = build_policy(PolicyConfig.from_json(described(manifest)), device=self._device)
        return policy.requires_grad_(False).eval()
