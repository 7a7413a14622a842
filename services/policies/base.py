"""The policy interface: torch tensors, leading batch dimension, no knowledge of environments or transports.

Dimensions: B rows, C actions in a chunk, D action dimensions.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from services.common.errors import ConfigError, DvlaError, InvalidInput
from services.common.spec import Array, FloatArray
from services.policies.noise import RowNoise

Mode = Literal["train", "eval"]
Inputs = dict[str, Tensor]
"""What `preprocess` returns and the network reads."""
Record = dict[str, Tensor]
"""What `evaluate` needs to score an action again: token ids, or a denoising chain. Opaque outside the policy."""


@dataclass(frozen=True)
class PolicySpec:
    """What the rest of the system may know about a policy. `config` (JSON-able) rebuilds it by `build_policy`."""

    family: str
    chunk: int
    action_dim: int
    ratio_level: Literal["token", "action", "chunk"]
    record: dict[str, tuple[tuple[int, ...], str]]  # name -> (shape per row, numpy dtype)
    observation: tuple[str, ...]  # names of the observation tensors it reads
    mask_unexecuted: bool  # whether the learner masks unexecuted actions (token heads) or scores chunks whole (flow)
    config: dict[str, object]
    has_value: bool = False  # whether act and evaluate give values
    has_entropy: bool = True  # whether the entropy depends on the weights, so that a bonus for it does something
    chunk_only: bool = False  # whether log_prob means something only as the sum over a whole chunk


@dataclass(frozen=True)
class Act:
    """actions: [B, C, D] in normalised units (give them to `postprocess`). log_prob: float32 [B, C, D].

    value: float32 [B] if the policy has a value head.
    """

    actions: Tensor
    record: Record
    log_prob: Tensor
    value: Tensor | None = None


@dataclass(frozen=True)
class Evaluation:
    """log_prob: float32 [B, C, D], with gradient; equal to `Act.log_prob` at the same weights.

    entropy: float32 [B], nats per action dimension, mean over the chunk.
    entropies: float32 [B, C, D], the same before the mean, so that masked actions can be left out.
    value: float32 [B] if the policy has a value head.
    """

    log_prob: Tensor
    entropy: Tensor
    entropies: Tensor
    value: Tensor | None = None


class Policy(nn.Module):
    """Base class of all policies. Normalisation statistics are buffers, so they travel with the weights."""

    spec: PolicySpec

    @abstractmethod
    def preprocess(self, observation: Mapping[str, Array], instructions: Sequence[str]) -> Inputs:
        """Raw observation arrays [B, ...] and B instructions to network inputs. Raises InvalidInput on a wrong
        shape, dtype or non-finite value."""

    @abstractmethod
    def postprocess(self, actions: Tensor) -> FloatArray:
        """Normalised actions [B, C, D] to environment units, unclipped (the simulator clips)."""

    @abstractmethod
    def act(self, inputs: Inputs, mode: Mode, noise: RowNoise) -> Act:
        """Sample (train) or take the mode of (eval) the action distribution. No gradient."""

    @abstractmethod
    def evaluate(self, inputs: Inputs, record: Record) -> Evaluation:
        """Score recorded actions under the current weights, with gradient."""

    @abstractmethod
    def sft_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor, noise: RowNoise) -> Tensor:
        """Imitation loss per row [B] of environment-unit actions [B, C, D]; mask [B, C] marks valid steps."""

    @torch.no_grad()
    def estimate(self, inputs: Inputs) -> Tensor:
        """Values float32 [B] of observations, without acting on them. Only with a value head."""
        rows = len(next(iter(inputs.values())))
        device = next(self.parameters()).device
        value = self.act(inputs, "eval", RowNoise([""] * rows, device)).value
        if value is None:
            raise DvlaError(f"{self.spec.family} has no value head")
        return value

    def recompute_activations(self) -> None:
        """From now on, compute activations again in the backward pass in place of keeping them."""
        raise ConfigError(
            f"{self.spec.family} offers no activation checkpointing; set activation_checkpointing = false"
        )

    def compile_layers(self) -> None:
        """Have torch compile the network at its first use."""
        raise ConfigError(f"{self.spec.family} cannot be compiled; set compile = false")

    def trainable_state(self) -> dict[str, Tensor]:
        """The tensors that training changes or that change the output, by `state_dict` name."""
        return dict(self.state_dict())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load exactly these tensors in place; raises InvalidInput on a missing, extra or misshapen one."""
        own = self.trainable_state()
        missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or extra:
            raise InvalidInput(f"weights do not fit {self.spec.family}: missing {missing[:3]}, unexpected {extra[:3]}")
        for name, tensor in state.items():
            if own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                raise InvalidInput(
                    f"weights do not fit {self.spec.family}: {name} is {tensor.dtype}{tuple(tensor.shape)}, "
                    f"expected {own[name].dtype}{tuple(own[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)


def numpy_record(record: Record) -> dict[str, np.ndarray]:
    """The record as contiguous numpy arrays, for a trajectory."""
    return {name: np.ascontiguousarray(tensor.detach().cpu().numpy()) for name, tensor in record.items()}
