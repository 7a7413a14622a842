"""The simulators of one process and what sessions do with them: start states, turns of resets and chunks.

Works on `dvla.v1` messages, so that the service in front only passes bytes on. One thread calls it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
from dvla.v1 import common_pb2, sim_pb2

from services.common import codec, wire
from services.common.arena import Extent, Peer
from services.common.arena.ring import RingWriter
from services.common.errors import DvlaError, InvalidInput, Unavailable, Unsupported
from services.common.spec import Array, FloatArray, Observation, SimSpec
from services.sim.chunks import ChunkResult, ChunkRunner, FinalObservation, ResetResult
from services.sim.recording import Recorder
from services.sim.vector import Start, VectorSim


@dataclass(frozen=True)
class SessionOptions:
    """What a client asked for when it opened a session. observation: tensor names, empty for all."""

    observation: tuple[str, ...] = ()
    final_observation: FinalObservation = "truncated"
    record: bool = False


@dataclass(frozen=True)
class RingPlace:
    """Where in shared memory a session's observations go, and the nonce that shows its client the way."""

    folder: Path
    extent: Extent
    nonce: bytes

    def header(self) -> dict[str, Any]:
        """As JSON, for the pipe."""
        return {"folder": str(self.folder), "extent": list(vars(self.extent).values()), "nonce": self.nonce.hex()}

    @staticmethod
    def of(header: dict[str, Any]) -> "RingPlace":
        """From the pipe."""
        return RingPlace(Path(header["folder"]), Extent(*header["extent"]), bytes.fromhex(header["nonce"]))


class Engine:
    """`sessions` simulators made by a factory, one per session, all alike."""

    def __init__(self, factory: Callable[[], VectorSim], sessions: int) -> None:
        self._sims = [factory() for _ in range(sessions)]
        self._sessions = [_Session(sim, SessionOptions()) for sim in self._sims]
        self.spec: SimSpec = self._sims[0].spec
        self.num_slots = self._sims[0].num_slots
        self._peers: dict[Path, Peer] = {}

    def open(self, index: int, options: SessionOptions, place: RingPlace | None = None) -> str:
        """Begin a session: all slots are idle until they are reset. With a place, replies go into shared memory.

        Returns why they do not, if that place cannot be used.
        """
        known = {tensor.name for tensor in self.spec.observation}
        unknown = set(options.observation) - known
        if unknown:
            raise InvalidInput(f"observation tensors {sorted(unknown)} do not exist; there are {sorted(known)}")
        self.leave(index)
        ring, problem = None, ""
        try:
            ring = self._ring(place) if place else None
        except DvlaError as error:
            problem = str(error)
        self._sessions[index] = _Session(self._sims[index], options, ring)
        return problem

    def leave(self, index: int) -> None:
        """End a session's use of shared memory."""
        self._sessions[index].close()

    def advance(self, index: int, request: sim_pb2.Advance) -> tuple[sim_pb2.Advanced, memoryview]:
        """One turn of a session; bytes that are not in shared memory come second."""
        return self._sessions[index].advance(request)

    def make_start(self, task: str, seed: int) -> bytes:
        """The start state of (task, seed)."""
        self.spec.task(task)
        if self.spec.starts != "state":
            raise Unsupported(f"{self.spec.backend} does not store start states (starts = {self.spec.starts!r})")
        return self._sims[0].make_start(task, seed)

    def close(self) -> None:
        """Close every simulator."""
        for session in self._sessions:
            session.close()
        for sim in self._sims:
            sim.close()

    def _ring(self, place: RingPlace) -> RingWriter:
        peer = self._peers.setdefault(place.folder, Peer(place.folder))
        return RingWriter(peer, place.extent, place.nonce)


