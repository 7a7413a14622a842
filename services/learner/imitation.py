"""The demonstration regulariser: an imitation loss beside the policy loss, so that RL does not forget what it knew."""

from pathlib import Path

import numpy as np
from torch import Tensor

from services.common.errors import ConfigError, InvalidInput, NotFound
from services.learner.config import LearnerConfig
from services.policies.base import Policy
from services.policies.demodata import Demos, load_demos
from services.policies.sft import check_fit, imitation_loss


class Imitation:
    """Draws chunks of demonstrations; batch and noise depend on seed and step only, so they survive a restart."""

    def __init__(self, policy: Policy, demos: Demos, rows: int, seed: int) -> None:
        check_fit(policy, demos)
        self._policy, self._demos, self._rows, self._seed = policy, demos, rows, seed

    @classmethod
    def from_config(cls, policy: Policy, config: LearnerConfig) -> "Imitation | None":
        """As the settings say; None without a weight. Raises ConfigError if the demonstrations cannot be used."""
        if not config.demo_weight:
            return None
        try:
            demos = load_demos([Path(folder) for folder in config.demonstrations])
            return cls(policy, demos, config.demo_rows, config.seed)
        except (NotFound, InvalidInput) as error:
            raise ConfigError(f"demonstrations = {config.demonstrations!r} cannot be used: {error}") from error

    def loss(self, update: int, step: int) -> Tensor:
        """Mean imitation loss of one optimiser step's draw, with gradient."""
        random = np.random.default_rng([self._seed, update, step])
        rows = random.integers(len(self._demos), size=self._rows)
        return imitation_loss(self._policy, self._demos, rows, f"imitation/{self._seed}/{update}/{step}")
