"""Start states: the first worker of a group makes it, the store keeps it, every member begins from it."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from dvla.v1 import store_pb2

KEEP = 256

Make = Callable[[str, int], Awaitable[bytes]]
Store = Callable[[int, bytes], Awaitable[bytes]]


class Starts:
    """Makes each group's start state once per worker, however many members are granted at the same time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: OrderedDict[int, asyncio.Future[bytes]] = OrderedDict()

    async def of(self, job: store_pb2.Job, make: Make) -> bytes:
        """The start state of a job; `make` asks the job's simulator for it."""
        if job.start:
            return job.start
        if job.kind == store_pb2.JOB_KIND_EVALUATE:
            return await make(job.task, job.seed)
        group = job.key.group
        future = self._groups.get(group)
        if future is None:
            future = asyncio.ensure_future(self._make(job, make))
            self._groups[group] = future
            while len(self._groups) > KEEP:
                self._groups.popitem(last=False)
        try:
            return await asyncio.shield(future)
        except BaseException:
            if future.done():
                self._groups.pop(group, None)  # a failure is not remembered; the next member tries again
            raise

    async def _make(self, job: store_pb2.Job, make: Make) -> bytes:
        return await self._store(job.key.group, await make(job.task, job.seed))
