"""Spreads sessions over environments and knows which are up. Thread-safe; no simulator is imported here."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from dvla.v1 import sim_pb2

from services.common.errors import DvlaError, Exhausted, Unavailable
from services.sim.engine import RingPlace, SessionOptions
from services.sim.env import Env, Factory, ProcessEnv, ThreadEnv
from services.sim.pipe import Part

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class HostConfig:
    """How many sessions, in how many processes (0: in a thread), and how long to wait for them in seconds."""

    sessions: int = 2
    processes: int = 1
    step_timeout: float = 120.0
    start_timeout: float = 300.0


class Host:
    """All environments of one service. on_change: called from any thread when the set of live ones changes."""

    def __init__(self, factory: Factory, config: HostConfig, on_change: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._taken: set[tuple[Env, int]] = set()
        self.failed: Future[DvlaError] = Future()  # resolved when the last environment is given up
        self._tell = on_change
        count = max(config.processes, 1)
        shares = [config.sessions // count + (index < config.sessions % count) for index in range(count)]
        self.envs: list[Env] = [
            ProcessEnv(f"env-{index}", factory, share, self._changed, config.step_timeout, config.start_timeout)
            if config.processes
            else ThreadEnv(f"env-{index}", factory, share, self._changed)
            for index, share in enumerate(shares)
        ]
        self.sessions = config.sessions

    def start(self) -> None:
        """Start all environments in the background."""
        for env in self.envs:
            env.start()

    @property
    def serving(self) -> bool:
        """At least one environment is up."""
        return any(env.ready for env in self.envs)

    @property
    def open_sessions(self) -> int:
        """Sessions in use."""
        return len(self._taken)

    @property
    def restarts(self) -> int:
        """Environments that were started again, since the beginning."""
        return sum(max(env.lives - 1, 0) for env in self.envs)

    def describe(self) -> sim_pb2.DescribeResponse:
        """The spec and what is in use; raises Unavailable before the first environment is up."""
        env = self._any()
        return sim_pb2.DescribeResponse(
            spec=sim_pb2.SimSpec.FromString(env.spec),
            slots_per_session=env.num_slots,
            max_sessions=self.sessions,
            open_sessions=self.open_sessions,
        )

    def open(self, options: SessionOptions, place: RingPlace | None = None) -> "HostedSession":
        """Take a free session, in the environment with the most room. Raises Exhausted or Unavailable."""
        self._any()
        with self._lock:
            free = [
                (env, index)
                for env in self.envs
                if env.ready
                for index in range(env.sessions)
                if (env, index) not in self._taken
            ]
            if not free:
                raise Exhausted(f"all {self.sessions} sessions are taken; retry, or start another simulator")
            room = {env: sum(1 for other, _ in free if other is env) for env, _ in free}
            env, index = max(free, key=lambda pair: room[pair[0]])
            self._taken.add((env, index))
        return HostedSession(self, env, index, options, place)

    def make_start(self, task: str, seed: int) -> "Future[bytes]":
        """The start state of (task, seed), made by the least busy environment."""
        self._any()
        env = min((env for env in self.envs if env.ready), key=lambda env: env.pending)
        return _then(
            env.submit(env.lives, {"op": "start", "task": task, "seed": seed}), lambda reply: bytes(reply[1][0])
        )

    def close(self) -> None:
        """Stop everything."""
        for env in self.envs:
            env.close()

    def release(self, env: Env, index: int) -> None:
        """Free a session."""
        with self._lock:
            self._taken.discard((env, index))

    def _any(self) -> Env:
        for env in self.envs:
            if env.ready:
                return env
        problem = next((str(env.failure) for env in self.envs if env.failure), "")
        raise Unavailable(problem or "the simulator is starting; no environment is up yet")

    def _changed(self) -> None:
        failures = [env.failure for env in self.envs if env.failure]
        if len(failures) == len(self.envs) and not self.failed.done():
            self.failed.set_result(failures[0])
        self._tell()


class HostedSession:
    """Exclusive use of one simulator. lost: resolves with the reason if its environment goes down."""

    def __init__(
        self, host: Host, env: Env, index: int, options: SessionOptions, place: RingPlace | None = None
    ) -> None:
        self._host, self._env, self._index, self._shares = host, env, index, place is not None
        self._life, self.lost = env.enter(index)
        self.slots = env.num_slots
        header = {
            "op": "open",
            "session": index,
            "observation": list(options.observation),
            "final_observation": options.final_observation,
            "record": options.record,
            "ring": place.header() if place else None,
        }
        self.opened: Future[str] = _then(env.submit(self._life, header), lambda reply: reply[0]["unshared"])
        """Done when the session is open; says why it does not use its place in shared memory, if so."""

    def advance(self, request: sim_pb2.Advance) -> "Future[tuple[sim_pb2.Advanced, Part]]":
        """One turn. The request's payload is inline, whatever its size; the reply's bytes come second."""
        header = {"op": "advance", "session": self._index}
        reply = self._env.submit(self._life, header, request.SerializeToString())
        return _then(reply, lambda done: (sim_pb2.Advanced.FromString(bytes(done[1][0])), done[1][1]))

    def close(self) -> None:
        """Give the simulator back. A turn in progress ends by itself; the next session queues behind it."""
        if self._shares:
            self._env.submit(self._life, {"op": "leave", "session": self._index})
        self._host.release(self._env, self._index)


def _then(source: "Future[A]", convert: "Callable[[A], B]") -> "Future[B]":
    target: Future[B] = Future()

    def done(finished: "Future[A]") -> None:
        if not target.set_running_or_notify_cancel():
            return
        error = finished.exception()
        if error:
            target.set_exception(error)
        else:
            target.set_result(convert(finished.result()))

    source.add_done_callback(done)
    return target
