"""Client of other replicas, for bytes that lie in their arenas."""

from collections.abc import AsyncIterator

import grpc.aio
from dvla.v1 import store_pb2, store_pb2_grpc

from services.common.channels import open_async_channel, translated
from services.common.security import Security

BULK_SECONDS = 60.0


class ReplicaClient:
    """Channels to other replicas, one for each address."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def fetch(
        self, address: str, run: str, claim: store_pb2.Claim
    ) -> AsyncIterator[store_pb2.FetchClaimsResponse]:
        """A claim's bytes, as the replica at this address sends them. Raises NotFound if it has lost them."""
        if address not in self._channels:
            self._channels[address] = open_async_channel(address, self._security)
        stub = store_pb2_grpc.StoreServiceStub(self._channels[address])
        request = store_pb2.FetchClaimsRequest(run=run, claims=[claim])
        with translated(f"store replica {address}"):
            async for response in stub.Fetch(request, timeout=BULK_SECONDS):
                yield response

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
