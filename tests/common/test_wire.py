"""Specs survive the wire."""

import math

import pytest
from dvla.v1 import sim_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidInput, NotFound
from services.common.spec import ActionSpec, SimSpec, TaskSpec, TensorSpec
from services.common.wire import spec_from_proto, spec_to_proto

words = st.text(max_size=8)
limits = st.floats(width=32, allow_nan=False)


@st.composite
def specs(draw: st.DrawFn) -> SimSpec:
    dim = draw(st.integers(1, 4))
    low, high = (tuple(draw(st.lists(limits, min_size=dim, max_size=dim))) for _ in range(2))
    shapes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
    return SimSpec(
        observation=tuple(draw(st.lists(st.builds(TensorSpec, words, words, shapes), max_size=3))),
        action=ActionSpec(dim, low, high, draw(words), draw(st.booleans())),
        tasks=tuple(draw(st.lists(st.builds(TaskSpec, words, words, st.integers(0, 2**32 - 1)), max_size=3))),
        starts=draw(st.sampled_from(["state", "seed", "none"])),
        backend=draw(words),
        batched=draw(st.booleans()),
    )


@given(spec=specs())
def test_a_spec_survives_the_wire(spec: SimSpec) -> None:
    assert spec_from_proto(sim_pb2.SimSpec.FromString(spec_to_proto(spec).SerializeToString())) == spec


def message(**changes: object) -> sim_pb2.SimSpec:
    spec = SimSpec((), ActionSpec(2, (-1.0, -1.0), (1.0, 1.0)), (TaskSpec("reach", "reach it", 9),), "state", "toy")
    out = spec_to_proto(spec)
    out.MergeFrom(sim_pb2.SimSpec(**changes))  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize(
    ("spoiled", "expected"),
    [
        (message(starts="sometimes"), "expected state, seed or none"),
        (message(action=sim_pb2.ActionSpec(dim=3)), "2 low and 2 high limits for 3"),
        (message(action=sim_pb2.ActionSpec(low=[0.0])), "3 low and 2 high limits for 2"),
        (message(action=sim_pb2.ActionSpec(low=[math.nan], dim=3, high=[1.0])), "not a number"),
    ],
)
def test_an_impossible_spec_is_refused(spoiled: sim_pb2.SimSpec, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        spec_from_proto(spoiled)


def test_an_unknown_task_names_the_known_ones() -> None:
    spec = spec_from_proto(message())
    assert spec.task("reach").max_steps == 9
    with pytest.raises(NotFound, match="unknown task 'grasp'; this simulator offers reach"):
        spec.task("grasp")
