"""What the parts of the store share: the link to Redis, scripts, memory, wake-ups, and refusals as errors."""

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from dvla.v1 import store_pb2

from services.common.errors import DvlaError, InvalidInput, NotFound, Superseded, Unavailable
from services.rollout.store.depot import Depot
from services.rollout.store.keys import RUNS_KEY
from services.rollout.store.memory import MemoryGauge
from services.rollout.store.owners import OtherReplicas, Owners
from services.rollout.store.redis_client import RedisLink
from services.rollout.store.scripts import Argument, Reply, Scripts
from services.rollout.store.waiting import Wakeups

_SPEC_SECONDS = 5.0


class StoreBase:
    """State of one replica: connections, its arenas, and a short-lived copy of run specs; all else is in Redis.

    depot: arenas for workers that share memory; None: all bytes lie in Redis. others, address: the other replicas, and
    where these reach this one.
    """

    def __init__(
        self,
        link: RedisLink,
        skew_ms: Callable[[], int] = lambda: 0,
        depot: Depot | None = None,
        others: OtherReplicas | None = None,
        address: str = "",
    ) -> None:
        self.link, self.depot, self.others = link, depot, others
        self.owners = Owners(link, depot, address)
        self.scripts = Scripts(link, skew_ms)
        self.memory = MemoryGauge(link)
        self.wakeups = Wakeups(link)
        self._specs: dict[str, tuple[float, store_pb2.RunSpec]] = {}

    async def call(self, name: str, run: str, *arguments: Argument) -> Reply:
        """Run a script and return what follows its OK; raises the error that its refusal stands for."""
        status, *facts = await self.scripts.call(name, run, *arguments)
        if status == b"OK":
            return facts
        if status == b"NO_RUN":
            self._specs.pop(run, None)
        raise _refusal(status.decode(), run, facts)

    async def spec(self, run: str) -> store_pb2.RunSpec:
        """The run's spec, at most a few seconds old (a run whose Redis was replaced may come back with another)."""
        known = self._specs.get(run)
        if known and time.monotonic() - known[0] < _SPEC_SECONDS:
            return known[1]
        self._specs.pop(run, None)
        spec = store_pb2.RunSpec.FromString((await self.call("get_run", run))[0])
        self._specs[run] = (time.monotonic(), spec)
        return spec

    async def remember(self, run: str) -> None:
        """Have replicas sweep this run, until there is nothing left to do."""

        async def name() -> None:
            if not await self.link.client.sismember(RUNS_KEY, run):  # else it must work at the memory limit too
                await self.link.client.sadd(RUNS_KEY, run)

        await self.link.retrying("naming the run", name)


def _refusal(status: str, run: str, facts: list[Any]) -> DvlaError:
    fact = facts[0].decode(errors="replace") if facts else ""
    if status == "NO_RUN":
        return NotFound(f"run {run!r} is not in this store; it is not open yet, or Redis was replaced: open it (again)")
    if status == "FENCED":
        return Superseded(f"another learner opened run {run!r} with epoch {fact}; this one must stop")
    if status == "AHEAD":
        return NotFound(f"run {run!r} knows epochs up to {fact} only, so Redis lost later ones: open the run again")
    if status == "BLOB_LOST":
        return Unavailable(f"the upload to run {run!r} took so long that it was swept as abandoned; send it again")
    kinds: dict[str, type[DvlaError]] = {"INVALID": InvalidInput, "MISSING": NotFound, "SUPERSEDED": Superseded}
    return kinds.get(status, DvlaError)(f"run {run!r}: {fact or status}")


def request_id() -> str:
    """An id for one request, so that repeating it grants nothing twice."""
    return uuid4().hex
