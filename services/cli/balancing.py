"""Carries out what the balance decides: starts and stops simulators and rollout workers of a running run."""

import os
import time

from services.cli.balance import Balance, Change, Split
from services.cli.processes import Processes
from services.cli.session import Session

DRAIN_SECONDS = 20.0
"""A simulator is stopped so long after workers were told of it: they leave at the end of their episodes."""


class Balancer:
    """Watches a run's samples; does nothing unless run.balance is on. processes: as many as there are now."""

    def __init__(self, processes: Processes, session: Session) -> None:
        run, cores = processes.recipe.run, len(os.sched_getaffinity(0))
        most = Split(run.most_sims or max(run.sims, cores), run.most_rollouts or max(run.rollouts, cores))
        self.processes, self._session = processes, session
        self._balance = Balance(Split(run.sims, run.rollouts), most)
        self._leaving: list[tuple[float, str]] = []
        self._coming: set[str] = set()

    def step(self) -> None:
        """Look, and change at most one thing. Called a few times a second."""
        if not self.processes.balances:
            return
        while self._leaving and self._leaving[0][0] < time.monotonic():
            self._end(self._leaving.pop(0)[1])
        latest = self._session.latest
        if latest is None or self._leaving:  # what is leaving must be gone before its name is used again
            return
        self._coming -= latest.roles.keys()
        if self._coming:
            self._balance.hold(latest)
        elif change := self._balance.look(latest):
            self._apply(change)

    def _apply(self, change: Change) -> None:
        before, now = self.processes, self.processes.sized(change.split.sims, change.split.rollouts)
        self.processes = now
        self._session.tell(f"balance: {now_in_words(change)}")
        now.write_sims()
        started = [*now.sim()[len(before.sims) :], *now.rollout()[len(before.rollouts) :]]
        self._session.start(started)
        self._coming = {spec.name for spec in started}
        for spec in started:
            self._session.follow(spec.name, now.address(spec.name))
        self._leaving += [(time.monotonic() + DRAIN_SECONDS, name) for name in before.sims[len(now.sims) :]]
        for name in before.rollouts[len(now.rollouts) :]:
            self._end(name)

    def _end(self, name: str) -> None:
        self._session.forget(name)
        self._session.stop([name])


def now_in_words(change: Change) -> str:
    """A change for the log."""
    return f"{change.split.sims} simulators and {change.split.rollouts} rollout workers from now on ({change.reason})"
