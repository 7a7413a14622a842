"""The simulators of one process and what sessions do with them: start states, turns of resets and chunks.

Works on `dvla.v1` messages, so that the service in front only passes bytes on. One thread calls it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np
from dvla.v1 import common_pb2, sim_pb2

from services.common import codec, wire
from services.common.errors import InvalidInput, Unavailable, Unsupported
from services.common.spec import Array, FloatArray, Observation, SimSpec
from services.sim.chunks import ChunkResult, ChunkRunner, ResetResult
from services.sim.recording import Recorder
from services.sim.vector import Start, VectorSim


@dataclass(frozen=True)
class SessionOptions:
    """What a client asked for when it opened a session. observation: tensor names, empty for all."""

    observation: tuple[str, ...] = ()
    final_observation: bool = False
    record: bool = False


class Engine:
    """`sessions` simulators made by a factory, one per session, all alike."""

    def __init__(self, factory: Callable[[], VectorSim], sessions: int) -> None:
        self._sims = [factory() for _ in range(sessions)]
        self._sessions = [_Session(sim, SessionOptions()) for sim in self._sims]
        self.spec: SimSpec = self._sims[0].spec
        self.num_slots = self._sims[0].num_slots

    def open(self, index: int, options: SessionOptions) -> None:
        """Begin a session: all slots are idle until they are reset."""
        known = {tensor.name for tensor in self.spec.observation}
        unknown = set(options.observation) - known
        if unknown:
            raise InvalidInput(f"observation tensors {sorted(unknown)} do not exist; there are {sorted(known)}")
        self._sessions[index] = _Session(self._sims[index], options)

    def advance(self, index: int, request: sim_pb2.Advance) -> tuple[sim_pb2.Advanced, bytearray]:
        """One turn of a session; the reply's payload lacks its bytes, which come second."""
        return self._sessions[index].advance(request)

    def make_start(self, task: str, seed: int) -> bytes:
        """The start state of (task, seed)."""
        self.spec.task(task)
        if self.spec.starts != "state":
            raise Unsupported(f"{self.spec.backend} does not store start states (starts = {self.spec.starts!r})")
        return self._sims[0].make_start(task, seed)

    def close(self) -> None:
        """Close every simulator."""
        for sim in self._sims:
            sim.close()


class _Session:
    def __init__(self, sim: VectorSim, options: SessionOptions) -> None:
        self._runner = ChunkRunner(sim)
        self._options = options
        self._recorder = Recorder(sim) if options.record else None

    def advance(self, request: sim_pb2.Advance) -> tuple[sim_pb2.Advanced, bytearray]:
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
        layout, buffer = codec.pack(self._arrays(started, chunk))
        reply.payload.CopyFrom(common_pb2.Payload(tensors=layout.tensors, length=layout.length))
        return reply, buffer

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
            final="all" if self._options.final_observation else "truncated",
            after_step=self._recorder.look if self._recorder else None,
        )

    def _arrays(self, started: ResetResult | None, chunk: ChunkResult | None) -> dict[str, Array]:
        parts: list[Observation] = [part.observation for part in (started, chunk) if part]
        names = self._options.observation or tuple(parts[0])
        arrays: dict[str, Array] = {f"obs/{name}": np.concatenate([part[name] for part in parts]) for name in names}
        if chunk:
            arrays |= {"reward": chunk.reward, "success": chunk.success, "executed_action": chunk.action}
        return arrays


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
