"""This replica's arenas: room for the episodes of workers that share memory with it. Knows nothing of Redis or gRPC.

With each job such a worker gets an extent, writes its episode there, and may die as soon as its append is answered:
the bytes belong to the store then. An arena outlives its replica; the next one on this node adopts it.
"""

import asyncio
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
from dvla.v1 import common_pb2, store_pb2

from services.common.arena import Arena, Extent, Lease, Peer, needed, orphans
from services.common.errors import ConfigError, Exhausted, InvalidInput, NotFound, Unavailable, Unsupported
from services.common.flatfile import shared_folder
from services.common.locality import unreachable
from services.rollout.store.blobs import Upload
from services.rollout.store.keys import extent_name

log = structlog.get_logger()

WRITER_SECONDS = 30.0
"""Time that a worker has to open its extent; one that was opened is its own while the worker lives."""
FIRST_BYTES = 16 * 2**20
"""Size of the first arena where bytes may also lie in Redis; it doubles as needed."""
ENTRIES = 4096

Job = tuple[str, str, int, int]
"""Run, unit, member, attempt."""


class Depot:
    """Arenas in one folder. strict: bytes lie nowhere else, so a run that does not fit is refused.

    size: bytes of the arena. 0: if strict what the first run needs, else little, and more as it is needed.
    """

    def __init__(self, folder: str, strict: bool, size: int = 0) -> None:
        self.strict = strict
        self._size = size
        self._folder: Path | None = None
        try:
            self._folder = shared_folder(folder)
        except ConfigError as error:
            if strict or folder:
                raise
            log.warning("no shared memory; trajectories lie in Redis", reason=str(error))
        self.peer = Peer(self._folder) if self._folder else None
        self.arenas: dict[str, Arena] = {}
        self._prefix = ""
        self._reserved: dict[Job, Extent] = {}
        self._near: dict[bytes, str] = {}
        self._opening = asyncio.Lock()
        self._told = False

    def adopt(self, store: str) -> list[str]:
        """Take over arenas of this store (its random name) whose replicas died; returns their names."""
        self._prefix = f"store-{store}"
        if self._folder is None:
            return []
        found = {arena.name: arena for arena in orphans(self._folder, self._prefix)}
        for arena in found.values():
            log.info("arena adopted", arena=arena.name, extents=len(arena.extents()), bytes=arena.capacity)
        self.arenas |= found
        return list(found)

    def near(self, theirs: common_pb2.Locality) -> bool:
        """Whether a peer shares this replica's memory, as it says and as its probe file proves."""
        if self._folder is None or common_pb2.TRANSPORT_SHM not in theirs.transports:
            return False
        key = theirs.probe_nonce
        if key not in self._near:
            if len(self._near) > ENTRIES:
                self._near.clear()
            self._near[key] = unreachable(theirs, self._folder)
            log.info(
                "peer probed", transport="grpc" if self._near[key] else "shm", reason=self._near[key] or "probe read"
            )
        return not self._near[key]

    async def prepare(self, spec: store_pb2.RunSpec) -> bool:
        """Have an arena for this run; True if one was made. Raises Unsupported if none can hold it and must."""
        if self._folder is None or not self._prefix:
            return False
        if self.strict and not spec.episode_bytes:
            raise Unsupported(f"run {spec.run!r} names no largest episode: set episode_bytes, or bytes_in = auto")
        wanted = most_bytes(spec)
        async with self._opening:
            largest = max((arena.capacity for arena in self.arenas.values()), default=0)
            if self.strict and self._size and wanted > self._size:
                raise Unsupported(
                    f"run {spec.run!r} can have {groups_in_flight(spec)} groups of {spec.group_size} x "
                    f"{spec.episode_bytes} bytes in flight: set arena_bytes to {wanted} or more (it is {self._size})"
                )
            if largest >= wanted or (largest and not self.strict):
                return False
            size = self._size or (wanted if self.strict else min(wanted, FIRST_BYTES))
            return await self._make(self._folder, spec, size)

    async def grow(self, spec: store_pb2.RunSpec, length: int) -> bool:
        """Have as much room again, for several extents of this length; True if there is more now.

        Never more than the run can need, nor than a quarter of the memory that was free.
        """
        if self._folder is None or self.strict or self._size:
            return False
        before = self.capacity
        async with self._opening:
            if self.capacity > before:
                return True  # by a call beside this one
            most = min(most_bytes(spec), (_free(self._folder) + before) // 4)
            size = min(max(before, 4 * length), most - before)
            return size >= length and await self._make(self._folder, spec, size)

    @property
    def capacity(self) -> int:
        """Bytes for extents in all arenas."""
        return sum(arena.capacity for arena in self.arenas.values())

    async def _make(self, folder: Path, spec: store_pb2.RunSpec, size: int) -> bool:
        try:
            entries = max(ENTRIES, 2 * groups_in_flight(spec) * spec.group_size)
            arena = await asyncio.to_thread(Arena.create, folder, self._prefix, size, entries)
        except ConfigError as error:
            if self.strict:
                raise Unsupported(str(error)) from error
            if not self._told:
                log.warning("no arena; trajectories lie in Redis", reason=str(error))
            self._told = True
            return False
        self.arenas[arena.name] = arena
        log.info("arena made", arena=arena.name, bytes=size)
        return True

    def allocate(self, length: int) -> Extent:
        """Room for so many bytes. Raises Exhausted if there is none now."""
        problem: Exhausted | None = None
        for arena in self.arenas.values():
            try:
                return arena.allocate(length)
            except Exhausted as error:
                problem = error
        raise problem or Exhausted("this replica has no arena")

    def reserved(self, job: Job) -> Extent | None:
        """The room of a granted job."""
        return self._reserved.get(job)

    def reserve(self, job: Job, extent: Extent) -> None:
        """This room is for that job."""
        self._reserved[job] = extent

    def forget(self, job: Job) -> None:
        """The job is over: free its room, unless it was accepted."""
        extent = self._reserved.pop(job, None)
        if extent is not None:
            self.release([extent])

    def accept(self, job: Job, message: common_pb2.Extent, length: int) -> Extent:
        """Keep the bytes that a worker wrote, and take the tail back. Safe to repeat.

        Raises Unsupported if this replica has no such extent for the job; the bytes must come another way then.
        """
        extent, mine = Extent.of(message), self._reserved.get(job)
        arena = self.arenas.get(extent.arena)
        if arena is None or (mine is not None and (mine.arena, mine.generation) != (extent.arena, extent.generation)):
            raise Unsupported(f"{extent} is not this replica's for this job; send the bytes as frames")
        kept = replace(extent, length=length)
        try:
            if arena.view(kept).flags.writeable:  # else it was sealed by an earlier call
                arena.shrink(extent, length)
                arena.seal(kept)
        except (NotFound, InvalidInput) as error:
            raise Unsupported(f"{error}; send the bytes as frames") from error
        return kept

    def settle(self, job: Job) -> None:
        """The job's episode was accepted: its room belongs to a claim now."""
        self._reserved.pop(job, None)

    def release(self, extents: Iterable[Extent]) -> None:
        """Free extents, those that are ours; the others are somebody else's to free."""
        for extent in extents:
            if arena := self.arenas.get(extent.arena):
                arena.release(extent)

    def sweep(self) -> None:
        """Free the room of writers that died."""
        freed = {extent.generation for arena in self.arenas.values() for extent in arena.sweep(WRITER_SECONDS)}
        if freed:
            self._reserved = {job: own for job, own in self._reserved.items() if own.generation not in freed}

    def sealed(self) -> set[Extent]:
        """All accepted extents."""
        return {extent for arena in self.arenas.values() for extent, sealed in arena.extents() if sealed}

    def read(self, extent: Extent) -> Lease | None:
        """The bytes of an extent in an arena of this node, whoever owns it; None if it is of another node.

        Raises NotFound if they are gone.
        """
        if self.peer is None or self._folder is None or not (self._folder / extent.arena).exists():
            return None
        return self.peer.read(extent)

    def close(self) -> None:
        """Delete the arenas in which nobody has bytes; the others wait for this node's next replica."""
        for arena in self.arenas.values():
            if any(sealed for _, sealed in arena.extents()):
                log.info("arena kept for the next start", path=str(arena.path))
                arena.close()
            else:
                arena.remove()
        self.arenas.clear()
        if self.peer is not None:
            self.peer.close()


class ExtentWriter(Upload):
    """Writes bytes that come in parts into an extent."""

    def __init__(self, depot: Depot, extent: Extent, digest: int) -> None:
        super().__init__(extent.length, digest)
        self.name = extent_name(extent)
        self._depot, self._extent = depot, extent
        self._view = depot.arenas[extent.arena].view(extent)

    async def abandon(self) -> None:
        """Free the extent."""
        self._depot.release([self._extent])

    async def _take(self, offset: int, data: bytes) -> None:
        self._view[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    async def _end(self) -> None:
        try:
            self._depot.arenas[self._extent.arena].seal(self._extent)
        except NotFound as error:
            raise Unavailable("the upload took so long that its room was given away; send it again") from error


def groups_in_flight(spec: store_pb2.RunSpec) -> int:
    """Groups that a run can have at once: those of s + 1 updates, and one being trained."""
    return (spec.staleness + 2) * spec.groups_per_update


def most_bytes(spec: store_pb2.RunSpec) -> int:
    """Room in which the episodes of a run always fit."""
    return needed(groups_in_flight(spec) * spec.group_size, spec.episode_bytes or 1)


def _free(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize
