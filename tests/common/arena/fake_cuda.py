"""A CUDA driver on the CPU: device memory is a file, a handle its name, an event a file with a counter."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.arena.cuda_driver import HANDLE_BYTES
from services.common.errors import Unavailable

STRIDE = 1 << 40
UUID = "GPU-fake"


class FakeDriver:
    """Two processes with the same folder see the same device. during_copy: called in the middle of a copy out."""

    def __init__(self, folder: Path, uuid: str = UUID) -> None:
        self.uuid = uuid
        self.during_copy: Callable[[], None] = lambda: None
        self.waited: list[int] = []
        self._folder = folder
        self._memory: dict[int, tuple[str, npt.NDArray[np.uint8]]] = {}
        self._events: dict[int, str] = {}
        self._count = 0

    @property
    def mapped(self) -> int:
        return len(self._memory)

    @property
    def events(self) -> int:
        return len(self._events)

    def malloc(self, size: int) -> int:
        name = f"memory-{os.urandom(4).hex()}"
        (self._folder / name).write_bytes(bytes(size))
        return self._map(name)

    def free(self, address: int) -> None:
        name, _ = self._memory.pop(address)
        (self._folder / name).unlink()

    def export_memory(self, address: int) -> bytes:
        return self._memory[address][0].encode().ljust(HANDLE_BYTES, b"\0")

    def open_memory(self, handle: bytes) -> int:
        return self._map(handle.rstrip(b"\0").decode())

    def close_memory(self, address: int) -> None:
        del self._memory[address]

    def make_event(self) -> int:
        name = f"event-{os.urandom(4).hex()}"
        (self._folder / name).touch()
        return self._event(name)

    def export_event(self, event: int) -> bytes:
        return self._events[event].encode().ljust(HANDLE_BYTES, b"\0")

    def open_event(self, handle: bytes) -> int:
        return self._event(handle.rstrip(b"\0").decode())

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int) -> None:
        with (self._folder / self._events[event]).open("ab") as file:
            file.write(b"r")

    def wait(self, event: int) -> None:
        path = self._folder / self._events[event]
        if not path.stat().st_size:
            raise Unavailable("waited for an event that was never recorded")
        self.waited.append(event)

    def to_device(self, address: int, data: memoryview) -> None:
        self._at(address, len(data))[:] = np.frombuffer(data, np.uint8)

    def to_host(self, data: memoryview, address: int) -> None:
        np.frombuffer(data, np.uint8)[:] = self._at(address, len(data))
        self.during_copy()

    def on_device(self, target: int, source: int, length: int) -> None:
        half = length // 2
        self._at(target, half)[:] = self._at(source, half)
        self.during_copy()
        self._at(target + half, length - half)[:] = self._at(source + half, length - half)

    def synchronise(self) -> None:
        pass

    def _map(self, name: str) -> int:
        try:
            data = np.memmap(self._folder / name, np.uint8, "r+")
        except FileNotFoundError as error:
            raise Unavailable(f"cudaIpcOpenMemHandle failed: {name!r} is void") from error
        self._count += 1
        self._memory[self._count * STRIDE] = (name, data)
        return self._count * STRIDE

    def _event(self, name: str) -> int:
        self._count += 1
        self._events[self._count] = name
        return self._count

    def _at(self, address: int, length: int) -> npt.NDArray[np.uint8]:
        base = address // STRIDE * STRIDE
        view = self._memory[base][1][address - base : address - base + length]
        assert view.size == length, "outside of the device's memory"
        return view
