"""A learner that is ten times slower for an hour: memory stays flat, simulators are throttled, and the rate comes back.

    python -m benchmarks.slow_learner [--minutes 60] [--quick] [--json FILE] [--plot docs/slow-learner.png]

A run of the toy recipe, all roles as real processes; its learner does several epochs, so that it is busy, and its
policy barely changes, so that groups keep their signal. Then the learner is stopped nine tenths of the time. Memory is
each role's own (private and shared pages in proportion, PSS), its children included.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Report, end_in_order, machine

ROLES = ("sim", "rollout", "store", "learner", "weights", "redis")
SLICE = 0.5
"""Seconds of one turn of stopping and going on."""
SETTINGS = (
    "run.solved=0", "run.sims=1", "eval.episodes=8", "eval.videos=0", "sft.steps=150", "learner.learning_rate=1e-9",
    "learner.updates=1000000", "learner.epochs=4", "run.name=slow",
)  # fmt: skip
STALENESS = 1
"""The bound of an asynchronous run."""


@dataclass
class Sample:
    """What was seen at one moment."""

    seconds: float
    memory: dict[str, float]  # megabytes by role


@dataclass
class Watch:
    """A run under observation."""

    folder: Path
    launcher: int
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)

    def look(self) -> None:
        """Take a sample."""
        memory: dict[str, float] = defaultdict(float)
        for pid, role in roles(self.launcher).items():
            memory[role] += proportional_mb(pid)
        self.samples.append(Sample(time.monotonic() - self.began, dict(memory)))

    def updates(self) -> list[dict[str, Any]]:
        """What the learner wrote of each update."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def rate(self, seconds: float) -> float:
        """Trained env steps per second over the latest `seconds`."""
        since = time.time() - seconds
        rows = [row for row in self.updates() if row["time"] >= since]
        return sum(row["env_steps"] for row in rows) / seconds


def roles(launcher: int) -> dict[int, str]:
    """Role of each process below the launcher; children of a role belong to it."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended meanwhile
            continue
        names[int(entry.name)] = next((role for role in ROLES if role in words[1:5]), "")
        if "-server" in words[0]:
            names[int(entry.name)] = "redis"
    found = {}
    for pid in parents:
        above, role = pid, ""
        while above in parents and above != launcher:
            role, above = names[above] or role, parents[above]
        if above == launcher and role:
            found[pid] = role
    return found


def proportional_mb(pid: int) -> float:
    """Proportional set size in megabytes; 0 once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def run_for(watch: Watch, seconds: float, duty: float = 1.0, until_rate: float = 0.0) -> float:
    """Let it run, the learner only `duty` of the time, until the rate is reached or time is over; returns seconds."""
    began = last = time.monotonic()
    while time.monotonic() - began < seconds:
        learner = next((pid for pid, role in roles(watch.launcher).items() if role == "learner"), None)
        if duty < 1 and learner:
            os.kill(learner, signal.SIGSTOP)
            time.sleep(SLICE * (1 - duty))
            os.kill(learner, signal.SIGCONT)
        time.sleep(SLICE * duty)
        if time.monotonic() - last > 5:
            last = time.monotonic()
            watch.look()
            if until_rate and watch.rate(10) >= until_rate:
                break
    return time.monotonic() - began


def wait_for_training(watch: Watch, process: "subprocess.Popen[bytes]") -> None:
    """Until some updates are made."""
    while len(watch.updates()) < 10:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} before it trained; see {watch.folder}/logs")
        time.sleep(1)


def growth(samples: list[Sample], role: str) -> tuple[float, float]:
    """Megabytes of a role at the start and end of the samples: medians of their first and last tenth."""
    values = [sample.memory.get(role, 0.0) for sample in samples]
    part = max(1, len(values) // 10)
    return statistics.median(values[:part]), statistics.median(values[-part:])


def measure(watch: Watch, minutes: float, warm: float, report: Report) -> tuple[float, float]:
    """Full rate, slow, full rate again; returns when the slow part began and ended, in seconds."""
    run_for(watch, warm)
    full = watch.rate(warm)
    report.add("trained at full rate", full, "env steps/s")
    run_for(watch, 60 if minutes > 5 else 15, duty=0.1)  # what is in flight comes to its bound
    start, first, update = time.monotonic() - watch.began, len(watch.samples), len(watch.updates())
    run_for(watch, 60 * minutes, duty=0.1)
    slow, end = watch.rate(60 * minutes), time.monotonic() - watch.began
    samples, rows = watch.samples[first:], watch.updates()[update:]
    report.add("trained with the learner stopped 90 % of the time", slow, "env steps/s", "throttled", slow < full / 3)
    stale = max(row["staleness_max"] for row in rows)
    report.add("staleness, largest", stale, "updates", f"at most {STALENESS}", stale <= STALENESS)
    for role in ROLES:
        before, after = growth(samples, role)
        grown = after - before
        report.add(
            f"memory of {role}, growth in {minutes:g} min", grown, "MB", "flat: 5 % + 5 MB",
            grown <= 0.05 * before + 5, f"{before:.0f} to {after:.0f} MB",
        )  # fmt: skip
    back = run_for(watch, 120, until_rate=0.9 * full)
    report.add("full rate again after", back, "s", "within 60 s", back <= 60, f"{watch.rate(10):.0f} env steps/s")
    return start, end


def draw(watch: Watch, slow: tuple[float, float], path: Path) -> None:
    """Memory of each role over time; the slow part is shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    minutes = [sample.seconds / 60 for sample in watch.samples]
    for role in ROLES:
        axes.plot(minutes, [sample.memory.get(role, 0.0) for sample in watch.samples], label=role, linewidth=1.2)
    axes.axvspan(slow[0] / 60, slow[1] / 60, color="0.93", label="learner 10x slower")
    axes.set(xlabel="minutes", ylabel="memory of a role (PSS, MB)", ylim=(0, None))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="two minutes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    end_in_order()
    minutes, warm = (2.0, 15.0) if args.quick else (args.minutes, 60.0)
    print(machine())
    report = Report("slow_learner")
    with tempfile.TemporaryDirectory(prefix="dvla-slow-") as out:
        command = [sys.executable, "-m", "services.cli", "train", "recipes/toy.toml", "--set", f"run.out={out}"]
        command += [word for setting in SETTINGS for word in ("--set", setting)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                watch = Watch(Path(out) / "slow", process.pid)
                wait_for_training(watch, process)
                slow = measure(watch, minutes, warm, report)
            finally:
                process.send_signal(signal.SIGINT)
        if args.plot:
            draw(watch, slow, args.plot)
    report.write(args.json)


if __name__ == "__main__":
    main()
