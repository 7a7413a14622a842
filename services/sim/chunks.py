"""Action chunks over a `VectorSim`: step limits, success termination, masks and failed slots.

A slot that ends inside a chunk stops there: the rest of its row is reward 0, success False, action 0. The runner
never resets by itself, so a final observation is always the finished episode's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidInput
from services.common.spec import BoolArray, FloatArray, IntArray, Observation
from services.sim.checks import (
    check_actions,
    check_control_step,
    check_flags,
    check_observation,
    check_slots,
    check_starts,
    finite_rows,
)
from services.sim.vector import Start, VectorSim

FinalObservation = Literal["none", "truncated", "all"]
"""Which finished slots are observed once more: none (GRPO), those cut by the step limit (PPO), or all."""


@dataclass(frozen=True)
class ResetResult:
    """First observation ([n, ...]) of the reset slots. failed: per slot "" or why it cannot be used."""

    observation: Observation
    failed: tuple[str, ...]


@dataclass(frozen=True)
class ChunkResult:
    """What one chunk did to n slots, in the order asked. C control steps, D action dimensions.

    executed: int32 [n], control steps done in this chunk. step: int32 [n], steps of the episode so far.
    action: float32 [n, C, D], as executed (clipped), 0 where nothing was executed.
    reward: float32 [n, C]. success: bool [n, C]. terminated, truncated: bool [n]; both can be true.
    failed: per slot "" or the reason why its episode must be dropped; such a slot needs a reset.
    observed: int64 [m], rows of the chunk that `observation` (arrays [m, ...]) belongs to.
    """

    executed: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    action: FloatArray
    reward: FloatArray
    success: BoolArray
    terminated: BoolArray
    truncated: BoolArray
    failed: tuple[str, ...]
    observed: IntArray
    observation: Observation


class ChunkRunner:
    """Drives one `VectorSim` chunk by chunk. Not thread-safe, as the simulator is not."""

    def __init__(self, sim: VectorSim) -> None:
        self.sim = sim
        self.env_steps = 0  # executed control steps since the start, over all slots
        n = sim.num_slots
        self._step = np.zeros(n, np.int32)
        self._limit = np.zeros(n, np.int32)
        self._end_on_success = np.zeros(n, np.bool_)
        self._running = np.zeros(n, np.bool_)

    @property
    def running(self) -> IntArray:
        """Slots (int64) with an unfinished episode."""
        return np.flatnonzero(self._running)

    def reset(self, slots: IntArray, starts: Sequence[Start], end_on_success: BoolArray) -> ResetResult:
        """Begin one episode per slot. Raises InvalidInput for bad slots, tasks or start states."""
        slots = check_slots(slots, self.sim.num_slots)
        check_starts(starts, len(slots), self.sim.spec)
        ends = check_flags(end_on_success, len(slots))
        self._running[slots] = False  # stays so if the simulator refuses the start
        self.sim.reset(slots, starts)
        observation = self.observe(slots)
        finite, names = finite_rows(observation)
        self._step[slots] = 0
        self._limit[slots] = [self.sim.spec.task(start.task).max_steps for start in starts]
        self._end_on_success[slots] = ends
        self._running[slots] = finite
        return ResetResult(observation, tuple(f"{why} right after reset" if why else "" for why in names))

    def advance(
        self,
        slots: IntArray,
        actions: FloatArray,
        final: FinalObservation = "none",
        after_step: Callable[[IntArray], None] | None = None,
    ) -> ChunkResult:
        """Execute actions (float32 [n, C, D], environment units, unclipped; left untouched) on running slots.

        after_step: called after every control step with the slots that were stepped, for recordings.
        Raises InvalidInput for slots without an episode and for actions of wrong shape, dtype or not finite.
        """
        slots = check_slots(slots, self.sim.num_slots)
        if not self._running[slots].all():
            idle = slots[~self._running[slots]].tolist()
            raise InvalidInput(f"slots {idle} have no running episode: reset them before stepping")
        wanted = check_actions(actions, len(slots), self.sim.spec.action)
        chunk = _Chunk(self, slots, wanted)
        for index in range(wanted.shape[1]):
            stepped = chunk.advance(index)
            if not len(stepped):
                break
            if after_step:
                after_step(stepped)
        return chunk.finish(final)

    def observe(self, slots: IntArray) -> Observation:
        """What the simulator sees now in these slots (none are fine): arrays [n, ...], checked against the spec."""
        if not len(slots):
            return {tensor.name: np.empty((0, *tensor.shape), tensor.dtype) for tensor in self.sim.spec.observation}
        return check_observation(self.sim.observe(slots), len(slots), self.sim.spec)


class _Chunk:
    """One chunk in the making."""

    def __init__(self, runner: ChunkRunner, slots: IntArray, wanted: FloatArray) -> None:
        n, length, _ = wanted.shape
        self._runner, self._slots, self._wanted = runner, slots, wanted  # wanted: clipped copy
        self._executed = np.zeros(n, np.int32)
        self._action = np.zeros_like(wanted)
        self._reward = np.zeros((n, length), np.float32)
        self._success = np.zeros((n, length), np.bool_)
        self._terminated = np.zeros(n, np.bool_)
        self._truncated = np.zeros(n, np.bool_)
        self._failed = [""] * n

    def advance(self, index: int) -> IntArray:
        """Do control step `index` on the slots still running; returns them."""
        runner = self._runner
        rows = np.flatnonzero(runner._running[self._slots])
        slots = self._slots[rows]
        if not len(rows):
            return slots
        step = check_control_step(runner.sim.step(slots, self._wanted[rows, index]), len(rows))
        runner.env_steps += len(rows)
        runner._step[slots] += 1
        self._executed[rows] += 1
        self._action[rows, index] = self._wanted[rows, index]
        self._success[rows, index] = step.success
        finite = np.isfinite(step.reward)
        self._reward[rows, index] = np.where(finite, step.reward, np.float32(0))
        for row in rows[~finite]:
            self._failed[row] = "the reward is not finite"
        self._terminated[rows] = step.terminated | (step.success & runner._end_on_success[slots])
        self._truncated[rows] = runner._step[slots] >= runner._limit[slots]
        runner._running[slots] = finite & ~self._terminated[rows] & ~self._truncated[rows]
        return slots

    def finish(self, final: FinalObservation) -> ChunkResult:
        """Observe what a policy or the learner will read, and drop slots that broke."""
        runner = self._runner
        alive = np.array([not why for why in self._failed])
        reads = {"none": np.zeros_like(alive), "truncated": self._truncated, "all": np.ones_like(alive)}[final]
        observed = np.flatnonzero(alive & (runner._running[self._slots] | reads))
        observation = runner.observe(self._slots[observed])
        finite, names = finite_rows(observation)
        for row, why in zip(observed, names, strict=True):
            self._failed[row] = why
        broken = np.array([bool(why) for why in self._failed])
        runner._running[self._slots[broken]] = False
        self._reward[broken], self._terminated[broken], self._truncated[broken] = 0, False, False
        return ChunkResult(
            executed=self._executed,
            step=runner._step[self._slots],
            action=self._action,
            reward=self._reward,
            success=self._success,
            terminated=self._terminated,
            truncated=self._truncated,
            failed=tuple(self._failed),
            observed=observed[finite],
            # Indexing copies, and nearly always all rows are fine.
            observation=observation if finite.all() else {n: array[finite] for n, array in observation.items()},
        )
