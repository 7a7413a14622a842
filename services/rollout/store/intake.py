"""Accepting trajectories: bytes first, then one script that makes them count, once per job."""

from collections.abc import AsyncIterator

from dvla.v1 import common_pb2, store_pb2

from services.common.errors import Exhausted, InvalidInput, NotFound, Superseded
from services.rollout.store.blobs import BlobWriter
from services.rollout.store.jobs import unit_of
from services.rollout.store.keys import check_name
from services.rollout.store.upkeep import Upkeep
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
            Exhausted: Redis is above 85 % of its memory.
        """
        run = check_name("run", begin.key.run)
        try:
            check_episode(begin.episode)
            if begin.evaluation:
                return await self._accept(run, begin, "")
            check_payload(begin.payload, (await self.spec(run)).episode_bytes)
            await self._require_room(run, begin.payload.length)
            return await self._append_training(run, begin, frames)
        except InvalidInput:
            await self.scripts.call("count", run, "invalid")
            raise

    async def _append_training(
        self, run: str, begin: store_pb2.AppendBegin, frames: AsyncIterator[common_pb2.Frame]
    ) -> store_pb2.AppendResponse:
        payload = begin.payload
        writer = BlobWriter(self.link, run, payload.length, payload.xxh3)
        try:
            if payload.WhichOneof("location") == "inline":
                await writer.add(0, payload.inline)
            else:
                async for frame in frames:
                    await writer.add(frame.offset, frame.data)
            blob = await writer.finish()
            self.memory.wrote(payload.length)
            response = await self._accept(run, begin, blob)
        except (InvalidInput, Superseded, NotFound, Exhausted):
            await writer.abandon()  # certainly not accepted; after any other error it may have been
            raise
        if response.repeated:
            await writer.abandon()
        return response

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
            claim = store_pb2.Claim(key=begin.key, episode=episode, payload=payload, blob=blob).SerializeToString()
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
