"""The layout of one trajectory: an episode as the learner reads it. Plain arrays by name.

T = chunks of the episode, C = actions in a chunk, D = action dimensions. Rows are chunks, in time order.

    obs/<name>          [T, ...]     what the policy read before each chunk
    final_obs/<name>    [1, ...]     only where the episode was truncated and the run asks for it (PPO)
    record/<name>       [T, ...]     what the policy needs to score the chunk again
    action              [T, C, D]    float32, environment units, as the policy gave it; log_prob belongs to it
    executed_action     [T, C, D]    float32, after clipping by the simulator
    log_prob            [T, C, D]    float32, of the behaviour policy
    value               [T]          float32, only with a value head
    reward              [T, C]       float32, 0 after the end
    success             [T, C]       bool, false after the end
    executed            [T]          int32, control steps executed in the chunk, 1..C
    version             [T, 2]       int64, (epoch, update) of the weights that computed the chunk
    ends                [2]          bool, (terminated, truncated)
    instruction         [L]          uint8, the instruction that the policy read, UTF-8 (`instruction_array`)
"""

from collections.abc import Mapping

import numpy as np

from services.common.errors import InvalidInput
from services.common.spec import Array

Trajectory = dict[str, Array]

_ROWS = {
    "action": (np.float32, 3),
    "executed_action": (np.float32, 3),
    "log_prob": (np.float32, 3),
    "reward": (np.float32, 2),
    "success": (np.bool_, 2),
    "executed": (np.int32, 1),
    "version": (np.int64, 2),
}


def validate(trajectory: Mapping[str, Array]) -> None:
    """Refuse a trajectory that a learner must not train on; the message names tensor and expectation."""
    for name, (dtype, ndim) in _ROWS.items():
        array = trajectory.get(name)
        if array is None:
            raise InvalidInput(f"trajectory lacks {name!r}")
        if array.dtype != dtype or array.ndim != ndim:
            raise InvalidInput(
                f"{name!r} is {array.dtype} with {array.ndim} dimensions; expected {np.dtype(dtype)} with {ndim}"
            )
    chunks, chunk = trajectory["reward"].shape
    if chunks == 0:
        raise InvalidInput("trajectory has no chunk")
    if trajectory["version"].shape[1] != 2 or trajectory.get("ends", np.zeros(0)).shape != (2,):
        raise InvalidInput("'version' must be [T, 2] and 'ends' [2]")
    instruction_text(trajectory)
    for name, array in trajectory.items():
        by_row = name not in ("ends", "instruction") and not name.startswith("final_obs/")
        if by_row and array.shape[:1] != (chunks,):
            raise InvalidInput(f"{name!r} has shape {array.shape}; the episode has {chunks} chunks")
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise InvalidInput(f"{name!r} holds a value that is not finite")
    for name in ("action", "executed_action", "log_prob", "success"):
        if trajectory[name].shape[1] != chunk:
            raise InvalidInput(f"{name!r} has chunks of {trajectory[name].shape[1]}; 'reward' has {chunk}")
    executed = trajectory["executed"]
    if executed.min() < 1 or executed.max() > chunk or (executed[:-1] != chunk).any():
        raise InvalidInput(f"'executed' must be {chunk} in all chunks but the last, and 1..{chunk} there")


def prefixed(trajectory: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The tensors under "prefix/", by their own names."""
    return {name.removeprefix(prefix + "/"): a for name, a in trajectory.items() if name.startswith(prefix + "/")}


def instruction_array(text: str) -> Array:
    """An instruction as the tensor that travels."""
    return np.frombuffer(text.encode(), np.uint8)


def instruction_text(trajectory: Mapping[str, Array]) -> str:
    """The instruction of a trajectory; raises InvalidInput if it is missing or no UTF-8."""
    array = trajectory.get("instruction")
    if array is None or array.dtype != np.uint8 or array.ndim != 1:
        raise InvalidInput("trajectory lacks 'instruction', expected uint8 [L]")
    try:
        return array.tobytes().decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"'instruction' is no UTF-8: {error.reason}") from error
