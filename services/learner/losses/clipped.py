"""The clipped objective that GRPO and PPO share, with a decoupled form for stale data."""

import torch
from torch import Tensor

from services.learner.losses.terms import LossOptions, LossTerms


def clipped_objective(terms: LossTerms, options: LossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of the objective over cleared terms, to be maximised; and metrics. Reads clips and importance_cap.

    With c, p, b the current, proximal and behaviour log-probabilities and A the advantage:

        ratio     = exp(c - p)
        objective = min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)    PPO (Schulman et al. 2017, equation 7),
                                                                          asymmetric as in DAPO (Yu et al. 2025)
        objective = max(objective, dual * A)  where A < 0                 dual clip (Ye et al. 2020, equation 5)
        sum(weight * importance * objective)

    Without `proximal`, p = b and importance = 1. With it, importance = min(exp(p - b), cap): the decoupled
    objective (Hilton et al. 2022, equation 4; Fu et al. 2025, AReaL, equation 5) with a truncated importance
    weight, which carries no gradient.
    """
    current, behaviour, weight = terms.current, terms.behaviour, terms.weight
    anchor, importance = behaviour, torch.ones_like(behaviour)
    if terms.proximal is not None:
        anchor = terms.proximal
        importance = (anchor - behaviour).exp().clamp(max=options.importance_cap)
    ratio = (current - anchor).exp()
    objective, clipped = _clipped(ratio, terms.advantage[:, None], options)
    log_ratio = (current - behaviour).detach()
    metrics = {
        "approx_kl": (weight * (log_ratio.exp() - 1.0 - log_ratio)).sum(),  # Schulman 2020, estimator k3
        "clip_fraction": (weight * clipped).sum(),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "importance_mean": (weight * importance).sum(),
    }
    return (weight * importance * objective).sum(), metrics


def _clipped(ratio: Tensor, advantage: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The objective [N, T], and where a clip took the gradient away."""
    free = ratio * advantage
    held = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high) * advantage
    objective, clipped = torch.minimum(free, held), held < free
    if options.dual_clip:
        floor = options.dual_clip * advantage
        beyond = (advantage < 0) & (objective < floor)
        objective, clipped = torch.where(beyond, floor, objective), clipped | beyond
    return objective, clipped
