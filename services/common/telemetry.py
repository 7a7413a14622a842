"""What a role says of itself: lanes (busy or idle, and why, and when), metrics and facts.

One `Telemetry` per process; the role service, the Prometheus endpoint and the run report all read it.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

BUSY = "busy"
KEPT_SPANS = 4096
"""Newest spans that each lane remembers: some 400 KB, and minutes of a lane that changes 30 times a second."""


@dataclass(frozen=True)
class Spans:
    """Consecutive spans of a lane. begins: (monotonic seconds, state), each lasting until the next; the last is open.

    first: number of the first of them, counted since the lane began.
    """

    first: int
    begins: list[tuple[float, str]]


class Lane:
    """Time account of one lane: at every moment it is busy or idle for one reason. Thread-safe."""

    def __init__(self, name: str, state: str = "start") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._state = state
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._begins = deque([(self._since, state)], KEPT_SPANS)
        self._count = 1

    def set(self, state: str) -> str:
        """Switch to `BUSY` or to an idle reason; returns the previous state."""
        with self._lock:
            now = time.monotonic()  # inside the lock, or two threads could set the clock back
            previous = self._state
            if state != previous:
                self._seconds[previous] = self._seconds.get(previous, 0.0) + now - self._since
                self._state, self._since = state, now
                self._begins.append((now, state))
                self._count += 1
        return previous

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Be in `state` inside the block, then back in the previous one."""
        previous = self.set(state)
        try:
            yield
        finally:
            self.set(previous)

    def seconds(self) -> dict[str, float]:
        """Seconds by state so far, the current one included."""
        with self._lock:
            now = time.monotonic()
            out = dict(self._seconds)
            out[self._state] = out.get(self._state, 0.0) + now - self._since
        return out

    def spans(self, first: int = 0) -> Spans:
        """Spans from number `first` on, as far as they are still kept; the newest one at least."""
        with self._lock:
            oldest = self._count - len(self._begins)
            start = min(max(first, oldest), self._count - 1)
            return Spans(start, list(itertools.islice(self._begins, start - oldest, None)))


@dataclass
class Telemetry:
    """Lanes, metrics (floats by name, units in the name) and facts (words by name) of one process."""

    role: str
    name: str
    started: float = field(default_factory=time.monotonic)
    lanes: dict[str, Lane] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    _metrics: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lane(self, name: str, state: str = "start") -> Lane:
        """The lane of this name, made on first use."""
        with self._lock:
            return self.lanes.setdefault(name, Lane(name, state))

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        with self._lock:
            self._metrics[name] = self._metrics.get(name, 0.0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._metrics[name] = value

    def update(self, values: Mapping[str, float]) -> None:
        """Set many gauges."""
        with self._lock:
            self._metrics.update(values)

    def metrics(self) -> dict[str, float]:
        """A copy of all metrics."""
        with self._lock:
            return dict(self._metrics)


class PrometheusCollector(Collector):
    """Shows a `Telemetry` to prometheus_client: dvla_metric{name=...} and dvla_lane_seconds{lane=..., state=...}."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        """All metrics and lane times now."""
        who = [self._telemetry.role, self._telemetry.name]
        metrics = GaugeMetricFamily("dvla_metric", "Metrics of a role by name", labels=["role", "replica", "name"])
        for name, value in self._telemetry.metrics().items():
            metrics.add_metric([*who, name], value)
        lanes = GaugeMetricFamily(
            "dvla_lane_seconds", "Seconds of a lane by state", labels=["role", "replica", "lane", "state"]
        )
        for lane in list(self._telemetry.lanes.values()):
            for state, seconds in lane.seconds().items():
                lanes.add_metric([*who, lane.name, state], seconds)
        return [metrics, lanes]
