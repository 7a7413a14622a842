"""The gRPC face of a depot: decode, call, encode. Disk and hashing run in threads, never in the event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from dvla.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from services.common.bundle import Manifest, Version, memory
from services.common.bundle_wire import (
    manifest_from_proto,
    manifest_to_proto,
    version_from_proto,
    version_to_proto,
)
from services.common.codec import FRAME_BYTES
from services.common.delta import ENCODING, MAX_BYTES
from services.common.errors import InvalidInput, NotFound, Unavailable, Unsupported
from services.common.flatfile import HEADER_BYTES, FlatFile
from services.common.frame_wire import encode_frame
from services.common.interceptors import replace_handlers
from services.common.process import boot_id
from services.common.telemetry import Telemetry
from services.weights.coverage import Coverage
from services.weights.depot import Depot
from services.weights.draft import Draft

Context = grpc.aio.ServicerContext[Any, Any]

HEARTBEAT_SECONDS = 10.0
IDLE_SECONDS = 30.0
"""A publisher that sends nothing for so long is taken for dead."""


class WeightsServicer(weights_pb2_grpc.WeightsServiceServicer):
    """Serves a depot. `relay`: publishes and fences are refused."""

    def __init__(self, depot: Depot, telemetry: Telemetry, relay: bool = False) -> None:
        self._depot, self._telemetry, self._relay = depot, telemetry, relay
        self._boot = boot_id()
        self._news = asyncio.Event()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        depot.listen(self._sealed)

    async def Fence(self, request: weights_pb2.FenceRequest, context: Context) -> weights_pb2.FenceResponse:
        """Refuse older epochs from now on."""
        self._root_only()
        newest = await asyncio.to_thread(self._depot.fence, request.model, request.epoch)
        return weights_pb2.FenceResponse(newest=version_to_proto(newest))

    async def Publish(
        self, request_iterator: AsyncIterator[weights_pb2.PublishRequest], context: Context
    ) -> weights_pb2.PublishResponse:
        """Take one version from frames or shared memory and seal it."""
        self._root_only()
        started = time.monotonic()
        begin = await self._begin(request_iterator)
        manifest = manifest_from_proto(begin.manifest)
        async with self._draft(manifest, begin) as draft:
            if draft is not None:
                await self._fill(draft, begin, request_iterator)
                await asyncio.to_thread(draft.seal)
                self._telemetry.count("versions_published")
                self._telemetry.gauge("publish_seconds", time.monotonic() - started)
        return weights_pb2.PublishResponse(
            version=version_to_proto(manifest.version), seconds=time.monotonic() - started
        )

    async def Watch(
        self, request: weights_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[weights_pb2.WatchResponse]:
        """Stream the newest version whenever it changes, and as a sign of life."""
        have = version_from_proto(request.have)
        while not self._closing:
            news = self._news
            newest = self._depot.newest(request.model)
            if newest is not None and (have is None or newest > have):
                have = newest
                yield weights_pb2.WatchResponse(newest=version_to_proto(newest))
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):  # Python 3.11's wait_for can swallow a cancellation
                    await news.wait()
            except TimeoutError:
                yield weights_pb2.WatchResponse(newest=version_to_proto(self._depot.newest(request.model)))

    async def Fetch(
        self, request: weights_pb2.FetchRequest, context: Context
    ) -> AsyncIterator[weights_pb2.FetchResponse]:
        """Stream a version, whole or as a delta, or say where it lies in shared memory."""
        async with aclosing(self.fetch_raw(request, context)) as messages:
            async for raw in messages:
                yield weights_pb2.FetchResponse.FromString(raw)

    async def fetch_raw(self, request: weights_pb2.FetchRequest, context: Context) -> AsyncGenerator[bytes, None]:
        """Fetch, its messages serialised already."""
        with self._depot.open(request.model, version_from_proto(request.version), context.peer()) as reading:
            begin = weights_pb2.FetchBegin(manifest=manifest_to_proto(reading.manifest))
            shared, data = self._shared(request.locality), memory(reading.view)
            if shared:
                begin.shm.CopyFrom(_extent(reading.file, reading.manifest, reading.generation))
            elif (coded := await self._delta(request, reading.manifest)) is not None:
                begin.delta.CopyFrom(weights_pb2.Delta(base=request.have, encoding=ENCODING, length=len(coded)))
                data = memory(coded)
            if request.offset > len(data):
                where = f"the end of version {reading.manifest.version}, {len(data)}"
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"offset {request.offset} is beyond {where}")
            self._telemetry.count(f"fetches/{'shm' if shared else 'delta' if begin.HasField('delta') else 'grpc'}")
            if request.offset:
                self._telemetry.count("fetches/resumed")
            yield weights_pb2.FetchResponse(begin=begin).SerializeToString()
            if shared:
                return
            for offset in range(request.offset, len(data), FRAME_BYTES):
                piece = data[offset : offset + FRAME_BYTES]
                self._telemetry.count("bytes_sent", len(piece))
                yield encode_frame(offset, piece)

    async def Hold(self, request: weights_pb2.HoldRequest, context: Context) -> weights_pb2.HoldResponse:
        """Keep a version readable."""
        version = version_from_proto(request.version) or Version(0, 0)
        self._depot.hold(request.model, version, request.holder, request.seconds)
        return weights_pb2.HoldResponse()

    async def ListVersions(
        self, request: weights_pb2.ListVersionsRequest, context: Context
    ) -> weights_pb2.ListVersionsResponse:
        """All versions of all models."""
        return weights_pb2.ListVersionsResponse(
            versions=[
                weights_pb2.VersionInfo(
                    model=info.model,
                    version=version_to_proto(info.version),
                    state=info.state,
                    length=info.length,
                    age_seconds=info.age_seconds,
                    readers=info.readers,
                )
                for info in self._depot.versions()
            ]
        )

    def close(self) -> None:
        """End the Watch streams, so that a drain need not wait for them."""
        self._closing = True
        self._ring()

    async def _begin(self, messages: AsyncIterator[weights_pb2.PublishRequest]) -> weights_pb2.PublishBegin:
        first = await _next(messages)
        if first is None or not first.HasField("begin"):
            raise InvalidInput("a publish starts with a message that holds `begin`")
        return first.begin

    @asynccontextmanager
    async def _draft(self, manifest: Manifest, begin: weights_pb2.PublishBegin) -> AsyncIterator[Draft | None]:
        """A draft that is aborted at the end unless it was sealed, also if the call is cancelled at any moment."""
        pending = asyncio.ensure_future(asyncio.to_thread(self._start, manifest, begin))
        try:
            yield await asyncio.shield(pending)
        finally:
            draft = await pending
            if draft is not None:
                await asyncio.to_thread(draft.abort)

    def _start(self, manifest: Manifest, begin: weights_pb2.PublishBegin) -> Draft | None:
        if begin.HasField("shm"):
            return self._adopt(manifest, begin.shm)
        if begin.HasField("delta"):
            self._check_delta(manifest, begin.delta)
        return self._depot.begin(manifest)

    def _adopt(self, manifest: Manifest, extent: common_pb2.Extent) -> Draft | None:
        length = manifest.length
        if extent.offset != HEADER_BYTES or extent.length != length:
            raise InvalidInput(
                f"extent has {extent.length} bytes at {extent.offset}; expected {length} at {HEADER_BYTES}"
            )
        try:
            file = FlatFile.open_shared(self._depot.folder, extent.arena, extent.generation, length)
        except (NotFound, Unavailable) as error:
            raise Unsupported(f"{error}; send frames") from error
        return self._depot.adopt(manifest, file, extent.generation)

    def _check_delta(self, manifest: Manifest, delta: weights_pb2.Delta) -> None:
        """Refuse before any frame is sent what could never be applied."""
        base = version_from_proto(delta.base)
        if delta.encoding != ENCODING or base is None:
            raise Unsupported(f"delta to {base} is encoded as {delta.encoding!r}; expected {ENCODING!r}")
        if delta.length > min(MAX_BYTES, manifest.length):
            raise InvalidInput(f"delta of {delta.length} bytes is longer than the version, {manifest.length} bytes")
        if self._depot.newest(manifest.model) != manifest.version:  # else a repeat of what is here
            with self._depot.base(manifest, base):
                return

    async def _fill(
        self, draft: Draft, begin: weights_pb2.PublishBegin, messages: AsyncIterator[weights_pb2.PublishRequest]
    ) -> None:
        base = version_from_proto(begin.delta.base) if begin.HasField("delta") else None
        coded, covered = bytearray(begin.delta.length if base else 0), Coverage(begin.delta.length)
        while (message := await _next(messages)) is not None:
            if not message.HasField("frame"):
                raise InvalidInput("after `begin` a publish consists of frames")
            offset, data = message.frame.offset, message.frame.data
            if base is None:
                draft.write(offset, data)
            else:
                covered.add(offset, len(data))
                coded[offset : offset + len(data)] = data
        if base is not None:
            if covered.gap():
                raise InvalidInput(f"bytes {covered.gap()} of the delta were not sent")
            await asyncio.to_thread(draft.apply, base, coded)

    async def _delta(self, request: weights_pb2.FetchRequest, manifest: Manifest) -> bytes | None:
        have = version_from_proto(request.have)
        return None if have is None else await asyncio.to_thread(self._depot.deltas.get, manifest, have)

    def _shared(self, locality: common_pb2.Locality) -> bool:
        return locality.boot_id == self._boot and common_pb2.TRANSPORT_SHM in locality.transports

    def _root_only(self) -> None:
        if self._relay:
            raise Unsupported("this weights server is a relay; publish and fence at the root")

    def _sealed(self, model: str) -> None:
        """Called in the thread that sealed."""
        self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def add_to_server(servicer: WeightsServicer, server: grpc.aio.Server) -> None:
    """Serve; Fetch sends what `fetch_raw` has serialised, which is several copies less."""
    fetch: Any = grpc.unary_stream_rpc_method_handler(
        servicer.fetch_raw, request_deserializer=weights_pb2.FetchRequest.FromString
    )
    weights_pb2_grpc.add_WeightsServiceServicer_to_server(servicer, server)
    replace_handlers(server, "dvla.v1.WeightsService", {"Fetch": fetch})


async def _next(messages: AsyncIterator[weights_pb2.PublishRequest]) -> weights_pb2.PublishRequest | None:
    """The next message, None at the end; raises Unavailable if none comes for too long."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            return await anext(messages, None)
    except TimeoutError as error:
        raise Unavailable(f"the publisher sent nothing for {IDLE_SECONDS} s") from error


def _extent(file: FlatFile, manifest: Manifest, generation: int) -> common_pb2.Extent:
    return common_pb2.Extent(arena=file.name, offset=HEADER_BYTES, length=manifest.length, generation=generation)
