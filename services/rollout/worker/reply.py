"""A simulator's reply to one turn, checked row by row: nothing that a policy or a learner would choke on gets past.

What is wrong with one episode makes that episode void; what is wrong with the whole reply raises InvalidInput.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from dvla.v1 import sim_pb2

from services.common.errors import InvalidInput
from services.common.spec import Array, BoolArray, FloatArray, TensorSpec
from services.rollout.worker.turn import Outcome, Turn

Row = dict[str, Array]


def read_turn(
    reply: sim_pb2.Advanced,
    arrays: Mapping[str, Array],
    tensors: Sequence[TensorSpec],
    resets: Sequence[int],
    slots: Sequence[int],
    chunk: tuple[int, int],
) -> Turn:
    """Sort the rows of a reply by slot: first the reset ones, then the advanced ones.

    tensors: the observation asked for. chunk: (C, D) of the actions sent.
    """
    if len(reply.outcomes) != len(slots):
        raise InvalidInput(f"simulator sent {len(reply.outcomes)} outcomes for {len(slots)} slots")
    observed = _observed(reply, arrays, tensors, len(resets) + len(slots))
    started = {}
    for row, slot in enumerate(resets):
        if row not in observed or _not_finite(observed[row]):
            raise InvalidInput(f"simulator sent no finite first observation for slot {slot}")
        started[slot] = observed[row]
    if not slots:
        return Turn(started, {})
    n, (length, dim) = len(slots), chunk
    reward = cast(FloatArray, _tensor(arrays, "reward", np.float32, (n, length)))
    success = cast(BoolArray, _tensor(arrays, "success", np.bool_, (n, length)))
    executed_action = cast(FloatArray, _tensor(arrays, "executed_action", np.float32, (n, length, dim)))
    outcomes = {}
    for row, (slot, said) in enumerate(zip(slots, reply.outcomes, strict=True)):
        outcome = Outcome(
            executed=said.executed,
            reward=reward[row].copy(),
            success=success[row].copy(),
            executed_action=executed_action[row].copy(),
            terminated=said.terminated,
            truncated=said.truncated,
            failure=said.failure,
            observation=observed.get(len(resets) + row),
        )
        outcomes[slot] = outcome if outcome.failure else _checked(outcome, slot, length)
    return Turn(started, outcomes)


def _observed(
    reply: sim_pb2.Advanced, arrays: Mapping[str, Array], tensors: Sequence[TensorSpec], rows: int
) -> dict[int, Row]:
    """The observation of each observed row; copies, so that one kept row does not keep the whole message alive."""
    observed = list(reply.observed)
    if observed != sorted(set(observed)) or (observed and observed[-1] >= rows):
        raise InvalidInput(f"simulator observed rows {observed}; expected ascending ones below {rows}")
    if not observed:
        return {}
    stacks = {
        spec.name: _tensor(arrays, f"obs/{spec.name}", np.dtype(spec.dtype), (len(observed), *spec.shape))
        for spec in tensors
    }
    return {row: {name: stack[at].copy() for name, stack in stacks.items()} for at, row in enumerate(observed)}


def _checked(outcome: Outcome, slot: int, length: int) -> Outcome:
    """The outcome itself, or a failed one if it holds a value that is not finite."""
    if not 1 <= outcome.executed <= length or (not outcome.ended and outcome.executed != length):
        raise InvalidInput(f"simulator executed {outcome.executed} of {length} steps in slot {slot}, which goes on")
    if outcome.reward[outcome.executed :].any() or outcome.success[outcome.executed :].any():
        raise InvalidInput(f"simulator sent reward or success after the end of slot {slot}; expected 0 and false")
    if not outcome.ended and outcome.observation is None:
        raise InvalidInput(f"simulator sent no observation for slot {slot}, whose episode goes on")
    values = {"reward": outcome.reward, "executed_action": outcome.executed_action} | (outcome.observation or {})
    name = _not_finite(values)
    return outcome.failed(f"{name} is not finite") if name else outcome


def _tensor(
    arrays: Mapping[str, Array], name: str, dtype: "np.dtype[Any] | type[np.generic]", shape: tuple[int, ...]
) -> Array:
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.shape != shape:
        got = "nothing" if array is None else f"{array.dtype}{array.shape}"
        raise InvalidInput(f"simulator sent {got} as {name!r}; expected {np.dtype(dtype)}{shape}")
    return array


def _not_finite(row: Mapping[str, Array]) -> str:
    """Name of a tensor with a value that is not finite, or nothing."""
    for name, array in row.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return name
    return ""
