"""Serving the bytes of claims."""

from collections.abc import AsyncIterator

from dvla.v1 import common_pb2, store_pb2

from services.common.codec import FRAME_BYTES, INLINE_LIMIT
from services.common.errors import InvalidInput
from services.rollout.store.base import StoreBase
from services.rollout.store.blobs import read_blob


class DeliveryCalls(StoreBase):
    """Calls that read bytes."""

    async def fetch(self, request: store_pb2.FetchClaimsRequest) -> AsyncIterator[store_pb2.FetchClaimsResponse]:
        """Each claim in the order asked: its payload, inline if small, else followed by frames of at most 1 MiB.

        The hash is checked; frames of a payload that does not match are followed by NotFound, so a reader uses a
        claim only when the next one starts or the stream ends well.
        """
        for claim in request.claims:
            if not claim.HasField("payload"):
                raise InvalidInput(f"claim {claim.key} has no bytes: its member failed for good and scores zero")
            async for response in self._claim(claim):
                yield response

    async def _claim(self, claim: store_pb2.Claim) -> AsyncIterator[store_pb2.FetchClaimsResponse]:
        length, digest = claim.payload.length, claim.payload.xxh3
        begin = common_pb2.Payload(tensors=claim.payload.tensors, length=length, xxh3=digest)
        chunks = read_blob(self.link, claim.blob, length, digest)
        if length <= INLINE_LIMIT:
            begin.inline = b"".join([chunk async for chunk in chunks])
            yield store_pb2.FetchClaimsResponse(begin=begin)
            return
        begin.frames = -(-length // FRAME_BYTES)
        yield store_pb2.FetchClaimsResponse(begin=begin)
        offset = 0
        async for chunk in chunks:
            yield store_pb2.FetchClaimsResponse(frame=common_pb2.Frame(offset=offset, data=chunk))
            offset += len(chunk)
