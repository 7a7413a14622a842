"""The CUDA IPC arena on a GPU: two processes, a thousand updates, flat memory, killed on either side."""

import ctypes
from pathlib import Path

import pytest
import torch

from services.common.arena.cuda_driver import CudaDriver, Cudart
from tests.common.arena import cuda_processes

pytestmark = pytest.mark.gpu


def driver(folder: Path) -> CudaDriver:
    """The first GPU; the folder is only for the fake driver."""
    return Cudart(0, f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def used(device: CudaDriver) -> int:
    """Bytes in use on the device, in steps that other processes' noise does not reach."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert isinstance(device, Cudart)
    assert device._lib.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return (total.value - free.value) >> 24


def test_a_thousand_updates_with_flat_memory(tmp_path: Path) -> None:
    cuda_processes.updates_arrive_and_memory_stays_flat(driver, tmp_path, False, 1000, used)


def test_a_killed_consumer(tmp_path: Path) -> None:
    cuda_processes.a_killed_consumer_frees_its_slot(driver, tmp_path, False)


def test_a_killed_producer(tmp_path: Path) -> None:
    cuda_processes.a_killed_producer_is_noticed(driver, tmp_path, False)
