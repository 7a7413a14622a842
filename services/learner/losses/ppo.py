"""PPO: the clipped objective over advantages from a value head, and the loss of that head."""

import torch
from torch import Tensor

from services.common.errors import DvlaError
from services.learner.losses.clipped import clipped_objective
from services.learner.losses.regularisers import regularisers
from services.learner.losses.terms import LossOptions, LossResult, LossTerms


def ppo_loss(terms: LossTerms, options: LossOptions) -> LossResult:
    """loss = -sum(weight * importance * clipped objective) + value_weight * value loss + regularisers.

    Schulman et al. 2017, equation 9. With V the value, V0 the one at the start of the update, R the target, and w
    the summed weight of a row's terms:

        value loss = sum(w * 0.5 * (V - R)^2)
        value loss = sum(w * 0.5 * max((V - R)^2, (V0 + clip(V - V0, -value_clip, value_clip) - R)^2))  if clipped

    The objective is in `clipped`, the advantages in `services.learner.gae`.
    """
    terms = terms.cleared()
    objective, metrics = clipped_objective(terms, options)
    extra, more = regularisers(terms, options)
    error = _value_errors(terms, options)
    row_weight = terms.weight.sum(1)
    value_loss = (row_weight * 0.5 * error).sum()
    metrics |= more | {"value_loss": value_loss.detach()}
    return LossResult(extra - objective + options.value_weight * value_loss, metrics)


def _value_errors(terms: LossTerms, options: LossOptions) -> Tensor:
    """Squared error of each row's value [N]; clipped, the larger of two, so that a clip never hides an error."""
    if terms.value is None or terms.target is None or terms.old_value is None:
        raise DvlaError("ppo needs values and targets; was the batch judged?")
    free = (terms.value - terms.target).square()
    if not options.value_clip:
        return free
    change = (terms.value - terms.old_value).clamp(-options.value_clip, options.value_clip)
    return torch.maximum(free, (terms.old_value + change - terms.target).square())
