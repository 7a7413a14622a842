"""What the steps of an episode are worth to the learner. Pure functions on a trajectory's arrays."""

from collections.abc import Sequence

import numpy as np

from services.common.errors import InvalidInput
from services.common.spec import FloatArray, IntArray
from services.common.trajectory import Trajectory
from services.learner.objective import Score


def step_rewards(trajectory: Trajectory, score: Score) -> FloatArray:
    """Reward of each control step, float32 [T, C], 0 after the end; its sum is the episode's score.

    * "success":      1 at the first success
    * "sum":          r_t as the simulator sent it, sparse, dense or normalised
    * "differential": r_t - r_(t-1), with 0 before the first step: the sum is the last reward, so that finishing early
                      costs nothing (potential-based shaping without discount, Ng et al. 1999, equation 2)
    """
    reward: FloatArray = trajectory["reward"].astype(np.float32, copy=True)
    if score == "sum":
        return reward
    steps = int(trajectory["executed"].sum())  # all chunks but the last are full, so the steps lie side by side
    flat = np.zeros(reward.size, np.float32)
    if score == "success":
        success = trajectory["success"].reshape(-1)
        if success.any():
            flat[int(success.argmax())] = 1
    else:
        flat[:steps] = np.diff(reward.reshape(-1)[:steps], prepend=np.float32(0))
    return flat.reshape(reward.shape)


def check_range(trajectory: Trajectory, limits: Sequence[float]) -> None:
    """Refuse a reward outside of [low, high]: the simulator's reward is not the one that the run was set up for."""
    if not limits:
        return
    low, high = limits
    reward: FloatArray = trajectory["reward"].astype(np.float32, copy=False)
    steps: IntArray = trajectory["executed"].astype(np.int64)
    executed = np.arange(reward.shape[1]) < steps[:, None]
    worst = reward[executed & ((reward < low) | (reward > high))]
    if worst.size:
        raise InvalidInput(
            f"{worst.size} rewards lie outside of reward_range {low} to {high}, such as {float(worst[0]):.6g}; "
            "correct the range, or the simulator's reward mode"
        )
