"""Lane 2: new weights are fetched and verified into a spare policy while lane 1 goes on, then swapped in whole."""

import asyncio
import copy
import json
import threading
from typing import Any

import structlog

from services.common import bundle
from services.common.bundle import Buffer, Manifest, Version
from services.common.errors import InvalidInput
from services.common.security import Security
from services.common.telemetry import BUSY, Telemetry
from services.common.weights_client import WeightSubscriber, fetch_once
from services.policies.base import Policy
from services.policies.config import PolicyConfig
from services.policies.raw import to_arrays, to_tensors
from services.policies.registry import build_policy
from services.rollout.worker.policy_runner import PolicyRunner, VersionKey

log = structlog.get_logger()


class Receiver:
    """Keeps a runner at the newest version of one model, and loads versions that an evaluation pins."""

    def __init__(
        self, address: str, security: Security, model: str, runner: PolicyRunner, telemetry: Telemetry, device: str
    ) -> None:
        self._address, self._security, self._model = address, security, model
        self._runner, self._telemetry, self._device = runner, telemetry, device
        self._lane = telemetry.lane("receiving", "weights")
        self._spare: Policy | None = None
        self._live: tuple[VersionKey, Policy] | None = None
        self._first = threading.Event()
        self._writing = threading.Lock()
        self._pinning = asyncio.Lock()
        self._subscriber = WeightSubscriber(address, model, self._receive, reader=telemetry.name, security=security)

    def start(self) -> None:
        """Begin to watch, in a thread of its own."""
        self._subscriber.start()

    async def first(self) -> None:
        """Wait until the first version is live."""
        while not self._first.is_set():
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Stop watching."""
        self._subscriber.close()

    def _receive(self, manifest: Manifest, buffer: Buffer) -> None:
        """Called by the subscriber's thread with a verified version; the buffer is ours until we return."""
        with self._lane.during(BUSY), self._writing:
            version = (manifest.version.epoch, manifest.version.update)
            spare = self._spare
            if spare is None or spare.spec.config != _described(manifest):
                spare = self._build(manifest)
            self._runner.settle()  # no call that still uses the spare
            _apply(spare, manifest, buffer)
            self._live = (version, spare)
            self._spare = self._runner.swap(version, spare)
        self._telemetry.gauge("version/epoch", version[0])
        self._telemetry.gauge("version/update", version[1])
        self._telemetry.count("weights_applied")
        self._first.set()
        log.info("weights live", version=str(manifest.version))

    async def pin(self, version: VersionKey) -> None:
        """Have exactly this version ready for evaluation; raises NotFound if it is retired."""
        async with self._pinning:
            if not self._runner.is_pinned(version):
                self._runner.pin(version, await asyncio.to_thread(self._load, version))

    def _load(self, version: VersionKey) -> Policy:
        with self._writing:  # or two newer versions could come in and write into what is being copied
            if self._live is not None and self._live[0] == version:
                return copy.deepcopy(self._live[1])
        manifest, buffer = fetch_once(self._address, self._model, Version(*version), security=self._security)
        policy = self._build(manifest)
        _apply(policy, manifest, buffer)
        return policy

    def _build(self, manifest: Manifest) -> Policy:
        policy = build_policy(PolicyConfig.from_json(_described(manifest)), device=self._device)
        return policy.requires_grad_(False).eval()


def _described(manifest: Manifest) -> dict[str, Any]:
    """The policy's configuration, which travels with its weights."""
    try:
        described = json.loads(manifest.metadata["policy"])
    except (KeyError, ValueError) as error:
        raise InvalidInput(f"version {manifest.version} does not say which policy it belongs to") from error
    if not isinstance(described, dict):
        raise InvalidInput(f"version {manifest.version} describes its policy as {type(described).__name__}")
    return described


def _apply(policy: Policy, manifest: Manifest, buffer: Buffer) -> None:
    """Load a bundle and check the hashes of what was loaded, not only of what arrived."""
    dtypes = {tensor.name: tensor.dtype for tensor in manifest.layout.tensors}
    dtypes |= {name: dtypes[target] for name, target in manifest.layout.tied.items()}
    policy.load_state(to_tensors(bundle.views(manifest.layout, buffer), dtypes))
    bundle.verify_arrays(manifest, to_arrays(policy.trainable_state())[0])
