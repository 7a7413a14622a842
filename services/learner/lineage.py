"""Which weight versions belong to the surviving history of a run.

Each learner epoch continues from one update. Versions that earlier epochs made beyond that update were rolled
back: chunks made by them may still arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lineage:
    """starts: (epoch, update that it continued from), in order of epochs."""

    starts: tuple[tuple[int, int], ...] = ()

    def continued(self, epoch: int, update: int) -> "Lineage":
        """With a new epoch that continues from `update`."""
        return Lineage((*self.starts, (epoch, update)))

    def rolled_back(self, epoch: Tensor, update: Tensor) -> Tensor:
        """Whether each version (int64 [N], [N]) was rolled back by a later epoch: bool [N]."""
        lost = torch.zeros(len(epoch), dtype=torch.bool)
        for later, start in self.starts:
            lost |= (epoch < later) & (update > start)
        return lost

    def to_json(self) -> list[list[int]]:
        """For a checkpoint."""
        return [list(start) for start in self.starts]

    @classmethod
    def from_json(cls, data: Sequence[Sequence[int]]) -> "Lineage":
        """The inverse of `to_json`."""
        return cls(tuple((int(epoch), int(update)) for epoch, update in data))
