"""Pulls one version from a weights server into a sink: by shared memory where possible, else by frames.

A broken stream is resumed where it stopped. Synchronous, for threads that neither sample nor train.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
from dvla.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from services.common.bundle import Manifest, Version, verify
from services.common.bundle_wire import manifest_from_proto, version_to_proto
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.errors import ConfigError, DvlaError, InvalidInput, NotFound, Unavailable
from services.common.flatfile import FlatFile, shared_folder
from services.common.process import boot_id
from services.common.security import Security

STREAM_SECONDS = 30.0
"""Deadline of one Fetch stream; a longer transfer goes on in the next one."""
PATIENCE_SECONDS = 5.0
"""Time without any progress after which a transfer is given up."""
_RETRY_SECONDS = 0.1
log = structlog.get_logger()


class Sink(Protocol):
    """Where a version goes. `begin`, then `write` in ascending order or `copy` once, then `finish`."""

    def begin(self, manifest: Manifest) -> bool:
        """Get ready for these bytes; False if they are not wanted."""

    def write(self, offset: int, data: bytes) -> None:
        """Take a frame."""

    def copy(self, file: FlatFile) -> None:
        """Take everything from a file that is locked for reading."""

    def finish(self) -> None:
        """All bytes are there: verify and deliver. Raises InvalidInput if a hash differs."""

    def abort(self) -> None:
        """The transfer failed, or was delivered; give back what `begin` took."""


class BufferSink:
    """A flat buffer in memory, reused while the length stays the same."""

    def __init__(self) -> None:
        self.buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.manifest: Manifest | None = None

    def begin(self, manifest: Manifest) -> bool:
        """Make the buffer fit."""
        self.manifest = manifest
        if self.buffer.size != manifest.length:
            self.buffer = np.empty(0, np.uint8)  # never both in memory
            self.buffer = np.empty(manifest.length, np.uint8)
        return True

    def write(self, offset: int, data: bytes) -> None:
        """Put a frame in its place."""
        self.buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def copy(self, file: FlatFile) -> None:
        """Read the whole file."""
        file.read_into(self.buffer)

    def finish(self) -> None:
        """Verify all hashes."""
        if self.manifest is not None:
            verify(self.manifest, self.buffer)

    def abort(self) -> None:
        """Keep the buffer for the next version."""


class Source:
    """One weights server, seen by a reader."""

    def __init__(self, address: str, model: str, security: Security | None = None, folder: str = "") -> None:
        self.address = address
        self._model = model
        self._folder = optional_folder(folder)
        self.channel = open_channel(address, security)
        self.stub = weights_pb2_grpc.WeightsServiceStub(self.channel)
        self.transport = ""

    def connect(self, seconds: float) -> None:
        """Wait until the server answers; raises Unavailable when the time is over."""
        self.models(seconds)

    def models(self, seconds: float = CALL_SECONDS) -> set[str]:
        """Names of the models that the server has a sealed version of."""
        request = weights_pb2.ListVersionsRequest()
        try:
            with translated(f"weights server {self.address}"):
                reply = self.stub.ListVersions(request, timeout=seconds, wait_for_ready=True)
        except ValueError as error:  # what grpc raises on a channel that another thread has closed
            raise Unavailable(f"weights server {self.address}: {error}") from error
        return {info.model for info in reply.versions if info.state == "sealed"}

    def fetch(self, version: Version | None, sink: Sink, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Bring a version, by default the newest, into the sink and finish it; False if the sink wants none.

        Raises NotFound if the version is retired, InvalidInput if bytes or hashes are wrong, and Unavailable if
        the server is silent for `PATIENCE_SECONDS`.
        """
        transfer = _Transfer(version, sink)
        try:
            wanted = self._bring(transfer, stopped)
            if wanted:
                sink.finish()
            return wanted
        finally:
            sink.abort()

    def close(self) -> None:
        """Close the channel; calls in progress end."""
        self.channel.close()

    def _bring(self, transfer: "_Transfer", stopped: Callable[[], bool]) -> bool:
        progress = time.monotonic()
        while True:
            received = transfer.received
            try:
                return self._attempt(transfer, stopped)
            except Unavailable:
                now = time.monotonic()
                progress = now if transfer.received > received else progress
                if stopped() or now - progress > PATIENCE_SECONDS:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _attempt(self, transfer: "_Transfer", stopped: Callable[[], bool]) -> bool:
        request = weights_pb2.FetchRequest(
            model=self._model, version=version_to_proto(transfer.version), offset=transfer.received
        )
        if self._folder and not transfer.received:
            request.locality.boot_id = boot_id()
            request.locality.transports.extend((common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GRPC))
        call = self.stub.Fetch(request, timeout=STREAM_SECONDS)
        try:
            with translated(f"weights server {self.address}"):
                for message in call:
                    if stopped():
                        raise Unavailable("the reader is stopping")
                    if message.HasField("begin"):
                        if not transfer.begin(message.begin.manifest):
                            return False
                        if self._folder and message.begin.HasField("shm"):
                            self._copy(transfer, self._folder, message.begin.shm)
                            return True
                    else:
                        transfer.add(message.frame)
        finally:
            call.cancel()
        if not transfer.complete():
            raise Unavailable(f"weights server {self.address} ended the stream at byte {transfer.received}")
        self._use("grpc")
        return True

    def _copy(self, transfer: "_Transfer", folder: Path, extent: common_pb2.Extent) -> None:
        """Copy from shared memory. If that fails, raises Unavailable, so that the caller asks again."""
        try:
            with FlatFile.open_shared(folder, extent.arena, extent.generation, extent.length) as file:
                transfer.copy(file)
        except NotFound as error:
            if not (folder / extent.arena).exists():  # another view of the folder: frames from now on
                self._folder = None
                self._use("grpc", str(error))
            raise Unavailable(f"{error}; asking again") from error
        self._use("shm")

    def _use(self, transport: str, reason: str = "") -> None:
        if transport != self.transport:
            log.info("weights transport", server=self.address, transport=transport, reason=reason)
            self.transport = transport


