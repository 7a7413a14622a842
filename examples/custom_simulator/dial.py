"""A simulator of one's own on one page: a dial is to be turned to a mark.

    python examples/custom_simulator/dial.py                          serves it on 127.0.0.1:7431
    dvla sim check 127.0.0.1:7431                                     checks that it keeps the contract
    dvla train examples/custom_simulator/dial.toml                    trains a policy on it

A simulator knows slots, states, control steps and observations. Step limits, action chunks, success, clipping, sessions
and transports are done for it.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from services.common.spec import ActionSpec, FloatArray, IntArray, Observation, SimSpec, TaskSpec, TensorSpec
from services.sim.serve import serve
from services.sim.vector import ControlStep, Start, VectorSim

TURN = 0.25  # how far an action of 1 turns the dial; its scale goes from -1 to 1
CLOSE = 0.15  # the dial is on the mark within this distance


class Dial(VectorSim):
    """`num_slots` dials, each with a mark."""

    spec = SimSpec(
        observation=(TensorSpec("state", "float32", (2,)),),  # dial, mark
        action=ActionSpec(dim=1, low=(-1.0,), high=(1.0,), control_mode="turn"),
        tasks=(TaskSpec("dial", "turn the dial to the mark", max_steps=12),),
        starts="state",  # make_start writes bytes that reset reads
        backend="dial/numpy",
    )

    def __init__(self, num_slots: int = 8) -> None:
        self.num_slots = num_slots
        self._dial, self._mark = np.zeros(num_slots, np.float32), np.zeros(num_slots, np.float32)

    def make_start(self, task: str, seed: int) -> bytes:
        """Dial and mark, at least 0.5 apart: the same seed is the same start, on every machine and in every slot."""
        rng = np.random.default_rng(seed)
        while True:
            dial, mark = rng.uniform(-0.9, 0.9, 2).astype("<f4")
            if abs(dial - mark) > 0.5:
                return np.array([dial, mark], "<f4").tobytes()

    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        """Put these slots at these starts, and touch no other."""
        states = np.stack([np.frombuffer(start.state, "<f4", count=2) for start in starts])
        self._dial[slots], self._mark[slots] = states.T

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        """One control step of these slots; actions (float32 [n, 1]) are clipped to the limits already."""
        self._dial[slots] = np.clip(self._dial[slots] + np.float32(TURN) * actions[:, 0], -1, 1)
        distance = np.abs(self._dial[slots] - self._mark[slots])
        return ControlStep(reward=-distance, success=distance < CLOSE, terminated=np.zeros(len(slots), np.bool_))

    def observe(self, slots: IntArray) -> Observation:
        """What a policy sees of these slots: arrays [n, ...] as the spec says."""
        return {"state": np.stack([self._dial[slots], self._mark[slots]], axis=1)}


if __name__ == "__main__":
    serve(partial(Dial, num_slots=8), listen="127.0.0.1:7431")
