"""Rows of the data-plane benchmark between simulator and worker: turns, hand-over, and bulk by grpc."""

import asyncio
import mmap
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import uvloop

from benchmarks.common import Report, ratio
from benchmarks.data_plane_children import BARE
from benchmarks.weight_hosts import Child, children, shared_memory, short_folder
from services.common.arena import Extent, Peer
from services.common.channels import OPTIONS
from services.common.errors import Unavailable
from services.common.locality import Vicinity
from services.common.security import Security
from services.rollout.worker.client_sim import Session, SimClient
from services.rollout.worker.turn import Reset

KB, MB = 1024, 1024 * 1024
CHILDREN = "benchmarks.data_plane_children"
ACTIONS = np.zeros((1, 1, 7), np.float32)
Measured = dict[str, list[float]]


def turns(report: Report, rounds: int, count: int) -> None:
    """Observation to action and back: 150 KB, two processes, by our transports and by the least that gRPC costs."""
    with short_folder() as place, shared_memory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
        medians, tails = run.run(_turns(place, folder, rounds, count))
    for name, words in (("shm", "shm"), ("grpc", "grpc"), ("bare", "bare gRPC stream and one copy")):
        shm = name == "shm"
        middle, tail = statistics.median(medians[name]), statistics.median(tails[name])
        target = ("< 0.5 ms", middle < 0.5) if shm else ("", None)
        report.add(f"round trip, 150 KB, {words}: p50", medians[name], "ms", *target)
        target = ("< 1.5 ms", tail < 1.5) if shm else ("", None)
        report.add(f"round trip, 150 KB, {words}: p99", tails[name], "ms", *target)
    report.add("round trip, 150 KB: shm to the bare stream, p50", ratio(medians["shm"], medians["bare"]), "x")


async def _turns(place: Path, folder: str, rounds: int, count: int) -> tuple[Measured, Measured]:
    size = 150 * KB
    async with AsyncExitStack() as stack:
        address = f"unix:{place}/sim"
        stack.enter_context(_child("simulator", address=address, folder=folder, size=size))
        ways: dict[str, Callable[[], Any]] = {}
        for name in ("shm", "grpc"):
            session = await stack.enter_async_context(session_of(address, name, folder))
            ways[name] = lambda session=session: session.advance((), (0,), ACTIONS)
        ways["bare"] = await stack.enter_async_context(_bare(place, folder, size))
        medians: Measured = {name: [] for name in ways}
        tails: Measured = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, turn in ways.items():
                times = [await _timed(turn) for _ in range(count)]
                if number:
                    medians[name].append(1e3 * statistics.median(times))
                    tails[name].append(1e3 * sorted(times)[int(0.99 * count)])
    return medians, tails


async def _timed(turn: Callable[[], Any]) -> float:
    started = time.perf_counter()
    await turn()
    return time.perf_counter() - started


@asynccontextmanager
async def session_of(address: str, transport: str, folder: str) -> AsyncIterator[Session]:
    """A session of a worker's own client, its one slot running."""
    vicinity = Vicinity(transport, folder if transport == "shm" else "")
    client = SimClient(address, Security(), vicinity)
    session = await _open(client)
    assert session.transport.startswith(transport), session.transport
    await session.advance([Reset(0, "still", b"", 0, False)], (), None)
    yield session
    await session.close()
    await client.close()
    vicinity.close()


async def _open(client: SimClient) -> Session:
    """Once the simulator is up."""
    for _ in range(600):
        try:
            return await client.open("bench", (), False)
        except Unavailable:
            await asyncio.sleep(0.1)
    raise Unavailable("the simulator did not come up within a minute")


@asynccontextmanager
async def _bare(place: Path, folder: str, size: int) -> AsyncIterator[Callable[[], Any]]:
    path, address = Path(folder) / "bare", f"unix:{place}/bare"
    path.write_bytes(bytes(size))
    target = np.ones(size, np.uint8)
    with path.open("rb") as file:
        shared = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), np.uint8)
    with _child("bare_turns", address=address, path=str(path), size=size) as child:
        child.read()
        async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
            call = channel.stream_stream(BARE)()

            async def turn() -> None:
                await call.write(ACTIONS.tobytes())
                await call.read()
                np.copyto(target, shared)  # as our client copies the row that it keeps

            yield turn
            call.cancel()


