"""A small synchronous client of a simulator service, for the conformance kit and for scripts."""

import queue
from collections.abc import Iterator, Sequence
from types import TracebackType

import grpc
import numpy as np
from dvla.v1 import common_pb2, sim_pb2, sim_pb2_grpc

from services.common import codec
from services.common.arena.ring import RingReader
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.errors import InvalidInput, Unavailable
from services.common.locality import Vicinity
from services.common.security import Security
from services.common.spec import Array, FloatArray, SimSpec
from services.common.wire import spec_from_proto

TURN_SECONDS = 120.0
PAYLOAD_LIMIT = 1 << 30


class SimClient:
    """One simulator address ("unix:/path" or "host:port")."""

    def __init__(
        self, address: str, security: Security | None = None, transport: str = "grpc", shared_folder: str = ""
    ) -> None:
        """transport, shared_folder: as in the settings; by default bytes come by grpc."""
        self.address = address
        self._vicinity = Vicinity(transport, shared_folder)
        self._channel = open_channel(address, security)
        self._stub = sim_pb2_grpc.SimServiceStub(self._channel)

    def describe(self) -> tuple[SimSpec, sim_pb2.DescribeResponse]:
        """The spec, and the whole answer."""
        with translated(self.address):
            reply = self._stub.Describe(sim_pb2.DescribeRequest(), timeout=CALL_SECONDS)
        return spec_from_proto(reply.spec), reply

    def make_start(self, task: str, seed: int) -> bytes:
        """The start state of (task, seed)."""
        with translated(self.address):
            request = sim_pb2.MakeStartRequest(task=task, seed=seed)
            return self._stub.MakeStart(request, timeout=TURN_SECONDS).state

    def open(self, **options: object) -> "SimSession":
        """Open a session; options are fields of OpenSession."""
        opening = sim_pb2.OpenSession(**options)  # type: ignore[arg-type]
        return SimSession(self.address, self._stub, opening, self._vicinity)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
        self._vicinity.close()


class SimSession:
    """A session of strict turns. Not for long pauses: it sends no pings."""

    def __init__(
        self, address: str, stub: sim_pb2_grpc.SimServiceStub, opening: sim_pb2.OpenSession, vicinity: Vicinity
    ) -> None:
        self._address = address
        self._requests: queue.SimpleQueue[sim_pb2.SessionRequest | None] = queue.SimpleQueue()
        if not opening.client:
            opening.client = "client"
        if not opening.locality.transports:
            opening.locality.CopyFrom(vicinity.locality())
        self._requests.put(sim_pb2.SessionRequest(open=opening))
        self._replies: Iterator[sim_pb2.SessionResponse] = stub.Session(iter(self._requests.get, None))
        self.opened = self._receive().opened
        self.slots = self.opened.slots
        self._ring: RingReader | None = None
        if self.opened.transport == common_pb2.TRANSPORT_SHM:
            if vicinity.peer is None:
                raise InvalidInput(f"{self._address} chose shm, which was not asked for")
            self._ring = RingReader(vicinity.peer, self.opened.arena, opening.locality.probe_nonce)

    def advance(
        self, resets: Sequence[sim_pb2.ResetSlot] = (), slots: Sequence[int] = (), actions: FloatArray | None = None
    ) -> tuple[sim_pb2.Advanced, dict[str, Array]]:
        """One turn; returns the reply and its tensors."""
        request = sim_pb2.Advance(reset=resets, slots=slots)
        rest = memoryview(b"")
        if actions is not None:
            payload, rest = codec.encode({"action": actions})
            request.actions.CopyFrom(payload)
        self._requests.put(sim_pb2.SessionRequest(advance=request))
        for frame in codec.frames(rest):
            self._requests.put(sim_pb2.SessionRequest(frame=frame))
        reply = self._receive().advanced
        if self._ring and reply.payload.HasField("shm"):
            return reply, {name: array.copy() for name, array in self._ring.arrays(reply.payload).items()}
        return reply, codec.receive(reply.payload, lambda: self._receive().frame, PAYLOAD_LIMIT)

    def ping(self, nonce: int) -> int:
        """Send a ping and return the nonce of the answer."""
        self._requests.put(sim_pb2.SessionRequest(ping=sim_pb2.Ping(nonce=nonce)))
        return self._receive().pong.nonce

    def close(self) -> None:
        """End the session and wait until the simulator has freed the slots."""
        self._requests.put(None)
        try:
            for _ in self._replies:
                pass
        except grpc.RpcError:
            pass  # it had ended already
        if self._ring:
            self._ring.close()

    def __enter__(self) -> "SimSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self) -> sim_pb2.SessionResponse:
        with translated(self._address):
            for reply in self._replies:
                return reply
        raise Unavailable(f"{self._address} closed the session")


def reset_slot(
    slot: int, task: str, start: bytes = b"", seed: int = 0, end_on_success: bool = True
) -> sim_pb2.ResetSlot:
    """A reset of one slot."""
    return sim_pb2.ResetSlot(slot=slot, task=task, start=start, seed=seed, end_on_success=end_on_success)


def zeros(spec: SimSpec, rows: int, chunk: int = 1) -> FloatArray:
    """Actions of nothing: float32 [rows, chunk, D]."""
    return np.zeros((rows, chunk, spec.action.dim), np.float32)
