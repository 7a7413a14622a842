"""Kills simulators, workers, stores and learners at random under load, and counts what was lost or trained twice.

    python -m benchmarks.chaos [--kills 200] [--seed 0] [--json FILE]

A run of the toy recipe, all roles as real processes under the launcher. SIGKILL takes them one after another, at random
moments, also while they start. In the end the learner's own history (which groups made which update, as its checkpoints
say) must be the store's, each group in one update, and every admitted group must be accounted for.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import grpc
import redis
from dvla.v1 import store_pb2, store_pb2_grpc

from benchmarks.common import end_in_order, machine
from services.cli.runfolder import RunFolder, read_json
from services.common.channels import open_channel

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "demos.episodes=30", "demos.bias=1.3", "sft.steps=40", "sft.batch=32", "eval.episodes=8", "eval.videos=0",
    "learner.groups_per_update=2", "learner.group_size=4", "learner.minibatches=1", "learner.grant_seconds=3",
    "learner.learning_rate=1e-6", "learner.checkpoint_updates=3", "learner.updates=1000000", "sim.slots=8",
    "run.restart_limit=100000", "run.solved=0",
)  # fmt: skip
WAIT_SECONDS = 300.0


@dataclass
class Outcome:
    """What became of a run. doubled, differing: groups in two updates; updates of which learner and store disagree."""

    kills: Counter[str] = field(default_factory=Counter)
    back: dict[str, list[float]] = field(default_factory=dict)
    updates: int = 0
    groups: int = 0
    doubled: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    unaccounted: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def exactly_once(self) -> bool:
        """Nothing lost, nothing doubled."""
        lost = self.counters.get("lost", 0)
        return self.groups > 0 and not (self.doubled or self.differing or self.unaccounted or lost)

    def table(self) -> str:
        """The table in words."""
        lines = [f"{'role':<10}{'kills':>6}  seconds until its successor started: median, longest"]
        for role, kills in sorted(self.kills.items()):
            times = self.back.get(role) or [0.0]
            lines.append(f"{role:<10}{kills:>6}  {median(times):.1f}, {max(times):.1f}")
        names = ("accepted", "expired", "given_back", "superseded", "rolled_back", "lost", "dead", "zeroed")
        counts = ", ".join(f"{name} {self.counters.get(name, 0)}" for name in names)
        lines += [
            f"{sum(self.kills.values())} kills; {self.updates} updates of {self.groups} groups in surviving history",
            f"groups in two updates: {len(self.doubled)}; updates on which learner and store differ: "
            f"{len(self.differing)}; admitted groups unaccounted for: {self.unaccounted}",
            counts,
        ]
        return "\n".join(lines)


class Chaos:
    """One run under fire, in `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.run, self._chance = RunFolder(folder / "chaos"), random.Random(seed)
        self.outcome = Outcome()
        self._history: dict[int, list[int]] = {}
        self._newest = (0, 0)
        sets = [part for setting in SETTINGS for part in ("--set", setting)]
        command = [sys.executable, "-m", "services.cli", "train", str(ROOT / "recipes" / "toy.toml")]
        flags = ["--name", "chaos", "--out", str(folder)]
        self._log = (folder / "launcher.log").open("wb")
        self._process = subprocess.Popen([*command, *flags, *sets], stdout=self._log, stderr=subprocess.STDOUT)

    def wait_for_load(self) -> None:
        """Until the learner has made its first checkpoint."""
        self._until(lambda: self._look() > 0, "the first checkpoint")

    def kill_one(self) -> None:
        """SIGKILL to one role, at once or soon; waits for its successor."""
        self._pause(self._chance.uniform(0.0, 2.0))
        name, pid = self._chance.choice(sorted(self._victims().items()))
        role = name.partition("-")[0].rstrip("0123456789")
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        self._until(lambda: self._victims().get(name, pid) != pid, f"a successor of {name}")
        self.outcome.kills[role] += 1
        self.outcome.back.setdefault(role, []).append(time.monotonic() - began)

    def calm(self) -> None:
        """No more kills: until the learner has made a few more updates."""
        target = self._look() + 6
        self._until(lambda: self._look() >= target, "updates after the last kill")

    def judge(self) -> Outcome:
        """Compare the learner's history with the store's."""
        outcome, live = self.outcome, cast(dict[str, Any], read_json(self.run.live))
        address = live["addresses"]["store"]
        socket = str(Path(address.removeprefix("unix:")).parent / "redis.sock")
        with redis.Redis(unix_socket_path=socket) as client:
            pairs = cast(Any, client.zrange(f"dvla:{{{live['run']}}}:acked", 0, -1, withscores=True))
        acked: dict[int, list[int]] = {}
        for group, update in pairs:
            acked.setdefault(int(update), []).append(int(group))
        last = max(acked, default=0)
        self._until(lambda: self._look() >= last, "the checkpoint that was acked")
        history = {update: groups for update, groups in self._history.items() if update <= last}
        outcome.differing = [u for u in range(1, last + 1) if sorted(history.get(u, [])) != sorted(acked.get(u, []))]
        counts = Counter(group for groups in self._history.values() for group in groups)
        outcome.doubled = [group for group, times in counts.items() if times > 1]
        outcome.updates, outcome.groups = last, sum(map(len, history.values()))
        with open_channel(address) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            stats = stub.GetStats(store_pb2.GetStatsRequest(run=live["run"]), timeout=20)
        count = outcome.counters = dict(stats.counters)
        gone = ("acked", "dead", "discarded_uniform", "discarded_failed", "discarded_batch", "lost")
        held = stats.open_groups + stats.complete_groups + stats.leased_groups
        outcome.unaccounted = count["admitted"] - held - sum(count.get(name, 0) for name in gone)
        return outcome

    def end(self) -> None:
        """Stop the run."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _victims(self) -> dict[str, int]:
        found = {}
        for event in self.run.read_events():
            if match := re.fullmatch(r"pid (\d+)", event["detail"]):
                found[event["who"]] = int(match[1])
        return {name: pid for name, pid in found.items() if name.startswith(("sim", "rollout", "store", "learner"))}

    def _look(self) -> int:
        """Take in new checkpoints; returns the newest update. One of a new epoch tells what was rolled back."""
        for version, path in sorted((numbers(path), path) for path in self._checkpoints()):
            epoch, update = version
            if (epoch, update) <= self._newest or not (path.parent / "manifest.json").exists():
                continue
            try:
                facts = json.loads(path.read_text())
            except FileNotFoundError:  # pruned meanwhile
                continue
            self._newest = epoch, update
            self._history = {u: groups for u, groups in self._history.items() if u <= update}
            self._history |= {int(u): groups for u, groups in facts["consumed"]["groups"].items()}
        return self._newest[1]

    def _checkpoints(self) -> list[Path]:
        return [path for path in (self.run.path / "checkpoints").glob("*/learner.json") if numbers(path) > (0, 0)]

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            time.sleep(0.1)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = Path(self._log.name).read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the run ended, or {what} never came: {last}")
            self._look()
            time.sleep(0.1)


def numbers(path: Path) -> tuple[int, int]:
    """Epoch and update of a checkpoint's file; zeros for a folder in the making."""
    match = re.fullmatch(r"(\d+)-(\d+)", path.parent.name)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def under_fire(folder: Path, kills: int, seed: int, tell: Callable[[str], None] = lambda text: None) -> Outcome:
    """A run that survives so many kills, and what became of its groups."""
    chaos = Chaos(folder, seed)
    try:
        chaos.wait_for_load()
        for number in range(kills):
            chaos.kill_one()
            if (number + 1) % 20 == 0:
                tell(f"{number + 1} of {kills} kills, update {chaos._look()}")
        chaos.calm()
        return chaos.judge()
    except grpc.RpcError as error:
        raise RuntimeError(f"the store does not answer after the last kill: {error}") from error
    finally:
        chaos.end()


def main() -> int:
    """Kill, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the outcome to this file")
    given = parser.parse_args()
    end_in_order()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="dvla-chaos-") as folder:
        outcome = under_fire(Path(folder), given.kills, given.seed, lambda text: print(text, flush=True))
    print(outcome.table())
    if given.json:
        text = {**vars(outcome), "kills": dict(outcome.kills), "exactly_once": outcome.exactly_once}
        given.json.write_text(json.dumps(text) + "\n")
    return 0 if outcome.exactly_once else 1


if __name__ == "__main__":
    raise SystemExit(main())
