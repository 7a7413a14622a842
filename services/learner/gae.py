"""Generalised advantage estimation over chunks, for PPO."""

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_rewards(reward: Tensor, executed: Tensor, discount: float) -> Tensor:
    """Discounted reward of each chunk, sum of gamma^j r_j over its executed steps: float64 [N].

    reward: float32 [N, C]. executed: int64 [N].
    """
    steps = torch.arange(reward.shape[1], device=reward.device)
    factors = torch.full((), discount, dtype=torch.float64, device=reward.device) ** steps
    counted = torch.where(steps < executed[:, None], reward.double(), 0.0)
    return (counted * factors).sum(1)


def advantages(
    reward: Tensor,
    executed: Tensor,
    value: Tensor,
    episode: Tensor,
    bootstrap: Tensor,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """Advantage of each chunk: float64 [N] on the CPU.

    Rows are in order of episode and time. reward: float32 [N, C]. executed: int64 [N]. value: float [N], V of the
    observation before the chunk. episode: int64 [N]. bootstrap: float [M], V of the observation at which an episode
    was cut off; 0 where it terminated.

    With R the chunk's reward (`chunk_rewards`) and n its executed steps (Schulman et al. 2016, equations 11 to 16,
    one step being a chunk):

        delta_k = R_k + gamma^n_k V_(k+1) - V_k
        A_k     = delta_k + gamma^n_k lambda A_(k+1)

    Nothing passes from one episode to the next: V_(k+1) after the last chunk is the episode's own bootstrap.
    """
    rewards: Sequence[float] = chunk_rewards(reward, executed, discount).tolist()
    values, ends = value.double().tolist(), bootstrap.double().tolist()
    owners, counts = episode.tolist(), executed.tolist()
    out = [0.0] * len(rewards)
    following, ahead = 0.0, 0.0
    for row in range(len(rewards) - 1, -1, -1):
        if row == len(rewards) - 1 or owners[row] != owners[row + 1]:
            following, ahead = ends[owners[row]], 0.0
        decay = discount ** counts[row]
        ahead = rewards[row] + decay * following - values[row] + decay * gae_lambda * ahead
        out[row], following = ahead, values[row]
    return torch.tensor(out, dtype=torch.float64)


def normalised(advantage: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over all chunks of the batch; equal ones become 0."""
    centred = advantage - advantage.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)
