"""AdamW over named parameters, with its state as plain tensors by name.

torch's own optimisers import the compiler at their first use, which takes a learner's start from one second to three,
and keep bfloat16 parameters without a float32 master, so that small steps are rounded away.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

EPSILON = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), torch's fused kernel.

    Parameters without a gradient are left alone, and have no state. Narrow parameters (bfloat16) have a float32
    master, which collects the steps; the parameter is its rounding.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        self.parameters = dict(parameters)
        self._betas, self._weight_decay = betas, weight_decay
        self._state: dict[str, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step along the gradients that are there."""
        named = {name: p for name, p in self.parameters.items() if p.grad is not None}
        if not named:
            return
        states = [self._state_of(name) for name in named]
        masters = [_local(state.get("master", p)) for state, p in zip(states, named.values(), strict=True)]
        gradients = [_local(p.grad).to(m.dtype) for p, m in zip(named.values(), masters, strict=True)]
        average, square, step = ([_local(state[key]) for state in states] for key in _MOMENTS)
        torch._foreach_add_(step, 1)
        torch._fused_adamw_(
            masters,
            gradients,
            average,
            square,
            [],
            step,
            lr=learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=self._weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
        for state, parameter in zip(states, named.values(), strict=True):
            if "master" in state:
                parameter.copy_(state["master"])

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and masters as "name//kind" tensors: the optimiser's own, not copies."""
        return {f"{name}//{kind}": value for name, state in self._state.items() for kind, value in state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`; a tensor of another parameter is a KeyError, one of another shape a ValueError."""
        loaded: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, kind = key.partition("//")
            parameter = self.parameters[name]
            if kind != "step" and value.shape != parameter.shape:
                raise ValueError(f"{key} has shape {tuple(value.shape)}, expected {tuple(parameter.shape)}")
            loaded.setdefault(name, {})[kind] = value.to(parameter.device, copy=True)
        for name, kinds in loaded.items():
            if missing := [kind for kind in _MOMENTS if kind not in kinds]:
                raise KeyError(f"{name}//{missing[0]}")
        self._state = loaded

    def _state_of(self, name: str) -> dict[str, Tensor]:
        if name not in self._state:
            parameter = self.parameters[name]
            wide = torch.promote_types(parameter.dtype, torch.float32)
            zeros = torch.zeros_like(parameter, dtype=wide, memory_format=torch.preserve_format)
            self._state[name] = {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": _counter(parameter)}
            if wide != parameter.dtype:
                self._state[name]["master"] = parameter.detach().to(wide)
        return self._state[name]


def _counter(parameter: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


def _local(tensor: Tensor | None) -> Tensor:
    """The part of a sharded tensor that lies here; the steps are elementwise."""
    assert tensor is not None
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
