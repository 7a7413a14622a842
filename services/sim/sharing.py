"""The shared memory of a simulator service: one arena with a ring for each session, and when a session may use it."""

import threading
from pathlib import Path

import structlog
from dvla.v1 import common_pb2, sim_pb2

from services.common.arena import Arena, orphans
from services.common.arena.ring import turn_bytes
from services.common.arena.space import rounded
from services.common.errors import ConfigError, Exhausted
from services.common.flatfile import shared_folder
from services.common.locality import CUDA_IPC, GRPC, SHM, Choice, accepted, choose, unreachable
from services.common.wire import spec_from_proto
from services.sim.engine import RingPlace

log = structlog.get_logger()

PREFIX = "sim"
SPARE = 2
"""Rings beyond one for each session: those of clients that are frozen, or that have not let go yet."""
CHUNK = 64
"""Control steps of a chunk whose rewards and actions fit into a ring beside the observation; longer ones go by grpc."""


class Sharing:
    """Chooses transports and gives out rings. Thread-safe. With transport "shm" what it needs must be there."""

    def __init__(self, transport: str, folder: str, sessions: int) -> None:
        self._offered = accepted(transport)
        self._forced, self._sessions = transport == "shm", sessions
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._problem = ""
        self._turn = 0
        self._folder: Path | None = None
        if transport == "cuda_ipc":
            raise ConfigError(
                "transport = 'cuda_ipc', but a VectorSim hands its observations over in host memory; "
                "use auto, shm or grpc"
            )
        if SHM in self._offered:
            try:
                self._folder = shared_folder(folder)
            except ConfigError as error:
                if self._forced or folder:
                    raise
                self._problem = str(error)

    def prepare(self, described: sim_pb2.DescribeResponse) -> None:
        """Make the arena, once the size of an observation is known.

        Raises ConfigError if there is no room and shared memory is a must; otherwise sessions use grpc.
        """
        with self._lock:
            if self._folder is None or self._arena is not None or self._problem:
                return
            spec, slots = spec_from_proto(described.spec), described.slots_per_session
            for dead in orphans(self._folder, PREFIX):
                dead.remove()
            self._turn = rounded(turn_bytes(spec.observation, slots, CHUNK * (5 + 4 * spec.action.dim)))
            try:
                size = (self._sessions + SPARE) * rounded(2 * self._turn)
                self._arena = Arena.create(self._folder, PREFIX, size, entries=8 * (self._sessions + SPARE))
            except ConfigError as error:
                if self._forced:
                    raise
                self._problem = str(error)
                log.warning("no shared memory, observations travel by grpc", reason=self._problem)

    def choose(self, theirs: common_pb2.Locality, problem: str = "") -> Choice:
        """The best transport that both sides can use, and why. Raises Unsupported if there is none.

        problem: what was found to speak against shared memory.
        """
        offers = {SHM: lambda: problem or self._objection(theirs), GRPC: lambda: ""}
        offers = {transport: offers[transport] for transport in self._offered if transport in offers}
        wanted = [item for item in theirs.transports if item != CUDA_IPC or len(theirs.transports) == 1]
        return choose(wanted, offers, f"same machine, and the probe in {self._folder} was read back")

    def reserve(self, nonce: bytes) -> RingPlace:
        """A ring for a new session. Raises Exhausted if clients that are gone or frozen hold too many."""
        with self._lock:
            if self._arena is None or self._folder is None:
                raise Exhausted("there is no arena")
            return RingPlace(self._folder, self._arena.allocate(2 * self._turn), nonce)

    def release(self, place: RingPlace) -> None:
        """Take a ring back, as soon as both sides have let go of it."""
        with self._lock:
            if self._arena is not None:
                self._arena.release(place.extent)

    def facts(self) -> str:
        """For the status: what there is."""
        if self._arena is None:
            return self._problem or "grpc only"
        used = self._arena.capacity - self._arena.free
        return f"{self._arena.name} in {self._folder}: {used} of {self._arena.capacity} bytes used"

    def close(self) -> None:
        """Delete the arena; clients that still look at it keep their bytes."""
        with self._lock:
            if self._arena is not None:
                self._arena.remove()
                self._arena = None

    def _objection(self, theirs: common_pb2.Locality) -> str:
        if self._problem:
            return self._problem
        if self._arena is None:
            return "the arena is not there yet"
        return unreachable(theirs, self._folder)
