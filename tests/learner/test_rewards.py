"""Rewards of control steps under each score, and bounds."""

import numpy as np
import pytest

from services.common.errors import InvalidInput
from services.common.trajectory import Trajectory
from services.learner.objective import Score
from services.learner.rewards import check_range, step_rewards
from services.rollout.worker.episode import facts
from tests.learner.data import make_trajectory as made
from tests.learner.data import small_policy


def trajectory(executed: int = 2) -> Trajectory:
    """Two chunks of three; success at the fifth step; the reward grows towards it."""
    out = made(small_policy(), "x", chunks=2)
    reward = np.array([[0.1, 0.4, 0.2], [0.5, 0.9, 0.0]], np.float32)
    success = np.array([[False, False, False], [False, True, False]])
    return out | {"reward": reward, "success": success, "executed": np.array([3, executed], np.int32)}


@pytest.mark.parametrize(
    ("score", "wanted"),
    [
        ("success", [[0, 0, 0], [0, 1, 0]]),
        ("sum", [[0.1, 0.4, 0.2], [0.5, 0.9, 0]]),
        ("differential", [[0.1, 0.3, -0.2], [0.3, 0.4, 0]]),
    ],
)
def test_rewards_sum_to_the_score_that_the_worker_reports(score: Score, wanted: list[list[float]]) -> None:
    got = step_rewards(trajectory(), score)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert float(got.sum()) == pytest.approx(facts(trajectory(), score, "toy", "w").score, abs=1e-6)


def test_only_the_first_success_is_worth_something() -> None:
    """S38: success at one step, lost at the end: once it is 1, at the end 0."""
    lost = trajectory() | {"success": np.array([[False, True, True], [True, False, False]])}
    assert step_rewards(lost, "success").tolist() == [[0, 1, 0], [0, 0, 0]]
    episode = facts(lost, "success", "toy", "w")
    assert (episode.success_once, episode.success_at_end, episode.score) == (True, False, 1.0)


def test_rewards_share_no_memory_with_the_payload() -> None:
    source = trajectory()
    step_rewards(source, "sum")[:] = 7
    assert source["reward"].max() < 1


def test_a_reward_out_of_range_is_named() -> None:
    check_range(trajectory(), ())
    check_range(trajectory(), (0.0, 0.9))
    with pytest.raises(InvalidInput, match=r"1 rewards lie outside of reward_range 0.0 to 0.8, such as 0.9"):
        check_range(trajectory(), (0.0, 0.8))
    beyond = trajectory()
    beyond["reward"][1, 2] = 0.0  # after the end nothing is read
    check_range(beyond, (0.05, 0.95))
