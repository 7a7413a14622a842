"""A policy of one's own: a Gaussian around what a small network says. See docs/policies.md."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from services.common.errors import InvalidInput
from services.common.spec import Array, FloatArray
from services.policies.base import Act, Evaluation, Inputs, Mode, Policy, PolicySpec, Record
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.normalise import Normaliser


class GaussianPolicy(Policy):
    """Reads the state. Option: `width` of the hidden layer."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.shape, self.state_dim = (config.chunk, config.action_dim), config.state_dim
        self.normaliser = Normaliser(config.state_dim, config.action_dim)  # its statistics travel with the weights
        width = int(config.options.get("width", 64))
        self.net = nn.Sequential(nn.Linear(config.state_dim, width), nn.Tanh(), nn.Linear(width, math.prod(self.shape)))
        self.log_std = nn.Parameter(torch.full((config.action_dim,), -1.5))
        self.spec = PolicySpec(
            family=config.family, chunk=config.chunk, action_dim=config.action_dim, ratio_level="action",
            record={"sample": (self.shape, "float32")}, observation=("state",), mask_unexecuted=True,
            config=config.to_json(),
        )  # fmt: skip

    def preprocess(self, observation: Mapping[str, Array], instructions: Sequence[str]) -> Inputs:
        state = torch.from_numpy(observation["state"]).float()
        if state.shape != (len(instructions), self.state_dim) or not state.isfinite().all():
            raise InvalidInput(f"state is {tuple(state.shape)}, expected finite {(len(instructions), self.state_dim)}")
        return {"state": self.normaliser.state(state.to(self.log_std.device))}

    def postprocess(self, actions: Tensor) -> FloatArray:
        return self.normaliser.denormalise_action(actions).cpu().numpy()

    @torch.no_grad()
    def act(self, inputs: Inputs, mode: Mode, noise: RowNoise) -> Act:
        mean = self._mean(inputs)
        sample = mean if mode == "eval" else mean + self.log_std.exp() * noise.normal(*self.shape)
        return Act(sample, {"sample": sample}, self._gaussian(mean).log_prob(sample))

    def evaluate(self, inputs: Inputs, record: Record) -> Evaluation:
        gaussian = self._gaussian(self._mean(inputs))
        return Evaluation(gaussian.log_prob(record["sample"]), gaussian.entropy().mean((1, 2)), gaussian.entropy())

    def sft_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor, noise: RowNoise) -> Tensor:
        error = (self._mean(inputs) - self.normaliser.action(actions)).square().mean(-1)
        return (error * mask).sum(1) / mask.sum(1).clamp(min=1)

    def _mean(self, inputs: Inputs) -> Tensor:
        return self.net(inputs["state"]).unflatten(1, self.shape)

    def _gaussian(self, mean: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(mean, self.log_std.exp(), validate_args=False)
