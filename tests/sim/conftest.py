"""A simulator turns gradients off in its process; here that is the process of other tests as well."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def gradients_as_before() -> Iterator[None]:
    """Turn gradients on again after each test, since the next one may be another module's."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_grad_enabled(True)
