"""Whole training runs as measurements: real roles as processes, the speed of their steady part, CPU time by role."""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import tick_seconds
from services.cli.lanes import LaneShare
from services.cli.samples import read_samples
from services.cli.summary import summarise

ROOT = Path(__file__).parents[1]
EMULATED = ROOT / "benchmarks" / "emulated.toml"
SKIPPED_UPDATES = 2
"""Updates at the beginning that do not count: queues fill up."""
_T90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""Student's t for a two-sided 90 % interval, by degrees of freedom from 1."""


@dataclass(frozen=True)
class Measured:
    """One run. rate: trained env steps per second between the first and the last update that count.

    cpu: CPU seconds per 1,000 trained env steps, by role. update_seconds: wall time of an update. training_seconds:
    what the learner was busy in it.
    """

    rate: float
    update_seconds: float
    training_seconds: float
    lanes: Mapping[str, LaneShare]
    folder: Path
    cpu: Mapping[str, float] = field(default_factory=dict)


def train(
    recipe: Path,
    out: Path,
    name: str,
    settings: Mapping[str, object],
    cores: Mapping[str, set[int]] | None = None,
) -> Measured:
    """Run `dvla train` to its end. cores: by role, where its processes may run ("" for all others)."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={_toml(value)}")]
    command = [sys.executable, "-m", "services.cli", "train", str(recipe), "--name", name, "--out", str(out), *sets]
    log = out / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=_environment())
        try:
            marks = _watch(process, out / name, cores or {})
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{log.read_text()[-2000:]}")
    return _measured(out / name, marks)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos" / "gen"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}


Marks = dict[int, dict[str, float]]
"""Update -> CPU seconds so far, by child."""


def _watch(process: "subprocess.Popen[bytes]", run: Path, cores: Mapping[str, set[int]]) -> Marks:
    """Pin processes and note their CPU time whenever an update is done, until the run ends."""
    marks: Marks = {}
    pinned: set[int] = set()
    while process.poll() is None:
        pids = children(run)
        for who, pid in pids.items():
            if cores and pid not in pinned:
                _pin(pid, cores.get(_role(who), cores.get("", set())))
                pinned.add(pid)
        done = len(updates(run))
        if done and done not in marks:
            marks[done] = {}
            for who, pid in pids.items():
                with suppress(OSError):
                    marks[done][who] = tick_seconds(pid)
        time.sleep(0.2)
    return marks


def _pin(pid: int, cores: set[int]) -> None:
    if cores:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):
                os.sched_setaffinity(int(task.name), cores)


def children(run: Path) -> dict[str, int]:
    """Newest process of every child of a run."""
    found = {}
    events = run / "events.jsonl"
    for line in events.read_text().splitlines() if events.exists() else ():
        event = json.loads(line)
        match = re.fullmatch(r"pid (\d+)", event["detail"])
        if match:
            found[event["who"]] = int(match[1])
    return found


def updates(run: Path) -> list[dict[str, float]]:
    """The learner's figures of all updates so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _measured(run: Path, marks: Marks) -> Measured:
    rows = updates(run)
    if len(rows) < SKIPPED_UPDATES + 2:
        raise RuntimeError(f"{run.name} made {len(rows)} updates; expected at least {SKIPPED_UPDATES + 2}")
    first, last = rows[SKIPPED_UPDATES - 1], rows[-1]
    seconds = last["time"] - first["time"]
    steps = sum(row["env_steps"] for row in rows[SKIPPED_UPDATES:])
    lanes = summarise(list(read_samples(run / "samples.jsonl"))).lanes
    each = seconds / (len(rows) - SKIPPED_UPDATES)
    return Measured(steps / seconds, each, lanes["training"].busy * each, lanes, run, _cpu(rows, marks))


def _cpu(rows: Sequence[Mapping[str, float]], marks: Marks) -> dict[str, float]:
    seen = sorted(mark for mark in marks if mark >= SKIPPED_UPDATES)
    if len(seen) < 2:
        return {}
    first, last = seen[0], seen[-1]
    steps = sum(row["env_steps"] for row in rows[first:last]) / 1000
    out: dict[str, float] = {}
    for who, spent in marks[last].items():
        if who in marks[first]:
            out[_role(who)] = out.get(_role(who), 0.0) + (spent - marks[first][who]) / steps
    return out


def _role(child: str) -> str:
    return child.split("-")[0]


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


def interval90(values: Sequence[float]) -> tuple[float, float]:
    """90 % interval of the mean (Student's t); of one value, that value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean
    t = _T90[min(len(values) - 1, len(_T90)) - 1]
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half
