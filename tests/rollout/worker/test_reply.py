"""Whatever a simulator answers, only well-formed rows get past."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from dvla.v1 import sim_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidInput
from services.common.spec import Array, TensorSpec
from services.rollout.worker.reply import read_turn
from services.rollout.worker.turn import Turn

TENSORS = (TensorSpec("state", "float32", (2,)), TensorSpec("rgb/base", "uint8", (1, 1, 3)))
CHUNK = (3, 2)


@dataclass
class Reply:
    """A reply to resets of slots 7 and 5 and advances of slots 0 and 4; slot 4 ended by success."""

    observed: list[int] = field(default_factory=lambda: [0, 1, 2])
    outcomes: list[sim_pb2.SlotOutcome] = field(
        default_factory=lambda: [sim_pb2.SlotOutcome(executed=3), sim_pb2.SlotOutcome(executed=2, terminated=True)]
    )
    arrays: dict[str, Array] = field(
        default_factory=lambda: {
            "obs/state": np.arange(6, dtype=np.float32).reshape(3, 2),
            "obs/rgb/base": np.arange(9, dtype=np.uint8).reshape(3, 1, 1, 3),
            "reward": np.array([[1, 2, 3], [4, 5, 0]], np.float32),
            "success": np.array([[0, 0, 0], [0, 1, 0]], np.bool_),
            "executed_action": np.arange(12, dtype=np.float32).reshape(2, 3, 2),
        }
    )

    def read(self) -> Turn:
        message = sim_pb2.Advanced(observed=self.observed, outcomes=self.outcomes)
        return read_turn(message, self.arrays, TENSORS, [7, 5], [0, 4], CHUNK)


def test_rows_are_sorted_by_slot_and_copied() -> None:
    reply = Reply()
    turn = reply.read()
    assert set(turn.started) == {7, 5}
    np.testing.assert_array_equal(turn.started[5]["state"], [2, 3])
    np.testing.assert_array_equal(turn.started[7]["rgb/base"], [[[0, 1, 2]]])
    goes_on, ended = turn.outcomes[0], turn.outcomes[4]
    assert (goes_on.executed, goes_on.ended, ended.executed, ended.terminated) == (3, False, 2, True)
    assert goes_on.observation is not None
    np.testing.assert_array_equal(goes_on.observation["state"], [4, 5])
    assert ended.observation is None
    np.testing.assert_array_equal(ended.reward, [4, 5, 0])
    np.testing.assert_array_equal(ended.executed_action, reply.arrays["executed_action"][1])
    assert not np.shares_memory(goes_on.reward, reply.arrays["reward"])
    assert not np.shares_memory(goes_on.observation["state"], reply.arrays["obs/state"])


def test_a_turn_of_resets_needs_no_rewards() -> None:
    arrays: dict[str, Array] = {
        "obs/state": np.zeros((1, 2), np.float32),
        "obs/rgb/base": np.zeros((1, 1, 1, 3), np.uint8),
    }
    turn = read_turn(sim_pb2.Advanced(observed=[0]), arrays, TENSORS, [3], [], (0, 0))
    assert set(turn.started) == {3}
    assert turn.outcomes == {}


def spoil(name: str, change: Callable[[Array], Array]) -> Callable[[Reply], None]:
    def apply(reply: Reply) -> None:
        reply.arrays[name] = change(reply.arrays[name].copy())

    return apply


def put(name: str, index: tuple[int, ...], value: float) -> Callable[[Reply], None]:
    def change(array: Array) -> Array:
        array[index] = value
        return array

    return spoil(name, change)


def drop(name: str) -> Callable[[Reply], None]:
    def apply(reply: Reply) -> None:
        del reply.arrays[name]

    return apply


def said(row: int, **facts: object) -> Callable[[Reply], None]:
    def apply(reply: Reply) -> None:
        reply.outcomes[row] = sim_pb2.SlotOutcome(**facts)  # type: ignore[arg-type]

    return apply


def saw(*rows: int) -> Callable[[Reply], None]:
    def apply(reply: Reply) -> None:
        reply.observed = list(rows)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("reward"), r"sent nothing as 'reward'; expected float32\(2, 3\)"),
        (drop("success"), "'success'"),
        (drop("executed_action"), "'executed_action'"),
        (drop("obs/state"), r"sent nothing as 'obs/state'; expected float32\(3, 2\)"),
        (drop("obs/rgb/base"), "'obs/rgb/base'"),
        (spoil("obs/state", lambda a: a.astype(np.float64)), r"sent float64\(3, 2\) as 'obs/state'"),
        (spoil("obs/rgb/base", lambda a: a.astype(np.float32)), "'obs/rgb/base'"),
        (spoil("obs/state", lambda a: a[:2]), "'obs/state'"),
        (spoil("reward", lambda a: a[:, :2]), "'reward'"),
        (spoil("reward", lambda a: a[:1]), "'reward'"),
        (spoil("success", lambda a: a.astype(np.uint8)), "'success'"),
        (spoil("executed_action", lambda a: a[..., :1]), "'executed_action'"),
        (lambda reply: reply.outcomes.pop(), "sent 1 outcomes for 2 slots"),
        (saw(0, 1, 4), "expected ascending ones below 4"),
        (saw(1, 0, 2), "expected ascending"),
        (saw(0, 1, 1), "expected ascending"),
        (saw(0, 2, 3), "no finite first observation for slot 5"),
        (saw(), "no finite first observation for slot 7"),
        (saw(0, 1, 3), "no observation for slot 0, whose episode goes on"),
        (put("obs/state", (0, 0), np.nan), "no finite first observation for slot 7"),
        (said(0, executed=2), "executed 2 of 3 steps in slot 0, which goes on"),
        (said(0), "executed 0 of 3"),
        (said(0, executed=4), "executed 4 of 3"),
        (said(1, executed=0, truncated=True), "executed 0 of 3"),
        (said(1, executed=1, truncated=True), "reward or success after the end of slot 4"),
        (put("reward", (1, 2), 0.5), "reward or success after the end of slot 4"),
        (put("success", (1, 2), 1), "reward or success after the end of slot 4"),
    ],
)
def test_a_reply_that_does_not_hold_together_is_refused(damage: Callable[[Reply], None], message: str) -> None:
    reply = Reply()
    damage(reply)
    with pytest.raises(InvalidInput, match=message):
        reply.read()


@pytest.mark.parametrize(
    ("damage", "slot", "reason"),
    [
        (put("obs/state", (2, 1), np.inf), 0, "state is not finite"),
        (put("reward", (0, 1), np.nan), 0, "reward is not finite"),
        (put("reward", (1, 0), -np.inf), 4, "reward is not finite"),
        (put("executed_action", (1, 0, 0), np.nan), 4, "executed_action is not finite"),
        (said(1, failure="physics overflow"), 4, "physics overflow"),
    ],
)
def test_a_value_that_is_not_finite_makes_only_its_own_episode_void(
    damage: Callable[[Reply], None], slot: int, reason: str
) -> None:
    reply = Reply()
    damage(reply)
    turn = reply.read()
    assert turn.outcomes[slot].failure == reason
    assert turn.outcomes[slot].ended
    assert not turn.outcomes[4 - slot].failure
    assert set(turn.started) == {7, 5}


@given(
    observed=st.lists(st.integers(0, 6), max_size=5),
    executed=st.lists(st.integers(0, 5), max_size=3),
    ends=st.lists(st.booleans(), min_size=3, max_size=3),
    missing=st.sampled_from(["", "reward", "success", "executed_action", "obs/state"]),
    rows=st.integers(0, 4),
)
def test_any_reply_is_read_or_refused(
    observed: list[int], executed: list[int], ends: list[bool], missing: str, rows: int
) -> None:
    reply = Reply()
    reply.observed = observed
    reply.outcomes = [sim_pb2.SlotOutcome(executed=n, truncated=end) for n, end in zip(executed, ends, strict=False)]
    reply.arrays.pop(missing, None)
    for name in ("obs/state", "obs/rgb/base"):
        if name in reply.arrays:
            reply.arrays[name] = np.resize(reply.arrays[name], (rows, *reply.arrays[name].shape[1:]))
    try:
        turn = reply.read()
    except InvalidInput:
        return
    assert set(turn.started) == {7, 5}
    assert set(turn.outcomes) == {0, 4}
