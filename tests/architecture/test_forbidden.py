"""Things that never appear in services: pickle, unsafe loaders, the resource tracker's shared memory, fork."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import Module, modules

FORBIDDEN_IMPORTS = {
    "pickle": "it runs code from data",
    "dill": "it runs code from data",
    "cloudpickle": "it runs code from data",
    "marshal": "it is not safe on foreign data",
    "shelve": "it is pickle",
    "joblib": "it is pickle",
    "multiprocessing.shared_memory": "its resource tracker unlinks other people's segments",
}
TORCH_LOADS = ("torch.load", "torch.jit.load")


def findings(module: Module) -> Iterator[str]:
    """Everything forbidden in one module, as messages."""
    for line, name in module.imports():
        for forbidden, reason in FORBIDDEN_IMPORTS.items():
            if name == forbidden or name.startswith(forbidden + "."):
                yield f"{module.where}:{line} imports {forbidden}: {reason}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{module.where}:{node.lineno} bare except: name the exception"
        if isinstance(node, ast.Call):
            problem = call_problem(node)
            if problem:
                yield f"{module.where}:{node.lineno} {problem}"


def call_problem(node: ast.Call) -> str:
    """What is wrong with a call, or nothing."""
    called = ast.unparse(node.func)
    keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if called in TORCH_LOADS and keywords.get("weights_only") != "True":
        return f"{called} without weights_only=True runs code from a file"
    if called in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
        return f"{called} with allow_pickle runs code from a file"
    if called in ("os.fork", "os.forkpty", "pty.fork"):
        return f"{called}: threads and grpc do not survive it"
    starts = [ast.unparse(argument) for argument in node.args] + list(keywords.values())
    if called.endswith(("get_context", "set_start_method")) and starts[:1] != ["'spawn'"]:
        return f"{called} with another method than spawn: threads and grpc do not survive a fork"
    if called in ("multiprocessing.Process", "mp.Process", "multiprocessing.Pool", "mp.Pool"):
        return f"{called} uses the platform's start method, which may be fork; use get_context('spawn')"
    return ""


def test_nothing_forbidden() -> None:
    found = [finding for module in modules() for finding in findings(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import shared_memory",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "try:\n    pass\nexcept:\n    pass",
        "import multiprocessing as mp\nmp.get_context('fork')",
        "import multiprocessing as mp\nmp.get_context()",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_check_itself_finds_it(code: str) -> None:
    example = modules()[0]
    assert list(findings(Module("services.example", example.path, ast.parse(code))))
