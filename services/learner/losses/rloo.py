"""REINFORCE with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024, equation 11)."""

from services.learner.losses.regularisers import regularisers
from services.learner.losses.terms import LossOptions, LossResult, LossTerms


def rloo_loss(terms: LossTerms, options: LossOptions) -> LossResult:
    """The score-function estimator, negated: no clipping, no proximal policy. Reads importance_cap.

    With c and b the current and behaviour log-probabilities and A the advantage over the mean of the others:

        importance = min(exp(c - b), cap), without gradient
        loss       = -sum(weight * importance * A * c) + regularisers

    The importance weight is 1 on data of the current weights; for later minibatches and stale data it is truncated
    (Ionides 2008; Espeholt et al. 2018, IMPALA, section 4.1). Masked terms change neither the loss nor a gradient.
    """
    terms = terms.cleared()
    current, weight = terms.current, terms.weight
    log_ratio = (current - terms.behaviour).detach()
    free = log_ratio.exp()
    importance = free.clamp(max=options.importance_cap)
    objective = (weight * importance * terms.advantage[:, None] * current).sum()
    extra, more = regularisers(terms, options)
    metrics = {
        "approx_kl": (weight * (free - 1.0 - log_ratio)).sum(),
        "clip_fraction": (weight * (free > options.importance_cap)).sum(),
        "ratio_mean": (weight * free).sum(),
        "importance_mean": (weight * importance).sum(),
    }
    return LossResult(extra - objective, metrics | more)
