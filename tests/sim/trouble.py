"""A toy simulator that gets into trouble when the first action of a step asks for it."""

import os
import signal
from functools import partial

import numpy as np

from services.common.errors import Unavailable, Unsupported
from services.common.spec import FloatArray, IntArray
from services.sim.toy import ToySim
from services.sim.vector import ControlStep, VectorSim

DIE, FREEZE, BUG, DAMAGED = (np.float32(value) for value in (0.75, 0.5, 0.25, 0.125))


class TroubleSim(ToySim):
    """Dies, freezes, raises or reports damage on demand."""

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        wish = actions[0, 0]
        if wish == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if wish == FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        if wish == BUG:
            raise ZeroDivisionError("a bug in the simulator")
        if wish == DAMAGED:
            raise Unavailable("contacts were lost")
        return super().step(slots, actions)


def trouble(num_slots: int = 2) -> VectorSim:
    return TroubleSim(num_slots)


def impossible() -> VectorSim:
    raise Unsupported("no Vulkan device: install one")


def broken() -> VectorSim:
    raise ZeroDivisionError("a bug in the constructor")


small = partial(trouble, 2)
