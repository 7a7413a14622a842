"""Environment processes: a death is noticed at once, costs only its own sessions, and is repaired."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from dvla.v1 import sim_pb2

from services.common import codec
from services.common.errors import DvlaError, Exhausted, InvalidInput, NotFound, Unavailable, Unsupported
from services.common.spec import Array
from services.sim.engine import SessionOptions
from services.sim.env import Factory, ProcessEnv
from services.sim.host import Host, HostConfig, HostedSession
from tests.sim import trouble

SECONDS = 120.0  # a loaded machine starts processes slowly


@contextmanager
def hosting(factory: Factory = trouble.small, wait: bool = True, **settings: float) -> Iterator[Host]:
    changed = threading.Event()
    host = Host(factory, HostConfig(**settings), changed.set)  # type: ignore[arg-type]
    host.start()
    try:
        if wait:
            until(lambda: all(env.ready for env in host.envs))
        yield host
    finally:
        host.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def open_session(host: Host) -> HostedSession:
    session = host.open(SessionOptions())
    session.opened.result(SECONDS)
    return session


def start(host: Host, session: HostedSession) -> None:
    state = host.make_start("reach", 3).result(SECONDS)
    request = sim_pb2.Advance()
    for slot in range(session.slots):
        request.reset.add(slot=slot, task="reach", start=state, end_on_success=True)
    session.advance(request).result(SECONDS)


def turn(first: float | np.float32 = 0.0, slots: tuple[int, ...] = (0, 1)) -> sim_pb2.Advance:
    actions: Array = np.full((len(slots), 2, 2), first, np.float32)
    payload, _ = codec.encode({"action": actions})
    return sim_pb2.Advance(slots=slots, actions=payload)


def executed(session: HostedSession) -> list[int]:
    reply, _ = session.advance(turn()).result(SECONDS)
    return [outcome.executed for outcome in reply.outcomes]


@pytest.fixture(scope="module")
def two() -> Iterator[Host]:
    with hosting(sessions=2, processes=2) as host:
        yield host


def pids(host: Host) -> list[int]:
    return [env.pid for env in host.envs if isinstance(env, ProcessEnv)]


def test_s30_a_killed_process_loses_only_its_sessions_and_comes_back(two: Host) -> None:
    first, second = open_session(two), open_session(two)
    start(two, first)
    start(two, second)
    before = pids(two)
    os.kill(before[0], signal.SIGKILL)
    reason = first.lost.result(10)
    assert "died: signal 9" in reason
    assert "open a new session" in reason
    with pytest.raises(Unavailable):
        first.advance(turn()).result(SECONDS)
    assert executed(second) == [2, 2], "the other process goes on with its episode"
    assert not second.lost.done()
    until(lambda: all(env.ready for env in two.envs))
    assert pids(two)[0] != before[0]
    assert two.restarts == 1
    first.close()
    again = open_session(two)
    start(two, again)
    assert executed(again) == [2, 2]
    again.close()
    second.close()


@pytest.mark.parametrize("how", [trouble.DIE, trouble.DAMAGED])
def test_a_process_that_dies_in_a_turn_fails_that_turn(two: Host, how: np.float32) -> None:
    session = open_session(two)
    start(two, session)
    with pytest.raises(Unavailable, match=r"died during this turn|contacts were lost"):
        session.advance(turn(how)).result(10)
    assert session.lost.result(10)
    session.close()
    until(lambda: all(env.ready for env in two.envs))


def test_a_bug_in_a_simulator_ends_the_turn_not_the_process(two: Host) -> None:
    before = pids(two)
    session = open_session(two)
    start(two, session)
    with pytest.raises(DvlaError, match="ZeroDivisionError: a bug in the simulator"):
        session.advance(turn(trouble.BUG)).result(SECONDS)
    assert executed(session) == [2, 2]
    session.close()
    assert pids(two) == before


def test_sessions_are_counted_and_reused(two: Host) -> None:
    sessions = [open_session(two), open_session(two)]
    with pytest.raises(Exhausted, match="all 2 sessions are taken"):
        two.open(SessionOptions())
    assert two.describe().open_sessions == 2
    sessions[0].close()
    again = open_session(two)
    with pytest.raises(InvalidInput, match="no running episode"):
        again.advance(turn()).result(SECONDS)  # nothing of the previous session is left
    for session in (again, sessions[1]):
        session.close()


def test_starts_are_equal_from_every_process(two: Host) -> None:
    assert len({two.make_start("reach", 11).result(SECONDS) for _ in range(6)}) == 1
    with pytest.raises(NotFound, match="this simulator offers reach"):
        two.make_start("nope", 0).result(SECONDS)


def test_a_frozen_process_is_replaced() -> None:
    with hosting(sessions=1, processes=1, step_timeout=1.0) as host:
        session = open_session(host)
        start(host, session)
        before = pids(host)
        with pytest.raises(Unavailable):
            session.advance(turn(trouble.FREEZE)).result(10)
        until(lambda: host.serving and pids(host) != before)
        session.close()
        start(host, open_session(host))


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [(trouble.impossible, Unsupported, "no Vulkan device"), (trouble.broken, DvlaError, "a bug in the constructor")],
)
@pytest.mark.parametrize("processes", [0, 1])
def test_a_simulator_that_cannot_be_built_fails_the_host(
    factory: Factory, kind: type[DvlaError], message: str, processes: int
) -> None:
    with hosting(factory, wait=False, sessions=1, processes=processes) as host:
        error = host.failed.result(SECONDS)
        assert isinstance(error, kind)
        assert message in str(error)
        assert not host.serving
        with pytest.raises(Unavailable, match=message):
            host.open(SessionOptions())


def test_a_thread_serves_as_well() -> None:
    with hosting(sessions=2, processes=0) as host:
        one, other = open_session(host), open_session(host)
        start(host, one)
        start(host, other)
        assert executed(one) == executed(other) == [2, 2]
    assert "shutting down" in one.lost.result(SECONDS)


def test_children_end_with_the_host() -> None:
    with hosting(sessions=1, processes=1) as host:
        (pid,) = pids(host)
    until(lambda: not os.path.exists(f"/proc/{pid}"))