class _Transfer:
    """Progress of one version on its way into a sink."""

    def __init__(self, version: Version | None, sink: Sink) -> None:
        self.version = version
        self.received = 0
        self._sink = sink
        self._manifest: Manifest | None = None

    def begin(self, message: weights_pb2.Manifest) -> bool:
        manifest = manifest_from_proto(message)
        if self._manifest is None or not self.received:
            if self._manifest is not None:
                self._sink.abort()
            self._manifest = manifest
            return self._sink.begin(manifest)
        if manifest != self._manifest:
            raise InvalidInput(f"version {manifest.version} is another one than before the stream broke")
        return True

    def add(self, frame: common_pb2.Frame) -> None:
        manifest = self._begun()
        end = frame.offset + len(frame.data)
        if frame.offset != self.received or end > manifest.length or not frame.data:
            raise InvalidInput(f"frame of bytes {frame.offset} to {end}; expected one at {self.received}")
        self._sink.write(frame.offset, frame.data)
        self.received = end
        self.version = manifest.version  # from now on no other will do

    def copy(self, file: FlatFile) -> None:
        self._sink.copy(file)
        self.received = self._begun().length

    def complete(self) -> bool:
        return self._manifest is not None and self.received == self._manifest.length

    def _begun(self) -> Manifest:
        if self._manifest is None:
            raise InvalidInput("a frame came before the manifest")
        return self._manifest


def fetch_once(
    address: str,
    model: str,
    version: Version | None = None,
    *,
    security: Security | None = None,
    folder: str = "",
) -> tuple[Manifest, npt.NDArray[np.uint8]]:
    """One verified version, by default the newest: manifest and uint8 [length]. For raises see `Source.fetch`."""
    source, sink = Source(address, model, security, folder), BufferSink()
    try:
        source.fetch(version, sink)
    finally:
        source.close()
    if sink.manifest is None:
        raise DvlaError(f"weights server {address} sent no manifest")
    return sink.manifest, sink.buffer


def optional_folder(folder: str) -> Path | None:
    """The shared folder; None if it is the default one and this machine cannot have it."""
    try:
        return shared_folder(folder)
    except ConfigError as error:
        if folder:
            raise
        log.warning("no shared memory, weights travel by grpc", reason=str(error))
        return None
