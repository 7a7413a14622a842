"""`WeightPublisher`: the learner's end of the weight plane. Synchronous, for the thread of lane 4."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import structlog
from dvla.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from services.common.bundle import Buffer, Manifest, Version, as_bytes, memory, verify
from services.common.bundle_wire import manifest_to_proto, version_from_proto, version_to_proto
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.client_fetch import optional_folder
from services.common.codec import FRAME_BYTES
from services.common.delta import ENCODING, Delta, DeltaRule, encode
from services.common.errors import Exhausted, InvalidInput, Superseded, Unavailable, Unsupported
from services.common.flatfile import HEADER_BYTES
from services.common.frame_wire import encode_frame
from services.common.security import Security
from services.common.staging import Stage, Stages

PUBLISH_SECONDS = 60.0
SLOWEST = 20e6
"""Deadline of a publish: this many seconds, and one more for every so many bytes."""
_FIRST_RETRY, _LAST_RETRY = 0.1, 2.0
log = structlog.get_logger()
ResultT = TypeVar("ResultT")


class WeightPublisher:
    """Publishes versions of one model to the root weights server. One thread uses it; any may `close` it.

    Calls are repeated while the server cannot be reached, for up to `patience` seconds; repeats are harmless.
    folder: shared-memory folder, by default the usual one; bytes travel as frames where the server does not see it.
    files: versions in memory at once: those the server keeps, one being written, one for each reader that lags.
    rule: when frames carry a delta to the version before instead of the whole.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        security: Security | None = None,
        folder: str = "",
        patience: float = 60.0,
        files: int = 4,
        rule: DeltaRule = DeltaRule(),  # noqa: B008 - frozen
    ) -> None:
        self._address, self._model, self._patience, self._rule = address, model, patience, rule
        place = optional_folder(folder)
        self._shared = place is not None
        self._stages = Stages(place, files)
        self._channel = open_channel(address, security)
        self._stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        self._stream = self._channel.stream_unary(
            "/dvla.v1.WeightsService/Publish", bytes, weights_pb2.PublishResponse.FromString
        )
        self._epoch = 0
        self._last: _Published | None = None
        self._sealed: _Published | None = None
        self._closed = threading.Event()
        self.sent = ""
        """How the last version travelled, in words."""

    def fence(self, epoch: int) -> Version | None:
        """Refuse publishes of older epochs from now on; returns the newest version there.

        Raises Superseded if a newer epoch has been fenced: somebody else took over this run.
        """
        version = self._repeat(lambda: self._fence(epoch))
        self._epoch = epoch
        return version

    def stage(self, length: int) -> Stage | None:
        """Room to prepare the next version in; None while readers hold all files."""
        base = None if self._shared else self._sealed
        stage = self._stages.take(length, [published.stage for published in (self._last, base) if published])
        if stage is None and self._last is not self._sealed:
            self._last = self._sealed  # it was never taken there, and a newer one is on its way
            stage = self._stages.take(length, [self._sealed.stage] if self._sealed else [])
        return stage

    def publish(self, manifest: Manifest, data: Stage | Buffer) -> Version:
        """Publish a sealed bundle from a stage, or from a buffer, which is copied to one.

        Returns when it is readable and durable. The stage then belongs to the readers: take another one.
        Raises Exhausted if readers hold all files (go on, publish a newer one later), Superseded if this
        learner has been replaced, and Unavailable if the server is away for longer than the patience.
        """
        if manifest.model != self._model:
            raise InvalidInput(f"manifest is of model {manifest.model!r}; this publisher is for {self._model!r}")
        stage = data if isinstance(data, Stage) else self._filled(manifest, data)
        stage.taken = False
        self._last = _Published(manifest, stage)
        self._epoch = max(self._epoch, manifest.version.epoch)
        try:
            version = self._repeat(lambda: self._publish(manifest, stage, self._sealed))
        except (InvalidInput, Superseded, Unsupported):
            self._last = None  # refused for good, so `ensure` must not send it again
            raise
        self._sealed = self._last
        return version

    def ensure(self) -> bool:
        """Compare with the server and publish the last version again if it lost it; True if it had to.

        Call it every few seconds between publishes. Raises as `fence` and `publish` do.
        """
        if not self._epoch:
            return False
        newest = self.fence(self._epoch)
        if self._last is None:
            return False
        manifest, stage = self._last.manifest, self._last.stage
        if newest is not None and newest >= manifest.version:
            return False
        verify(manifest, stage.buffer)
        log.warning("publishing again", model=self._model, version=str(manifest.version), server_has=str(newest))
        self._repeat(lambda: self._publish(manifest, stage, None))
        return True

    def close(self) -> None:
        """End calls in progress and give the files to whoever reads them."""
        self._closed.set()
        self._channel.close()
        self._stages.close()

    def _fence(self, epoch: int) -> Version | None:
        with translated(f"weights server {self._address}"):
            reply = self._stub.Fence(weights_pb2.FenceRequest(model=self._model, epoch=epoch), timeout=CALL_SECONDS)
        return version_from_proto(reply.newest)

    def _filled(self, manifest: Manifest, data: Buffer) -> Stage:
        stage = self.stage(manifest.length)
        if stage is None:
            raise Exhausted(f"readers hold all files; version {manifest.version} of {self._model} is left out")
        stage.buffer[:] = as_bytes(data, manifest.length)
        return stage

    def _publish(self, manifest: Manifest, stage: Stage, before: "_Published | None") -> Version:
        """By handle, else as a delta, else whole: whatever the server takes first."""
        stage.seal()
        if self._shared and stage.file is not None:
            extent = common_pb2.Extent(
                arena=stage.file.name, offset=HEADER_BYTES, length=manifest.length, generation=stage.generation
            )
            try:
                return self._send(manifest, b"", "shm", shm=extent)
            except Unsupported as error:
                log.info("weights transport", server=self._address, transport="grpc", reason=str(error))
                self._shared = False
        coded = before.delta_to(manifest, stage, self._rule) if before is not None else None
        if coded is not None:
            head = weights_pb2.Delta(base=version_to_proto(coded.base), encoding=ENCODING, length=len(coded.data))
            try:
                return self._send(manifest, coded.data, f"delta of {coded.density:.1%}", delta=head)
            except (Unsupported, InvalidInput) as error:
                log.info("delta refused, sending the whole version", reason=str(error))
        return self._send(manifest, memory(stage.buffer), "whole")

    def _send(
        self,
        manifest: Manifest,
        data: Buffer,
        words: str,
        shm: common_pb2.Extent | None = None,
        delta: weights_pb2.Delta | None = None,
    ) -> Version:
        begin = weights_pb2.PublishBegin(manifest=manifest_to_proto(manifest), shm=shm, delta=delta)

        def messages() -> Iterator[bytes]:
            yield weights_pb2.PublishRequest(begin=begin).SerializeToString()
            for offset in range(0, len(data), FRAME_BYTES):
                yield encode_frame(offset, data[offset : offset + FRAME_BYTES])

        with translated(f"weights server {self._address}"):
            reply = self._stream(messages(), timeout=PUBLISH_SECONDS + manifest.length / SLOWEST)
        self.sent = words
        return version_from_proto(reply.version) or manifest.version

    def _repeat(self, action: Callable[[], ResultT]) -> ResultT:
        deadline, pause = time.monotonic() + self._patience, _FIRST_RETRY
        while True:
            try:
                return action()
            except Unavailable as error:
                if time.monotonic() + pause > deadline or self._closed.is_set():
                    raise
                log.warning("weights server away, trying again", seconds=pause, reason=str(error))
            if self._closed.wait(pause):
                raise Unavailable("this publisher is closed")
            pause = min(2 * pause, _LAST_RETRY)


@dataclass(frozen=True)
class _Published:
    """A version and its bytes, which stay so that it can be sent again or be the base of a delta."""

    manifest: Manifest
    stage: Stage

    def delta_to(self, manifest: Manifest, stage: Stage, rule: DeltaRule) -> Delta | None:
        """The delta from this version, if that is the better way."""
        base = self.manifest
        if base.version >= manifest.version or base.layout.digest != manifest.layout.digest:
            return None
        if not rule.allows(base.version, manifest.version):
            return None
        return encode(manifest.layout, base.version, self.stage.buffer, stage.buffer, rule.density)
