"""Runs: opened by a learner that gets a fencing epoch, read by workers, closed, counted."""

import math
import time

from dvla.v1 import store_pb2

from services.common.errors import InvalidInput
from services.rollout.store.keys import check_name
from services.rollout.store.scripts import Argument
from services.rollout.store.upkeep import Upkeep
from services.rollout.store.validate import check_memory, check_spec, different_fields

_LARGEST = 2**53
"""Redis scripts count in doubles."""


class RunCalls(Upkeep):
    """Calls about a run as a whole."""

    async def open_run(self, request: store_pb2.OpenRunRequest) -> store_pb2.OpenRunResponse:
        """Open or re-open a run; grants epoch max(stored, floor) + 1 and rolls back to `resume_update`."""
        spec = request.spec
        check_spec(spec)
        if request.floor_epoch >= 2**28 or request.resume_update >= _LARGEST:
            raise InvalidInput(f"floor_epoch {request.floor_epoch}, resume_update {request.resume_update}: not real")
        await self.memory.share(fresh=True)
        if self.depot is not None and self.depot.strict:
            await self.prepare_arena(spec)
        else:
            check_memory(spec, self.memory.limit)
        await self.remember(spec.run)
        wire = spec.SerializeToString(deterministic=True)
        status, *facts = await self.scripts.call(
            "open_run", spec.run, wire, request.floor_epoch, request.resume_update, *_record(spec)
        )
        if status == b"OTHER_SPEC":
            differences = different_fields(spec, store_pb2.RunSpec.FromString(facts[0]))
            raise InvalidInput(f"run {spec.run!r} exists with another spec: {differences}; choose another run name")
        self._specs[spec.run] = (time.monotonic(), spec)
        epoch, update, rolled_back, lost = facts
        return store_pb2.OpenRunResponse(
            epoch=int(epoch), update=int(update), rolled_back=map(int, rolled_back), lost=map(int, lost)
        )

    async def get_run(self, request: store_pb2.GetRunRequest) -> store_pb2.GetRunResponse:
        """Spec and state of a run; NotFound until it is open."""
        spec, epoch, update, finished = await self.call("get_run", check_name("run", request.run))
        return store_pb2.GetRunResponse(
            spec=store_pb2.RunSpec.FromString(spec), epoch=int(epoch), update=int(update), finished=finished == b"1"
        )

    async def close_run(self, request: store_pb2.CloseRunRequest) -> store_pb2.CloseRunResponse:
        """Grant no further jobs. After the last update, or a complete run, free what nobody will train any more."""
        await self.call("close_run", check_name("run", request.run), request.epoch, int(request.complete))
        return store_pb2.CloseRunResponse()

    async def get_stats(self, request: store_pb2.GetStatsRequest) -> store_pb2.GetStatsResponse:
        """Counters and gauges of a run."""
        reply = await self.call("stats", check_name("run", request.run))
        update, open_groups, complete, leased, granted, workers, held, counters, sums, staleness = reply
        await self.memory.share()
        histogram = {int(key): max(0, int(value)) for key, value in _pairs(staleness).items()}
        return store_pb2.GetStatsResponse(
            update=int(update),
            open_groups=open_groups,
            complete_groups=complete,
            leased_groups=leased,
            granted_jobs=granted,
            workers=workers,
            bytes=max(0, int(held)),
            redis_used=self.memory.used,
            redis_limit=self.memory.limit,
            counters={key.decode(): max(0, int(value)) for key, value in _pairs(counters).items()},
            sums={key.decode(): float(value) for key, value in _pairs(sums).items()},
            staleness=[histogram.get(index, 0) for index in range(max(histogram, default=-1) + 1)],
        )


def _record(spec: store_pb2.RunSpec) -> list[Argument]:
    """The fields that the scripts read, as name, value, name, value, ..."""
    record: dict[str, Argument] = {
        "group_size": spec.group_size,
        "groups_per_update": spec.groups_per_update,
        "staleness": spec.staleness,
        "total_updates": spec.total_updates,
        "filter_uniform": int(spec.filter_uniform),
        "max_attempts": spec.max_attempts,
        "on_failure": spec.on_failure,
        "grant_ms": max(1, math.ceil(spec.grant_seconds * 1000)),
        "seed_base": str(spec.seed_base),
        "end_on_success": int(spec.end_on_success),
        "tasks": len(spec.tasks),
    }
    for index, share in enumerate(spec.tasks, 1):
        record |= {f"task:{index}": share.task, f"weight:{index}": repr(share.weight)}
    return [part for pair in record.items() for part in pair]


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
