"""Where simulators run: in a thread of the service, or in a child process that may die without harming others.

An `Env` owns one thread for its whole life. It takes requests in order, so a simulator is never used by two callers
at once. If its process dies, all its sessions are lost at once and it starts again.
"""

import multiprocessing
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import structlog

from services.common.errors import DvlaError, Unavailable
from services.common.telemetry import BUSY, Lane
from services.sim.child import Worker, child_main
from services.sim.engine import Engine
from services.sim.pipe import Header, Part, bound, raise_error, receive, send
from services.sim.vector import VectorSim

log = structlog.get_logger()

Reply = tuple[Header, list[Part]]
Factory = Callable[[], VectorSim]

QUICK_SECONDS = 10.0  # a process that dies sooner after its start is restarted with a growing pause
RESTART_LIMIT = 5  # starts in a row that fail before an environment is given up


@dataclass
class _Request:
    header: Header
    parts: list[Part]
    reply: "Future[Reply]" = field(default_factory=Future)


class Env(ABC):
    """One place for `sessions` simulators. Callbacks and futures resolve in its own thread."""

    def __init__(self, name: str, sessions: int, on_change: Callable[[], None]) -> None:
        self.name, self.sessions = name, sessions
        self.lane = Lane(name, "start")
        self.spec = b""  # serialised SimSpec, once ready
        self.num_slots = 0
        self.ready = False
        self.lives = 0  # counts starts; a session belongs to one life
        self.failure: DvlaError | None = None  # set when it is given up
        self.pending = 0  # requests queued or running
        self._lost: dict[int, Future[str]] = {}  # of the newest session in each place
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # a request is either refused or queued before a life ends
        self._on_change = on_change
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to build the simulators, in the background."""
        self._thread.start()

    def enter(self, index: int) -> tuple[int, "Future[str]"]:
        """Begin a session in this place: its life, and a future that gives the reason when that life ends."""
        lost: Future[str] = Future()
        with self._lock:
            self._lost[index] = lost
            life = self.lives if self.ready else -1
        if life < 0:
            lost.set_result(f"environment {self.name} has just gone down; open a new session")
        return life, lost

    def submit(self, life: int, header: Header, *parts: bytes) -> "Future[Reply]":
        """Queue a request. Its future fails with Unavailable if this life is over or ends first."""
        request = _Request(header, list(parts))
        with self._lock:
            if not self.ready or life != self.lives or self._closing:
                gone = f"environment {self.name} is not running; its episodes are lost, open a new session"
                request.reply.set_exception(Unavailable(gone))
                return request.reply
            self.pending += 1
            self._requests.put(request)
        self._wake()
        return request.reply

    def close(self) -> None:
        """Stop the thread and whatever it owns."""
        with self._lock:
            self._closing = True
            self._requests.put(None)
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    @abstractmethod
    def _run(self) -> None:
        """The thread."""

    def _wake(self) -> None:  # noqa: B027 - only a process needs it
        pass

    def _begin_life(self, spec: bytes, num_slots: int) -> None:
        with self._lock:
            self.spec, self.num_slots = spec, num_slots
            self._lost = {}
            self.lives += 1
            self.ready = True
        self.lane.set("client")
        self._on_change()

    def _end_life(self, reason: str) -> None:
        """Fail everything that waits and tell the sessions."""
        waiting: list[_Request] = []
        with self._lock:
            self.ready = False
            sessions = list(self._lost.values())
            while not self._requests.empty():
                if request := self._requests.get():
                    waiting.append(request)
        self.lane.set("restart")
        for request in waiting:
            self._answer(request, Unavailable(reason))
        for lost in sessions:
            if lost.set_running_or_notify_cancel():  # whoever waited may have gone
                lost.set_result(reason)
        self._on_change()

    def _give_up(self, error: DvlaError) -> None:
        self.failure = error
        self._end_life(str(error))

    def _answer(self, request: _Request, result: Reply | DvlaError) -> None:
        with self._lock:
            self.pending -= 1
        if not request.reply.set_running_or_notify_cancel():
            return
        if isinstance(result, DvlaError):
            request.reply.set_exception(result)
        else:
            request.reply.set_result(result)


class ThreadEnv(Env):
    """Simulators in a thread of this process: for quick ones that need no isolation."""

    def __init__(self, name: str, factory: Factory, sessions: int, on_change: Callable[[], None]) -> None:
        super().__init__(name, sessions, on_change)
        self._factory = factory

    def _run(self) -> None:
        try:
            engine = Engine(self._factory, self.sessions)
        except Exception as error:  # noqa: BLE001 - the role ends with it, in one line
            self._give_up(error if isinstance(error, DvlaError) else _bug(error))
            return
        worker = Worker(engine)
        self._begin_life(*worker.hello())
        while request := self._requests.get():
            with self.lane.during(BUSY):
                header, parts = worker.handle(request.header, request.parts)
            self._answer(request, _reply(header, parts))
        engine.close()
        self._end_life("the simulator is shutting down")


class ProcessEnv(Env):
    """Simulators in a spawned child. A child that dies, or does not answer in time, is replaced."""

    def __init__(
        self,
        name: str,
        factory: Factory,
        sessions: int,
        on_change: Callable[[], None],
        step_timeout: float,
        start_timeout: float,
    ) -> None:
        super().__init__(name, sessions, on_change)
        self._factory = factory
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._wake_reader, self._wake_writer = os.pipe()
        self.pid = 0

    def _wake(self) -> None:
        os.write(self._wake_writer, b"x")

    def _run(self) -> None:
        failures = 0
        while not self._closing:
            started = time.monotonic()
            try:
                self._live()
            except DvlaError as error:
                quick = time.monotonic() - started < QUICK_SECONDS or not self.ready
                failures = failures + 1 if quick else 0
                if not self.lives or failures >= RESTART_LIMIT:
                    self._give_up(error)
                    break
                log.error("environment lost", name=self.name, reason=str(error))
                self._end_life(f"{error}; its episodes are lost, open a new session")
                self._pause(min(0.5 * 2**failures, 10.0) if failures > 1 else 0.0)

    def close(self) -> None:
        """Stop the thread, and the child with it."""
        super().close()
        if not self._thread.is_alive():
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _live(self) -> None:
        """One life: start a child, serve until it dies (raises Unavailable) or this env closes (returns)."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=child_main, args=(theirs, self._factory, self.sessions, os.getpid()), name=self.name, daemon=True
        )
        process.start()  # from this thread: the child asks the kernel to end it when its starter ends
        theirs.close()
        bound(ours, self._step_timeout)
        self.pid = process.pid or 0
        try:
            self._serve(ours, process)
        except (EOFError, OSError) as error:
            process.join(timeout=5)
            raise Unavailable(f"environment process {self.pid} ({self.name}) died: {_exit(process)}") from error
        finally:
            ours.close()
            process.kill()
            process.join(timeout=5)

    def _serve(self, connection: Connection, process: multiprocessing.process.BaseProcess) -> None:
        header, parts = self._receive(connection, self._start_timeout, "was not ready")
        raise_error(header)
        self._begin_life(bytes(parts[0]), header["slots"])
        while not self._closing:
            if connection in wait([connection, self._wake_reader]):
                raise EOFError  # it never speaks first, so it is gone
            os.read(self._wake_reader, 1)
            request = None if self._requests.empty() else self._requests.get()  # empty: a wake of an earlier life
            if request and not self._exchange(connection, request):
                raise Unavailable(f"environment process {self.pid} ({self.name}) must be rebuilt")

    def _exchange(self, connection: Connection, request: _Request) -> bool:
        """Pass a request on and its answer back; False if the child says that it cannot go on."""
        try:
            with self.lane.during(BUSY):
                send(connection, request.header, request.parts)
                header, parts = self._receive(connection, self._step_timeout, "did not answer")
        except (EOFError, OSError, Unavailable):
            self._answer(request, Unavailable(f"environment process {self.pid} ({self.name}) died during this turn"))
            raise
        self._answer(request, _reply(header, parts))
        return not header.get("broken", False)

    def _receive(self, connection: Connection, seconds: float, what: str) -> Reply:
        if not connection.poll(seconds):
            raise Unavailable(f"environment process {self.pid} ({self.name}) {what} within {seconds:.0f} s")
        return receive(connection)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._closing and time.monotonic() < end:
            time.sleep(0.05)


def _reply(header: Header, parts: list[Part]) -> Reply | DvlaError:
    try:
        raise_error(header)
    except DvlaError as error:
        return error
    return header, parts


def _bug(error: Exception) -> DvlaError:
    log.error("simulator failed to start", exc_info=error)
    return DvlaError(f"the simulator failed to start: {type(error).__name__}: {error}")


def _exit(process: multiprocessing.process.BaseProcess) -> str:
    code = process.exitcode
    if code is None:
        return "no exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
