import fcntl
import os
import time
from pathlib import Path

import pytest

from services.cli.runfolder import RunFolder, find_run, list_runs
from services.cli.sockets import LOCK, socket_folder, sweep
from services.cli.top import run_table
from services.common.errors import ConfigError, NotFound


def made(out: Path, name: str) -> RunFolder:
    run = RunFolder(out / name)
    run.create()
    run.recipe.write_text("")
    return run


def test_a_run_is_made_once(tmp_path: Path) -> None:
    made(tmp_path, "a")
    with pytest.raises(ConfigError, match="--resume a"):
        RunFolder(tmp_path / "a").create()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder(tmp_path / "file" / "run").create()


def test_a_run_is_found_by_name_or_folder(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    assert find_run("a", tmp_path) == run
    assert find_run(str(run.path), Path("elsewhere")) == run
    with pytest.raises(NotFound, match=r"the newest in .* are a"):
        find_run("b", tmp_path)


def test_one_launcher_owns_a_run(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    assert not run.is_running()
    with run.lock():
        assert run.is_running()
        with pytest.raises(ConfigError, match="is running in another process"):
            run.lock()
    assert not run.is_running()


def test_state_and_events(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    run.update_state(stage="x", evaluations={"before": 0.5})
    run.update_state(stage="y")
    assert run.read_state() == {"stage": "y", "evaluations": {"before": 0.5}}
    run.event(1.0, "sim-0", "died", "why")
    with run.events.open("a") as file:
        file.write('{"cut')
    assert [(event["who"], event["what"]) for event in run.read_events()] == [("sim-0", "died")]


def test_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    with pytest.raises(NotFound, match="no policy yet"):
        run.newest_policy()
    run.policy.mkdir()
    (run.policy / "policy.json").write_text("{}")
    assert run.newest_policy() == run.policy
    for name in ("1-9", "1-10", "2-4", ".aside-3-1"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "manifest.json").write_text("{}")
    (run.checkpoints / "2-5").mkdir()
    assert run.newest_policy() == run.checkpoints / "2-4", "ordered as numbers, and 2-5 is not complete"


def test_the_list_of_runs(tmp_path: Path) -> None:
    made(tmp_path, "old").update_state(stage="training", elapsed=75.0)
    done = made(tmp_path, "new")
    done.update_state(stage="finished", result="success 0.28 -> 0.98")
    os.utime(done.recipe, (time.time() + 10, time.time() + 10))
    assert [run.name for run in list_runs(tmp_path)] == ["old", "new"]
    old, new = run_table(tmp_path).splitlines()
    assert "interrupted" in old
    assert "training, 1:15" in old
    assert "finished" in new
    assert "0.98" in new


def test_sockets_lie_in_a_short_private_folder(tmp_path: Path) -> None:
    with socket_folder(Path("/tmp")) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(f"{folder}/rollout-100.sock") < 60
    assert not folder.exists()
    with socket_folder(tmp_path / ("long" * 30)) as folder:
        assert len(str(folder)) < 40, "a long temporary folder is not used"


def test_folders_of_killed_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, used, young = (tmp_path / f"dvla-{name}" for name in ("left", "used", "young"))
    for folder in (left, used, young):
        folder.mkdir()
        (folder / LOCK).write_text("")
    with (used / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert young.exists(), "it may not be locked yet"
        monkeypatch.setattr("services.cli.sockets.YOUNG_SECONDS", 0.0)
        sweep(tmp_path)
        assert used.exists()
    assert not left.exists()
