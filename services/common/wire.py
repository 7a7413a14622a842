"""Plain dataclasses to protobuf messages and back."""

from math import isnan

from dvla.v1 import common_pb2, sim_pb2

from services.common import spec as s
from services.common.errors import InvalidInput


def spec_to_proto(spec: s.SimSpec) -> sim_pb2.SimSpec:
    """A simulator's spec as a message."""
    return sim_pb2.SimSpec(
        observation=[common_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in spec.observation],
        action=sim_pb2.ActionSpec(
            dim=spec.action.dim,
            low=spec.action.low,
            high=spec.action.high,
            control_mode=spec.action.control_mode,
            bounded=spec.action.bounded,
        ),
        tasks=[sim_pb2.TaskSpec(id=t.id, instruction=t.instruction, max_steps=t.max_steps) for t in spec.tasks],
        starts=spec.starts,
        backend=spec.backend,
        batched=spec.batched,
    )


def spec_from_proto(message: sim_pb2.SimSpec) -> s.SimSpec:
    """A simulator's spec from a message; raises InvalidInput if it contradicts itself."""
    action = message.action
    if not len(action.low) == len(action.high) == action.dim:
        raise InvalidInput(
            f"simulator states {len(action.low)} low and {len(action.high)} high limits for {action.dim} dimensions"
        )
    if any(isnan(limit) for limit in (*action.low, *action.high)):
        raise InvalidInput("simulator states an action limit that is not a number; open limits are -inf and inf")
    return s.SimSpec(
        observation=tuple(s.TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in message.observation),
        action=s.ActionSpec(
            action.dim, tuple(action.low), tuple(action.high), action.control_mode, bounded=action.bounded
        ),
        tasks=tuple(s.TaskSpec(t.id, t.instruction, t.max_steps) for t in message.tasks),
        starts=s.starts(message.starts),
        backend=message.backend,
        batched=message.batched,
    )
