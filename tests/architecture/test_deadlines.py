"""No remote call without a deadline: a frozen peer must never hang its caller."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source import ROOT, modules

ENDLESS = {"Session", "Watch"}
"""Streams that live as long as their owner; they notice a silent peer by pings."""


def remote_calls() -> set[str]:
    """Names of all RPCs that end, read from the protos, and of the health check."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "protos/dvla/v1").glob("*.proto")))
    names = set(re.findall(r"^\s*rpc (\w+)\(", text, re.MULTILINE))
    assert names >= ENDLESS
    return names - ENDLESS | {"Check"}


def without_deadline(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, call) of every call of a stub that gives no timeout."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        target = node.func
        if target.attr in ("future", "with_call") and isinstance(target.value, ast.Attribute):
            target = target.value
        if target.attr not in names:
            continue
        given = [word.value for word in node.keywords if word.arg == "timeout"] + node.args[1:2]
        if not given or (isinstance(given[0], ast.Constant) and given[0].value is None):
            yield node.lineno, ast.unparse(node.func)


def test_every_call_has_a_deadline() -> None:
    names = remote_calls()
    wrong = [
        f"{module.where}:{line} {call} has no timeout"
        for folder in ("services", "examples", "benchmarks")
        for module in modules(folder)
        for line, call in without_deadline(module.tree, names)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("await stub.Lease(request)", 1),
        ("await stub.Lease(request, timeout=None)", 1),
        ("stub.Lease.future(request)", 1),
        ("await stub.Lease(request, timeout=3)", 0),
        ("stub.Lease.future(request, 1.0)", 0),
        ("stub.Session()", 0),
    ],
)
def test_the_check_itself(code: str, found: int) -> None:
    wrapped = f"async def f(stub, request):\n    {code}"
    assert len(list(without_deadline(ast.parse(wrapped), remote_calls()))) == found
