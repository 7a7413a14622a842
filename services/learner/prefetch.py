"""The prefetch thread: lease, fetch, decode, validate, preprocess. The training lane finds ready groups in a queue.

One bad group is refused with its reason and nobody else suffers. The queue is bounded in groups.
"""

import queue
import time
from dataclasses import dataclass

import structlog

from services.common.errors import Exhausted, InvalidInput, NotFound, Superseded, Unavailable
from services.common.telemetry import BUSY, Telemetry
from services.learner.collected import Collected
from services.learner.episodes import EpisodeRules, PreparedGroup, prepare_group
from services.learner.ledger import Ledger, see_statistics
from services.learner.session import Consumed, Session
from services.learner.source import LeasedGroup, Store
from services.learner.threads import Background, Failures, delays
from services.policies.base import Policy

log = structlog.get_logger()

LEASE_SECONDS = 2.0


@dataclass(frozen=True)
class ReadyGroup:
    """A prepared group and the epoch under which it was leased."""

    epoch: int
    group: PreparedGroup


class Prefetch:
    """Leases ahead of the training lane, never more than `room` groups. The policy is only read (`preprocess`)."""

    def __init__(
        self,
        store: Store,
        session: Session,
        consumed: Consumed,
        collected: Collected,
        ledger: Ledger,
        policy: Policy,
        rules: EpisodeRules,
        room: int,
        telemetry: Telemetry,
        failures: Failures,
    ) -> None:
        self._store, self._session, self._consumed, self._ledger = store, session, consumed, ledger
        self._collected, self._policy, self._rules, self._telemetry = collected, policy, rules, telemetry
        self._ready: queue.Queue[ReadyGroup] = queue.Queue(room)
        self._lane = telemetry.lane("prefetch")
        self._thread = Background("prefetch", self._run, failures)

    def start(self) -> None:
        """Start leasing."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Stop leasing; leased groups go back with the next learner's first lease."""
        return self._thread.stop(seconds)

    def take(self, seconds: float) -> PreparedGroup | None:
        """The next group of the current epoch in admission order; None if there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                ready = self._ready.get(timeout=left)
            except queue.Empty:
                return None
            self._telemetry.gauge("queue/prefetch", self._ready.qsize())
            if ready.epoch == self._session.epoch:
                return ready.group
            self._telemetry.count("groups_dropped")  # leased from a store that has lost the run since
        return None

    def _run(self) -> None:
        stopping = self._thread.stopping
        while not stopping.is_set():
            if not self._session.wait_usable(0.5):
                continue
            epoch, room = self._session.epoch, self._ready.maxsize - self._ready.qsize()
            if room <= 0:
                with self._lane.during("full"):
                    stopping.wait(0.02)
                continue
            for leased in self._lease(epoch, room):
                self._lane.set(BUSY)
                self._prepare(epoch, leased)

    def _lease(self, epoch: int, room: int) -> list[LeasedGroup]:
        """Complete groups, or none: after the wait, or when the run was lost."""
        self._lane.set("lease")
        for attempt in delays(self._thread.stopping):
            try:
                groups = self._store.lease(epoch, room, LEASE_SECONDS)
            except (Unavailable, Exhausted) as error:  # groups of a lost reply come with the next one
                self._tell("store", f"waiting: {error}", first=attempt == 0)
                continue
            except NotFound as error:
                self._session.report_lost(epoch, str(error))
                return []
            except Superseded:
                if epoch != self._session.epoch:
                    return []
                raise
            self._tell("store", "connected")
            if not groups:
                see_statistics(self._store, self._collected)
            return groups
        return []

    def _prepare(self, epoch: int, leased: LeasedGroup) -> None:
        """Fetch and check one group, then queue it; refuse it if it is not fit."""
        if leased.trained_update:
            return  # trained and in the checkpoint we came from; its ack frees it
        if (update := self._consumed.update_of(leased.group)) is not None:
            # The store forgot what we did with it (Redis lost its last second, or the learner died before it said).
            self._ledger.settle(epoch, update, leased.group)
            return
        for attempt in delays(self._thread.stopping):
            try:
                members = self._store.fetch(leased)
                group = prepare_group(leased.group, leased.task, members, self._policy, self._rules)
            except (Unavailable, Exhausted) as error:
                self._tell("store", f"waiting: {error}", first=attempt == 0)
                continue
            except (InvalidInput, NotFound) as error:
                log.warning("group refused", group=leased.group, reason=str(error))
                self._telemetry.count("groups_refused")
                self._ledger.refuse(epoch, leased.group, str(error))
                return
            self._put(ReadyGroup(epoch, group))
            return

    def _put(self, ready: ReadyGroup) -> None:
        while not self._thread.stopping.is_set():
            try:
                self._ready.put(ready, timeout=0.5)
            except queue.Full:
                continue
            self._telemetry.gauge("queue/prefetch", self._ready.qsize())
            return

    def _tell(self, name: str, fact: str, first: bool = False) -> None:
        if first:
            log.warning("store call waits", reason=fact)
        self._telemetry.facts[name] = fact
