"""What a simulator offers: tensors, tasks, limits. Plain data, shared by every role.

No torch, no grpc. `services.common.wire` converts these to and from protobuf.
"""

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidInput, NotFound

Array = npt.NDArray[np.generic]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Observation = dict[str, Array]
"""One array per observation tensor, leading dimension = slots."""

Starts = Literal["state", "seed", "none"]


def starts(text: str) -> Starts:
    """This text as a `Starts`; raises InvalidInput for anything else."""
    if text not in ("state", "seed", "none"):
        raise InvalidInput(f"starts = {text!r}; expected state, seed or none")
    return cast(Starts, text)


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (numpy name, such as "float32") and shape of one tensor, without the batch dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ActionSpec:
    """The action of one control step: `dim` floats, clipped to [low, high] per dimension by the simulator.

    `bounded=False` marks controllers whose limits are open (low/high are then -inf/inf).
    """

    dim: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    control_mode: str = ""
    bounded: bool = True


@dataclass(frozen=True)
class TaskSpec:
    """A task id, the instruction the policy reads, and the step limit of an episode."""

    id: str
    instruction: str
    max_steps: int


@dataclass(frozen=True)
class SimSpec:
    """The whole contract of one simulator.

    observation: tensors a policy may read. Names: "state" (float32 vector), "rgb/<camera>" (uint8 HWC).
    starts: "state" (start states can be stored and replayed), "seed" (only re-made from a seed), "none".
    backend: engine and device, such as "maniskill/physx_cpu"; travels with every trajectory.
    """

    observation: tuple[TensorSpec, ...]
    action: ActionSpec
    tasks: tuple[TaskSpec, ...]
    starts: Starts
    backend: str
    batched: bool = False

    def task(self, task_id: str) -> TaskSpec:
        """The task with this id; `NotFound` names the known ones."""
        for task in self.tasks:
            if task.id == task_id:
                return task
        known = ", ".join(task.id for task in self.tasks)
        raise NotFound(f"unknown task {task_id!r}; this simulator offers {known}")
