"""Checkpoint folders: whole or not there, whenever the writer is killed; damaged ones are passed over (S28)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.bundle import Version
from services.common.errors import InvalidInput
from services.learner.durable import (
    MANIFEST,
    check_folder,
    newest_folder,
    parse_version,
    prune_folders,
    sweep_folders,
    write_folder,
)

WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from services.common.bundle import Version
from services.learner.durable import prune_folders, write_folder

def write_for_ever(root, update, out):
    def fill(folder):
        for name in ("a", "b", "c"):
            (folder / name).write_bytes(bytes([update % 256]) * 300_000)
    while True:
        update += 1
        write_folder(root, Version(1, update), fill)
        prune_folders(root, 3)
        os.write(out, b"%d\\n" % update)

root, update, delays = Path(sys.argv[1]), 0, random.Random(7)
for kill in range(20):
    durable, out = os.pipe()
    pid = os.fork()  # cheap, and this interpreter has no threads
    if not pid:
        write_for_ever(root, update, out)
    os.close(out)
    with os.fdopen(durable) as lines:
        if kill % 2:  # on a busy machine the first one takes its time; kill also well after it
            update = int(lines.readline())
        time.sleep(delays.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        update = max([update, *map(int, lines.read().split())])
    print(update, flush=True)
    sys.stdin.readline()
"""


def write(root: Path, version: Version, text: str = "x") -> Path:
    def fill(folder: Path) -> None:
        (folder / "data").write_text(text)

    return write_folder(root, version, fill)


def test_sigkill_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """20 kills; after each the newest complete folder is at least the last one that was reported durable."""
    writers = subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writers.stdout is not None
    assert writers.stdin is not None
    newest = kills = 0
    while line := writers.stdout.readline():
        kills += 1
        folder = newest_folder(tmp_path)
        if folder is None:
            assert int(line) == 0
        else:
            newest = int(folder.name.removeprefix("1-"))
            assert newest >= int(line)
            content = {(folder / name).read_bytes() for name in ("a", "b", "c")}
            assert content == {bytes([newest % 256]) * 300_000}
        writers.stdin.write("\n")
        writers.stdin.flush()
    writers.stdin.close()
    writers.stdout.close()
    assert writers.wait() == 0
    assert kills == 20
    assert newest > 0
    sweep_folders(tmp_path)
    assert all(parse_version(path.name) for path in tmp_path.iterdir())


def test_the_highest_epoch_then_update_wins(tmp_path: Path) -> None:
    for version in (Version(1, 30), Version(2, 4), Version(1, 100), Version(2, 10)):
        write(tmp_path, version)
    assert newest_folder(tmp_path) == tmp_path / "2-10"
    assert newest_folder(tmp_path / "none") is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest", "no manifest"])
def test_a_damaged_folder_is_passed_over(tmp_path: Path, damage: str) -> None:
    good, bad = write(tmp_path, Version(1, 1)), write(tmp_path, Version(1, 2), "precious")
    data = bad / "data"
    if damage == "truncate":
        os.truncate(data, 3)
    elif damage == "flip":
        data.write_text("preciouS")
    elif damage == "remove":
        data.unlink()
    elif damage == "manifest":
        (bad / MANIFEST).write_text('{"files": [1')
    else:
        (bad / MANIFEST).unlink()
    with pytest.raises(InvalidInput, match="1-2"):
        check_folder(bad)
    assert newest_folder(tmp_path) == good


def test_an_existing_version_is_kept(tmp_path: Path) -> None:
    first = write(tmp_path, Version(1, 1), "first")
    assert write(tmp_path, Version(1, 1), "second") == first
    assert (first / "data").read_text() == "first"


def test_pruning_keeps_the_highest(tmp_path: Path) -> None:
    for update in (9, 10, 2, 100):
        write(tmp_path, Version(1, update))
    (tmp_path / "notes").mkdir()
    prune_folders(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"1-10", "1-100", "notes"}


def test_other_names_are_no_versions() -> None:
    assert parse_version("1-2") == Version(1, 2)
    for name in ("1", "1-", "-2", "1-2-3", "a-1", ".aside-1-2-77", "1-2 "):
        assert parse_version(name) is None
