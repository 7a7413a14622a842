"""`WeightPublisher`: the learner's end of the weight plane. Synchronous, for the thread of lane 4."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog
from dvla.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from services.common.bundle import Buffer, Manifest, Version, memory, verify
from services.common.bundle_wire import manifest_to_proto, version_from_proto
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.client_fetch import optional_folder
from services.common.codec import frames
from services.common.errors import Exhausted, InvalidInput, Superseded, Unavailable, Unsupported
from services.common.flatfile import HEADER_BYTES, FlatFile
from services.common.security import Security

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
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        security: Security | None = None,
        folder: str = "",
        patience: float = 60.0,
    ) -> None:
        self._address, self._model, self._patience = address, model, patience
        self._folder = optional_folder(folder)
        self._channel = open_channel(address, security)
        self._stub = weights_pb2_grpc.WeightsServiceStub(self._channel)
        self._staging: FlatFile | None = None
        self._epoch = 0
        self._last: tuple[Manifest, Buffer] | None = None
        self._closed = threading.Event()

    def fence(self, epoch: int) -> Version | None:
        """Refuse publishes of older epochs from now on; returns the newest version there.

        Raises Superseded if a newer epoch has been fenced: somebody else took over this run.
        """
        version = self._repeat(lambda: self._fence(epoch))
        self._epoch = epoch
        return version

    def publish(self, manifest: Manifest, buffer: Buffer) -> Version:
        """Publish a sealed bundle; returns when it is durable and readable.

        The buffer must stay unchanged until the next publish, so that `ensure` can send it again.
        Raises Exhausted if readers hold all files there (go on, publish a newer one later), Superseded if this
        learner has been replaced, and Unavailable if the server is away for longer than the patience.
        """
        if manifest.model != self._model:
            raise InvalidInput(f"manifest is of model {manifest.model!r}; this publisher is for {self._model!r}")
        self._last = (manifest, buffer)
        self._epoch = max(self._epoch, manifest.version.epoch)
        try:
            return self._repeat(lambda: self._publish(manifest, buffer))
        except (InvalidInput, Superseded, Unsupported):
            self._last = None  # refused for good, so `ensure` must not send it again
            raise

    def ensure(self) -> bool:
        """Compare with the server and publish the last version again if it lost it; True if it had to.

        Call it every few seconds between publishes. Raises as `fence` and `publish` do.
        """
        if not self._epoch:
            return False
        newest = self.fence(self._epoch)
        if self._last is None:
            return False
        manifest, buffer = self._last
        if newest is not None and newest >= manifest.version:
            return False
        verify(manifest, buffer)
        log.warning("publishing again", model=self._model, version=str(manifest.version), server_has=str(newest))
        self._repeat(lambda: self._publish(manifest, buffer))
        return True

    def close(self) -> None:
        """End calls in progress and give back the staging file."""
        self._closed.set()
        self._channel.close()
        self._unstage()

    def _fence(self, epoch: int) -> Version | None:
        with translated(f"weights server {self._address}"):
            reply = self._stub.Fence(weights_pb2.FenceRequest(model=self._model, epoch=epoch), timeout=CALL_SECONDS)
        return version_from_proto(reply.newest)

    def _publish(self, manifest: Manifest, buffer: Buffer) -> Version:
        extent = self._stage(manifest, buffer)
        if extent is not None:
            try:
                return self._send(manifest, iter(()), extent)
            except Unsupported as error:
                log.info("weights transport", server=self._address, transport="grpc", reason=str(error))
                self._folder = None
        return self._send(manifest, _frames(manifest, buffer))

    def _send(
        self,
        manifest: Manifest,
        rest: Iterator[weights_pb2.PublishRequest],
        extent: common_pb2.Extent | None = None,
    ) -> Version:
        begin = weights_pb2.PublishBegin(manifest=manifest_to_proto(manifest), shm=extent)

        def messages() -> Iterator[weights_pb2.PublishRequest]:
            yield weights_pb2.PublishRequest(begin=begin)
            yield from rest

        with translated(f"weights server {self._address}"):
            reply = self._stub.Publish(messages(), timeout=PUBLISH_SECONDS + manifest.length / SLOWEST)
        return version_from_proto(reply.version) or manifest.version

    def _stage(self, manifest: Manifest, buffer: Buffer) -> common_pb2.Extent | None:
        """Put the bytes into our file in shared memory, if there is any."""
        if self._folder is None:
            return None
        try:
            if self._staging is None:
                self._staging = FlatFile.create(self._folder, "publish")
            elif not self._staging.try_lock_exclusive():
                self._unstage()  # the server still copies for an earlier try; it keeps the bytes it has open
                self._staging = FlatFile.create(self._folder, "publish")
            self._staging.start(manifest.length)
        except (Exhausted, OSError) as error:
            log.warning("no shared memory, weights travel by grpc", reason=str(error))
            self._unstage()
            self._folder = None
            return None
        self._staging.write(0, memory(buffer)[: manifest.length])
        generation = self._staging.finish(manifest.length)
        self._staging.unlock()
        return common_pb2.Extent(
            arena=self._staging.name, offset=HEADER_BYTES, length=manifest.length, generation=generation
        )

    def _unstage(self) -> None:
        if self._staging is not None:
            self._staging.remove()
            self._staging = None

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


def _frames(manifest: Manifest, buffer: Buffer) -> Iterator[weights_pb2.PublishRequest]:
    for frame in frames(memory(buffer)[: manifest.length]):
        yield weights_pb2.PublishRequest(frame=frame)
