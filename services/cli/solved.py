"""Notices that a task is solved: then no group carries signal any more, and training would wait for ever."""

from collections import deque

from services.cli.samples import Sample


class Solved:
    """Success of the latest `episodes` training episodes against a bound; 0 never counts as solved."""

    def __init__(self, bound: float, episodes: int) -> None:
        self._bound, self._episodes = bound, episodes
        self._seen: deque[tuple[int, float]] = deque()

    def look(self, sample: Sample | None) -> str:
        """The reason to stop, or nothing."""
        if sample is None or sample.store is None or not self._bound:
            return ""
        accepted = sample.store.counters.get("accepted", 0)
        wins = sample.store.sums.get("accepted_success", 0.0)
        if self._seen and accepted < self._seen[-1][0]:
            self._seen.clear()  # the counters began anew
        self._seen.append((accepted, wins))
        while len(self._seen) > 1 and accepted - self._seen[1][0] >= self._episodes:
            self._seen.popleft()
        since, before = self._seen[0]
        if accepted - since < self._episodes or (wins - before) / (accepted - since) < self._bound:
            return ""
        return f"solved: {wins - before:.0f} of the latest {accepted - since} training episodes succeeded"
