"""How full Redis is. Appends are refused early, so that there is always room to train, ack and free."""

import time

from services.common.errors import Exhausted
from services.rollout.store.redis_client import RedisLink, check_policy

REFUSE_SHARE = 0.85
"""Share of maxmemory from which appends are refused."""
EVICT_SHARE = 0.75
"""Share from which the bytes of trained groups are given up, oldest first."""
OVERHEAD = 1.25
"""Redis memory per payload byte, measured at 1 MB chunks."""
_SAMPLE_SECONDS = 0.05


class MemoryGauge:
    """Of the fullest node in a cluster.

    Samples `INFO memory` at most every 50 ms and adds what this replica wrote since. Bytes; limit 0 for none.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._sampled_at = -1.0
        self._written = 0
        self._used = 0
        self.limit = 0

    @property
    def used(self) -> int:
        """Memory in use, estimated."""
        return self._used + int(self._written * OVERHEAD)

    async def share(self, fresh: bool = False) -> float:
        """Share of the limit in use, 0 without a limit. Raises Unsupported if Redis may evict keys by now."""
        if fresh or time.monotonic() - self._sampled_at > _SAMPLE_SECONDS:
            self._sampled_at, self._written = time.monotonic(), 0  # first, so that one caller samples
            nodes = await self._link.info("memory")
            for info in nodes:
                check_policy(str(info["maxmemory_policy"]))
            fullest = max(nodes, key=lambda info: int(info["used_memory"]) / (int(info["maxmemory"]) or 2**62))
            self._used, self.limit = int(fullest["used_memory"]), int(fullest["maxmemory"])
        return self.used / self.limit if self.limit else 0.0

    async def full(self, length: int) -> bool:
        """True if so many more bytes would bring Redis to 85 % of its limit."""
        share = await self.share()
        return self.limit > 0 and share + length * OVERHEAD / self.limit >= REFUSE_SHARE

    async def require_room(self, length: int) -> None:
        """Raise Exhausted if so many more bytes would bring Redis to 85 % of its limit."""
        if await self.full(length):
            raise Exhausted(
                f"Redis uses {self.used / 1e6:.0f} of {self.limit / 1e6:.0f} MB; appends are refused from "
                f"{REFUSE_SHARE:.0%}, repeat this one when the learner has freed some"
            )

    def wrote(self, length: int) -> None:
        """Count bytes written since the last sample."""
        self._written += length
