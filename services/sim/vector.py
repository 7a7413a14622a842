"""`VectorSim`: the one small class a simulator implements. Chunks, limits and transports are ours.

A simulator knows slots, states, control steps and observations. It knows nothing about chunks, step limits,
success termination, jobs, policies or gRPC: `services.sim.chunks` and the servicer add those.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.spec import Array, BoolArray, FloatArray, IntArray, Observation, SimSpec


@dataclass(frozen=True)
class Start:
    """How an episode begins: a task and either stored state bytes or a seed (by `spec.starts`)."""

    task: str
    state: bytes = b""
    seed: int = 0


@dataclass(frozen=True)
class ControlStep:
    """Result of one control step for the n stepped slots, in the order asked.

    reward: float32 [n]. success: bool [n], the task's success test after this step.
    terminated: bool [n], true where the simulator itself ends the episode (a fall, a broken object);
    success alone does not terminate, the caller decides that.
    """

    reward: FloatArray
    success: BoolArray
    terminated: BoolArray


class VectorSim(ABC):
    """A vectorised environment with `num_slots` independent slots. Not thread-safe: one thread drives it."""

    spec: SimSpec
    num_slots: int

    @abstractmethod
    def make_start(self, task: str, seed: int) -> bytes:
        """Bytes that `reset` turns into exactly this start state, in any slot and any subset of slots.

        Depends on (task, seed) only. Only called when `spec.starts == "state"`.
        """

    @abstractmethod
    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        """Put these slots (int64 [n]) at these starts; other slots are untouched."""

    @abstractmethod
    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        """Advance these slots (int64 [n]) by one control step with actions (float32 [n, D]).

        Actions are already clipped to the spec's limits and must not be modified. Slots left out hold still.
        """

    @abstractmethod
    def observe(self, slots: IntArray) -> Observation:
        """Observation of these slots now: arrays [n, ...] as in `spec.observation`."""

    def render(self, slot: int) -> Array | None:
        """An RGB frame (uint8 [H, W, 3]) of one slot for a recording, or None if it cannot be drawn."""
        return None

    def close(self) -> None:  # noqa: B027 - most simulators have nothing to free
        """Free everything."""
