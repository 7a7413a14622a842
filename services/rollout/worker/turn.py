"""Values that pass between the sampling loop and a simulator session. No grpc, no torch."""

from dataclasses import dataclass, replace

from services.common.spec import Array, BoolArray, FloatArray


@dataclass(frozen=True)
class Reset:
    """Put a slot at a new start."""

    slot: int
    task: str
    start: bytes
    seed: int
    end_on_success: bool


@dataclass(frozen=True)
class Outcome:
    """What one chunk did in one slot. reward float32 [C], success bool [C], executed_action float32 [C, D].

    observation: at the end of the chunk, where the simulator sent one.
    """

    executed: int
    reward: FloatArray
    success: BoolArray
    executed_action: FloatArray
    terminated: bool
    truncated: bool
    failure: str
    observation: dict[str, Array] | None

    @property
    def ended(self) -> bool:
        """The episode is over, by its end or by a failure."""
        return self.terminated or self.truncated or bool(self.failure)

    def failed(self, reason: str) -> "Outcome":
        """The same outcome of an episode that is void."""
        return replace(self, failure=reason)


@dataclass(frozen=True)
class Turn:
    """Reply to one turn: first observation per reset slot, outcome per advanced slot."""

    started: dict[int, dict[str, Array]]
    outcomes: dict[int, Outcome]
