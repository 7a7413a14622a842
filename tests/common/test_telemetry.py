"""Lanes account for every moment once; metrics survive threads; Prometheus reads it all."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from services.common import telemetry
from services.common.telemetry import BUSY, Lane, PrometheusCollector, Telemetry


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


states = st.sampled_from([BUSY, "weights", "sim", "store"])
turns = st.lists(st.tuples(states, st.integers(0, 50)), max_size=30)


@given(turns=turns)
def test_seconds_by_state_sum_to_the_time_that_passed(turns: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(telemetry, "time", clock)
        lane = Lane("sampling")
        expected: dict[str, float] = {"start": 0.0}
        current = "start"
        for state, seconds in turns:
            assert lane.set(state) == current
            current = state
            clock.now += seconds
            expected[state] = expected.get(state, 0.0) + seconds
            assert lane.seconds() == expected
        assert sum(lane.seconds().values()) == clock.now - 100.0


def test_during_returns_to_the_state_before_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(telemetry, "time", clock)
    lane = Lane("receiving", "weights")

    def fail() -> None:
        with lane.during(BUSY):
            clock.now += 2
            with lane.during("disk"):
                clock.now += 3
            clock.now += 4
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    clock.now += 5
    assert lane.seconds() == {"weights": 5.0, BUSY: 6.0, "disk": 3.0}


def test_lanes_and_metrics_are_exact_under_many_threads() -> None:
    told = Telemetry("rollout", "r0")
    began = time.monotonic()
    lane = told.lane("sampling")

    def work(number: int) -> None:
        for step in range(500):
            told.count("steps")
            told.count("bytes", 3)
            told.gauge(f"last/{number}", step)
            told.lane("sampling").set(f"state{step % 3}")
            assert min(lane.seconds().values()) >= 0.0
            told.metrics()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    metrics = told.metrics()
    assert metrics["steps"] == 4000
    assert metrics["bytes"] == 12000
    assert [metrics[f"last/{n}"] for n in range(8)] == [499] * 8
    assert told.lanes == {"sampling": lane}
    total = sum(lane.seconds().values())
    assert 0 < total <= time.monotonic() - began


def test_prometheus_shows_metrics_and_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(telemetry, "time", clock)
    told = Telemetry("store", "s0")
    told.update({"queue/prefetch": 4, "rate": 0.5})
    told.lane("work", "redis")
    clock.now += 7
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(told))
    text = generate_latest(registry).decode()
    assert 'dvla_metric{name="queue/prefetch",replica="s0",role="store"} 4.0' in text
    assert 'dvla_metric{name="rate",replica="s0",role="store"} 0.5' in text
    assert 'dvla_lane_seconds{lane="work",replica="s0",role="store",state="redis"} 7.0' in text
