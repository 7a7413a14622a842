"""What is on disk: complete files only, the newest first, one server per folder."""

from pathlib import Path

import pytest

from services.common.bundle import Version
from services.common.errors import ConfigError, Exhausted
from services.weights.depot import Depot
from services.weights.durable import KEEP, Archive
from services.weights.files import FilePool
from tests.weights.hosting import check_stamp, stamped

V = Version


def depot(folder: Path) -> Depot:
    shared = folder / "shm"
    shared.mkdir(exist_ok=True)
    new = Depot(2, FilePool(shared, 2**30, 8), Archive(folder / "disk"))
    new.restore()
    return new


def publish(target: Depot, epoch: int, update: int) -> None:
    manifest, buffer = stamped(epoch, update, size=100)
    draft = target.begin(manifest)
    assert draft is not None
    draft.write(0, buffer)
    draft.seal()


def newest(target: Depot) -> Version:
    with target.open("policy") as reading:
        check_stamp(reading.manifest, reading.view)
        return reading.manifest.version


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "disk" / "policy").iterdir())


def test_only_the_newest_versions_stay_on_disk(tmp_path: Path) -> None:
    first = depot(tmp_path)
    for update in range(8, 12):  # 9 and 10 differ in length as text
        publish(first, 1, update)
    first.close()  # removing waits for the disk
    assert files(tmp_path) == ["1-10.safetensors", "1-11.safetensors"]
    assert len(files(tmp_path)) == KEEP
    second = depot(tmp_path)
    assert newest(second) == V(1, 11)
    second.close()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_newest_file_is_set_aside_for_the_one_before(tmp_path: Path, damage: str) -> None:
    first = depot(tmp_path)
    publish(first, 1, 0)
    publish(first, 1, 1)
    first.close()
    path = tmp_path / "disk" / "policy" / "1-1.safetensors"
    raw = path.read_bytes()
    path.write_bytes({"truncated": raw[:-9], "flipped": raw[:-9] + b"?" + raw[-8:], "empty": b""}[damage])
    second = depot(tmp_path)
    assert newest(second) == V(1, 0)
    assert files(tmp_path) == ["1-0.safetensors", "1-1.damaged"]
    publish(second, 1, 1)  # the publisher sends it again
    assert newest(second) == V(1, 1)
    second.close()


def test_remains_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    first = depot(tmp_path)
    publish(first, 1, 0)
    first.close()
    (tmp_path / "disk" / "policy" / "1-1.partial").write_bytes(b"half")
    (tmp_path / "disk" / "policy" / "notes.safetensors").write_bytes(b"of a person")
    second = depot(tmp_path)
    assert newest(second) == V(1, 0)
    assert files(tmp_path) == ["1-0.safetensors", "notes.safetensors"]
    second.close()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    first = Archive(tmp_path)
    with pytest.raises(ConfigError, match="used by another weights server"):
        Archive(tmp_path)
    first.close()
    Archive(tmp_path).close()


def test_an_unusable_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another"):
        Archive(tmp_path / "file")


def test_a_version_that_cannot_be_made_durable_is_readable_and_its_publisher_is_told(tmp_path: Path) -> None:
    target = depot(tmp_path)
    publish(target, 1, 0)
    folder = tmp_path / "disk" / "policy"
    saved = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.touch()  # a file where the folder should be stands for a disk that refuses
    with pytest.raises(Exhausted, match="cannot be written"):
        publish(target, 1, 1)
    assert newest(target) == V(1, 1)
    assert target.durable("policy") == V(1, 0)
    with pytest.raises(Exhausted, match="cannot be written"):  # a repeat tries the disk again
        target.begin(stamped(1, 1, size=100)[0])
    folder.unlink()
    folder.mkdir()
    for name, raw in saved.items():
        (folder / name).write_bytes(raw)
    assert target.begin(stamped(1, 1, size=100)[0]) is None
    assert target.durable("policy") == V(1, 1)
    target.close()
    again = depot(tmp_path)
    assert newest(again) == V(1, 1)
    again.close()


def test_fences_survive_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.save_fence("policy", 7)
    archive.save_fence("other", 2)
    assert archive.fences() == {"policy": 7, "other": 2}
    (tmp_path / "other" / "fence").write_text("many")
    with pytest.raises(ConfigError, match="not an epoch"):
        archive.fences()
    archive.close()
