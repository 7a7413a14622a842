"""Settings of all tests: one thread per process, property tests without timing, GPU tests only where there is one."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported anywhere; children of the tests inherit it. More threads only slow small tensors down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("dvla", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("dvla")

HAS_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version").exists()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where no NVIDIA driver is loaded."""
    if HAS_NVIDIA_DRIVER:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA driver on this machine"))
