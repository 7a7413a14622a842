"""A policy in a folder: `policy.json` (configuration, name and hash of the weights) and `weights-<hash>.safetensors`.

`policy.json` is renamed into place last, so a folder holds either the old policy or the new one, whole. Optimisers and
run state are no part of this: the learner keeps its own.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError

from services.common.errors import ConfigError, InvalidInput, NotFound
from services.policies.base import Policy
from services.policies.config import PolicyConfig
from services.policies.registry import build_policy

FORMAT = "dvla-policy-1"
_DESCRIPTION = "policy.json"
_PIECE = 4 * 1024 * 1024


def save_checkpoint(folder: Path, policy: Policy) -> None:
    """Write a policy, replacing the one that the folder may hold."""
    save_weights(folder, policy.spec.config, policy.trainable_state())


def save_weights(folder: Path, config: Mapping[str, object], weights: Mapping[str, torch.Tensor]) -> None:
    """Write a policy of this configuration with these weights, replacing the one that the folder may hold."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    # Through a file: serialising to bytes holds up every other thread of the interpreter.
    partial = folder / "weights.partial"
    safetensors.torch.save_file(state, partial)
    digest = _digest(partial)
    file = f"weights-{digest[:16]}.safetensors"
    description = {"format": FORMAT, "config": dict(config), "weights": {"file": file, "xxh3_128": digest}}
    _sync(partial)
    os.replace(partial, folder / file)
    _write(folder / _DESCRIPTION, json.dumps(description, indent=2).encode())
    for old in folder.glob("weights-*.safetensors"):
        if old.name != file:
            old.unlink()


def load_checkpoint(folder: Path, expected: PolicyConfig | None = None, device: torch.device | str = "cpu") -> Policy:
    """Read a policy back, exactly.

    Raises NotFound without a checkpoint, InvalidInput if it is damaged, and ConfigError if it is of another
    configuration than `expected`, naming the first difference.
    """
    description = _read_description(folder)
    config = PolicyConfig.from_json(description["config"])
    if expected is not None:
        _check_same(folder, config, expected)
    policy = build_policy(config, device=device)
    policy.load_state({name: tensor.to(device) for name, tensor in _read_weights(folder, description).items()})
    return policy


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / _DESCRIPTION
    if not path.is_file():
        raise NotFound(f"no policy in {folder}: expected {_DESCRIPTION}, as `dvla sft` and `dvla train` write it")
    try:
        description: dict[str, Any] = json.loads(path.read_bytes())
        if description["format"] != FORMAT:
            raise InvalidInput(f"{path} has format {description['format']!r}, expected {FORMAT!r}: write it again")
        str(description["weights"]["file"]), str(description["weights"]["xxh3_128"]), dict(description["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path} describes no policy ({error!r}): write the checkpoint again") from error
    return description


def _read_weights(folder: Path, description: dict[str, Any]) -> dict[str, torch.Tensor]:
    # Only the name counts: a description from elsewhere must not make us read outside its folder.
    path = folder / Path(description["weights"]["file"]).name
    if not path.is_file():
        raise InvalidInput(f"{path} is missing, though {_DESCRIPTION} names it: the checkpoint was copied in part")
    data = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != description["weights"]["xxh3_128"]:
        raise InvalidInput(f"{path} does not have the hash that {_DESCRIPTION} gives: the file is damaged, use another")
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise InvalidInput(f"{path} is no safetensors file ({error}): write the checkpoint again") from error


def _check_same(folder: Path, config: PolicyConfig, expected: PolicyConfig) -> None:
    own, wanted = config.to_json(), expected.to_json()
    for name, value in wanted.items():
        if own[name] != value:
            raise ConfigError(
                f"the policy in {folder} has {name} = {own[name]!r}, this recipe asks for {value!r}: "
                "change the recipe, or give another checkpoint"
            )


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return state.hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, also through a power cut."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
