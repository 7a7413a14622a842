"""What workers deliver, before any filter: success of training episodes, and why nothing arrives."""

import threading
from collections import deque

from services.learner.source import StoreStats


class Collected:
    """Differences between the store's counters over time. Thread-safe.

    window: episodes over which the recent success is measured, at least.
    """

    def __init__(self, window: int) -> None:
        self._lock = threading.Lock()
        self._window = window
        self._history: deque[StoreStats] = deque()
        self._base: StoreStats | None = None
        self.newest = StoreStats()

    def see(self, stats: StoreStats) -> None:
        """New counters. Counters that fell mean a store that lost its data: what was known is void."""
        with self._lock:
            if self._history and _accepted(stats) < _accepted(self._history[-1]):
                self._history.clear()
                self._base = None
            self._base = self._base or stats
            self.newest = stats
            if not self._history or _accepted(stats) > _accepted(self._history[-1]):
                self._history.append(stats)
            while len(self._history) > 2 and _accepted(stats) - _accepted(self._history[1]) >= self._window:
                self._history.popleft()

    def close_update(self) -> dict[str, float]:
        """Metrics of what was accepted since the last call; counts are totals of the run."""
        with self._lock:
            base, now = self._base or StoreStats(), self.newest
            self._base = now
        metrics = {f"store/{name}": float(value) for name, value in sorted(now.counters.items())}
        episodes = _accepted(now) - _accepted(base)
        if episodes > 0:
            metrics["success"] = (now.sum("accepted_success") - base.sum("accepted_success")) / episodes
            metrics["accepted_episode_steps"] = (now.sum("accepted_length") - base.sum("accepted_length")) / episodes
        return metrics | {"env_steps_accepted": float(now.counter("accepted_steps"))}

    def recent_success(self) -> float:
        """Share of successes among the newest accepted episodes; 0 before a whole window of them was seen."""
        with self._lock:
            if not self._history:
                return 0.0
            first, last = self._history[0], self._history[-1]
        episodes = _accepted(last) - _accepted(first)
        if episodes < self._window:
            return 0.0
        return (last.sum("accepted_success") - first.sum("accepted_success")) / episodes

    def explain(self) -> str:
        """Why the learner waits, in words, as far as the store's counters tell."""
        with self._lock:
            base, now = self._base or StoreStats(), self.newest
        uniform = now.counter("discarded_uniform") - base.counter("discarded_uniform")
        if not now.workers:
            return "no rollout worker is alive"
        if uniform:
            return f"no informative groups: all episodes scored the same in each of the last {uniform} groups"
        return f"{now.workers} workers, {now.open_groups} groups open, {now.complete_groups} complete"


def _accepted(stats: StoreStats) -> int:
    return stats.counter("accepted")
