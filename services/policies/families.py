"""Which policy families exist: a name for a class, without importing it. No torch.

Built in are `tiny-oft`, `tiny-flow` and `emulated`, which only waits. Others come from installed packages (entry
points in the group `dvla.policies`), from the environment variable `DVLA_POLICIES` (`module:Class`, separated by
commas) or from `register_family`.
A family name travels over the network inside weight manifests, so a name alone never imports anything:
each process lists for itself which modules it trusts.
"""

import os
from importlib.metadata import entry_points

from services.common.errors import ConfigError

OFT, FLOW = "tiny-oft", "tiny-flow"
ENTRY_POINTS = "dvla.policies"
ENVIRONMENT = "DVLA_POLICIES"

_registered = {
    OFT: "services.policies.oft:TinyOft",
    FLOW: "services.policies.flow:TinyFlow",
    "emulated": "services.policies.emulated:EmulatedPolicy",
}


def register_family(target: str, name: str = "") -> None:
    """Make the policy class `module:Class` known in this process, under `name` or its own spelling."""
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise ConfigError(f"policy {target!r} is no class: expected module:Class, such as my_robot.policy:MyPolicy")
    _registered[name or target] = target


def known_families() -> dict[str, str]:
    """Family name -> `module:Class`, of everything this process may build."""
    listed = [target.strip() for target in os.environ.get(ENVIRONMENT, "").split(",") if target.strip()]
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return installed | {target: target for target in listed} | _registered


def family_target(family: str) -> str:
    """`module:Class` of a family. Raises ConfigError, naming the known ones and how to add one."""
    # The built-in names come first: listing entry points reads the metadata of every installed package.
    target = _registered.get(family) or known_families().get(family)
    if target is None:
        raise ConfigError(
            f"unknown policy family {family!r}: expected one of {', '.join(sorted(known_families()))}; "
            f"for a policy of your own set {ENVIRONMENT}=module:Class in every role"
        )
    return target
