"""No dead options: every field of every configuration is read by code beyond its own checks, and set in some test.

What a change does is shown field by field in tests/learner/test_options.py and tests/policies/test_options.py; for the
other roles by the tests that set the field, which this module looks for.
"""

import ast
import re
from dataclasses import fields
from functools import cache

import pytest

from services.cli.roles import ROLES
from services.cli.sections import DemosSection, EvalSection, RunSection, SftSection
from services.policies.config import PolicyConfig
from services.policies.sft import SftConfig
from tests.architecture.source import ROOT, modules

SECTIONS = {
    "run": RunSection,
    "demos": DemosSection,
    "sft": SftSection,
    "eval": EvalSection,
    "policy": PolicyConfig,
    "services.policies.sft": SftConfig,
}
CLASSES: dict[str, type] = {name: info.config_class() for name, info in ROLES.items()} | SECTIONS
FIELDS = sorted({(f.name, name) for name, cls in CLASSES.items() for f in fields(cls)})


UNTRIED = {
    ("run", "minutes"), ("run", "restart_limit"), ("run", "rollouts"), ("run", "solved_episodes"),
    ("sim", "gpu_memory"), ("sim", "reward_mode"), ("sim", "start_timeout"), ("rollout", "spare_policy"),
    ("store", "advertise"), ("store", "arena_bytes"), ("store", "redis_ca"), ("store", "redis_cert"),
    ("store", "redis_key"), ("weights", "budget_gib"), *((role, "metrics_host") for role in ROLES),
}  # fmt: skip
"""Fields that code reads but no test sets yet. This list only shrinks."""
REFUSALS = {("learner", "differential_reward")}
"""Fields that only a check reads: they say what is true of a simulator, and lift a refusal."""
SETTINGS = ("config", "sections", "objective", "settings", "sft")
"""Last parts of the names of modules that define settings."""


@cache
def reads() -> frozenset[str]:
    """Names that some code reads as an attribute, outside of functions that only check."""
    found: set[str] = set()

    def visit(node: ast.AST, settings: bool) -> None:
        if settings and isinstance(node, ast.FunctionDef) and node.name.startswith(("__post_init__", "_check")):
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("fields", "asdict"):
            found.update(_whole(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            found.update(str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant))
        for child in ast.iter_child_nodes(node):
            visit(child, settings)

    for module in modules():
        visit(module.tree, module.name.rpartition(".")[2] in SETTINGS)
    return frozenset(found)


def _whole(call: ast.Call) -> set[str]:
    """Fields of a dataclass that is copied whole by name, such as `fields(LossOptions)`."""
    from services.learner.losses.terms import LossOptions

    named = ast.unparse(call.args[0]) if call.args else ""
    return {f.name for f in fields(LossOptions)} if named == "LossOptions" else set()


@cache
def written() -> str:
    """All tests and recipes."""
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "recipes").glob("*.toml"), *(ROOT / "examples").rglob("*.toml")]
    return "\n".join(
        path.read_text() for path in paths if path.name != "test_options.py" or "architecture" not in str(path)
    )


@pytest.mark.parametrize(("name", "section"), FIELDS)
def test_it_is_read_and_tried(name: str, section: str) -> None:
    assert name in reads() or (section, name) in REFUSALS, (
        f"[{section}] {name} is read by nobody: remove it, or let something read it"
    )
    dashed = name.replace("_", "-")
    tried = re.search(rf"(\b{name}\b\s*[=:\"'])|(--{dashed}\b)|(--no-{dashed}\b)", written())
    assert tried or (section, name) in UNTRIED, (
        f"[{section}] {name} is set in no test and no recipe: nobody knows whether it works"
    )
