"""From a configuration to a policy: the only place that turns a family name into a class."""

from importlib import import_module

import torch

from services.common.errors import ConfigError
from services.policies.base import Policy
from services.policies.config import PolicyConfig
from services.policies.families import family_target
from services.policies.tiny import DTYPES


def build_policy(config: PolicyConfig, seed: int = 0, device: torch.device | str = "cpu") -> Policy:
    """A policy with freshly drawn weights. The same seed gives the same weights; global random state is untouched.

    Raises ConfigError if the family is unknown or its class cannot be imported.
    """
    policy_class = _load_class(config.family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = policy_class(config)
    # Buffers keep float32: statistics and bin centres are data, not parameters.
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(DTYPES[config.dtype])
    if config.compile:
        policy.compile_layers()
    return policy.to(device)


def _load_class(family: str) -> type[Policy]:
    target = family_target(family)
    module, _, attribute = target.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {target!r} cannot be imported ({error}): install its package") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"policy {target!r} is no policy class: expected a subclass of services.policies.base.Policy")
    return found
