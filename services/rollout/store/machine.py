"""The rollout store: one replica of the state machine that lives in Redis.

    live --(all members filled)--> complete --(longest finished prefix)--> streamed --> leased --> trained --> acked
     ^          | no signal, or failed for good                             | nack             |
     |          v                                                           v                  | rollback
     +---- discarded and replaced                                      dead letter             +--> live

Methods take and return the messages of store.proto and raise the errors of services/common/errors.py; they know
nothing of gRPC. Every state change is one script in `lua/`, so replicas need no leader and no clock.
"""

from services.rollout.store.delivery import DeliveryCalls
from services.rollout.store.evaluations import EvaluationCalls
from services.rollout.store.inspection import InspectionCalls
from services.rollout.store.intake import IntakeCalls
from services.rollout.store.jobs import JobCalls
from services.rollout.store.learners import LearnerCalls


class RolloutStore(InspectionCalls, JobCalls, IntakeCalls, LearnerCalls, DeliveryCalls, EvaluationCalls):
    """One replica. Run `maintain()` and `wakeups.listen()` as tasks beside it."""

    def stop_waiting(self) -> None:
        """Let long polls answer at once, before the server drains."""
        self.wakeups.close()

    async def close(self) -> None:
        """Close the connections. Arenas without bytes of a run that goes on are deleted."""
        await self.settle()
        if self.depot is not None:
            self.depot.close()
        await self.link.close()
