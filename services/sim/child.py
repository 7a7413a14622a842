"""The environment process: builds simulators, then answers requests from its pipe until the pipe closes."""

import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from dvla.v1 import sim_pb2

from services.common.errors import DvlaError, Unavailable
from services.common.process import die_with_parent
from services.sim.engine import Engine, RingPlace, SessionOptions, spec_message
from services.sim.pipe import Header, Part, error_header, receive, send
from services.sim.vector import VectorSim


class Worker:
    """Carries out requests on an engine. `handle` never raises: errors are replies."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def hello(self) -> tuple[bytes, int]:
        """The serialised spec and the number of slots of one session."""
        return spec_message(self._engine), self._engine.num_slots

    def handle(self, header: Header, parts: list[Part]) -> tuple[Header, list[Part]]:
        """One request: open, leave, advance or start."""
        try:
            return getattr(self, f"_{header['op']}")(header, parts)  # type: ignore[no-any-return]
        except Unavailable as error:
            return error_header(error) | {"broken": True}, []  # the simulator itself is damaged: rebuild it
        except DvlaError as error:
            return error_header(error), []
        except Exception as error:  # noqa: BLE001 - a bug in a simulator ends the session, not the process
            traceback.print_exc()
            return error_header(error), []

    def _open(self, header: Header, parts: list[Part]) -> tuple[Header, list[Part]]:
        options = SessionOptions(tuple(header["observation"]), header["final_observation"], header["record"])
        place = RingPlace.of(header["ring"]) if header["ring"] else None
        return {"unshared": self._engine.open(header["session"], options, place)}, []

    def _leave(self, header: Header, parts: list[Part]) -> tuple[Header, list[Part]]:
        self._engine.leave(header["session"])
        return {}, []

    def _advance(self, header: Header, parts: list[Part]) -> tuple[Header, list[Part]]:
        reply, data = self._engine.advance(header["session"], sim_pb2.Advance.FromString(bytes(parts[0])))
        return {}, [reply.SerializeToString(), data]

    def _start(self, header: Header, parts: list[Part]) -> tuple[Header, list[Part]]:
        return {}, [self._engine.make_start(header["task"], header["seed"])]


def child_main(connection: Connection, factory: Callable[[], VectorSim], sessions: int, parent: int) -> None:
    """Entry point of the spawned process."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    try:
        engine = Engine(factory, sessions)
    except Exception as error:  # noqa: BLE001 - told to the parent, which ends the role with one line
        if not isinstance(error, DvlaError):
            traceback.print_exc()
        send(connection, error_header(error))
        return
    worker = Worker(engine)
    spec, slots = worker.hello()
    send(connection, {"slots": slots}, [spec])
    while True:
        try:
            header, parts = receive(connection)
        except (EOFError, OSError):
            break
        send(connection, *worker.handle(header, parts))
    engine.close()
