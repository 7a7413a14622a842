"""Starts `dvla train` on the toy simulator as a process of its own, and looks at it from outside."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.runfolder import RunFolder

RECIPE = Path(__file__).parents[2] / "recipes" / "toy.toml"
LINE = (
    r"success 0\.\d\d -> [01]\.\d\d \({starts} held-out starts\), \d+ env steps/s, "
    r"lanes idle \d+/\d+/\d+/\d+ %, staleness mean \d+\.\d max \d+"
)
SMALL = (
    "demos.episodes=30", "demos.bias=1.3", "sft.steps=40", "sft.batch=32", "eval.episodes=40", "eval.videos=0",
    "learner.groups_per_update=2", "learner.group_size=4", "learner.minibatches=1", "learner.grant_seconds=3",
    "learner.learning_rate=1e-6", "learner.checkpoint_updates=1", "sim.slots=8",
)  # fmt: skip
"""A run of seconds that neither learns nor solves its task, so that it lasts as long as its updates do."""


class Launched:
    """One launcher process and its run folder."""

    def __init__(self, out: Path, name: str, *arguments: str, settings: tuple[str, ...] = SMALL) -> None:
        self.run = RunFolder(out / name)
        sets = [part for setting in settings for part in ("--set", setting)]
        self._start(["train", str(RECIPE), "--name", name, "--out", str(out), *sets, *arguments])

    def resume(self) -> None:
        """Go on with the run in a new process."""
        self._start(["train", "--resume", str(self.run.path)])

    def _start(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "services.cli", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, seconds: float = 300.0) -> str:
        """Wait for its end; returns what it printed."""
        text, _ = self.process.communicate(timeout=seconds)
        return text

    def until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        """Wait for a condition while the launcher runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline, f"{self.run.read_state()}\n{self.logs()}"
            time.sleep(0.1)

    def in_stage(self, stage: str) -> bool:
        """Whether the run has reached this stage."""
        return self.run.path.is_dir() and bool(self.run.read_state().get("stage") == stage)

    def updates(self) -> int:
        """Updates that the learner has made."""
        path = self.run.path / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def pids(self) -> dict[str, int]:
        """The newest process of every child, by name."""
        found = {}
        for event in self.run.read_events():
            match = re.fullmatch(r"pid (\d+)", event["detail"])
            if match:
                found[event["who"]] = int(match[1])
        return found

    def kill(self) -> None:
        """End the launcher, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in (self.run.path / "logs").glob("*.log"))


def family(pid: int) -> set[int]:
    """A process and all its descendants."""
    out = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            out |= {p for child in task.read_text().split() for p in family(int(child))}
        except OSError:
            continue
    return out


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: set[int], seconds: float = 15.0) -> bool:
    """Whether all these processes end within so long."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def result(path: Path) -> dict[str, object]:
    """A JSON file."""
    value: dict[str, object] = json.loads(path.read_text())
    return value


def signal(pid: int, number: int) -> None:
    """Send a signal."""
    os.kill(pid, number)
