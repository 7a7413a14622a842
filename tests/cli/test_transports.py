"""What `dvla doctor` says of transports, tried with a real second process."""

from pathlib import Path

import pytest

from services.cli import transports
from services.common.flatfile import shared_folder


def test_shared_memory_is_tried_between_two_processes(tmp_path: Path) -> None:
    assert transports.shared_memory(str(tmp_path)) == ""
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    fine, text = transports.summary(str(tmp_path))
    assert fine
    assert f"shm: works in {tmp_path}" in text


def test_what_does_not_work_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert "cannot be made" in transports.shared_memory(str(tmp_path / "file"))
    monkeypatch.setattr(transports, "_PEER", "print('no: another folder')")
    fine, text = transports.summary(str(tmp_path / "folder"))
    assert not fine
    assert "shm: no, no: another folder" in text
    assert shared_folder(str(tmp_path / "folder")).is_dir()
    monkeypatch.setattr(transports, "_PEER", "raise SystemExit(1)")
    assert "the second process failed" in transports.shared_memory(str(tmp_path))
