"""Producer and consumer processes of a CUDA arena, with whichever driver: the fake one here, a real one on a GPU."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from dvla.v1 import common_pb2

from services.common.arena import Arena, Peer, cuda
from services.common.arena.cuda import CudaArena, CudaReader
from services.common.arena.cuda_driver import CudaDriver
from services.common.errors import NotFound
from services.common.process import die_with_parent

Factory = Callable[[Path], CudaDriver]
SPAWN = multiprocessing.get_context("spawn")
SLOTS, LENGTH = 3, 5000


def produce(connection: Connection, parent: int, factory: Factory, folder: Path, allowed: bool) -> None:
    """For each message, write a slot that is filled with its number and send its handle."""
    die_with_parent(parent)
    if allowed:
        cuda.impossible = lambda uuid="": ""  # type: ignore[attr-defined]
    host = Arena.create(folder, "cuda", 1 << 16)
    with CudaArena(factory(folder), host, SLOTS, LENGTH) as arena:
        first = True
        while (number := connection.recv()) is not None:
            slot = arena.write(memoryview(bytes([number % 251]) * LENGTH))
            connection.send_bytes(arena.message(slot, first).SerializeToString())
            first = False
    host.remove()


def hold(connection: Connection, parent: int, factory: Factory, folder: Path, handle: bytes) -> None:
    """Map the arena, hold a slot as a reader in the middle of a copy does, and wait to be killed."""
    die_with_parent(parent)
    message = common_pb2.CudaExtent.FromString(handle)
    reader = CudaReader(factory(folder), Peer(folder), message)
    with reader._holding(message):
        connection.send("holding")
        connection.recv()


def started(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs, os.getpid(), *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def ask(connection: Connection, number: int) -> common_pb2.CudaExtent:
    connection.send(number)
    return common_pb2.CudaExtent.FromString(connection.recv_bytes())


def updates_arrive_and_memory_stays_flat(
    factory: Factory, folder: Path, allowed: bool, updates: int, used: Callable[[CudaDriver], int]
) -> None:
    """Every update is read whole; neither mappings nor events nor memory grow."""
    producer, connection = started(produce, factory, folder, allowed)
    driver, target = factory(folder), bytearray(LENGTH)
    first = ask(connection, 0)
    reader = CudaReader(driver, Peer(folder), first)
    before = 0
    for number in range(1, updates):
        reader.copy_to_host(ask(connection, number), memoryview(target))
        assert target == bytes([number % 251]) * LENGTH
        if number == 2 * SLOTS:
            before = used(driver)
    assert used(driver) == before
    with pytest.raises(NotFound, match="written anew"):
        reader.copy_to_host(first, memoryview(target))
    reader.close()
    connection.send(None)
    producer.join(30)
    assert producer.exitcode == 0


def a_killed_consumer_frees_its_slot(factory: Factory, folder: Path, allowed: bool) -> None:
    """The producer goes on around the slot that it holds, and uses that again when it is dead."""
    producer, connection = started(produce, factory, folder, allowed)
    message = ask(connection, 0)
    consumer, other = started(hold, factory, folder, message.SerializeToString())
    assert other.recv() == "holding"
    assert message.slot not in {ask(connection, number).slot for number in range(1, 3 * SLOTS)}
    consumer.kill()
    consumer.join()
    assert message.slot in {ask(connection, number).slot for number in range(SLOTS)}
    producer.kill()
    producer.join()


def a_killed_producer_is_noticed(factory: Factory, folder: Path, allowed: bool) -> None:
    """The consumer never takes what its successor writes for its own session's."""
    producer, connection = started(produce, factory, folder, allowed)
    message = ask(connection, 0)
    reader = CudaReader(factory(folder), Peer(folder), message)
    producer.kill()
    producer.join()
    successor, connection = started(produce, factory, folder, allowed)
    fresh, target = ask(connection, 7), bytearray(LENGTH)
    with pytest.raises(NotFound, match="which is over"):
        reader.copy_to_host(fresh, memoryview(target))
    reader.close()
    again = CudaReader(factory(folder), Peer(folder), fresh)
    again.copy_to_host(fresh, memoryview(target))
    assert target == bytes([7]) * LENGTH
    again.close()
    successor.kill()
    successor.join()
