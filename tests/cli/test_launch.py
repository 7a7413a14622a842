"""The whole of `dvla train` on the toy simulator, with real processes: faults, Ctrl-C, SIGKILL, resume."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.runfolder import read_json
from services.common import seeds
from tests.cli.launching import LINE, SMALL, Launched, all_gone, family
from tests.cli.launching import signal as send

pytestmark = [pytest.mark.slow, pytest.mark.redis]

ROLES = ("sim-0", "rollout-0", "store", "learner", "weights", "redis")


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[Launched]]:
    runs: list[Launched] = []
    yield runs
    for run in runs:
        run.kill()


@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_every_role(tmp_path: Path, launched: list[Launched]) -> None:
    run = Launched(tmp_path, "faults", settings=(*SMALL, "learner.updates=14", "eval.videos=1"))
    launched.append(run)
    run.until(lambda: run.in_stage("training"))
    top = [sys.executable, "-m", "services.cli", "top", run.run.name, "--out", str(tmp_path)]
    watcher = subprocess.Popen(top, stdout=subprocess.PIPE, text=True)
    for count, role in enumerate(ROLES):
        run.until(lambda wanted=2 * count + 1: run.updates() >= wanted)  # type: ignore[misc]
        before = run.pids()[role]
        send(before, signal.SIGKILL)
        run.until(lambda role=role, before=before: run.pids()[role] != before)  # type: ignore[misc]
    text = run.finish()
    assert run.process.returncode == 0, text + run.logs()
    assert re.fullmatch(LINE.format(starts=40), text.splitlines()[-1])
    assert all_gone(set(run.pids().values()))
    seen, _ = watcher.communicate(timeout=30)
    assert watcher.returncode == 0
    assert "training" in seen
    died = {event["who"] for event in run.run.read_events() if event["what"] == "died"}
    assert died >= set(ROLES)
    for name in ("before", "after"):
        check_evaluation(run, name)
    assert [path.suffix for path in run.run.videos.iterdir()] == [".mp4"]
    page = run.run.report.read_text()
    assert text.splitlines()[-1].replace(">", "&gt;") in page
    assert "killed by SIGKILL" in page
    check_eval_command(run, tmp_path)
    run.resume()
    text = run.finish()
    assert run.process.returncode == 2
    assert "is finished" in text
    assert text.count("\n") == 1


def check_eval_command(run: Launched, out: Path) -> None:
    """`dvla eval` of the run measures its last policy: the same starts end in the same way."""
    command = ["eval", run.run.name, "--episodes", "10", "--out", str(out), "--json", str(out / "eval.json")]
    done = subprocess.run([sys.executable, "-m", "services.cli", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    again, after = read_json(out / "eval.json"), read_json(run.run.evaluation("after"))
    assert again["episodes"] == 10
    assert again["results"] == after["results"][:10]
    assert "success once" in done.stdout
    assert f"{again['success_once']:.3f}" in done.stdout


def check_evaluation(run: Launched, name: str) -> None:
    """Exactly the held-out starts, each once, run to the horizon."""
    result = read_json(run.run.evaluation(name))
    assert result["episodes"] == 40
    assert [episode["seed"] for episode in result["results"]] == [seeds.evaluation_seed(i) for i in range(40)]
    assert {episode["steps"] for episode in result["results"] if not episode["failure"]} == {20}
    low, high = result["success_once_interval"]
    assert low <= result["success_once"] <= high


@pytest.mark.timeout(900)
def test_killed_resumed_and_interrupted(tmp_path: Path, launched: list[Launched]) -> None:
    run = Launched(tmp_path, "resumed", settings=(*SMALL, "learner.updates=1000", "run.mode=sync"))
    launched.append(run)

    run.until(lambda: run.updates() >= 2)
    everyone = family(run.process.pid)
    assert len(everyone) > len(ROLES)
    send(run.process.pid, signal.SIGKILL)
    run.finish()
    assert all_gone(everyone), "every child ends with a launcher that was killed"

    done = run.updates()
    run.resume()
    run.until(lambda: run.updates() >= done + 2)
    everyone = family(run.process.pid)
    send(run.process.pid, signal.SIGINT)
    text = run.finish()
    assert run.process.returncode == 130, text
    assert "dvla train --resume resumed" in text
    assert all_gone(everyone)
    versions = [(line["epoch"], line["update"]) for line in run.run.read_metrics()]
    assert versions == sorted(versions), "versions only ever get newer"
    assert {epoch for epoch, _ in versions} == {1, 2}
    epoch, update = versions[-1]
    assert (run.run.checkpoints / f"{epoch}-{update}" / "manifest.json").exists(), "Ctrl-C keeps a checkpoint"


def test_a_role_that_cannot_start_ends_the_run_with_one_line(tmp_path: Path, launched: list[Launched]) -> None:
    run = Launched(tmp_path, "bad", "--sim", "no.such:Simulator", settings=("demos.episodes=0",))
    launched.append(run)
    text = run.finish()
    assert run.process.returncode == 2, text
    assert "no.such" in text.splitlines()[-1]
    assert "Traceback" not in text
