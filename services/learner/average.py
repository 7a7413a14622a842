"""An exponential average of the weights: smoother than the last step, for evaluation. Sampling never uses it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.policies.base import Policy


class Average:
    """average = decay * average + (1 - decay) * weights after every step; starts at the weights. float32 or wider."""

    def __init__(self, policy: Policy, decay: float) -> None:
        self._policy, self._decay = policy, decay
        self._average = {name: _wide(tensor) for name, tensor in policy.trainable_state().items()}

    @torch.no_grad()
    def step(self) -> None:
        """Take in the weights as they are now."""
        for name, tensor in self._policy.trainable_state().items():
            if tensor.is_floating_point():
                self._average[name].lerp_(tensor.to(self._average[name].dtype), 1.0 - self._decay)
            else:
                self._average[name].copy_(tensor)

    def state(self) -> dict[str, Tensor]:
        """The average in the policy's own dtypes; copies on the CPU."""
        own = self._policy.trainable_state()
        return {name: tensor.to("cpu", own[name].dtype, copy=True) for name, tensor in self._average.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, up to rounding to the policy's dtypes."""
        for name, tensor in self._average.items():
            tensor.copy_(state[name])


def _wide(tensor: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wide, copy=True)
