"""Only whole, finite, finished episodes pass."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import codec
from services.common.errors import InvalidInput
from services.common.spec import Array
from services.common.trajectory import (
    Trajectory,
    instruction_array,
    instruction_text,
    prefixed,
    validate,
)


def episode(chunks: int = 3, chunk: int = 4, dim: int = 2, last: int = 2, value: bool = False) -> Trajectory:
    rng = np.random.default_rng(0)
    executed = np.full(chunks, chunk, np.int32)
    executed[-1] = last
    alive = np.arange(chunk) < executed[:, None]
    trajectory: Trajectory = {
        "obs/state": rng.normal(size=(chunks, 5)).astype(np.float32),
        "obs/rgb/base": rng.integers(0, 255, (chunks, 2, 2, 3)).astype(np.uint8),
        "record/tokens": rng.integers(0, 255, (chunks, chunk, dim)),
        "action": rng.normal(size=(chunks, chunk, dim)).astype(np.float32),
        "executed_action": rng.normal(size=(chunks, chunk, dim)).astype(np.float32),
        "log_prob": rng.normal(size=(chunks, chunk, dim)).astype(np.float32),
        "reward": (rng.normal(size=(chunks, chunk)) * alive).astype(np.float32),
        "success": alive & (rng.random((chunks, chunk)) < 0.5),
        "executed": executed,
        "version": np.tile(np.array([1, 7]), (chunks, 1)),
        "ends": np.array([False, True]),
        "instruction": instruction_array("push the cube → goal"),
    }
    if value:
        trajectory |= {"value": np.zeros(chunks, np.float32), "final_obs/state": np.zeros((1, 5), np.float32)}
    return trajectory


@given(
    chunks=st.integers(1, 5),
    chunk=st.integers(1, 4),
    dim=st.integers(1, 3),
    last=st.integers(1, 4),
    value=st.booleans(),
    ends=st.sampled_from([(True, False), (False, True), (True, True)]),
    instruction=st.text(max_size=20),
)
def test_a_finished_episode_passes_also_after_the_wire(
    chunks: int, chunk: int, dim: int, last: int, value: bool, ends: tuple[bool, bool], instruction: str
) -> None:
    trajectory = episode(chunks, chunk, dim, min(last, chunk), value)
    trajectory["ends"] = np.array(ends)
    trajectory["instruction"] = instruction_array(instruction)
    validate(trajectory)
    received = codec.decode(codec.encode(trajectory, hashed=True)[0])
    validate(received)
    assert instruction_text(received) == instruction
    assert set(prefixed(received, "obs")) == {"state", "rgb/base"}


def put(name: str, change: Callable[[Array], Array]) -> Callable[[Trajectory], None]:
    def spoil(trajectory: Trajectory) -> None:
        trajectory[name] = change(trajectory[name].copy())

    return spoil


def at(name: str, index: tuple[int, ...], value: float) -> Callable[[Trajectory], None]:
    def change(array: Array) -> Array:
        array[index] = value
        return array

    return put(name, change)


REQUIRED = (
    "action",
    "executed_action",
    "log_prob",
    "reward",
    "success",
    "executed",
    "version",
    "ends",
    "instruction",
)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_tensor_is_named(name: str) -> None:
    trajectory = episode()
    del trajectory[name]
    with pytest.raises(InvalidInput, match=f"lacks '{name}'"):
        validate(trajectory)


@pytest.mark.parametrize("name", [*REQUIRED, "value"])
def test_a_wrong_dtype_or_number_of_dimensions_is_named(name: str) -> None:
    for change in (lambda a: a.astype(np.float64), lambda a: a[None], lambda a: a.reshape(-1)[0]):
        trajectory = episode(value=True)
        put(name, change)(trajectory)
        with pytest.raises(InvalidInput, match=f"'{name}'"):
            validate(trajectory)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (put("obs/state", lambda a: a[:-1]), r"'obs/state' has shape \(2, 5\); expected \(3, '...'\)"),
        (put("obs/state", lambda a: a[0, 0]), "'obs/state' has shape"),
        (put("record/tokens", lambda a: np.concatenate([a, a])), "'record/tokens' has shape"),
        (put("action", lambda a: a[:0]), "at least 1"),
        (put("action", lambda a: a[:, :, :1]), "'executed_action' has shape"),
        (put("log_prob", lambda a: a[:, :, :1]), "'log_prob' has shape"),
        (put("executed_action", lambda a: a[:, :3]), "'executed_action' has shape"),
        (put("reward", lambda a: a[:, :3]), "'reward' has shape"),
        (put("success", lambda a: a[:2]), "'success' has shape"),
        (put("version", lambda a: a[:, :1]), "'version' has shape"),
        (put("executed", lambda a: a[:2]), "'executed' has shape"),
        (put("value", lambda a: a[:2]), "'value' has shape"),
        (put("ends", lambda a: a[:1]), "'ends' has shape"),
        (put("final_obs/state", lambda a: np.concatenate([a, a])), "'final_obs/state' has shape"),
        (put("instruction", lambda a: np.array([0xFF, 0xFE], np.uint8)), "no UTF-8"),
        (at("executed", (0,), 3), "'executed' must be 4"),
        (at("executed", (2,), 0), "'executed' must be 4"),
        (at("executed", (2,), 5), "'executed' must be 4"),
        (at("executed", (2,), -1), "'executed' must be 4"),
        (at("reward", (2, 3), 0.5), "after the last executed step"),
        (at("success", (2, 2), 1), "after the last executed step"),
        (put("ends", lambda a: np.zeros_like(a)), "not over"),
        (at("obs/state", (1, 1), np.nan), "'obs/state' holds a value that is not finite"),
        (at("reward", (0, 0), np.inf), "'reward' holds"),
        (at("log_prob", (0, 0, 0), -np.inf), "'log_prob' holds"),
        (at("action", (2, 3, 1), np.nan), "'action' holds"),
        (at("value", (0,), np.nan), "'value' holds"),
        (at("final_obs/state", (0, 0), np.nan), "'final_obs/state' holds"),
        (put("record/tokens", lambda a: a.astype(np.float16) * np.float16(np.inf)), "'record/tokens' holds"),
    ],
)
def test_an_episode_to_be_refused(spoil: Callable[[Trajectory], None], message: str) -> None:
    trajectory = episode(value=True)
    validate(trajectory)
    spoil(trajectory)
    with pytest.raises(InvalidInput, match=message):
        validate(trajectory)