def hand_over(report: Report, rounds: int, count: int) -> None:
    """From the descriptor in hand to a view of the batch, and the same with one copy against a warm memcpy."""
    tails: dict[int, list[float]] = {}
    for size in (MB, 32 * MB):
        with shared_memory() as folder, _child("producer", folder=folder, size=size) as child:
            child.read()
            views, copies, plain = _handed(child, Peer(Path(folder)), size, rounds, count)
        name, tails[size] = f"hand-over, {size // MB} MB", views
        report.add(f"{name}: descriptor to view, p99", views, "ms", "< 1 ms", statistics.median(views) < 1)
        with_copy = ratio(plain, copies)
        met = statistics.median(with_copy) >= 0.9
        report.add(f"{name}: with one copy, to a warm memcpy", with_copy, "x", ">= 0.9", met)
    report.add("hand-over: 32 MB to 1 MB, descriptor to view", ratio(tails[32 * MB], tails[MB]), "x", "equal")


def _handed(
    child: Child, peer: Peer, size: int, rounds: int, count: int
) -> tuple[list[float], list[float], list[float]]:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    views, copies, plain = list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        seen, copied, memcpy = list[float](), list[float](), list[float]()
        for _ in range(count):
            extent = Extent(*child.ask()["extent"])
            started = time.perf_counter()
            lease = peer.read(extent)
            opened = time.perf_counter()
            seen.append(opened - started)
            np.copyto(target, lease.view)
            copied.append(time.perf_counter() - started)
            lease.close()
            started = time.perf_counter()
            np.copyto(target, source)
            memcpy.append(time.perf_counter() - started)
        if number:
            views.append(1e3 * sorted(seen)[int(0.99 * count)])
            copies.append(statistics.median(copied))
            plain.append(statistics.median(memcpy))
    return views, copies, plain


def bulk(report: Report, rounds: int) -> None:
    """A 32 MB batch by our grpc transport, by a bare stream of 1 MB frames, and by raw TCP, in turns."""
    size = 32 * MB // 3 * 3
    with short_folder() as place, shared_memory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
        bare, port = f"unix:{place}/bare", 20000 + os.getpid() % 20000
        servers = [
            _spawn("bare_server", address=bare, length=size),
            _spawn("tcp_server", host="127.0.0.1", port=port, length=size),
        ]
        clients = {
            "bare": _spawn("bare_client", address=bare, length=size),
            "tcp": _spawn("tcp_client", host="127.0.0.1", port=port, length=size),
        }
        with children(*servers, *clients.values()):
            for server in servers:
                server.read()
            times = run.run(_bulk(place, folder, size, clients, rounds))
    for name, words in (
        ("ours", "one turn of a session, to views"),
        ("kept", "one turn of a session, rows copied to keep"),
        ("bare", "bare stream of 1 MB frames"),
        ("tcp", "raw TCP"),
    ):
        report.add(f"grpc, 32 MB: {words}", [size / t / 1e9 for t in times[name]], "GB/s")
    to_bare = ratio(times["bare"], times["ours"])
    report.add("grpc, 32 MB: ours to the bare stream", to_bare, "x", ">= 0.95", statistics.median(to_bare) >= 0.95)
    report.add("grpc, 32 MB: ours to raw TCP", ratio(times["tcp"], times["ours"]), "x")


async def _bulk(place: Path, folder: str, size: int, clients: dict[str, Child], rounds: int) -> Measured:
    address, times = f"unix:{place}/sim", {name: list[float]() for name in ("ours", "kept", *clients)}
    with _child("simulator", address=address, folder=folder, size=size):
        async with session_of(address, "grpc", folder) as session:
            for number in range(rounds + 2):
                took = {"ours": await _timed(lambda: session.exchange((), (0,), ACTIONS))}
                took["kept"] = await _timed(lambda: session.advance((), (0,), ACTIONS))
                took |= {name: client.ask()["seconds"] for name, client in clients.items()}
                for name, seconds in took.items():
                    if number >= 2:
                        times[name].append(seconds)
    return times


def _spawn(kind: str, **arguments: Any) -> Child:
    return Child(kind, module=CHILDREN, **arguments)


@contextmanager
def _child(kind: str, **arguments: Any) -> Iterator[Child]:
    child = _spawn(kind, **arguments)
    with children(child):
        yield child
