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

_ROWS: dict[str, tuple[type[np.generic], int]] = {
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
        _require(trajectory, name, dtype, ndim)
    _require(trajectory, "ends", np.bool_, 1)
    if "value" in trajectory:
        _require(trajectory, "value", np.float32, 1)
    instruction_text(trajectory)
    chunks, chunk, dim = trajectory["action"].shape
    if 0 in (chunks, chunk, dim):
        raise InvalidInput(f"'action' has shape {(chunks, chunk, dim)}; expected at least 1 in each dimension")
    shapes = {"action": (chunk, dim), "executed_action": (chunk, dim), "log_prob": (chunk, dim), "version": (2,)}
    shapes |= {"reward": (chunk,), "success": (chunk,)}
    lengths = {"ends": 2, "instruction": trajectory["instruction"].size}
    for name, array in trajectory.items():
        rows = lengths.get(name, 1 if name.startswith("final_obs/") else chunks)
        if array.shape[:1] != (rows,) or array.shape[1:] != shapes.get(name, array.shape[1:]):
            raise InvalidInput(f"{name!r} has shape {array.shape}; expected {(rows, *shapes.get(name, ('...',)))}")
        if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            raise InvalidInput(f"{name!r} holds a value that is not finite")
    _require_ends(trajectory, chunk)


def _require(trajectory: Mapping[str, Array], name: str, dtype: type[np.generic], ndim: int) -> None:
    array = trajectory.get(name)
    if array is None:
        raise InvalidInput(f"trajectory lacks {name!r}")
    if array.dtype != dtype or array.ndim != ndim:
        raise InvalidInput(
            f"{name!r} is {array.dtype} with {array.ndim} dimensions; expected {np.dtype(dtype)} with {ndim}"
        )


def _require_ends(trajectory: Mapping[str, Array], chunk: int) -> None:
    executed, last = trajectory["executed"], int(trajectory["executed"][-1])
    if not 1 <= last <= chunk or (executed[:-1] != chunk).any():
        raise InvalidInput(f"'executed' must be {chunk} in all chunks but the last, and 1..{chunk} there")
    if trajectory["reward"][-1, last:].any() or trajectory["success"][-1, last:].any():
        raise InvalidInput("'reward' and 'success' must be 0 and false after the last executed step")
    if not trajectory["ends"].any():
        raise InvalidInput("'ends' says neither terminated nor truncated: the episode is not over")


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
