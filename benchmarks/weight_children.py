"""Processes that `weight_plane.py` and `weight_soak.py` start: readers, and bare transfers to compare with.

    python -m benchmarks.weight_children KIND JSON-ARGUMENTS

Each prints one JSON object a line; times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np

from services.common.bundle import Manifest, WeightTensor
from services.common.channels import OPTIONS
from services.common.client_fetch import Source
from services.common.client_subscribe import Follower
from services.common.server import configure_logging
from services.common.sinks import BufferSink, Bytes, TensorSink

MB = 1024 * 1024


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Model(TensorSink):
    """Two sets of arrays that stand for the live and the spare policy; without a spare only one."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self._sets: list[dict[str, Bytes]] = [{}, {}][: 1 + spare]
        self._began = 0.0

    def ready(self, manifest: Manifest) -> bool:
        self._began = time.monotonic()
        target = self._sets[-1]
        if not target:
            target |= {tensor.name: np.zeros(tensor.length, np.uint8) for tensor in manifest.layout.tensors}
            for array in target.values():
                array[:] = 1  # touched, as a model's tensors are
        return True

    def place(self, tensor: WeightTensor) -> Bytes:
        return self._sets[-1][tensor.name]

    def done(self, manifest: Manifest) -> None:
        self._sets.reverse()
        now = time.monotonic()
        say(update=manifest.version.update, at=now, seconds=now - self._began)


class Discard(TensorSink):
    """Takes tensors one by one into the same memory: for versions larger than the room for a model."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch: Bytes = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def copy(self, source: Bytes) -> None:
        """One after another: there is room for one tensor."""
        manifest = self._begun()
        for number, tensor in enumerate(manifest.layout.tensors):
            self._take(number, tensor, source)
        self._index = len(manifest.layout.tensors)

    def place(self, tensor: WeightTensor) -> Bytes:
        if self._scratch.size < tensor.length:
            self._scratch = np.zeros(tensor.length, np.uint8)
        return self._scratch[: tensor.length]

    def done(self, manifest: Manifest) -> None:
        say(update=manifest.version.update, at=time.monotonic(), tensors=len(manifest.layout.tensors))


def reader(address: str, folder: str, spare: bool = True, discard: bool = False) -> None:
    """Follows the newest version until stdin closes."""
    follower = Follower(address, "policy", Discard() if discard else Model(spare), folder=folder)
    started = time.monotonic()
    follower.start()
    say(ready=True, at=started)
    sys.stdin.read()
    follower.close()
    say(errors=follower.status.errors, last=follower.status.last_error, transport=follower.status.transport)


def fetcher(address: str, folder: str) -> None:
    """Fetches the newest version once for each line on stdin."""
    source, sink = Source(address, "policy", None, folder), BufferSink()
    for _ in sys.stdin:
        started = time.monotonic()
        source.fetch(None, sink)
        say(seconds=time.monotonic() - started, transport=source.transport)
    source.close()


def bare_server(address: str, length: int) -> None:
    """A gRPC stream of raw 1 MB frames and nothing else, on the same kind of server."""
    import uvloop

    data = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for start in range(0, length, MB):
            yield data[start : start + MB].tobytes()

    async def serve() -> None:
        server = grpc.aio.server(options=OPTIONS)
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", handlers),))
        server.add_insecure_port(address)
        await server.start()
        say(ready=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def bare_client(address: str, length: int) -> None:
    """Receives that stream into memory once for each line on stdin."""
    buffer = np.zeros(length, np.uint8)
    with grpc.insecure_channel(address, OPTIONS) as channel:
        call = channel.unary_stream("/bare.Bare/Stream")
        for _ in sys.stdin:
            started, done = time.monotonic(), 0
            for frame in call(b"", timeout=60, wait_for_ready=True):
                buffer[done : done + len(frame)] = np.frombuffer(frame, np.uint8)
                done += len(frame)
            assert done == length
            say(seconds=time.monotonic() - started)


def tcp_server(host: str, port: int, length: int) -> None:
    """Sends so many bytes to whoever connects."""
    data = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)
    with socket.create_server((host, port)) as listener:
        say(ready=True)
        threading.Thread(target=_shut_at_end, args=(listener,), daemon=True).start()
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.sendall(memoryview(data))


def _shut_at_end(listener: socket.socket) -> None:
    sys.stdin.read()
    listener.shutdown(socket.SHUT_RDWR)


def tcp_client(host: str, port: int, length: int) -> None:
    """Receives them once for each line on stdin."""
    buffer = memoryview(bytearray(length))
    for _ in sys.stdin:
        started, done = time.monotonic(), 0
        with socket.create_connection((host, port)) as peer:
            while done < length:
                done += peer.recv_into(buffer[done : done + MB])
        say(seconds=time.monotonic() - started)


KINDS: dict[str, Callable[..., None]] = {
    "reader": reader,
    "fetcher": fetcher,
    "bare_server": bare_server,
    "bare_client": bare_client,
    "tcp_server": tcp_server,
    "tcp_client": tcp_client,
}

if __name__ == "__main__":
    configure_logging("warning")  # to stderr: stdout is for answers
    KINDS[sys.argv[1]](**json.loads(sys.argv[2]))
