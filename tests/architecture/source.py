"""The source tree as the architecture tests see it: modules, their syntax trees and what they import."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("sim", "rollout.worker", "rollout.store", "learner", "weights", "policies", "common", "cli")
"""The parts that have import rules of their own, as names below `services`."""


def unit_of(name: str) -> str:
    """The part that a dotted name under `services` belongs to; "" for anything else."""
    below = name.removeprefix("services.")
    if below == name:
        return ""
    return next((unit for unit in UNITS if below == unit or below.startswith(unit + ".")), "")


@dataclass(frozen=True)
class Module:
    """One Python file. name: dotted import name, such as "services.sim.vector"."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The part it belongs to."""
        return unit_of(self.name)

    @property
    def where(self) -> str:
        """Path from the repository's root, for messages."""
        return str(self.path.relative_to(ROOT))

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of everything imported anywhere in the file, late imports included."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parents, base]).rstrip(".")
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"


@cache
def modules(folder: str = "services") -> tuple[Module, ...]:
    """All modules under a folder of the repository."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return tuple(found)
