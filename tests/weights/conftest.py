"""A host for weights servers, in a short folder, because paths of Unix sockets are limited."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weights.hosting import Host


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        yield Path(name)


@pytest.fixture
def host(folder: Path) -> Iterator[Host]:
    host = Host(folder)
    yield host
    host.close()
