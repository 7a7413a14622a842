"""A policy whose device time is a calibrated wait. Emulated: it acts at random around one learned mean.

Use it as `policy.family = "emulated"` with its numbers in `[policy] options`. Probabilities and gradients are real, so
that every service around it works as with any policy; only the network is a wait.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from services.common.emulated import EmulatedDevice, Linear, read_costs
from services.common.errors import InvalidInput
from services.common.spec import Array, FloatArray
from services.policies.base import Act, Evaluation, Inputs, Mode, Policy, PolicySpec, Record
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise

FORWARD_SHARE = 1 / 3
"""Share of a training step that its forward pass takes: scoring without gradient costs so much."""


@dataclass(frozen=True)
class PolicyCosts:
    """What an emulated policy takes. Times in seconds of its device.

    act_seconds, act_row_seconds: of a policy call, and more for each row.
    train_seconds, train_row_seconds: of a forward and backward pass, and more for each row.
    load_seconds: until new weights are in a policy that acts, as over a slow link.
    weights: number of float32 weights, to have something to publish.
    """

    act_seconds: float = 0.0
    act_row_seconds: float = 0.0
    train_seconds: float = 0.0
    train_row_seconds: float = 0.0
    load_seconds: float = 0.0
    weights: int = 1024


_DEVICE, _LINK = EmulatedDevice(), EmulatedDevice()
"""All emulated policies of a process share one device and one link."""


class EmulatedPolicy(Policy):
    """Gaussian actions around one mean [C, D], with a standard deviation of 1."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        costs = read_costs(PolicyCosts, config.options, "the emulated policy")
        self._act_cost = Linear(costs.act_seconds, costs.act_row_seconds)
        self._train_cost = Linear(costs.train_seconds, costs.train_row_seconds)
        self._load_seconds = costs.load_seconds
        self.mean = nn.Parameter(torch.zeros(config.chunk, config.action_dim))
        self.filler = nn.Parameter(torch.zeros(int(costs.weights)))
        self.spec = PolicySpec(
            family=config.family,
            chunk=config.chunk,
            action_dim=config.action_dim,
            ratio_level=config.effective_ratio_level,
            record={"action": ((config.chunk, config.action_dim), "float32")},
            observation=config.observation,
            mask_unexecuted=True,
            config=config.to_json(),
            has_entropy=False,
        )

    def preprocess(self, observation: Mapping[str, Array], instructions: Sequence[str]) -> Inputs:
        """The observations as they are."""
        inputs = {}
        for name in self.config.observation:
            if name not in observation or len(observation[name]) != len(instructions):
                raise InvalidInput(f"observation {name} is missing or not of {len(instructions)} rows")
            inputs[name] = torch.from_numpy(np.ascontiguousarray(observation[name]))
        return inputs

    def postprocess(self, actions: Tensor) -> FloatArray:
        """As they are, float32 [B, C, D]."""
        out: FloatArray = actions.detach().float().cpu().numpy()
        return out

    def act(self, inputs: Inputs, mode: Mode, noise: RowNoise) -> Act:
        """Wait, then draw."""
        _DEVICE.work(self._act_cost.of(len(noise)))
        drawn = noise.normal(*self.mean.shape) * float(mode == "train")
        actions = self.mean.detach() + drawn
        return Act(actions, {"action": actions}, _log_density(drawn))

    def evaluate(self, inputs: Inputs, record: Record) -> Evaluation:
        """Wait as long as this pass and the backward pass that follows it, if one may, then score."""
        share = 1.0 if torch.is_grad_enabled() else FORWARD_SHARE
        _DEVICE.work(share * self._train_cost.of(len(record["action"])))
        log_prob = _log_density(record["action"] - self.mean)
        entropies = torch.full_like(log_prob, 0.5 * math.log(2 * math.pi * math.e))
        return Evaluation(log_prob, entropies.mean(dim=(1, 2)), entropies)

    def sft_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor, noise: RowNoise) -> Tensor:
        """Squared distance to the mean."""
        _DEVICE.work(self._train_cost.of(len(actions)))
        gap = ((actions - self.mean) ** 2).mean(dim=2) * mask
        return gap.sum(dim=1) / mask.sum(dim=1).clamp(min=1)

    def trainable_state(self) -> dict[str, Tensor]:
        """All weights. A policy that acts (its weights take no gradient) is about to load some: that takes a while."""
        if not self.mean.requires_grad:
            _LINK.work(self._load_seconds)
        return super().trainable_state()


def _log_density(gap: Tensor) -> Tensor:
    return -0.5 * gap**2 - 0.5 * math.log(2 * math.pi)
