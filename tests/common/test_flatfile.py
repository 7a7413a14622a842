"""Flat files: locks, generations, and names and lengths from a peer."""

import os
from pathlib import Path

import pytest

from services.common import flatfile
from services.common.errors import ConfigError, Exhausted, InvalidInput, NotFound, Unavailable
from services.common.flatfile import FlatFile, shared_folder, sweep


def filled(folder: Path, data: bytes) -> tuple[FlatFile, int]:
    file = FlatFile.create(folder, "test")
    file.start(len(data))
    file.write(0, data)
    generation = file.finish(len(data))
    file.unlock()
    return file, generation


def test_what_was_written_is_read(tmp_path: Path) -> None:
    writer, generation = filled(tmp_path, b"0123456789")
    with writer, FlatFile.open_shared(tmp_path, writer.name, generation, 10) as reader:
        assert reader.view.tobytes() == b"0123456789"
        assert not reader.view.flags.writeable
        assert writer.view.flags.writeable
        for offset, data in ((8, b"xyz"), (-1, b"x"), (11, b"")):
            with pytest.raises(InvalidInput, match="do not fit into 10"):
                writer.write(offset, data)
    assert writer.path.stat().st_mode & 0o777 == 0o600


def test_a_reader_keeps_the_writer_out_and_the_other_way_round(tmp_path: Path) -> None:
    writer, generation = filled(tmp_path, b"x" * 10)
    with writer:
        with FlatFile.open_shared(tmp_path, writer.name, generation, 10):
            assert not writer.try_lock_exclusive()
        assert writer.try_lock_exclusive()
        with pytest.raises(Unavailable, match="locked by its writer"):
            FlatFile.open_shared(tmp_path, writer.name, generation, 10, seconds=0.05)


def test_a_stale_handle_is_detected(tmp_path: Path) -> None:
    writer, old = filled(tmp_path, b"x" * 10)
    with writer:
        assert writer.try_lock_exclusive()
        writer.start(10)
        with pytest.raises(NotFound, match="generation 0"):
            FlatFile.open_shared(tmp_path, writer.name, old, 10)
        new = writer.finish(10)
        writer.unlock()
        assert new > old
        with pytest.raises(NotFound):
            FlatFile.open_shared(tmp_path, writer.name, old, 10)
        with pytest.raises(NotFound):
            FlatFile.open_shared(tmp_path, writer.name, 0, 10)
        FlatFile.open_shared(tmp_path, writer.name, new, 10).close()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "/etc/passwd", "a\0b"])
def test_paths_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="plain file name"):
        FlatFile.open_shared(tmp_path, name, 1, 10)


def test_things_that_are_no_flat_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 10_000)
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    for name in ("text", "empty", "fifo"):
        with pytest.raises(InvalidInput):
            FlatFile.open_shared(tmp_path, name, 1, 10)
    for name in ("link", "absent"):
        with pytest.raises(NotFound):
            FlatFile.open_shared(tmp_path, name, 1, 10)


@pytest.mark.parametrize("length", [9, 11, 2**60])
def test_lengths_are_compared_with_the_file(tmp_path: Path, length: int) -> None:
    writer, generation = filled(tmp_path, b"x" * 10)
    with writer, pytest.raises(InvalidInput):
        FlatFile.open_shared(tmp_path, writer.name, generation, length)


def test_no_room_is_an_error_at_once(tmp_path: Path) -> None:
    with FlatFile.create(tmp_path, "test") as file, pytest.raises(Exhausted, match="no room for"):
        file.start(2**55)


def test_a_file_shrinks_and_grows_when_it_is_filled_anew(tmp_path: Path) -> None:
    writer, _ = filled(tmp_path, b"x" * 10_000)
    with writer:
        for length in (10, 100_000):
            writer.start(length)
            assert writer.path.stat().st_size == flatfile.HEADER_BYTES + length


def test_only_files_of_dead_owners_are_swept(tmp_path: Path) -> None:
    alive, _ = filled(tmp_path, b"x")
    dead, _ = filled(tmp_path, b"x")
    dead.close()
    (tmp_path / "other.txt").touch()
    assert sweep(tmp_path) == [dead.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "other.txt"])
    alive.remove()
    assert sweep(tmp_path) == []


def test_the_shared_folder_is_private_and_must_be_usable(tmp_path: Path) -> None:
    folder = shared_folder(str(tmp_path / "a" / "b"))
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        shared_folder(str(tmp_path / "file"))
