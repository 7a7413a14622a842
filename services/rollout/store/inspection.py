"""What lies in the store, for a person: runs, groups by state and age, dead letters, arenas. Reads only."""

from typing import Any

from dvla.v1 import store_pb2

from services.rollout.store.keys import check_name, extent_of, held_key
from services.rollout.store.runs import RunCalls

_GROUPS = 20
_MOST_GROUPS = 1000


class InspectionCalls(RunCalls):
    """Calls of people who look."""

    async def inspect(self, request: store_pb2.InspectRequest) -> store_pb2.InspectResponse:
        """All runs that are not over, or one run; NotFound if that is not there."""
        names = [check_name("run", request.run)] if request.run else await self.runs()
        wanted = min(request.groups or _GROUPS, _MOST_GROUPS)
        info, *others = await self.link.info("server")
        response = store_pb2.InspectResponse(
            runs=[await self._inspect_run(name, wanted) for name in names],
            redis=f"{self.link.address}, version {info['redis_version']}"
            + (f", a cluster of {1 + len(others)} primaries" if self.link.cluster else ""),
        )
        arenas: dict[str, store_pb2.ArenaInspection] = {}
        for name in names:
            for arena in await self.owners.arenas(name):
                found = arenas.setdefault(arena, store_pb2.ArenaInspection(arena=arena))
                await self._add_arena(found, name)
        response.arenas.extend(arenas.values())
        return response

    async def _inspect_run(self, run: str, wanted: int) -> store_pb2.RunInspection:
        epoch, finished, members, entries, pending, letters, oldest, groups = await self.call("inspect", run, wanted)
        return store_pb2.RunInspection(
            run=run,
            epoch=int(epoch),
            finished=finished == b"1",
            stats=await self.get_stats(store_pb2.GetStatsRequest(run=run)),
            stream_entries=entries,
            stream_pending=pending,
            dead_letters=letters,
            oldest_dead_seconds=max(0, int(oldest)) / 1000,
            groups=[_group(int(members), *group) for group in groups],
        )

    async def _add_arena(self, found: store_pb2.ArenaInspection, run: str) -> None:
        key = held_key(run, found.arena)
        names: Any = await self.link.retrying("extents of a run", lambda: self.link.client.smembers(key))
        extents = [extent for name in names if (extent := extent_of(name.decode()))]
        found.address = await self.owners.address(found.arena)
        found.extents += len(extents)
        found.bytes += sum(extent.length for extent in extents)


def _group(
    members: int,
    number: bytes,
    state: bytes,
    filled: bytes,
    size: bytes,
    age: bytes,
    deliveries: bytes,
    workers: list[bytes],
) -> store_pb2.GroupInspection:
    return store_pb2.GroupInspection(
        group=int(number),
        state=state.decode(),
        filled=int(filled),
        members=members,
        bytes=int(size),
        age_seconds=max(0, int(age)) / 1000,
        deliveries=int(deliveries),
        workers=sorted({worker.decode() for worker in workers}),
    )
