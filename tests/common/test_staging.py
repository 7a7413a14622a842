"""Stages: taken by one, locked by readers, filled again when nobody needs them."""

from pathlib import Path

import pytest

from services.common.errors import Exhausted
from services.common.flatfile import FlatFile, sweep
from services.common.staging import Stage, Stages


def sealed(stages: Stages, length: int, content: int, keep: tuple[Stage, ...] = ()) -> Stage:
    stage = stages.take(length, keep)
    assert stage is not None
    stage.buffer[:] = content
    stage.seal()
    stage.give_back()
    return stage


def reader(stage: Stage, folder: Path) -> FlatFile:
    assert stage.file is not None
    return FlatFile.open_shared(folder, stage.file.name, stage.generation, len(stage.buffer), 0)


def test_a_stage_that_is_read_is_left_alone(tmp_path: Path) -> None:
    stages = Stages(tmp_path, 2)
    first = sealed(stages, 100, 1)
    with reader(first, tmp_path) as held:
        second = sealed(stages, 100, 2)
        assert second.file is not first.file
        assert stages.take(100, [second]) is None
        assert (held.view == 1).all()
    again = stages.take(100, [second])
    assert again is first
    assert stages.take(100, [second]) is None  # taken
    stages.close()
    assert not list(tmp_path.iterdir())


def test_what_readers_hold_at_the_end_is_theirs(tmp_path: Path) -> None:
    stages = Stages(tmp_path, 2)
    held = reader(sealed(stages, 50, 7), tmp_path)
    stages.close()
    assert sweep(tmp_path) == []
    assert (held.view == 7).all()
    held.close()
    assert len(sweep(tmp_path)) == 1


def test_another_length_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(tmp_path, 1)
    assert len(sealed(stages, 50, 1).buffer) == 50
    assert len(sealed(stages, 5000, 2).buffer) == 5000

    def full(self: FlatFile, length: int) -> None:
        raise Exhausted("no room")

    monkeypatch.setattr(FlatFile, "start", full)
    plain = stages.take(70)
    assert plain is not None
    assert plain.file is None
    assert len(plain.buffer) == 70
    assert not list(tmp_path.iterdir())


def test_without_a_folder_stages_are_plain_memory() -> None:
    stages = Stages(None, 2)
    first = sealed(stages, 10, 1)
    assert stages.take(10, [first]) is not first
    assert stages.take(10, [first]) is None
    assert stages.take(10) is first
    stages.close()
