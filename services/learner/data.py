"""The rows of one update with all that the loss reads of them."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from services.learner.episodes import Rows


@dataclass(frozen=True)
class UpdateData:
    """Sliced and shuffled whole: every tensor has leading dimension N. T terms of a row, as `losses.terms` says.

    behaviour, proximal, reference: log-probabilities [N, T]. advantage: [N]. mask: bool [N, T]. weight: [N, T].
    on_policy: bool [N]. old_value, target: [N]. None where the loss does not read it.
    """

    rows: Rows
    behaviour: Tensor
    advantage: Tensor
    mask: Tensor
    weight: Tensor
    on_policy: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None
    old_value: Tensor | None = None
    target: Tensor | None = None

    def __len__(self) -> int:
        return len(self.behaviour)

    def select(self, index: Tensor | slice) -> "UpdateData":
        """These rows of everything."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        chosen = {name: tensor[index] for name, tensor in tensors.items() if tensor is not None}
        return replace(self, rows=self.rows.map(lambda tensor: tensor[index]), **chosen)

    def shuffled(self, seed: int) -> "UpdateData":
        """In an order that depends on the seed only."""
        generator = torch.Generator().manual_seed(seed)
        return self.select(torch.randperm(len(self), generator=generator).to(self.mask.device))
