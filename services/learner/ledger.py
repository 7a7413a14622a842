"""The ledger thread: tells the store what became of its groups, in order, so that training never waits for it.

Exactly once rests on this order: `trained` after the update, `ack` only after a durable checkpoint that contains
it. Every call is safe to repeat. Calls of an older epoch are dropped: opening the run again said all they would.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from services.common.errors import DvlaError, Exhausted, InvalidInput, NotFound, Superseded, Unavailable
from services.common.telemetry import BUSY, Telemetry
from services.learner.collected import Collected
from services.learner.session import Consumed, Session
from services.learner.source import Store
from services.learner.threads import Background, Failures, delays

log = structlog.get_logger()


@dataclass(frozen=True)
class Entry:
    """A call for the store, and what to do once it has answered or was dropped."""

    epoch: int
    call: Callable[[], object]
    what: str
    done: Callable[[], None] | None = None


class Ledger:
    """Queued calls to the store."""

    def __init__(
        self,
        store: Store,
        session: Session,
        consumed: Consumed,
        collected: Collected,
        telemetry: Telemetry,
        failures: Failures,
    ) -> None:
        self._store, self._session, self._consumed, self._collected = store, session, consumed, collected
        self._lane = telemetry.lane("ledger", "empty")
        self._telemetry = telemetry
        self._entries: queue.Queue[Entry] = queue.Queue()
        self._thread = Background("ledger", self._run, failures)

    def start(self) -> None:
        """Start calling."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Make the calls that are left, for at most `seconds`; the next learner settles what is not said."""
        self._entries.put(Entry(0, self._thread.stopping.set, "the end"))
        self._thread.join(seconds)
        return self._thread.stop(1.0)

    def trained(self, epoch: int, update: int, groups: Sequence[int], done: Callable[[], None]) -> None:
        """These groups made this update; `done` runs here afterwards, when fresh statistics were collected."""

        def call() -> None:
            self._store.trained(epoch, update, groups)
            self._session.confirm()
            see_statistics(self._store, self._collected)

        self._entries.put(Entry(epoch, call, f"trained {update}", done))

    def ack(self, epoch: int, update: int) -> None:
        """A checkpoint of `update` is durable."""

        def call() -> None:
            self._store.ack(epoch, update)
            self._consumed.confirm_ack(update)

        self._entries.put(Entry(epoch, call, f"ack {update}"))

    def restate(self, epoch: int, update: int, groups: Sequence[int]) -> None:
        """Say once more, in a run that was just opened, which groups made an earlier update: word of it may be lost."""

        def call() -> None:
            try:
                self._store.trained(epoch, update, groups)
            except InvalidInput as error:
                # It even forgot that they were leased. It will offer them again; then they are settled one by one.
                log.info("update not restated", update=update, reason=str(error))

        self._entries.put(Entry(epoch, call, f"restate {update}"))

    def settle(self, epoch: int, update: int, group: int) -> None:
        """The store offers a group that made this update already: record that, so that it is not trained twice."""
        log.info("group was trained already", group=group, update=update)
        self._telemetry.count("groups_settled")
        self._entries.put(Entry(epoch, lambda: self._store.trained(epoch, update, [group]), f"settle {group}"))

    def refuse(self, epoch: int, group: int, reason: str, discard: bool = False) -> None:
        """This group cannot be trained; discard: although nothing is wrong with it."""
        self._entries.put(Entry(epoch, lambda: self._store.nack(epoch, group, reason, discard), f"refuse {group}"))

    def close_run(self, epoch: int) -> None:
        """The run is over."""
        self._entries.put(Entry(epoch, lambda: self._store.close_run(epoch), "close"))

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            try:
                entry = self._entries.get(timeout=0.5)
            except queue.Empty:
                continue
            with self._lane.during(BUSY):
                self._make(entry)
                if entry.done:
                    entry.done()

    def _make(self, entry: Entry) -> None:
        for attempt in delays(self._thread.stopping):
            if entry.epoch and entry.epoch != self._session.epoch:
                log.info("call of an older epoch dropped", what=entry.what, epoch=entry.epoch)
                return
            if entry.epoch and not self._session.usable:
                continue
            try:
                entry.call()
            except (Unavailable, Exhausted) as error:
                if attempt == 0:
                    log.warning("store call waits", what=entry.what, reason=str(error))
            except (NotFound, InvalidInput) as error:
                # Its record of the run is not ours: it lost its data, or its last second. Opening again repairs it.
                self._session.report_lost(entry.epoch, f"{entry.what}: {error}")
            except Superseded:
                if entry.epoch == self._session.epoch:
                    raise
            else:
                return


def see_statistics(store: Store, collected: Collected) -> None:
    """Collect the store's counters; without them while it is away."""
    try:
        collected.see(store.stats())
    except DvlaError as error:
        log.debug("no statistics", reason=str(error))
