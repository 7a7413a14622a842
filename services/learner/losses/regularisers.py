"""Terms that every loss may add: an entropy bonus, and the divergence from the policy that the run started from."""

import torch
from torch import Tensor

from services.learner.losses.terms import LossOptions, LossTerms


def regularisers(terms: LossTerms, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """A sum to add to the loss, over cleared terms; and metrics. Reads entropy_bonus and kl_weight.

        kl_weight * sum(weight * k3) - entropy_bonus * sum(weight * entropy)
        k3 = exp(r - c) - (r - c) - 1

    with c and r the current and reference log-probabilities: an estimate of KL(current || reference) on samples of
    the current policy that is never negative (Schulman 2020; DeepSeekMath, Shao et al. 2024, equation 4).
    """
    total, metrics = torch.zeros((), dtype=terms.current.dtype, device=terms.current.device), dict[str, Tensor]()
    if terms.entropy is not None:
        total = total - options.entropy_bonus * (terms.weight * terms.entropy).sum()
    if terms.reference is not None:
        gap = terms.reference - terms.current
        divergence = (terms.weight * (gap.exp() - gap - 1.0)).sum()
        total = total + options.kl_weight * divergence
        metrics["reference_kl"] = divergence.detach()
    return total, metrics
