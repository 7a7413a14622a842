"""Which chunks are worth a gradient: those at which successes and failures of a group differ.

After Probabilistic Chunk Masking (arXiv:2605.16154): GRPO gives every chunk of an episode the same advantage, but the
signal comes from where outcomes diverge. Phases here are equal parts of an episode's time.
"""

import torch
from torch import Tensor

from services.learner.batch import Batch

PHASES = 10
FLOOR = 0.1
"""Smallest keep weight of a phase, as a share of the mean one: no phase is given up for good."""


def informative_rows(batch: Batch, share: float, seed: int) -> Tensor:
    """Ascending row numbers, int64 on the rows' device: ceil(share * T) chunks of each episode of T, drawn without
    replacement with probability proportional to their phase's divergence. The same seed draws the same.

    divergence of a phase = mean over groups of |mean action of the better - mean action of the worse episodes|^2,
    each action dimension in units of its standard deviation.
    """
    episode = batch.rows.episode.cpu()
    length = torch.bincount(episode, minlength=len(batch.members))
    position = torch.arange(len(episode)) - (length.cumsum(0) - length)[episode]
    phase = position * PHASES // length[episode]
    weight = _divergence(batch, episode, phase)[phase]
    # Gumbel top-k: the k largest of log w + Gumbel noise are k draws without replacement in proportion to w.
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(weight), generator=generator, dtype=torch.float64).clamp(1e-12, 1.0 - 1e-12)
    key = weight.log() - (-uniform.log()).log()
    order = torch.argsort(key, descending=True)
    order = order[torch.argsort(episode[order], stable=True)]  # by episode, the largest key first
    rank = torch.arange(len(order)) - (length.cumsum(0) - length)[episode[order]]
    budget = (length[episode[order]] * share).ceil()
    return order[rank < budget].sort().values.to(batch.rows.episode.device)


def _divergence(batch: Batch, episode: Tensor, phase: Tensor) -> Tensor:
    """Keep weight of each phase: float64 [PHASES], all above 0."""
    sizes = torch.tensor([len(group.members) for group in batch.groups])
    group = torch.arange(len(sizes)).repeat_interleave(sizes)[episode]
    action = batch.rows.action.double().cpu().flatten(1)  # (N, C * D)
    action = action / action.std(0, correction=0).clamp(min=1e-6)
    advantage = batch.advantage.cpu()
    cell = group * PHASES + phase
    better, worse = (_means(action, cell, side, len(sizes) * PHASES) for side in (advantage > 0, advantage < 0))
    gap = (better[0] - worse[0]).square().mean(1)
    known = (better[1] > 0) & (worse[1] > 0)
    by_phase = torch.where(known, gap, 0.0).view(-1, PHASES).sum(0) / known.view(-1, PHASES).sum(0).clamp(min=1)
    return by_phase.clamp(min=max(FLOOR * float(by_phase.mean()), 1e-9))


def _means(action: Tensor, cell: Tensor, chosen: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Mean action [cells, C * D] of the chosen rows of each cell, and their number [cells]."""
    count = torch.bincount(cell[chosen], minlength=cells)
    total = torch.zeros(cells, action.shape[1], dtype=action.dtype).index_add_(0, cell[chosen], action[chosen])
    return total / count.clamp(min=1)[:, None], count
