"""Advantages of whole episodes relative to their group: same task, same start state, same instruction.

Pure functions on tensors. Groups may have any size and their members may come in any order.
"""

import torch
from torch import Tensor

from services.learner.objective import Normalisation

EPSILON = 1e-6


def group_advantages(score: Tensor, group: Tensor, normalisation: Normalisation) -> Tensor:
    """Advantage of each episode within its group.

    score: float64 [M]; group: int64 [M], group index of each episode. Returns float32 [M].

    With R the score, mean and std (n - 1 degrees of freedom) over the n members of the group:
    * "std":           A = (R - mean) / (std + 1e-6)           GRPO (Shao et al. 2024, DeepSeekMath, section 4.1.2)
    * "mean":          A = R - mean                            Dr. GRPO (Liu et al. 2025)
    * "leave-one-out": A = R - mean of the others              RLOO (Ahmadian et al. 2024, equation 11)

    A group whose largest score equals its smallest has no signal: its advantages are exactly 0, also where the
    mean of equal scores (.35, 1/3) leaves a float residue that a division by a tiny std would blow up.
    """
    index, group = torch.unique(group, return_inverse=True)
    count = len(index)
    lowest = _per_group(score, group, count, "amin")
    highest = _per_group(score, group, count, "amax")
    size = torch.zeros(count, dtype=score.dtype).index_add_(0, group, torch.ones_like(score))
    # Scores are shifted by the group's minimum first: large equal parts cancel before anything is squared.
    above = score - lowest[group]
    mean = torch.zeros(count, dtype=score.dtype).index_add_(0, group, above) / size
    deviation = above - mean[group]
    if normalisation == "std":
        squares = torch.zeros(count, dtype=score.dtype).index_add_(0, group, deviation.square())
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        advantage = deviation / (std[group] + EPSILON)
    elif normalisation == "mean":
        advantage = deviation
    else:
        advantage = deviation * (size / (size - 1).clamp(min=1))[group]
    return torch.where((highest == lowest)[group], 0.0, advantage).float()


def _per_group(values: Tensor, group: Tensor, count: int, reduce: str) -> Tensor:
    out = torch.zeros(count, dtype=values.dtype)
    return out.scatter_reduce_(0, group, values, reduce, include_self=False)
