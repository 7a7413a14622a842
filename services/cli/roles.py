"""The five roles as the command line knows them: where their app and their settings live. Imports nothing of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from cyclopts import App

    from services.common.config import RoleConfig


@dataclass(frozen=True)
class RoleInfo:
    """One role. owned: settings that `dvla train` gives by itself, with the reason."""

    package: str
    config: str
    owned: Mapping[str, str] = field(default_factory=dict)

    def app(self) -> "App":
        """Its command-line application; imports the role."""
        from cyclopts import App

        found = import_module(f"{self.package}.__main__").app
        return found if isinstance(found, App) else cast(App, found())

    def config_class(self) -> "type[RoleConfig]":
        """Its configuration class; imports no torch."""
        return cast("type[RoleConfig]", getattr(import_module(f"{self.package}.config"), self.config))


_ADDRESS = "it starts all roles and connects them"
_RUN = "it is the run's own"
_COMMON = {"listen": _ADDRESS, "name": _ADDRESS}

ROLES: Mapping[str, RoleInfo] = {
    "sim": RoleInfo("services.sim", "SimConfig", _COMMON),
    "rollout": RoleInfo(
        "services.rollout.worker",
        "RolloutConfig",
        _COMMON | {"run": _RUN, "store": _ADDRESS, "weights": _ADDRESS, "sims": _ADDRESS},
    ),
    "store": RoleInfo(
        "services.rollout.store",
        "StoreConfig",
        _COMMON | {"redis": _ADDRESS},
    ),
    "learner": RoleInfo(
        "services.learner",
        "LearnerConfig",
        _COMMON
        | {"run": _RUN, "init": "see [sft] init", "output": _RUN, "store": _ADDRESS, "weights": _ADDRESS}
        | {"close_run": _RUN, "mode": "set run.mode instead"},
    ),
    "weights": RoleInfo(
        "services.weights",
        "WeightsConfig",
        _COMMON | {"durable_folder": _RUN},
    ),
}
