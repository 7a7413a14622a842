"""GRPO: the clipped objective over group-relative advantages (Shao et al. 2024, DeepSeekMath, equation 3)."""

from services.learner.losses.clipped import clipped_objective
from services.learner.losses.regularisers import regularisers
from services.learner.losses.terms import LossOptions, LossResult, LossTerms


def grpo_loss(terms: LossTerms, options: LossOptions) -> LossResult:
    """loss = -sum(weight * importance * clipped objective) + regularisers.

    The formulas are in `clipped` and `regularisers`; the advantages in `services.learner.advantages`, which also
    offers those of Dr. GRPO and leave-one-out. Masked terms change neither the loss nor a gradient.
    """
    terms = terms.cleared()
    objective, metrics = clipped_objective(terms, options)
    extra, more = regularisers(terms, options)
    return LossResult(extra - objective, metrics | more)
