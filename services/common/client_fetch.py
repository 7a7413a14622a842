"""Pulls one version from a weights server into a sink: by shared memory where possible, else by frames.

A broken stream is resumed where it stopped. Synchronous, for threads that neither sample nor train.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
from dvla.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from services.common.bundle import Manifest, Version
from services.common.bundle_wire import manifest_from_proto, version_from_proto, version_to_proto
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.delta import ENCODING, MAX_BYTES
from services.common.errors import ConfigError, InvalidInput, NotFound, Unavailable
from services.common.flatfile import FlatFile, Mappings, shared_folder
from services.common.frame_wire import decode_fetch
from services.common.process import boot_id
from services.common.security import Security
from services.common.sinks import BufferSink, Sink, TensorSink

STREAM_SECONDS = 30.0
"""Deadline of one Fetch stream; a longer transfer goes on in the next one."""
PATIENCE_SECONDS = 5.0
"""Time without any progress after which a transfer is given up."""
_RETRY_SECONDS = 0.1
log = structlog.get_logger()


class Source:
    """One weights server, seen by a reader."""

    def __init__(self, address: str, model: str, security: Security | None = None, folder: str = "") -> None:
        self.address = address
        self._model = model
        self._folder = optional_folder(folder)
        self._mappings = Mappings()
        self.channel = open_channel(address, security)
        self.stub = weights_pb2_grpc.WeightsServiceStub(self.channel)
        self._stream = self.channel.unary_stream(
            "/dvla.v1.WeightsService/Fetch", weights_pb2.FetchRequest.SerializeToString, decode_fetch
        )
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

    def prune(self) -> None:
        """Let go of deleted files."""
        self._mappings.prune()

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
        request = transfer.request(self._model)
        if self._folder and not transfer.received:
            request.locality.boot_id = boot_id()
            request.locality.transports.extend((common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GRPC))
        call = self._stream(request, timeout=STREAM_SECONDS)
        try:
            with translated(f"weights server {self.address}"):
                for message in call:
                    if stopped():
                        raise Unavailable("the reader is stopping")
                    if isinstance(message, tuple):
                        transfer.add(*message)
                        continue
                    if not transfer.begin(message.begin):
                        return False
                    if self._folder and message.begin.HasField("shm"):
                        self._copy(transfer, self._folder, message.begin.shm)
                        return True
        finally:
            call.cancel()
        if not transfer.complete():
            raise Unavailable(f"weights server {self.address} ended the stream at byte {transfer.received}")
        self._use("grpc" if transfer.delta is None else "delta")
        return True

    def _copy(self, transfer: "_Transfer", folder: Path, extent: common_pb2.Extent) -> None:
        """Copy from shared memory. If that fails, raises Unavailable, so that the caller asks again."""
        try:
            with FlatFile.open_shared(folder, extent.arena, extent.generation, extent.length) as file:
                transfer.copy(self._mappings.of(file))
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
    """Progress of one version on its way into a sink, whole or as a delta to what the sink has."""

    def __init__(self, version: Version | None, sink: Sink) -> None:
        self.version = version
        self.received = 0
        self.delta: weights_pb2.Delta | None = None
        self._have = sink.base()
        self._parts: list[memoryview] = []
        self._sink = sink
        self._manifest: Manifest | None = None

    def request(self, model: str) -> weights_pb2.FetchRequest:
        """What to ask for now."""
        have = self._have if self.delta is not None or not self.received else None
        return weights_pb2.FetchRequest(
            model=model, version=version_to_proto(self.version), offset=self.received, have=version_to_proto(have)
        )

    def begin(self, message: weights_pb2.FetchBegin) -> bool:
        manifest = manifest_from_proto(message.manifest)
        offered = message.delta if message.HasField("delta") else None
        if self._manifest is not None and self.received:
            if manifest != self._manifest:
                raise InvalidInput(f"version {manifest.version} is another one than before the stream broke")
            if offered != self.delta:
                self._restart()
            return True
        if self._manifest is not None:
            self._sink.abort()
        self._manifest, self.delta = manifest, offered
        longest = min(MAX_BYTES, manifest.length)
        if offered is not None and (
            offered.encoding != ENCODING or version_from_proto(offered.base) != self._have or offered.length > longest
        ):
            self._restart()
        return self._sink.begin(manifest)

    def add(self, offset: int, data: memoryview) -> None:
        manifest, end = self._begun(), offset + len(data)
        if offset != self.received or end > self._length() or not data:
            raise InvalidInput(f"frame of bytes {offset} to {end}; expected one at {self.received}")
        if self.delta is None:
            self._sink.write(offset, data)
        else:
            self._parts.append(data)
        self.received = end
        self.version = manifest.version  # from now on no other will do

    def copy(self, source: npt.NDArray[np.uint8]) -> None:
        self._sink.copy(source)
        self.received = self._begun().length

    def complete(self) -> bool:
        """Whether everything has come; applies a delta that has."""
        if self._manifest is None or self.received != self._length():
            return False
        if self.delta is not None and self._have is not None:
            try:
                self._sink.patch(self._have, b"".join(self._parts))
            except InvalidInput as error:
                log.warning("delta does not fit, asking for the whole version", reason=str(error))
                self._restart()
        return True

    def _restart(self) -> None:
        """Ask for the whole version from its beginning."""
        self._have, self.delta, self.received, self._parts = None, None, 0, []
        raise Unavailable("the delta is of no use; asking for the whole version")

    def _length(self) -> int:
        return self._begun().length if self.delta is None else self.delta.length

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
    sink = BufferSink()
    return fetch_into(sink, address, model, version, security=security, folder=folder), sink.buffer


def fetch_into(
    sink: TensorSink,
    address: str,
    model: str,
    version: Version | None = None,
    *,
    security: Security | None = None,
    folder: str = "",
) -> Manifest:
    """Bring one version, by default the newest, into a sink; returns its manifest. For raises see `Source.fetch`."""
    source = Source(address, model, security, folder)
    try:
        source.fetch(version, sink)
    finally:
        source.close()
    if sink.manifest is None:
        raise InvalidInput(f"weights server {address} sent no manifest")
    return sink.manifest


def optional_folder(folder: str) -> Path | None:
    """The shared folder; None if it is the default one and this machine cannot have it."""
    try:
        return shared_folder(folder)
    except ConfigError as error:
        if folder:
            raise
        log.warning("no shared memory, weights travel by grpc", reason=str(error))
        return None
