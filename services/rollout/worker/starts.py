"""Start states: the first worker of a group makes it, the store keeps it, every member begins from it."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dvla.v1 import store_pb2

KEEP = 256

Make = Callable[[str, int], Awaitable[bytes]]
Store = Callable[[int, bytes], Awaitable[bytes]]


class Starts:
    """Makes each group's start state once per worker, however many members are granted at the same time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: OrderedDict[int, _Group] = OrderedDict()

    async def of(self, job: store_pb2.Job, make: Make) -> bytes:
        """The start state of a job; `make` asks the job's simulator for it."""
        if job.start:
            return job.start
        if job.kind == store_pb2.JOB_KIND_EVALUATE:
            return await make(job.task, job.seed)
        group = self._groups.setdefault(job.key.group, _Group())
        while len(self._groups) > KEEP:
            self._groups.popitem(last=False)
        async with group.making:  # if the first one's simulator fails, the next member tries with its own
            if group.start is None:
                group.start = await self._store(job.key.group, await make(job.task, job.seed))
        return group.start


@dataclass
class _Group:
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    start: bytes | None = None
