"""What the tiny policies share: checked inputs, normalisation, backbone, value head."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from services.common.errors import ConfigError, InvalidInput
from services.common.spec import Array, FloatArray
from services.policies.backbone import BYTES_PER_TOKEN, Backbone, Layer
from services.policies.base import Inputs, Policy, PolicySpec
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.normalise import Normaliser

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


Method = TypeVar("Method", bound=Callable[..., Any])


def in_precision(method: Method) -> Method:
    """The method of a TinyPolicy computes in the precision that is configured, whoever calls it."""

    @wraps(method)
    def call(self: "TinyPolicy", *args: Any, **kwargs: Any) -> Any:
        if not self.config.autocast:
            return method(self, *args, **kwargs)
        with torch.autocast(self.normaliser.action_scale.device.type, torch.bfloat16):
            return method(self, *args, **kwargs)

    return cast(Method, call)


class TinyPolicy(Policy):
    """A policy over the tiny backbone; subclasses add the action head."""

    mask_unexecuted: bool

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.normaliser = Normaliser(config.state_dim, config.action_dim)
        self.backbone = Backbone(config)
        width = config.shape.width
        if config.value_head:
            self.value = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.spec = PolicySpec(
            family=config.family,
            chunk=config.chunk,
            action_dim=config.action_dim,
            ratio_level=config.effective_ratio_level,
            record=self.record_schema(config),
            observation=config.observation,
            mask_unexecuted=self.mask_unexecuted,
            config=config.to_json(),
            has_value=config.value_head,
            has_entropy=self.entropy_depends_on_weights(config),
            chunk_only=config.chunk_only,
        )

    @property
    def layers(self) -> list[Layer]:
        """All transformer layers."""
        return list(self.backbone.layers)

    def recompute_activations(self) -> None:
        """As the base class says, layer by layer."""
        for layer in self.layers:
            layer.recompute = True

    def compile_layers(self) -> None:
        """As the base class says; batches of any size share one compilation."""
        for layer in self.layers:
            layer.compile(dynamic=True)

    @staticmethod
    def entropy_depends_on_weights(config: PolicyConfig) -> bool:
        """Whether a bonus for entropy would do something."""
        return True

    @staticmethod
    @abstractmethod
    def record_schema(config: PolicyConfig) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape per row, numpy dtype) of the record."""

    def preprocess(self, observation: Mapping[str, Array], instructions: Sequence[str]) -> Inputs:
        """Check, and normalise the state. Images stay uint8 until the network reads them: a quarter of the bytes."""
        config, device = self.config, self.normaliser.action_scale.device
        length = self.backbone.embedding.groups * BYTES_PER_TOKEN
        rows = [_spell(text, config.instruction_bytes, length) for text in instructions]
        inputs = {"instruction": torch.from_numpy(np.stack(rows)).to(device)}
        if config.state_dim:
            state = _checked(observation, "state", "float32", (len(rows), config.state_dim))
            if not np.isfinite(state).all():
                bad = np.flatnonzero(~np.isfinite(state).all(axis=1))
                raise InvalidInput(f"observation state is not finite in rows {bad[:8].tolist()}: drop these episodes")
            inputs["state"] = self.normaliser.state(torch.from_numpy(state).to(device))
        for camera in config.cameras:
            shape = (len(rows), config.image_size, config.image_size, 3)
            image = _checked(observation, f"rgb/{camera}", "uint8", shape)
            inputs[f"rgb/{camera}"] = torch.from_numpy(np.ascontiguousarray(image)).to(device)
        return inputs

    def postprocess(self, actions: Tensor) -> FloatArray:
        """Float32 [B, C, D] in environment units."""
        environment: FloatArray = self.normaliser.denormalise_action(actions).detach().float().cpu().numpy()
        return environment

    def prefix(self, inputs: Inputs, dropout: RowNoise | None = None) -> Tensor:
        """Embedded inputs [B, P, W]. Features are dropped only when imitation passes its noise."""
        tokens: Tensor = self.backbone.embedding(inputs)
        if dropout is None or not self.config.dropout:
            return tokens
        keep = dropout.uniform(*tokens.shape[1:]) >= self.config.dropout
        return tokens * keep.to(tokens.dtype) / (1.0 - self.config.dropout)

    def values(self, tokens: Tensor) -> Tensor | None:
        """Value estimates float32 [B] from tokens [B, T, W], if there is a value head."""
        return self.value(tokens.mean(dim=1)).float().squeeze(-1) if self.config.value_head else None

    def require_values(self, tokens: Tensor) -> Tensor:
        """As `values`, for a caller that cannot do without."""
        value = self.values(tokens)
        if value is None:
            raise ConfigError(f"this {self.spec.family} has no value head; set policy.value_head = true")
        return value


def exact(tensor: Tensor) -> Tensor:
    """At least float32: probabilities are never computed in a narrower type than this."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@lru_cache(maxsize=4096)
def _spell(instruction: str, limit: int, length: int) -> Array:
    """UTF-8 bytes padded with zeros to uint8 [length]. Cutting would make two tasks look the same, so it is refused."""
    spelled = instruction.encode()
    if len(spelled) > limit:
        raise InvalidInput(
            f"instruction {instruction!r} has {len(spelled)} bytes, the policy reads {limit}: shorten it, "
            "or train a policy with a larger instruction_bytes"
        )
    return np.frombuffer(spelled.ljust(length, b"\0"), dtype=np.uint8)


def _checked(observation: Mapping[str, Array], name: str, dtype: str, shape: tuple[int, ...]) -> Array:
    array = observation.get(name)
    if array is None:
        raise InvalidInput(f"observation {name} is missing: expected {dtype}{shape}, got {sorted(observation)}")
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise InvalidInput(f"observation {name} is {array.dtype}{array.shape}, expected {dtype}{shape}")
    return array
