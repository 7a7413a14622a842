"""The folder of one run: where everything lies, and small files that are always whole.

recipe.toml      the recipe, frozen, with every override in it
state.json       how far the run is: stages done, evaluations, result
live.json        addresses of the running roles, while they run
events.jsonl     starts, restarts, failures, stages
samples.jsonl    one observation a second
spans.jsonl      what each lane did when: the newest, up to some 64 MB
logs/            one log per process
demos/ policy/ checkpoints/ weights/ redis/ tensorboard/ evaluations/ videos/
report.html
"""

import fcntl
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from services.common.errors import ConfigError, NotFound

_VERSION = re.compile(r"\d+-\d+")
_FOLDERS = ("logs", "evaluations", "videos")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Nothing is created until `create`."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def recipe(self) -> Path:
        """The frozen recipe."""
        return self.path / "recipe.toml"

    @property
    def samples(self) -> Path:
        """Observations, one a line."""
        return self.path / "samples.jsonl"

    @property
    def spans(self) -> Path:
        """What the lanes did when; see `services.cli.spans`."""
        return self.path / "spans.jsonl"

    @property
    def events(self) -> Path:
        """Events, one a line."""
        return self.path / "events.jsonl"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report.html"

    @property
    def demos(self) -> Path:
        """Demonstrations."""
        return self.path / "demos"

    @property
    def policy(self) -> Path:
        """The warm-started policy."""
        return self.path / "policy"

    @property
    def policy_config(self) -> Path:
        """The configuration of the policy that the warm start makes."""
        return self.path / "policy.json"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the learner."""
        return self.path / "checkpoints"

    def newest_policy(self) -> Path:
        """The policy of the newest checkpoint, else the warm start; raises NotFound without any."""
        complete = [path.parent for path in self.checkpoints.glob("*-*/manifest.json")]
        versions = {tuple(map(int, path.name.split("-"))): path for path in complete if _VERSION.fullmatch(path.name)}
        if versions:
            newest = versions[max(versions)]
            return newest / "policy" if (newest / "policy").is_dir() else newest
        if (self.policy / "policy.json").exists():
            return self.policy
        raise NotFound(f"run {self.name!r} has no policy yet")

    @property
    def videos(self) -> Path:
        """Recorded episodes."""
        return self.path / "videos"

    @property
    def live(self) -> Path:
        """Addresses of the running roles."""
        return self.path / "live.json"

    def log(self, child: str) -> Path:
        """Log of one process."""
        return self.path / "logs" / f"{child}.log"

    def evaluation(self, name: str) -> Path:
        """Results of one evaluation."""
        return self.path / "evaluations" / f"{name}.json"

    def create(self) -> None:
        """Make the folder; raises ConfigError if a run of this name exists."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError as error:
            raise ConfigError(
                f"run folder {str(self.path)!r} exists; choose another run.name, or go on with it: --resume {self.name}"
            ) from error
        except OSError as error:
            raise ConfigError(f"run folder {str(self.path)!r} cannot be made: {error.strerror}") from error
        for name in _FOLDERS:
            (self.path / name).mkdir()

    def read_state(self) -> dict[str, Any]:
        """How far the run is; empty for a new one."""
        return read_json(self.path / "state.json") or {}

    def update_state(self, **values: Any) -> None:
        """Change some values of the state."""
        write_json(self.path / "state.json", self.read_state() | values)

    def evaluations(self) -> dict[str, float]:
        """Success by evaluation."""
        return dict(self.read_state().get("evaluations", {}))

    def event(self, t: float, who: str, what: str, detail: str = "") -> None:
        """Record something that happened, t seconds into the run."""
        entry = {"t": round(t, 3), "time": time.time(), "who": who, "what": what, "detail": detail}
        with self.events.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def read_events(self) -> list[dict[str, Any]]:
        """All events so far."""
        return read_lines(self.events)

    def read_metrics(self) -> list[dict[str, Any]]:
        """What the learner said of its updates."""
        return read_lines(self.path / "metrics.jsonl")

    def lock(self) -> IO[bytes]:
        """Own the run while the returned file is open; raises ConfigError if another process does."""
        file = (self.path / ".lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"run {self.name!r} is running in another process; look at it with `dvla top`") from error
        return file

    def is_running(self) -> bool:
        """Whether a launcher owns it now."""
        try:
            self.lock().close()
        except ConfigError:
            return True
        return False


def find_run(name: str, out: Path = Path("runs")) -> RunFolder:
    """A run by folder or by name; raises NotFound, which lists the nearest ones."""
    for path in (Path(name), out / name):
        if (path / "recipe.toml").is_file():
            return RunFolder(path.resolve())
    known = [run.name for run in list_runs(out)][-5:]
    hint = f"the newest in {str(out)!r} are {', '.join(known)}" if known else f"there are no runs in {str(out)!r}"
    raise NotFound(f"run {name!r} does not exist; {hint}")


def list_runs(out: Path = Path("runs")) -> list[RunFolder]:
    """All runs in a folder, oldest first."""
    found = [RunFolder(path.parent) for path in out.glob("*/recipe.toml")] if out.is_dir() else []
    return sorted(found, key=lambda run: run.recipe.stat().st_mtime)


def read_json(path: Path) -> Any:
    """The file's content, or None if it does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a JSON file of lines; empty if it does not exist. A line cut off by a crash is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
