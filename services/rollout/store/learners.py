"""The learner's calls: lease complete groups, record updates, free what a checkpoint holds, refuse bad groups.

All are fenced by epoch, except those on dead letters, which are a person's.
"""

from typing import Any

from dvla.v1 import common_pb2, store_pb2

from services.common.errors import NotFound
from services.rollout.store.blobs import present
from services.rollout.store.jobs import seed_of
from services.rollout.store.keys import check_name, check_stream_id, extent_of
from services.rollout.store.upkeep import Upkeep

_MOST_GROUPS = 4096


class LearnerCalls(Upkeep):
    """Calls of the learner about groups."""

    async def lease(self, request: store_pb2.LeaseRequest) -> store_pb2.LeaseResponse:
        """Lease complete groups in admission order, or wait for the first.

        With the cursor of the caller's last answer, the answer is the same however often the call is repeated.
        Without one, a lost reply is lost with its groups until the run is opened again. A new epoch starts with
        what was leased and not acked.
        """
        run = check_name("run", request.run)
        wanted = max(1, min(request.count, _MOST_GROUPS))
        position = check_stream_id("cursor", request.cursor) if request.cursor else ""

        async def look() -> tuple[bool, store_pb2.LeaseResponse]:
            at, seed_base, groups = await self.call("lease", run, request.epoch, wanted, position)
            leased = [_group(run, group, int(seed_base)) for group in groups]
            return bool(leased), store_pb2.LeaseResponse(groups=leased, cursor=at)

        return await self.wakeups.poll(run, "groups", request.wait_seconds, look)

    async def trained(self, request: store_pb2.TrainedRequest) -> store_pb2.TrainedResponse:
        """Record that these groups made this update."""
        await self.call("trained", check_name("run", request.run), request.epoch, request.update, *request.groups)
        return store_pb2.TrainedResponse()

    async def ack(self, request: store_pb2.AckRequest) -> store_pb2.AckResponse:
        """Free everything trained at or before a durable checkpoint."""
        run = check_name("run", request.run)
        (groups,) = await self.call("ack", run, request.epoch, request.checkpoint_update)
        if groups:
            await self.sweep(run)
        return store_pb2.AckResponse(groups=map(int, groups))

    async def nack(self, request: store_pb2.NackRequest) -> store_pb2.NackResponse:
        """Put one leased group on the dead-letter stream, or discard it."""
        run, reason = check_name("run", request.run), request.reason[:1000] or "no reason given"
        await self.call("nack", run, request.epoch, request.group, reason, int(request.discard))
        return store_pb2.NackResponse()

    async def list_dead(self, request: store_pb2.ListDeadRequest) -> store_pb2.ListDeadResponse:
        """Dead letters, oldest first."""
        (letters,) = await self.call("list_dead", check_name("run", request.run), max(1, min(request.limit, 1000)))
        return store_pb2.ListDeadResponse(
            letters=[
                store_pb2.DeadLetter(
                    id=letter.decode(), group=int(group), reason=reason.decode(), age_seconds=max(0, int(age)) / 1000
                )
                for letter, group, reason, age in letters
            ]
        )

    async def replay_dead(self, request: store_pb2.ReplayDeadRequest) -> store_pb2.ReplayDeadResponse:
        """Put a dead group back to live under its old number."""
        run, letter = check_name("run", request.run), check_stream_id("id", request.id)
        group, blobs = await self.call("replay_dead", run, letter, "look")
        names = [blob.decode() for blob in blobs]
        extents = [extent for name in names if (extent := extent_of(name))]
        gone = [extent for extent in extents if await self.owners.gone(extent.arena)]
        if gone or not await present(self.link, [name for name in names if extent_of(name) is None]):
            raise NotFound(f"the bytes of group {int(group)} are gone")
        await self.call("replay_dead", run, letter, "move")
        return store_pb2.ReplayDeadResponse(group=int(group))


def _group(run: str, group: list[Any], seed_base: int) -> store_pb2.Group:
    number, task, trained_update, claims = group
    return store_pb2.Group(
        group=int(number),
        task=task.decode(),
        seed=seed_of(seed_base, int(number)),
        claims=[_claim(run, int(number), member, wire) for member, wire in enumerate(claims)],
        trained_update=int(trained_update),
    )


def _claim(run: str, group: int, member: int, wire: bytes) -> store_pb2.Claim:
    if wire:
        return store_pb2.Claim.FromString(wire)
    return store_pb2.Claim(key=common_pb2.JobKey(run=run, group=group, member=member))  # failed for good: scores zero
