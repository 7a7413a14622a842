"""Accepting trajectories: bytes first, then one script that makes them count, once per job."""

from collections.abc import AsyncIterator

from dvla.v1 import common_pb2, store_pb2

from services.common.errors import Exhausted, InvalidInput, NotFound, Superseded, Unsupported
from services.rollout.store.blobs import BlobWriter, Upload
from services.rollout.store.depot import ExtentWriter
from services.rollout.store.jobs import unit_of
from services.rollout.store.keys import check_name, extent_name, extent_of
from services.rollout.store.upkeep import CLAIM_BYTES, Upkeep
from services.rollout.store.validate import check_episode, check_payload, version_text


class IntakeCalls(Upkeep):
    """Calls of rollout workers about finished episodes."""

    async def append(
        self, begin: store_pb2.AppendBegin, frames: AsyncIterator[common_pb2.Frame]
    ) -> store_pb2.AppendResponse:
        """Accept one episode; `frames` are its bytes unless they are inline. Safe to repeat.

        Raises:
            Superseded: a newer attempt was granted, or the group is gone.
            InvalidInput: header, payload and hash do not fit; counted.
            Exhausted: Redis is above 85 % of its memory, or the arena is full.
            Unsupported: the payload's extent is none of this replica's (any more); the bytes must come as frames.
        """
        run = check_name("run", begin.key.run)
        try:
            check_episode(begin.episode)
            if begin.evaluation:
                return await self._accept(run, begin, "")
            check_payload(begin.payload, (await self.spec(run)).episode_bytes)
            if begin.payload.WhichOneof("location") == "shm":
                return await self._keep(run, begin)
            return await self._append_training(run, begin, frames)
        except InvalidInput:
            await self.scripts.call("count", run, "invalid")
            raise

    async def _append_training(
        self, run: str, begin: store_pb2.AppendBegin, frames: AsyncIterator[common_pb2.Frame]
    ) -> store_pb2.AppendResponse:
        payload = begin.payload
        writer = await self._writer(run, payload)
        try:
            if payload.WhichOneof("location") == "inline":
                await writer.add(0, payload.inline)
            else:
                async for frame in frames:
                    await writer.add(frame.offset, frame.data)
            blob = await writer.finish()
            self.memory.wrote(payload.length if isinstance(writer, BlobWriter) else CLAIM_BYTES)
            response = await self._accept(run, begin, blob)
        except (InvalidInput, Superseded, NotFound, Exhausted):
            await writer.abandon()  # certainly not accepted; after any other error it may have been
            raise
        if response.repeated:
            await writer.abandon()
        return response

    async def _keep(self, run: str, begin: store_pb2.AppendBegin) -> store_pb2.AppendResponse:
        """Accept an episode that its worker wrote into an extent of ours. The hash is checked by whoever reads it."""
        await self._require_room(run, CLAIM_BYTES)
        if self.depot is None:
            raise Unsupported("this replica has no arena; send the bytes as frames")
        job = (run, *unit_of(begin.key, begin.evaluation), begin.key.attempt)
        extent = self.depot.accept(job, begin.payload.shm, begin.payload.length)
        await self.owners.tenant(extent.arena, run)
        try:
            response = await self._accept(run, begin, extent_name(extent))
        except (InvalidInput, Superseded, NotFound):
            self.depot.forget(job)  # certainly not accepted
            raise
        if response.repeated:
            self.depot.forget(job)
        else:
            self.depot.settle(job)
        return response

    async def _writer(self, run: str, payload: common_pb2.Payload) -> Upload:
        """Where bytes that come by gRPC go."""
        if self.depot is None or not self.depot.strict:
            await self._require_room(run, payload.length)
            return BlobWriter(self.link, run, payload.length, payload.xxh3)
        await self._require_room(run, CLAIM_BYTES)
        await self.prepare_arena(await self.spec(run))
        extent = await self.make_room_in_arena(run, payload.length)
        await self.owners.tenant(extent.arena, run)
        return ExtentWriter(self.depot, extent, payload.xxh3)

    async def _require_room(self, run: str, length: int) -> None:
        try:
            await self.memory.require_room(length)
        except Exhausted:
            await self.make_room(run)
            await self.memory.require_room(length)

    async def _accept(self, run: str, begin: store_pb2.AppendBegin, blob: str) -> store_pb2.AppendResponse:
        unit, member = unit_of(begin.key, begin.evaluation)
        episode, payload = begin.episode, common_pb2.Payload()
        if blob:
            payload.CopyFrom(begin.payload)
            payload.ClearField("inline")
            payload.ClearField("frames")
            payload.ClearField("shm")
            extent = extent_of(blob)
            owner = extent.arena if extent else ""
            claim = store_pb2.Claim(
                key=begin.key, episode=episode, payload=payload, blob=blob, owner=owner
            ).SerializeToString()
        else:
            claim = episode.SerializeToString()
        (repeated,) = await self.call(
            "append",
            run,
            unit,
            member,
            begin.key.attempt,
            claim,
            blob,
            payload.length,
            repr(episode.score),
            episode.steps,
            int(episode.success_once),
            min(episode.oldest.update, episode.newest.update),
            version_text(episode.oldest),
            version_text(episode.newest),
        )
        return store_pb2.AppendResponse(repeated=repeated == 1)
