"""Processes that `data_plane.py` starts: a simulator, a bare stream with one copy into shared memory, a producer.

    python -m benchmarks.data_plane_children KIND JSON-ARGUMENTS

Each prints one JSON object a line, first that it is ready; lines in ask for one piece of work; it ends with stdin.
"""

import asyncio
import json
import mmap
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import uvloop

from benchmarks.weight_children import bare_client, bare_server, say, tcp_client, tcp_server
from services.common.arena import Arena
from services.common.channels import OPTIONS
from services.common.server import configure_logging
from services.common.spec import ActionSpec, FloatArray, IntArray, Observation, SimSpec, TaskSpec, TensorSpec
from services.sim.config import SimConfig
from services.sim.serve import serve_async
from services.sim.vector import ControlStep, Start, VectorSim

BARE = "/bare.Turn/Session"


class Still(VectorSim):
    """One slot whose observation is so many bytes; nothing moves, so that only the transport is measured."""

    num_slots = 1

    def __init__(self, size: int) -> None:
        self.spec = SimSpec(
            observation=(TensorSpec("rgb/top", "uint8", (size // 3, 1, 3)),),
            action=ActionSpec(7, (-1.0,) * 7, (1.0,) * 7, control_mode="none"),
            tasks=(TaskSpec("still", "do nothing", 1 << 30),),
            starts="seed",
            backend="still",
            batched=True,
        )
        self._image = np.random.default_rng(0).integers(0, 256, (1, size // 3, 1, 3), dtype=np.uint8)

    def make_start(self, task: str, seed: int) -> bytes:
        return b""

    def reset(self, slots: IntArray, starts: Sequence[Start]) -> None:
        pass

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        none = np.zeros(1, np.bool_)
        return ControlStep(np.zeros(1, np.float32), none, none)

    def observe(self, slots: IntArray) -> Observation:
        return {"rgb/top": self._image}


def simulator(address: str, folder: str, size: int) -> None:
    """A simulator service that runs in one process."""
    config = SimConfig(listen=address, sim="custom:Still", processes=0, shared_folder=folder, log_level="warning")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stdin_ends(serve_async(lambda: Still(size), config)))


def bare_turns(address: str, path: str, size: int) -> None:
    """The least that a turn can cost: a message in, one copy into a mapped file, a message out."""
    image = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    shared = np.frombuffer(mmap.mmap(os.open(path, os.O_RDWR), size), np.uint8)
    shared[:] = 1

    async def session(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            np.copyto(shared, image)
            yield b"done"

    async def serve() -> None:
        server = grpc.aio.server(options=OPTIONS)
        handlers = {"Session": grpc.stream_stream_rpc_method_handler(session)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Turn", handlers),))
        server.add_insecure_port(address)
        await server.start()
        say(ready=True)
        await server.wait_for_termination()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stdin_ends(serve()))


def producer(folder: str, size: int) -> None:
    """Owns an arena and, for each line on stdin, hands over the next of a few sealed batches; the last is released."""
    arena, extents = Arena.create(Path(folder), "bench", 4 * size), list[Any]()
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    for _ in range(4):
        extents.append(arena.allocate(size))
        np.copyto(arena.view(extents[-1]), data)
        arena.seal(extents[-1])
    say(ready=True)
    for number, _ in enumerate(sys.stdin):
        say(extent=list(vars(extents[number % 4]).values()))
    arena.remove()


async def _until_stdin_ends(work: Any) -> None:
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=wait, daemon=True).start()
    try:
        await task
    except asyncio.CancelledError:
        return


KINDS: dict[str, Callable[..., None]] = {
    "simulator": simulator,
    "bare_turns": bare_turns,
    "producer": producer,
    "bare_server": bare_server,
    "bare_client": bare_client,
    "tcp_server": tcp_server,
    "tcp_client": tcp_client,
}

if __name__ == "__main__":
    configure_logging("warning")
    KINDS[sys.argv[1]](**json.loads(sys.argv[2]))
