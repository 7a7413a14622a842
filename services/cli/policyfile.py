"""The configuration of a policy in a folder, read without torch, and whether it fits a simulator and a recipe."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.spec import SimSpec
from services.policies.config import PolicyConfig

POLICY_FILE = "policy.json"
"""Written last: a folder with it holds a whole policy."""


def read_policy_config(folder: Path) -> PolicyConfig:
    """What the policy in a folder is; raises ConfigError if there is none or if it cannot be read."""
    path = folder / POLICY_FILE
    try:
        return PolicyConfig.from_json(json.loads(path.read_text())["config"])
    except FileNotFoundError as error:
        raise ConfigError(f"no policy in {str(folder)!r}; expected policy.json, as `dvla sft` writes it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(path)!r} describes no policy ({error!r}); write it again with `dvla sft`") from error


def check_fits(folder: Path, sim: SimSpec) -> None:
    """Refuse a policy whose actions or inputs are not those of the simulator."""
    config = read_policy_config(folder)
    if config.action_dim != sim.action.dim:
        raise ConfigError(
            f"the policy in {str(folder)!r} has {config.action_dim} action dimensions; the simulator "
            f"({sim.backend}, {sim.action.control_mode}) has {sim.action.dim}; use a policy made for them"
        )
    offered = {tensor.name: tensor.shape for tensor in sim.observation}
    side = config.image_size
    wanted: dict[str, tuple[int, ...]] = {f"rgb/{camera}": (side, side, 3) for camera in config.cameras}
    if config.state_dim:
        wanted["state"] = (config.state_dim,)
    for name, shape in wanted.items():
        if offered.get(name) != shape:
            raise ConfigError(
                f"the policy in {str(folder)!r} reads {name!r} of shape {list(shape)}; the simulator offers "
                f"{_listed(offered)}; use a policy made for these observations"
            )


def check_same(folder: Path, given: Mapping[str, Any]) -> None:
    """Refuse a policy that contradicts what a recipe says of it in [policy]."""
    own = read_policy_config(folder).to_json()
    for name, value in given.items():
        wanted = list(value) if isinstance(value, tuple) else value
        if own[name] != wanted:
            raise ConfigError(
                f"[policy] {name} = {wanted!r}, but the policy in {str(folder)!r} has {name} = {own[name]!r}; change "
                "the recipe, or give another sft.init"
            )


def _listed(tensors: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in tensors.items()) or "nothing"
