"""What every loss reads and returns, and how log-probabilities become terms of the ratio level.

N rows (chunks), C actions in a chunk, D action dimensions, T terms of a row: C * D at level "token", C at
"action", 1 at "chunk".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.learner.objective import Level, Weighting


@dataclass(frozen=True)
class LossOptions:
    """Settings of the losses; each file says which it reads.

    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: lower bound dual_clip * A of the objective where A < 0; 0 leaves it out.
    importance_cap: largest truncated importance weight.
    entropy_bonus: nats are rewarded by this factor. kl_weight: of the divergence from the reference.
    value_weight: of the value loss. value_clip: largest change of a value that the value loss rewards; 0 for any.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    importance_cap: float = 2.0
    entropy_bonus: float = 0.0
    kl_weight: float = 0.0
    value_weight: float = 0.5
    value_clip: float = 0.0


@dataclass(frozen=True)
class LossTerms:
    """Log-probabilities of recorded actions under three policies, and what weighs them.

    current: float32 [N, T], with gradient. behaviour: float32 [N, T], of the weights that acted.
    proximal: float32 [N, T], of the weights at the start of the update; None for an objective without it.
    reference: float32 [N, T], of the weights that the run started from; None without a divergence from them.
    advantage: float32 [N]. mask: bool [N, T].
    weight: float32 [N, T], share of each term in the loss. Already divided by the denominator of the whole
    minibatch on all ranks, so that the losses of micro-batches simply add up.
    entropy: float32 [N, T], nats per action dimension, with gradient; None where the loss does not read it.
    value: float32 [N], with gradient. old_value, target: float32 [N], estimate at the start of the update, and what
    it should have been. None for losses without a value head.
    """

    current: Tensor
    behaviour: Tensor
    proximal: Tensor | None
    advantage: Tensor
    mask: Tensor
    weight: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    old_value: Tensor | None = None
    target: Tensor | None = None

    def cleared(self) -> "LossTerms":
        """Masked terms replaced before any arithmetic: whatever they hold, NaN included, changes no gradient."""

        def clear(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.where(self.mask, values, 0.0)

        return replace(
            self,
            current=torch.where(self.mask, self.current, 0.0),
            behaviour=torch.where(self.mask, self.behaviour, 0.0),
            weight=torch.where(self.mask, self.weight, 0.0),
            proximal=clear(self.proximal),
            reference=clear(self.reference),
            entropy=clear(self.entropy),
        )


@dataclass(frozen=True)
class LossResult:
    """loss: scalar with gradient. metrics: detached sums over the same weights, so that they add up as well."""

    loss: Tensor
    metrics: dict[str, Tensor]


Loss = Callable[[LossTerms], LossResult]


def at_level(values: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Sum values [N, C, D] over the dimensions inside a term: [N, T].

    mask: bool [N, C], actions that count. Masked entries are replaced by 0 before the sum, so that not even a
    NaN there gets into a term that other actions share.
    """
    kept = torch.where(mask[:, :, None], values, 0.0)
    if level == "token":
        return kept.flatten(1)
    return kept.sum(2) if level == "action" else kept.sum((1, 2))[:, None]


def mean_at_level(values: Tensor, mask: Tensor, level: Level) -> Tensor:
    """As `at_level`, but the mean over the unmasked dimensions inside a term; 0 for a masked term."""
    return at_level(values, mask, level) / at_level(torch.ones_like(values), mask, level).clamp(min=1.0)


def term_mask(mask: Tensor, dimensions: int, level: Level) -> Tensor:
    """Which terms count: bool [N, C] of actions to bool [N, T]."""
    if level == "token":
        return mask.repeat_interleave(dimensions, dim=1)
    return mask if level == "action" else mask.any(dim=1, keepdim=True)


def term_weights(mask: Tensor, trajectory: Tensor, weighting: Weighting) -> Tensor:
    """Relative weight of each term, before division by a minibatch's denominator: float32 [N, T].

    mask: bool [N, T]. trajectory: int64 [N], index of each row's episode.
    "token": every term counts 1, long episodes count more (DAPO). "trajectory": the terms of one episode share
    a weight of 1 (T_max / T_valid in RLinf), so short, successful episodes are not drowned by long failures.
    """
    ones = mask.float()
    if weighting == "token":
        return ones
    episodes = int(trajectory.max()) + 1
    terms = torch.zeros(episodes, device=mask.device).index_add_(0, trajectory, ones.sum(1))
    return ones / terms.clamp(min=1.0)[trajectory][:, None]
