"""Lane 4: a version leaves the learner in the background. Training pauses only for `offer`, one flat copy.

Two snapshots: one is being published (and kept, so that a server that lost it gets it again), the other takes the
next. A snapshot that nobody has begun to publish is overwritten by the next: versions coalesce. They lie in files of
shared memory that the weights server takes over; while slow readers hold all of them, versions coalesce as well.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from services.common import bundle
from services.common.bundle import Manifest, Version
from services.common.errors import ConfigError, Exhausted, Superseded, Unavailable
from services.common.staging import Stage
from services.common.telemetry import BUSY, Telemetry
from services.learner.session import Session
from services.learner.snapshot import Staging, gather_home, layout_of
from services.learner.threads import Background, Failures
from services.policies.base import Policy

log = structlog.get_logger()

FILE_SECONDS = 0.02
"""Between looks for a file that no reader holds."""
ENSURE_SECONDS = 2.0
"""Between comparisons with the weights server while there is nothing new to publish."""


class Publisher(Protocol):
    """What `services.common.weights_client.WeightPublisher` does."""

    def fence(self, epoch: int) -> Version | None:
        """Refuse publishes of older epochs from now on."""

    def stage(self, length: int) -> Stage | None:
        """Room for a version; None while readers hold all of it."""

    def publish(self, manifest: Manifest, data: Stage) -> Version:
        """Publish a sealed bundle, which lies in a stage."""

    def ensure(self) -> bool:
        """Publish the last version again if the server lost it."""

    def close(self) -> None:
        """End calls in progress."""


class Distribution:
    """Publishes the newest offered version; older ones that were not begun are skipped.

    `sealed` is called with each version that is on the server.
    """

    def __init__(
        self,
        policy: Policy,
        model: str,
        publisher: Publisher,
        session: Session,
        sealed: Callable[[Version], None],
        telemetry: Telemetry,
        failures: Failures,
    ) -> None:
        self._policy, self._model, self._publisher, self._session = policy, model, publisher, session
        self._sealed, self._telemetry = sealed, telemetry
        self._layout = layout_of(policy)
        device = next(iter(policy.trainable_state().values())).device
        first = publisher.stage(self._layout.length)
        if first is None:
            raise ConfigError("the publisher has no file to prepare a version in; raise staging_files")
        home = gather_home(policy, self._layout)
        self._free, self._held = (Staging(self._layout, device, first, home) for _ in range(2))
        self._sealed_last: Manifest | None = None
        self._offered: Version | None = None
        self._changed = threading.Condition()
        self._fenced = 0
        self._published: Version | None = None
        self._metadata = {"policy": json.dumps(policy.spec.config)}
        self._lane = telemetry.lane("distribution", "version")
        self._thread = Background("distribution", self._run, failures)

    def start(self) -> None:
        """Start publishing."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Publish what is offered, for at most `seconds`, then end."""
        with self._changed:
            self._changed.wait_for(lambda: self._offered is None or self._thread.stopping.is_set(), seconds)
        self._thread.stopping.set()
        with self._changed:
            self._changed.notify_all()
        ended = self._thread.stop(seconds)
        self._publisher.close()
        return ended

    def offer(self, version: Version) -> None:
        """Snapshot the policy's weights as this version. The training lane's only pause."""
        started = time.monotonic()
        with self._changed:
            self._free.fill(self._policy.trainable_state())
            self._telemetry.gauge("publish/pause_seconds", time.monotonic() - started)
            if self._offered is not None:
                self._telemetry.count("versions_coalesced")
            self._offered = version
            self._changed.notify_all()

    def wait(self, version: Version, seconds: float) -> bool:
        """Wait until this version, or a newer one, is sealed; False if the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._published is not None and self._published >= version, seconds)

    def _run(self) -> None:
        while True:
            version = self._next()
            if version is not None:
                with self._lane.during(BUSY):
                    self._publish(version)
            elif self._thread.stopping.is_set():
                return
            else:
                self._ensure()

    def _next(self) -> Version | None:
        """The offered version, its buffer now held; None after a while without one."""
        with self._changed:
            stopping = self._thread.stopping
            self._changed.wait_for(lambda: self._offered is not None or stopping.is_set(), ENSURE_SECONDS)
            if self._offered is None:
                return None
        while (stage := self._publisher.stage(self._layout.length)) is None:
            self._telemetry.facts["weights"] = "waiting: slow readers hold all files"
            if stopping.wait(FILE_SECONDS):
                return None
        with self._changed:
            version, self._offered = self._offered, None
            self._free, self._held = self._held, self._free
            self._free.attach(stage)
            self._changed.notify_all()
            return version

    def _publish(self, version: Version) -> None:
        started = time.monotonic()
        buffer = self._held.settle()
        manifest = bundle.seal(self._layout, self._model, version, buffer, self._metadata)
        try:
            if not self._send(manifest):
                return
        finally:
            self._held.stage.give_back()
        self._watch_digest(manifest)
        self._telemetry.gauge("publish/seconds", time.monotonic() - started)
        self._telemetry.facts["weights"] = f"published {version}"
        with self._changed:
            self._published = version
            self._changed.notify_all()
        self._sealed(version)

    def _send(self, manifest: Manifest) -> bool:
        """Whether the server has it; False if a newer version comes first."""
        version = manifest.version
        while True:
            try:
                if version.epoch > self._fenced:
                    self._publisher.fence(version.epoch)
                    self._fenced = version.epoch
                self._publisher.publish(manifest, self._held.stage)
                return True
            except (Unavailable, Exhausted) as error:
                log.warning("publish waits", version=str(version), reason=str(error))
                self._telemetry.facts["weights"] = f"waiting: {error}"
                if self._superseded_locally() or self._thread.stopping.wait(0.5):
                    return False
            except Superseded:
                if version.epoch != self._session.epoch:
                    return False  # the run was opened again; the same weights follow under the new epoch
                raise

    def _watch_digest(self, manifest: Manifest) -> None:
        """Steps that leave every published tensor as it was: what is trained is not what is published."""
        last, self._sealed_last = self._sealed_last, manifest
        if last is None or manifest.version.update <= last.version.update:
            return
        if manifest.hashes != last.hashes:
            self._telemetry.facts.pop("weights_unchanged", None)
            return
        steps = f"update {last.version.update} and update {manifest.version.update}"
        words = f"{steps} published the same weights: the optimiser moves nothing that is published"
        log.error("weights unchanged", steps=steps, hint=words)
        self._telemetry.count("versions_unchanged")
        self._telemetry.facts["weights_unchanged"] = words

    def _superseded_locally(self) -> bool:
        """Whether a newer version waits: then this one is left out."""
        with self._changed:
            return self._offered is not None

    def _ensure(self) -> None:
        try:
            if self._publisher.ensure():
                self._telemetry.count("versions_republished")
        except (Unavailable, Exhausted) as error:
            self._telemetry.facts["weights"] = f"waiting: {error}"
        except Superseded:
            if self._session.epoch == self._fenced:
                raise
