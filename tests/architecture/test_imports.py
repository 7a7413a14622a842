"""Who may import whom: services never import each other, light parts never import torch, domain code no grpc."""

import subprocess
import sys

import pytest

from tests.architecture.source import ROOT, Module, modules, unit_of

ALLOWED: dict[str, set[str]] = {
    "sim": {"common"},
    "rollout.worker": {"common", "policies"},
    "rollout.store": {"common"},
    "learner": {"common", "policies"},
    "weights": {"common"},
    "policies": {"common"},
    "common": set(),
}
"""What each part may import besides itself. The command line composes everything, so it has no entry."""

LIGHT = ("common", "weights", "rollout.store")
HEAVY = ("torch", "mani_skill", "sapien", "gymnasium", "services.policies")
GRPC_MODULES = ("__main__", "servicer", "client", "serve", "channels", "interceptors", "security", "server")
"""Modules that speak grpc. A name such as client_store counts by its first word."""


def test_services_never_import_each_other() -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules()
        for line, name in module.imports()
        if module.unit in ALLOWED
        and (unit := unit_of(name))
        and unit != module.unit
        and unit not in ALLOWED[module.unit]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_belongs_to_a_part_with_rules() -> None:
    packages = {"services", "services.rollout"}
    strays = [m.where for m in modules() if not m.unit and m.name not in packages]
    assert not strays, f"no import rules for {strays}; add their part to tests/architecture/source.py"


def test_light_parts_name_no_heavy_import() -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules()
        if module.unit in LIGHT
        for line, name in module.imports()
        if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)
    ]
    assert not wrong, "\n".join(wrong)


def speaks_grpc(module: Module) -> bool:
    return module.unit == "cli" or module.path.stem.split("_")[0] in GRPC_MODULES or module.path.stem in GRPC_MODULES


def test_domain_modules_import_no_grpc() -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules()
        if not speaks_grpc(module)
        for line, name in module.imports()
        if name.split(".")[0].startswith("grpc") or "_pb2_grpc" in name
    ]
    assert not wrong, "\n".join(wrong) + "\nonly " + ", ".join(GRPC_MODULES) + " modules may"


def loaded_after(code: str) -> set[str]:
    """Names of the modules that are loaded after running code in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize("part", LIGHT)
def test_light_parts_load_no_torch(part: str) -> None:
    names = [module.name for module in modules() if module.unit == part]
    loaded = loaded_after("import importlib\nfor name in " + repr(names) + ": importlib.import_module(name)")
    assert names[0] in loaded
    assert not loaded & {"torch", "mani_skill", "sapien"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["store", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Help answers at once because torch, ManiSkill and grpc are imported only when something really runs."""
    loaded = loaded_after(
        "from services.cli.__main__ import main\n"
        f"sys.argv = ['dvla', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code"
    )
    assert "services.cli.__main__" in loaded
    assert not loaded & {"torch", "mani_skill", "sapien", "grpc"}
