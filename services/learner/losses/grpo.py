"""GRPO: the clipped objective over group-relative advantages, with a decoupled form for stale data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.losses.terms import LossResult, LossTerms


@dataclass(frozen=True)
class GrpoOptions:
    """clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].

    dual_clip: lower bound dual_clip * A of the objective where A < 0; 0 leaves it out.
    importance_cap: largest truncated importance weight of the decoupled objective.
    entropy_bonus: nats are rewarded by this factor.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    importance_cap: float = 2.0
    entropy_bonus: float = 0.0


def grpo_loss(terms: LossTerms, options: GrpoOptions) -> LossResult:
    """The clipped objective, negated.

    With c, p, b the current, proximal and behaviour log-probabilities and A the advantage:

        ratio     = exp(c - p)
        objective = min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)    PPO (Schulman et al. 2017, equation 7),
                                                                          asymmetric as in DAPO (Yu et al. 2025)
        objective = max(objective, dual * A)  where A < 0                 dual clip (Ye et al. 2020, equation 5)
        loss      = -sum(weight * (importance * objective + bonus * entropy))

    Without `proximal`, p = b and importance = 1. With it, importance = min(exp(p - b), cap): the decoupled
    objective (Hilton et al. 2022, equation 4; Fu et al. 2025, AReaL, equation 5) with a truncated importance
    weight, which carries no gradient.

    Masked terms are replaced before any arithmetic: whatever they hold, NaN included, they change neither the
    loss nor a gradient.
    """
    mask = terms.mask
    weight = torch.where(mask, terms.weight, 0.0)
    current = torch.where(mask, terms.current, 0.0)
    behaviour = torch.where(mask, terms.behaviour, 0.0)
    anchor, importance = behaviour, torch.ones_like(behaviour)
    if terms.proximal is not None:
        anchor = torch.where(mask, terms.proximal, 0.0)
        importance = (anchor - behaviour).exp().clamp(max=options.importance_cap)
    ratio = (current - anchor).exp()
    objective, clipped = _clipped(ratio, terms.advantage[:, None], options)
    loss = -(weight * importance * objective).sum()
    if terms.entropy is not None:
        loss = loss - options.entropy_bonus * (weight * torch.where(mask, terms.entropy, 0.0)).sum()
    log_ratio = (current - behaviour).detach()
    metrics = {
        "approx_kl": (weight * (log_ratio.exp() - 1.0 - log_ratio)).sum(),  # Schulman 2020, estimator k3
        "clip_fraction": (weight * clipped).sum(),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "importance_mean": (weight * importance).sum(),
    }
    return LossResult(loss, metrics)


def _clipped(ratio: Tensor, advantage: Tensor, options: GrpoOptions) -> tuple[Tensor, Tensor]:
    """The objective [N, T], and where a clip took the gradient away."""
    free = ratio * advantage
    held = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high) * advantage
    objective, clipped = torch.minimum(free, held), held < free
    if options.dual_clip:
        floor = options.dual_clip * advantage
        beyond = (advantage < 0) & (objective < floor)
        objective, clipped = torch.where(beyond, floor, objective), clipped | beyond
    return objective, clipped
