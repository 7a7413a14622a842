"""Small policies and inputs for the tests of this folder."""

from typing import Any

import numpy as np
import torch

from services.common.spec import Observation
from services.policies.base import Act, Inputs, Policy, Record, numpy_record
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.registry import build_policy

STATE, ACTION, CHUNK = 6, 3, 4
INSTRUCTION = "push the cube to the goal"

HEADS: dict[str, dict[str, Any]] = {
    "oft": {"family": "tiny-oft"},
    "oft-cool": {"family": "tiny-oft", "temperature": 0.6, "value_head": True},
    "sde": {"family": "tiny-flow"},
    "sde-value": {"family": "tiny-flow", "value_head": True, "denoising_steps": 3, "noise_level": 0.3},
    "noise-mean": {"family": "tiny-flow", "flow_method": "noise"},
    "noise-sum": {"family": "tiny-flow", "flow_method": "noise", "noise_reduction": "sum"},
    "fpo": {"family": "tiny-flow", "flow_method": "fpo", "value_head": True},
    "oft-rgb": {"family": "tiny-oft", "cameras": ("top",), "image_size": 16},
    "sde-rgb": {"family": "tiny-flow", "cameras": ("top", "side"), "image_size": 16, "state_dim": 0},
    "oft-dropout": {"family": "tiny-oft", "dropout": 0.3},
    "sde-dropout": {"family": "tiny-flow", "dropout": 0.3},
}


def make_config(**settings: Any) -> PolicyConfig:
    return PolicyConfig(**({"action_dim": ACTION, "state_dim": STATE, "chunk": CHUNK} | settings))


def make_policy(seed: int = 0, **settings: Any) -> Policy:
    """A policy that is away from its special initial values, as after some training."""
    policy = build_policy(make_config(**settings), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return policy


def observe(policy: Policy, rows: int, seed: int = 0) -> Observation:
    config = PolicyConfig.from_json(policy.spec.config)
    random = np.random.default_rng(seed)
    size = (rows, config.image_size, config.image_size, 3)
    observation: Observation = {f"rgb/{c}": random.integers(0, 256, size, dtype=np.uint8) for c in config.cameras}
    if config.state_dim:
        observation["state"] = random.standard_normal((rows, config.state_dim), dtype=np.float32)
    return observation


def inputs_for(policy: Policy, rows: int, instruction: str = INSTRUCTION, seed: int = 0) -> Inputs:
    return policy.preprocess(observe(policy, rows, seed), [instruction] * rows)


def keys(rows: int) -> list[str]:
    return [f"run/{row}/0/0" for row in range(rows)]


def take(tensors: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
    return {name: tensor[rows] for name, tensor in tensors.items()}


def act(policy: Policy, inputs: Inputs, rows: list[int]) -> Act:
    """Act for some rows of a batch, each with the key of its row number."""
    names = [f"run/{row}/0/0" for row in rows]
    return policy.act(take(inputs, rows), "train", RowNoise(names))


def through_numpy(policy: Policy, record: Record) -> Record:
    """A record as it comes back from a trajectory, checked against the schema."""
    arrays = numpy_record(record)
    for name, (shape, dtype) in policy.spec.record.items():
        assert arrays[name].shape[1:] == shape
        assert arrays[name].dtype == np.dtype(dtype)
    assert arrays.keys() == policy.spec.record.keys()
    return {name: torch.from_numpy(np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape).copy())
            for name, array in arrays.items()}  # fmt: skip
