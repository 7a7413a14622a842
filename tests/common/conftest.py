"""Fixtures of the tests of services.common."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
