"""Serving the bytes of claims, wherever they lie: an arena of this node, another replica's, or Redis."""

from collections.abc import AsyncIterator

import xxhash
from dvla.v1 import common_pb2, store_pb2

from services.common.arena import Extent, Lease
from services.common.codec import FRAME_BYTES, INLINE_LIMIT
from services.common.errors import InvalidInput, NotFound, Unavailable
from services.rollout.store.base import StoreBase
from services.rollout.store.blobs import read_blob
from services.rollout.store.keys import extent_of

Responses = AsyncIterator[store_pb2.FetchClaimsResponse]


class DeliveryCalls(StoreBase):
    """Calls that read bytes."""

    async def fetch(self, request: store_pb2.FetchClaimsRequest) -> Responses:
        """Each claim in the order asked: its payload, in an extent or inline, else in frames of at most 1 MiB.

        The hash is checked; frames of a payload that does not match are followed by NotFound, so a reader uses a
        claim only when the next one starts or the stream ends well. Who opens an extent checks the hash himself.
        """
        near = self.depot is not None and self.depot.near(request.locality)
        for claim in request.claims:
            if not claim.HasField("payload"):
                raise InvalidInput(f"claim {claim.key} has no bytes: its member failed for good and scores zero")
            async for response in self._claim(request.run, claim, near):
                yield response

    async def _claim(self, run: str, claim: store_pb2.Claim, near: bool) -> Responses:
        extent = extent_of(claim.blob)
        if extent is None:
            chunks = read_blob(self.link, claim.blob, claim.payload.length, claim.payload.xxh3)
        elif self.depot is None or (lease := self.depot.read(extent)) is None:
            async for response in self._from_owner(run, claim, extent):
                yield response
            return
        elif near:
            lease.close()
            yield store_pb2.FetchClaimsResponse(begin=_head(claim, shm=extent.message()))
            return
        else:
            chunks = _cut(lease, claim)
        async for response in _messages(claim, chunks):
            yield response

    async def _from_owner(self, run: str, claim: store_pb2.Claim, extent: Extent) -> Responses:
        """Through the replica that owns the arena. Its frames are passed on as they come."""
        address = await self.owners.address(extent.arena)
        if not address or self.others is None:
            if await self.owners.gone(extent.arena):
                raise NotFound(f"the bytes of {claim.key} went with their node (arena {extent.arena}); nack its group")
            raise Unavailable(f"the owner of arena {extent.arena} does not answer; it may be restarting")
        async for response in self.others.fetch(address, run, claim):
            yield response


def _head(claim: store_pb2.Claim, **location: object) -> common_pb2.Payload:
    payload = claim.payload
    return common_pb2.Payload(tensors=payload.tensors, length=payload.length, xxh3=payload.xxh3, **location)  # type: ignore[arg-type]


async def _messages(claim: store_pb2.Claim, chunks: AsyncIterator[bytes]) -> Responses:
    length = claim.payload.length
    if length <= INLINE_LIMIT:
        inline = b"".join([chunk async for chunk in chunks])
        yield store_pb2.FetchClaimsResponse(begin=_head(claim, inline=inline))
        return
    yield store_pb2.FetchClaimsResponse(begin=_head(claim, frames=-(-length // FRAME_BYTES)))
    offset = 0
    async for chunk in chunks:
        yield store_pb2.FetchClaimsResponse(frame=common_pb2.Frame(offset=offset, data=chunk))
        offset += len(chunk)


async def _cut(lease: Lease, claim: store_pb2.Claim) -> AsyncIterator[bytes]:
    """The bytes of an extent; its lock is held meanwhile."""
    with lease:
        if claim.payload.xxh3 and xxhash.xxh3_64_intdigest(lease.view.data) != claim.payload.xxh3:
            raise NotFound(f"the bytes of {claim.blob} do not match their record; nack its group")
        for start in range(0, lease.view.size, FRAME_BYTES):
            yield lease.view[start : start + FRAME_BYTES].tobytes()
