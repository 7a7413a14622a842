"""Arenas between processes that are killed or stopped: the kernel's locks tell the living from the dead."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.arena import Arena, Extent, Peer, orphans
from services.common.process import die_with_parent

SIZE = 1 << 16
SPAWN = multiprocessing.get_context("spawn")


def write_and_wait(connection: Connection, parent: int, folder: Path, extent: Extent) -> None:
    die_with_parent(parent)
    with Peer(folder).write(extent) as lease:
        lease.view[:] = 7
        connection.send("ready")
        connection.recv()


def read_and_wait(connection: Connection, parent: int, folder: Path, extent: Extent) -> None:
    die_with_parent(parent)
    with Peer(folder).read(extent) as lease:
        connection.send(int(lease.view.sum()))
        connection.recv()


def own_and_churn(connection: Connection, parent: int, folder: Path) -> None:
    """Own an arena, announce one sealed extent, then change the table until killed."""
    die_with_parent(parent)
    arena = Arena.create(folder, "store", SIZE, entries=64)
    kept = arena.allocate(1000)
    arena.view(kept)[:] = 9
    arena.seal(kept)
    connection.send(kept)
    rng, live = np.random.default_rng(os.getpid()), list[Extent]()
    while True:
        if len(live) < 20:
            extent = arena.allocate(int(rng.integers(1, 2000)))
            live.append(arena.shrink(extent, extent.length // 2))
            if rng.random() < 0.5:
                arena.seal(live[-1])
        else:
            arena.release(live.pop(int(rng.integers(0, 20))))


def started(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs, os.getpid(), *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def test_a_killed_writer_lets_go_and_a_stopped_one_does_not(tmp_path: Path) -> None:
    with Arena.create(tmp_path, "store", SIZE) as arena:
        extent = arena.allocate(100)
        process, connection = started(write_and_wait, tmp_path, extent)
        assert connection.recv() == "ready"
        os.kill(process.pid or 0, signal.SIGSTOP)
        assert arena.held(extent)
        assert arena.sweep(0) == []
        kill(process)
        assert not arena.held(extent)
        assert arena.sweep(0) == [extent]
        assert arena.free == arena.capacity


def test_accepted_bytes_outlive_their_writer(tmp_path: Path) -> None:
    with Arena.create(tmp_path, "store", SIZE) as arena:
        extent = arena.allocate(100)
        process, connection = started(write_and_wait, tmp_path, extent)
        connection.recv()
        arena.seal(extent)
        kill(process)
        assert arena.sweep(0) == []
        with Peer(tmp_path).read(extent) as lease:
            assert lease.view.tolist() == [7] * 100


def test_room_comes_back_when_a_reader_is_killed(tmp_path: Path) -> None:
    with Arena.create(tmp_path, "store", SIZE) as arena:
        extent = arena.allocate(100)
        arena.view(extent)[:] = 3
        arena.seal(extent)
        process, connection = started(read_and_wait, tmp_path, extent)
        assert connection.recv() == 300
        assert not arena.release(extent)
        assert arena.free < arena.capacity
        kill(process)
        arena.collect()
        assert arena.free == arena.capacity


@pytest.mark.parametrize("seed", range(3))
def test_an_owner_killed_at_any_instant_leaves_an_arena_to_adopt(tmp_path: Path, seed: int) -> None:
    process, connection = started(own_and_churn, tmp_path)
    kept = connection.recv()
    assert list(orphans(tmp_path, "store")) == [], "its owner lives"
    time.sleep(0.01 + 0.02 * seed)  # anywhere in its work
    kill(process)
    (arena,) = orphans(tmp_path, "store")
    assert (kept, True) in arena.extents()
    assert arena.view(kept).tolist() == [9] * 1000
    with Peer(tmp_path).read(kept) as lease:
        assert lease.view.tolist() == [9] * 1000
    for extent, _ in arena.extents():
        arena.release(extent)
    assert arena.free == arena.capacity
    arena.remove()
