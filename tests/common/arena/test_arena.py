"""Owner and peers of an arena in one process: states, bounds, handles from a wire, locks, adoption."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.arena import Arena, Extent, Peer, orphans
from services.common.errors import ConfigError, Exhausted, InvalidInput, NotFound

SIZE = 4096


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path, "test", SIZE, entries=16)


def written(arena: Arena, data: bytes, seal: bool = True) -> Extent:
    extent = arena.allocate(len(data))
    with Peer(arena.path.parent).write(extent) as lease:
        lease.view[:] = np.frombuffer(data, np.uint8)
    if seal:
        arena.seal(extent)
    return extent


def test_bytes_go_from_a_writer_to_a_reader_without_a_copy(arena: Arena) -> None:
    extent = Extent.of(written(arena, b"0123456789").message())
    peer = Peer(arena.path.parent)
    with peer.read(extent) as lease:
        assert lease.view.tobytes() == b"0123456789"
        assert not lease.view.flags.writeable
        assert arena.view(extent).tobytes() == b"0123456789"
        assert not arena.view(extent).flags.writeable
    writable = arena.allocate(8)
    with peer.write(writable) as lease, peer.read(writable, sealed=False) as reader:
        torch.from_numpy(lease.view)[:] = 7
        assert reader.view.tolist() == [7] * 8
    assert arena.path.stat().st_mode & 0o777 == 0o600
    assert extent.offset % 64 == 0


def test_all_memory_is_there_from_the_start(arena: Arena) -> None:
    facts = arena.path.stat()
    assert facts.st_blocks * 512 >= facts.st_size > SIZE


def test_no_room_on_the_file_system_names_size_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"arena of \d+ bytes does not fit .* shm_size of this service, to at least \d+mb"
    ):
        Arena.create(tmp_path, "test", 2**55)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="name another folder"):
        Arena.create(tmp_path / "absent", "test", SIZE)


def test_room_runs_out_and_comes_back(arena: Arena) -> None:
    extent = arena.allocate(SIZE)
    with pytest.raises(Exhausted, match="0 of 4096 are free"):
        arena.allocate(1)
    small = arena.shrink(extent, 100)
    assert (small.offset, small.generation, small.length) == (extent.offset, extent.generation, 100)
    assert arena.free == SIZE - 128
    arena.allocate(SIZE - 128)
    assert arena.release(small)
    assert arena.free == 128
    with pytest.raises(NotFound):
        arena.view(small)
    assert arena.release(small), "a repeat does no harm"


def test_entries_run_out_too(arena: Arena) -> None:
    extents = [arena.allocate(1) for _ in range(16)]
    with pytest.raises(Exhausted, match="0 entries"):
        arena.allocate(1)
    arena.release(extents[3])
    arena.allocate(1)


def test_handles_from_the_wire_are_checked(arena: Arena) -> None:
    extent, peer = written(arena, b"x" * 100), Peer(arena.path.parent)
    wrong = [
        (replace(extent, offset=0), InvalidInput),
        (replace(extent, offset=extent.offset + 64), InvalidInput),
        (replace(extent, length=101), InvalidInput),
        (replace(extent, length=2**63), InvalidInput),
        (replace(extent, length=SIZE * 4), InvalidInput),
        (replace(extent, arena="../x"), InvalidInput),
        (replace(extent, arena="absent"), NotFound),
        (replace(extent, generation=extent.generation + 1), NotFound),
        (replace(extent, generation=0), NotFound),
    ]
    for handle, kind in wrong:
        with pytest.raises(kind):
            peer.read(handle)
        with pytest.raises((InvalidInput, NotFound)):
            arena.view(handle)
    with pytest.raises(InvalidInput, match="sealed"):
        peer.write(extent)
    assert peer.read(replace(extent, length=50)).view.size == 50
    (arena.path.parent / "text.arena").write_bytes(b"x" * 10_000)
    with pytest.raises(InvalidInput, match="no arena"):
        peer.read(replace(extent, arena="text.arena"))


def test_states_forbid_what_makes_no_sense(arena: Arena) -> None:
    extent, peer = arena.allocate(100), Peer(arena.path.parent)
    with pytest.raises(NotFound, match="not sealed"):
        peer.read(extent)
    with peer.write(extent), pytest.raises(NotFound, match="another writer"):
        peer.write(extent)
    for length in (-1, 101):
        with pytest.raises(InvalidInput, match="cannot shrink"):
            arena.shrink(extent, length)
    arena.seal(extent)
    with pytest.raises(InvalidInput, match="cannot shrink"):
        arena.shrink(extent, 10)


def test_nothing_is_freed_under_a_reader(arena: Arena) -> None:
    extent, peer = written(arena, b"keep"), Peer(arena.path.parent)
    with peer.read(extent) as one:
        with peer.read(extent):
            pass
        assert arena.held(extent)
        assert not arena.release(extent)
        with pytest.raises(NotFound):
            peer.read(extent)  # nobody else begins to read it
        with pytest.raises(Exhausted):
            arena.allocate(SIZE)
        assert one.view.tobytes() == b"keep"
        assert arena.extents() == []
    arena.allocate(SIZE)


def test_a_stale_handle_never_opens_its_successor(arena: Arena) -> None:
    old = written(arena, b"old!")
    arena.release(old)
    new = written(arena, b"new!")
    assert new.offset == old.offset
    assert new.generation > old.generation
    with pytest.raises(NotFound):
        Peer(arena.path.parent).read(old)


def test_only_reserved_extents_without_a_writer_are_swept(arena: Arena) -> None:
    sealed, abandoned, busy = written(arena, b"sealed"), arena.allocate(10), arena.allocate(10)
    with Peer(arena.path.parent).write(busy):
        assert arena.sweep(60) == []
        assert arena.sweep(0) == [abandoned]
    assert arena.sweep(0) == [busy]
    assert [extent for extent, _ in arena.extents()] == [sealed]


def test_an_arena_is_adopted_with_all_its_extents(arena: Arena) -> None:
    sealed, reserved, doomed = written(arena, b"sealed"), arena.allocate(100), written(arena, b"doomed")
    reader = Peer(arena.path.parent)
    lease = reader.read(doomed)
    assert not arena.release(doomed)
    assert Arena.adopt(arena.path) is None, "its owner lives"
    arena.close()
    adopted = Arena.adopt(arena.path)
    assert adopted is not None
    assert adopted.extents() == [(sealed, True), (reserved, False)]
    assert adopted.view(sealed).tobytes() == b"sealed"
    lease.close()
    adopted.collect()
    assert adopted.free == SIZE - 64 - 128
    assert adopted.allocate(1).generation > doomed.generation


def test_orphans_are_found_and_rubbish_is_deleted(tmp_path: Path, arena: Arena) -> None:
    dead = Arena.create(tmp_path, "test", SIZE)
    dead.close()
    other = Arena.create(tmp_path, "other", SIZE)
    other.close()
    (tmp_path / "test-1.arena").write_bytes(b"rubbish")
    (tmp_path / "test-2.arena").symlink_to(other.path)
    assert [found.name for found in orphans(tmp_path, "test")] == [dead.name]
    assert not (tmp_path / "test-1.arena").exists()
    assert other.path.exists()


def test_a_table_that_contradicts_itself_is_refused(arena: Arena) -> None:
    one = arena.allocate(100)
    arena.allocate(100)
    arena.close()
    with arena.path.open("r+b") as file:
        file.seek(4096 + 64 + 16)  # offset of the second entry
        file.write(one.offset.to_bytes(8, "little"))
    with pytest.raises(InvalidInput, match="not free"):
        Arena.adopt(arena.path)
    os.truncate(arena.path, 5000)
    with pytest.raises(InvalidInput, match="5000"):
        Arena.adopt(arena.path)


def test_deleted_files_are_let_go(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    for _ in range(3):
        arena = Arena.create(tmp_path, "test", SIZE, entries=4)
        with peer.read(written(arena, b"x")):
            pass
        arena.remove()
    assert len(peer._files) == 1
    peer.close()
