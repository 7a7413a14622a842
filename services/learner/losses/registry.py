"""From an algorithm's name to its loss. A new algorithm is one file beside this one and one line here."""

from collections.abc import Callable

from services.common.errors import ConfigError
from services.learner.losses.grpo import grpo_loss
from services.learner.losses.ppo import ppo_loss
from services.learner.losses.rloo import rloo_loss
from services.learner.losses.terms import Loss, LossOptions, LossResult, LossTerms

_LOSSES: dict[str, Callable[[LossTerms, LossOptions], LossResult]] = {
    "grpo": grpo_loss,
    "rloo": rloo_loss,
    "ppo": ppo_loss,
}
ALGORITHMS = tuple(_LOSSES)


def build_loss(algorithm: str, options: LossOptions) -> Loss:
    """The loss of an algorithm; raises ConfigError naming the known ones."""
    if algorithm not in _LOSSES:
        raise ConfigError(f"algorithm = {algorithm!r}; expected one of {', '.join(ALGORITHMS)}")
    loss = _LOSSES[algorithm]
    return lambda terms: loss(terms, options)
