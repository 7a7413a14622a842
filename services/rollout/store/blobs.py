"""Bytes of trajectories as chunks in Redis.

A blob is registered as pending before its first byte is written, and leaves that list in the script that accepts
its claim. So a writer that dies leaves nothing behind: a sweep turns old pending blobs into garbage and deletes
garbage. Blobs have names of their own, so writing and deleting them twice is harmless.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import xxhash

from services.common.errors import InvalidInput, NotFound
from services.rollout.store.keys import CHUNK_BYTES, chunk_keys, garbage_key, new_blob, pending_key
from services.rollout.store.redis_client import RedisLink


class Upload(ABC):
    """Takes bytes of a known length in parts in ascending order. digest: expected xxh3-64, or 0 for none."""

    name = ""

    def __init__(self, length: int, digest: int) -> None:
        self._length, self._digest = length, digest
        self._hash = xxhash.xxh3_64()
        self._received = 0

    async def add(self, offset: int, data: bytes) -> None:
        """Take the next part; raises InvalidInput on a gap, an overlap or too many bytes."""
        if offset != self._received or not data or offset + len(data) > self._length:
            raise InvalidInput(
                f"frame at {offset} of {len(data)} bytes; expected offset {self._received} of {self._length} bytes"
            )
        self._received += len(data)
        self._hash.update(data)
        await self._take(offset, data)

    async def finish(self) -> str:
        """Check length and hash, and return the name of the bytes."""
        if self._received != self._length:
            raise InvalidInput(f"payload has {self._received} bytes; its header says {self._length}")
        if self._digest and self._hash.intdigest() != self._digest:
            raise InvalidInput(f"payload of {self._length} bytes does not match its hash; send it again")
        await self._end()
        return self.name

    @abstractmethod
    async def abandon(self) -> None:
        """Delete what was written."""

    @abstractmethod
    async def _take(self, offset: int, data: bytes) -> None: ...

    @abstractmethod
    async def _end(self) -> None: ...


class BlobWriter(Upload):
    """Writes one blob to Redis; holds at most one chunk and one part."""

    def __init__(self, link: RedisLink, run: str, length: int, digest: int) -> None:
        super().__init__(length, digest)
        self.name = new_blob(length)
        self._link, self._run = link, run
        self._keys = chunk_keys(self.name)
        self._buffer = bytearray()
        self._chunks = 0

    async def _take(self, offset: int, data: bytes) -> None:
        if not self._buffer and len(data) == CHUNK_BYTES:
            await self._store(data)
            return
        self._buffer += data
        while len(self._buffer) >= CHUNK_BYTES:
            await self._store(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    async def _end(self) -> None:
        if self._buffer or not self._chunks:
            await self._store(bytes(self._buffer))

    async def abandon(self) -> None:
        """Delete what was written."""
        if self._chunks:
            await delete_blobs(self._link, self._run, [self.name])

    async def _store(self, chunk: bytes) -> None:
        key, first = self._keys[self._chunks], self._chunks == 0
        self._chunks += 1

        async def write() -> None:
            if first and self._link.cluster:  # on another node, so it must be there before
                await self._link.client.zadd(pending_key(self._run), {self.name: 0}, nx=True)
            async with self._link.client.pipeline(transaction=False) as pipe:
                if first and not self._link.cluster:
                    pipe.zadd(pending_key(self._run), {self.name: 0}, nx=True)
                pipe.set(key, chunk)
                await pipe.execute()

        await self._link.retrying("storing a trajectory", write)


async def read_blob(link: RedisLink, blob: str, length: int, digest: int) -> AsyncIterator[bytes]:
    """A blob's chunks in order. Raises NotFound if one is missing, or if the whole does not match its hash."""
    seen, received = xxhash.xxh3_64(), 0
    for key in chunk_keys(blob):
        chunk = await _chunk(link, key)
        if chunk is None:
            raise NotFound(f"the bytes of {blob} are gone from Redis; nack its group")
        received += len(chunk)
        seen.update(chunk)
        if chunk:
            yield chunk
    if received != length or (digest and seen.intdigest() != digest):
        raise NotFound(f"the {received} bytes of {blob} do not match their record ({length} bytes); nack its group")


async def _chunk(link: RedisLink, key: str) -> bytes | None:
    value: Any = await link.retrying("reading a trajectory", lambda: link.client.get(key))
    return cast("bytes | None", value)


async def delete_blobs(link: RedisLink, run: str, blobs: Iterable[str]) -> None:
    """Delete chunks first, then the names from the lists that remember them."""
    names = list(blobs)
    if not names:
        return

    async def delete() -> None:
        async with link.client.pipeline(transaction=False) as pipe:
            for key in [key for blob in names for key in chunk_keys(blob)]:
                pipe.execute_command("UNLINK", key)  # `unlink` of a cluster's pipeline is not queued
            await pipe.execute()
        async with link.client.pipeline(transaction=False) as pipe:
            pipe.srem(garbage_key(run), *names)
            pipe.zrem(pending_key(run), *names)
            await pipe.execute()

    await link.retrying("freeing bytes", delete)


async def present(link: RedisLink, blobs: Iterable[str]) -> bool:
    """True if every chunk of these blobs is there."""
    keys = [key for blob in blobs for key in chunk_keys(blob)]

    async def look() -> bool:
        async with link.client.pipeline(transaction=False) as pipe:  # they spread over a cluster
            for key in keys:
                pipe.execute_command("EXISTS", key)
            return all(await pipe.execute())

    return not keys or await link.retrying("looking for bytes", look)
