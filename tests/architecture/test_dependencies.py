"""Each role runs with its own extra alone: what its code imports is what pyproject.toml gives that extra."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from tests.architecture.source import ROOT, modules

EXTRAS = {
    "common": [],
    "sim": ["sim", "maniskill"],
    "rollout.worker": ["rollout"],
    "rollout.store": ["store"],
    "learner": ["learner"],
    "weights": ["weights"],
    "policies": ["rollout"],
    "cli": ["train"],
}
"""Part of the source -> the extras that it may count on, besides the base dependencies."""

OPTIONAL = {"policies": {"transformers", "lerobot"}}
"""Imports that a part makes only where the package is there anyway."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extras: list[str]) -> set[str]:
    """Distributions that these extras name, the base dependencies included; own extras are followed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, found = list(extras), set()
    requirements = list(project["dependencies"])
    while waiting:
        requirements += project["optional-dependencies"][waiting.pop()]
        for requirement in list(requirements):
            if own := re.fullmatch(r"dvla\[([\w,-]+)\]", requirement):
                requirements.remove(requirement)
                waiting += own[1].split(",")
    for requirement in requirements:
        found.add(canonical(re.split(r"[\[<>=!~; ]", requirement)[0]))
    return found


@pytest.mark.parametrize("part", EXTRAS)
def test_imports_are_declared(part: str) -> None:
    allowed, providers = declared(EXTRAS[part]), packages_distributions()
    wrong = []
    for module in modules():
        if module.unit != part:
            continue
        for line, name in module.imports():
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in ("services", "dvla") or top in OPTIONAL.get(part, ()):
                continue
            if not {canonical(provider) for provider in providers.get(top, [top])} & allowed:
                wrong.append(f"{module.where}:{line} imports {top}, which extra {EXTRAS[part]} does not bring")
    assert not wrong, "\n".join(wrong)
