"""From an algorithm's name to its loss. A new algorithm is one file beside this one and one line here."""

from functools import partial

from services.common.errors import ConfigError
from services.learner.losses.grpo import GrpoOptions, grpo_loss
from services.learner.losses.terms import Loss

ALGORITHMS = ("grpo",)


def build_loss(algorithm: str, options: GrpoOptions) -> Loss:
    """The loss of an algorithm; raises ConfigError naming the known ones."""
    if algorithm != "grpo":
        raise ConfigError(f"algorithm = {algorithm!r}; expected one of {', '.join(ALGORITHMS)}")
    return partial(grpo_loss, options=options)
