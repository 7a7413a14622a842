"""A simulator whose device time is a calibrated wait. Emulated: it has no physics and uses next to no CPU.

Use it as `run.sim = "services.sim.emulated:EmulatedSim"` with its numbers in `[sim] options`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from services.common.emulated import MARK, EmulatedDevice, Linear, read_costs
from services.common.errors import ConfigError, InvalidInput
from services.common.spec import ActionSpec, FloatArray, IntArray, Observation, SimSpec, TaskSpec, TensorSpec
from services.sim.vector import ControlStep, Start, VectorSim

TASK = "emulated"
_START_BYTES = 8


@dataclass(frozen=True)
class SimCosts:
    """What an emulated simulator takes and makes. Times in seconds of its device.

    step_seconds, slot_seconds: of a control step, and more for each slot that is stepped.
    observe_seconds: of each slot that is observed (rendering). reset_seconds: of each slot that is reset.
    steps: length of an episode that fails. shortest: earliest success. success: share of episodes that succeed.
    state_dim: numbers of the state observation. image_size: side of a camera image in pixels, 0 for none.
    """

    step_seconds: float = 0.0
    slot_seconds: float = 0.0
    observe_seconds: float = 0.0
    reset_seconds: float = 0.0
    steps: int = 80
    shortest: int = 0
    success: float = 0.5
    state_dim: int = 8
    image_size: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.success > 1 or self.shortest > self.steps or self.state_dim < 1:
            raise ConfigError(
                "emulated simulator: expected steps and state_dim of 1 or more, success of at most 1 and "
                f"shortest of at most steps; got {self}"
            )


_DEVICE = EmulatedDevice()
"""All emulated simulators of a process share one device, as the sessions of a simulator service share a GPU."""


class EmulatedSim(VectorSim):
    """Slots that count steps. Whether and when an episode succeeds depends on its start and its first action only."""

    def __init__(self, num_slots: int, **options: Any) -> None:
        costs = read_costs(SimCosts, options, "the emulated simulator")
        self.num_slots, self._costs = num_slots, costs
        tensors = [TensorSpec("state", "float32", (costs.state_dim,))]
        if costs.image_size:
            tensors.append(TensorSpec("rgb/emulated", "uint8", (costs.image_size, costs.image_size, 3)))
        self.spec = SimSpec(
            observation=tuple(tensors),
            action=ActionSpec(7, (-1.0,) * 7, (1.0,) * 7, control_mode=MARK),
            tasks=(TaskSpec(TASK, "wait as long as the real one would", costs.steps),),
            starts="state",
            backend=MARK,
            batched=True,
        )
        self._step_cost = Linear(costs.step_seconds, costs.slot_seconds)
        self._owed = 0.0
        self._seeds = np.zeros(num_slots, np.uint64)
        self._steps = np.zeros(num_slots, np.int64)
        self._success_at = np.zeros(num_slots, np.int64)
        self._image = np.zeros((num_slots, costs.image_size, costs.image_size, 3), np.uint8)

    def make_start(self, task: str, seed: int) -> bytes:
        """8 bytes: the seed."""
        return seed.to_bytes(_START_BYTES, "little")

    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        """Steps are counted from 0."""
        if any(len(start.state) != _START_BYTES for start in starts):
            raise InvalidInput(f"an emulated start state has {_START_BYTES} bytes")
        self._seeds[slots] = [int.from_bytes(start.state, "little") for start in starts]
        self._steps[slots] = 0
        self._owed += self._costs.reset_seconds * len(slots)

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        """Count. The device's time is owed until somebody looks: a real one, too, is only asked then."""
        for slot, action in zip(slots, actions, strict=True):
            if not self._steps[slot]:
                self._success_at[slot] = self._fate(int(self._seeds[slot]), action)
        self._steps[slots] += 1
        self._owed += self._step_cost.of(len(slots))
        success = self._steps[slots] == self._success_at[slots]
        return ControlStep(success.astype(np.float32), success, np.zeros(len(slots), np.bool_))

    def observe(self, slots: IntArray) -> Observation:
        """Wait for the device, then the step count and the seed in every number of the state."""
        _DEVICE.work(self._owed + self._costs.observe_seconds * len(slots))
        self._owed = 0.0
        state = np.zeros((len(slots), self._costs.state_dim), np.float32)
        state[:, 0] = self._steps[slots] / self._costs.steps
        out: Observation = {"state": state}
        if self._costs.image_size:
            out["rgb/emulated"] = self._image[slots]
        return out

    def _fate(self, seed: int, action: FloatArray) -> int:
        """The step of success, 0 for never."""
        draw = xxhash.xxh3_64_intdigest(np.ascontiguousarray(action).tobytes(), seed)
        if (draw & 0xFFFFFFFF) >= self._costs.success * 2.0**32:
            return 0
        first, last = self._costs.shortest or self._costs.steps, self._costs.steps
        return first + (draw >> 32) % (last - first + 1)
