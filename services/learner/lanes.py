"""The learner's background threads and what they share, started and stopped together."""

from dataclasses import dataclass

import structlog

from services.learner.checkpointer import Checkpointer
from services.learner.distribution import Distribution
from services.learner.journal import Journal
from services.learner.ledger import Ledger
from services.learner.prefetch import Prefetch
from services.learner.session import Session
from services.learner.source import Store
from services.learner.threads import Failures

log = structlog.get_logger()


@dataclass(frozen=True)
class Lanes:
    """Everything beside the training lane."""

    store: Store
    session: Session
    failures: Failures
    ledger: Ledger
    prefetch: Prefetch
    distribution: Distribution
    checkpointer: Checkpointer
    journal: Journal

    def start(self) -> None:
        """Start all threads; prefetch holds until the session is open."""
        for thread in (self.ledger, self.distribution, self.checkpointer, self.prefetch):
            thread.start()

    def stop(self, seconds: float) -> None:
        """Stop them in the order of the data's way; each gets up to `seconds` to finish what it has."""
        ended = {
            "prefetch": self.prefetch.stop(seconds),
            "checkpoint": self.checkpointer.stop(seconds),
            "ledger": self.ledger.stop(seconds),
            "distribution": self.distribution.stop(seconds),
        }
        if busy := [name for name, done in ended.items() if not done]:
            log.warning("threads left unfinished work", threads=busy, seconds=seconds)
        if ended["ledger"]:
            self.journal.close()
