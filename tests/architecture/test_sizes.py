"""Files and functions stay readable: 400 lines a file at most, and one loop a page."""

import ast

from tests.architecture.source import ROOT, modules

FILE_LINES = 400
FUNCTION_LINES = 60


def test_files_are_short() -> None:
    folders = ("services", "tests", "examples", "benchmarks")
    long = {
        module.where: lines
        for folder in folders
        for module in modules(folder)
        if (lines := len(module.path.read_text().splitlines())) > FILE_LINES
    }
    assert not long, f"over {FILE_LINES} lines, split by subject: {long}"


def test_functions_fit_a_page() -> None:
    long = [
        f"{module.where}:{node.lineno} {node.name} has {length} lines"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_scripts_are_short() -> None:
    scripts = [*(ROOT / "deploy").rglob("*.sh"), *(ROOT / "protos").glob("*.sh"), ROOT / "Makefile"]
    assert len(scripts) > 3
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in scripts}
    assert max(lengths.values()) <= FILE_LINES, lengths
