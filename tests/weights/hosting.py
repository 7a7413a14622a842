"""Real weights servers for tests: in a thread of this process, or as processes of their own."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop
from dvla.v1 import weights_pb2, weights_pb2_grpc

from services.common.bundle import Manifest, Version, bundle, verify, views
from services.common.channels import open_channel
from services.common.spec import Array
from services.weights.config import WeightsConfig
from services.weights.server import WeightsServer

ROOT = Path(__file__).resolve().parents[2]


class Host:
    """One event loop in a thread, with any number of weights servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._running: dict[str, tuple[WeightsServer, list[asyncio.Task[None]]]] = {}

    def start(self, name: str = "root", **settings: Any) -> str:
        """Start a server; returns its address, by default a socket. A folder of its name is its disk."""
        address = str(settings.pop("listen", f"unix:{self._folder}/{name}.sock"))
        settings = {"durable_folder": str(self._folder / name), "drain_seconds": 0.5, **settings}
        shared = settings.pop("shared", str(self._folder / "shm"))
        config = WeightsConfig(listen=address, name=name, shared_folder=shared, **settings)
        self._await(self._start(name, config))
        return address

    def stop(self, name: str = "root") -> None:
        """Stop one."""
        self._await(self._stop(name))

    def server(self, name: str = "root") -> WeightsServer:
        return self._running[name][0]

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self, name: str, config: WeightsConfig) -> None:
        server = WeightsServer(config)
        await server.start()
        self._running[name] = server, [asyncio.create_task(server.tend()), asyncio.create_task(server.relay())]

    async def _stop(self, name: str) -> None:
        server, tasks = self._running.pop(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()


@contextmanager
def process(address: str, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A weights server as a process, ready to serve; killed at the end if it still runs."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    child = subprocess.Popen([sys.executable, "-m", "services.weights", f"--listen={address}", *flags], cwd=ROOT)
    try:
        with stub_of(address) as stub:
            stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=30, wait_for_ready=True)
        yield child
    finally:
        child.kill()
        child.wait()


@contextmanager
def stub_of(address: str) -> Iterator[weights_pb2_grpc.WeightsServiceStub]:
    with open_channel(address) as channel:
        yield weights_pb2_grpc.WeightsServiceStub(channel)


def stamped(epoch: int, update: int, size: int = 5000, model: str = "policy") -> tuple[Manifest, npt.NDArray[np.uint8]]:
    """A version whose every element says which version it is."""
    stamp = np.float32(epoch * 1000 + update)
    arrays: dict[str, Array] = {
        "layer.weight": np.full((size, 50), stamp, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "layer.bias": np.full(7, stamp, np.float32),
    }
    return bundle(model, Version(epoch, update), arrays, metadata={"stamp": str(int(stamp))})


def check_stamp(manifest: Manifest, buffer: npt.NDArray[np.uint8]) -> None:
    """The buffer is whole: all hashes are right, and all elements are of the version that the manifest names."""
    verify(manifest, buffer)
    stamp = manifest.version.epoch * 1000 + manifest.version.update
    assert manifest.metadata["stamp"] == str(stamp)
    for array in views(manifest.layout, buffer).values():
        assert (array == stamp).all()
