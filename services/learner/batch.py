"""One update's data: groups joined into flat tensors, with advantages and staleness.

Rows are chunks; groups and episodes are indices, so groups of any size fit and nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.learner.advantages import group_advantages
from services.learner.episodes import Finals, Member, PreparedGroup, Rows
from services.learner.lineage import Lineage
from services.learner.objective import Normalisation


@dataclass(frozen=True)
class Batch:
    """rows: all N chunks; their `episode` counts the M members of all groups, those without trajectory included.

    finals: where episodes were cut off. advantage: float32 [N]; all 0 until values are known (PPO).
    staleness: int64 [N], updates between the chunk's weights and this update. on_policy: bool [N], made by exactly
    the current weights. rolled_back: bool [N], made by weights that a crash took back. values: what the value head
    said, with an advantage from it.
    """

    groups: tuple[PreparedGroup, ...]
    members: tuple[Member, ...]
    rows: Rows
    finals: Finals | None
    advantage: Tensor
    staleness: Tensor
    on_policy: Tensor
    rolled_back: Tensor
    values: "Values | None" = None

    @property
    def group_numbers(self) -> list[int]:
        """Numbers of the groups, in admission order."""
        return [group.group for group in self.groups]

    @property
    def informative(self) -> bool:
        """False if no row has a gradient: all advantages are exactly 0, and no value has anything to learn."""
        return self.values is not None or bool(self.advantage.any())

    def select(self, index: Tensor) -> "Batch":
        """Only these rows; groups and members stay."""
        here = index.cpu()
        values = self.values
        return replace(
            self,
            rows=self.rows.map(lambda tensor: tensor[index]),
            advantage=self.advantage[index],
            staleness=self.staleness[here],
            on_policy=self.on_policy[here],
            rolled_back=self.rolled_back[here],
            values=values and Values(values.estimate[index], values.target[index], values.log_prob[index]),
        )


@dataclass(frozen=True)
class Values:
    """Under the weights at the start of the update: estimate and target, float32 [N], and log_prob float32 [N, T]."""

    estimate: Tensor
    target: Tensor
    log_prob: Tensor


def build_batch(
    groups: Sequence[PreparedGroup],
    update: int,
    lineage: Lineage,
    normalisation: Normalisation | None,
    device: torch.device | str = "cpu",
) -> Batch | None:
    """Join groups for the update that follows `update`; None if no member of any group has a trajectory.

    Weights of update w count as min(w, update): where a crash rolled updates back, chunks made by the lost
    versions are trained with their own log-probabilities.
    """
    members = tuple(member for group in groups for member in group.members)
    rows, finals = _join(groups)
    if rows is None:
        return None
    advantage = torch.zeros(len(members))
    if normalisation is not None:
        sizes = torch.tensor([len(group.members) for group in groups])
        score = torch.tensor([member.score for member in members], dtype=torch.float64)
        advantage = group_advantages(score, torch.arange(len(groups)).repeat_interleave(sizes), normalisation)
    epoch, made_by = rows.version.unbind(1)
    rolled_back = lineage.rolled_back(epoch, made_by)
    return Batch(
        groups=tuple(groups),
        members=members,
        rows=rows.map(lambda tensor: tensor.to(device)),
        finals=finals,
        advantage=advantage[rows.episode].to(device),
        staleness=(update - made_by).clamp(min=0),
        on_policy=(made_by == update) & ~rolled_back,
        rolled_back=rolled_back,
    )


def _join(groups: Sequence[PreparedGroup]) -> tuple[Rows | None, Finals | None]:
    """Concatenate; episode indices move from each group's own count to the batch's."""
    parts: list[Rows] = []
    finals: list[Finals] = []
    offset = 0
    for group in groups:
        if group.rows is not None:
            parts.append(replace(group.rows, episode=group.rows.episode + offset))
        if group.finals is not None:
            finals.append(replace(group.finals, episode=group.finals.episode + offset))
        offset += len(group.members)
    return Rows.join(parts) if parts else None, Finals.join(finals) if finals else None