class _Session:
    def __init__(self, sim: VectorSim, options: SessionOptions, ring: RingWriter | None = None) -> None:
        self._runner = ChunkRunner(sim)
        self._options = options
        self._ring = ring
        self._room = np.empty(0, np.uint8)
        self._recorder = Recorder(sim) if options.record else None

    def advance(self, request: sim_pb2.Advance) -> tuple[sim_pb2.Advanced, memoryview]:
        """Reset, then advance, then encode."""
        both = sorted({reset.slot for reset in request.reset} & set(request.slots))
        if both:
            raise InvalidInput(f"slots {both} are both reset and advanced; a slot may be in one list only")
        if not request.reset and not request.slots:
            raise InvalidInput("an advance must reset or advance at least one slot")
        started = self._reset(request) if request.reset else None
        chunk = self._chunk(request) if request.slots else None
        reply = sim_pb2.Advanced(observed=_observed_rows(len(request.reset), chunk))
        if chunk:
            reply.outcomes.extend(_outcomes(chunk))
        if self._recorder:
            reply.frames.extend(self._recorder.take())
        return reply, self._pack(reply.payload, self._stacks(started, chunk))

    def close(self) -> None:
        """Let go of shared memory."""
        if self._ring:
            self._ring.close()
            self._ring = None

    def _pack(self, payload: common_pb2.Payload, stacks: dict[str, list[Array]]) -> memoryview:
        """Bytes into the ring, or, without one or where they are too many for it, into the returned buffer.

        The buffer is filled anew in the next turn, which the client asks for when it has all of this one.
        """
        layout = codec.plan_parts(stacks)
        payload.MergeFrom(common_pb2.Payload(tensors=layout.tensors, length=layout.length))
        placed = self._ring.place(layout.length) if self._ring else None
        if placed:
            extent, room = placed
            payload.shm.CopyFrom(extent)
            codec.pack_parts_into(room, layout, stacks)
            return memoryview(b"")
        if self._room.size < layout.length:
            self._room = np.empty(layout.length, np.uint8)
        buffer = self._room[: layout.length].data
        codec.pack_parts_into(buffer, layout, stacks)
        return buffer

    def _reset(self, request: sim_pb2.Advance) -> ResetResult:
        slots = np.array([reset.slot for reset in request.reset], np.int64)
        starts = [Start(reset.task, reset.start, reset.seed) for reset in request.reset]
        ends = np.array([reset.end_on_success for reset in request.reset], np.bool_)
        result = self._runner.reset(slots, starts, ends)
        for slot, why in zip(slots, result.failed, strict=True):
            if why:
                raise Unavailable(f"slot {slot}: {why}")
        if self._recorder:
            self._recorder.look(slots)
        return result

    def _chunk(self, request: sim_pb2.Advance) -> ChunkResult:
        tensors = codec.decode(request.actions)
        if set(tensors) != {"action"}:
            raise InvalidInput(f"actions hold tensors {sorted(tensors)}, expected one named 'action'")
        return self._runner.advance(
            np.array(request.slots, np.int64),
            cast(FloatArray, tensors["action"]),  # dtype and shape are checked by the runner
            final=self._options.final_observation,
            after_step=self._recorder.look if self._recorder else None,
        )

    def _stacks(self, started: ResetResult | None, chunk: ChunkResult | None) -> dict[str, list[Array]]:
        parts: list[Observation] = [part.observation for part in (started, chunk) if part]
        names = self._options.observation or tuple(parts[0])
        stacks: dict[str, list[Array]] = {f"obs/{name}": [part[name] for part in parts] for name in names}
        if chunk:
            stacks |= {"reward": [chunk.reward], "success": [chunk.success], "executed_action": [chunk.action]}
        return stacks


def _observed_rows(resets: int, chunk: ChunkResult | None) -> Sequence[int]:
    advanced = (chunk.observed + resets).tolist() if chunk else ()
    return list(chain(range(resets), advanced))


def _outcomes(chunk: ChunkResult) -> list[sim_pb2.SlotOutcome]:
    return [
        sim_pb2.SlotOutcome(
            executed=int(chunk.executed[row]),
            terminated=bool(chunk.terminated[row]),
            truncated=bool(chunk.truncated[row]),
            failure=chunk.failed[row],
            step=int(chunk.step[row]),
        )
        for row in range(len(chunk.executed))
    ]


def spec_message(engine: Engine) -> bytes:
    """The spec, serialised, for the process in front."""
    return wire.spec_to_proto(engine.spec).SerializeToString()
