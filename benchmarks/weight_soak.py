"""The weight plane under fire: many publishes, readers and kills; every answer must match exactly one sealed version.

    python -m benchmarks.weight_soak [--publishes 1000] [--rate 10] [--readers 8] [--seed 0] [--json FILE]

A publisher, a root, a relay and readers (half of them behind the relay, half of them without shared memory) are
processes. Every second or so one that works is killed by SIGKILL and started again. Every version's
elements all hold a number that is derived from its version; readers check hashes and numbers of all that they apply,
and that versions never go back. At the end everybody must reach the last version.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import end_in_order
from benchmarks.weight_hosts import ROOT, shared_memory, short_folder, wait_ready
from services.common.bundle import Manifest, Version, bundle, verify, views
from services.common.errors import DvlaError, Exhausted
from services.common.server import configure_logging
from services.common.sinks import Bytes
from services.common.weights_client import WeightPublisher, WeightSubscriber

ROWS, COLUMNS = 4000, 250  # 4 MB of float32
DENSE_EVERY = 7
CALM_SECONDS = 60.0
SERVER_SECONDS = 5.0
"""A server is let live for so long at least."""


def stamped(version: Version) -> tuple[Manifest, Bytes]:
    """A version that can be checked from its bytes alone; most differ from the one before in a few elements only."""
    stamp = np.float32(version.epoch * 100_000 + version.update)
    weights = np.full((ROWS, COLUMNS), np.float32(version.update // DENSE_EVERY))
    weights[:, 0] = stamp
    return bundle("policy", version, {"w": weights, "stamp": np.array(stamp)})


def check(manifest: Manifest, buffer: Bytes) -> None:
    """Raises ValueError if these bytes are not exactly the version that they say they are."""
    verify(manifest, buffer)
    version, arrays = manifest.version, views(manifest.layout, buffer)
    stamp = np.float32(version.epoch * 100_000 + version.update)
    whole = bool((arrays["w"][:, 0] == stamp).all() and arrays["stamp"] == stamp)
    if not whole or not (arrays["w"][:, 1:] == np.float32(version.update // DENSE_EVERY)).all():
        raise ValueError(f"version {version} holds other numbers than its own")


def publisher(address: str, folder: str, epoch: int, start: int, last: int, rate: float) -> None:
    """Publishes one version after another, at this rate; says which are sealed."""
    writer = WeightPublisher(address, "policy", folder=folder, files=6)
    writer.fence(epoch)
    print(json.dumps({"fenced": epoch}), flush=True)
    due = time.monotonic()
    for update in range(start, last + 1):
        due += 1 / rate
        while True:
            try:
                writer.publish(*stamped(Version(epoch, update)))
                break
            except Exhausted:
                if update < last:  # slow readers: this one is left out
                    break
                time.sleep(0.05)
        print(json.dumps({"sealed": update}), flush=True)
        time.sleep(max(0.0, due - time.monotonic()))
    print(json.dumps({"done": last}), flush=True)
    while True:  # a server that lost the last version gets it again
        time.sleep(0.2)
        try:
            writer.ensure()
        except DvlaError as error:
            print(json.dumps({"waiting": str(error)}), flush=True)


def reader(addresses: list[str], folder: str, seed: int) -> None:
    """Checks every version it gets; says which, or what was wrong."""
    rng, newest = random.Random(seed), Version(0, 0)

    def receive(manifest: Manifest, buffer: Bytes) -> None:
        nonlocal newest
        try:
            check(manifest, buffer)
            time.sleep(rng.choice((0, 0, 0, 0.05, 0.3)))
            check(manifest, buffer)  # ours until we return
            if manifest.version <= newest:
                raise ValueError(f"version {manifest.version} came after {newest}")
        except (ValueError, DvlaError) as error:
            print(json.dumps({"wrong": str(error)}), flush=True)
            raise
        newest = manifest.version
        print(json.dumps({"applied": [newest.epoch, newest.update]}), flush=True)

    subscriber = WeightSubscriber(addresses, "policy", receive, folder=folder)
    subscriber.start()
    signal.pause()


@dataclass
class Player:
    """A process that is killed and started again. Its output goes to files, one for each life."""

    name: str
    command: list[str]
    folder: Path
    lives: int = 0
    since: float = 0.0
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        self.lives += 1
        self.since = time.monotonic()
        with (self.folder / f"{self.name}-{self.lives}.out").open("wb") as out:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=out, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def said(self) -> list[list[dict[str, Any]]]:
        """Everything it said, by life; the last line of a killed one may be cut off."""
        lives = []
        for number in range(1, self.lives + 1):
            lines = (self.folder / f"{self.name}-{number}.out").read_text().split("\n")[:-1]
            lives.append([json.loads(line) for line in lines if line.startswith("{")])
        return lives


@dataclass
class Outcome:
    """What a soak found."""

    sealed: int = 0
    applied: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.wrong and self.sealed > 0 and self.applied > 0


class Soak:
    """One run of it."""

    def __init__(self, place: Path, shared: tuple[str, str], publishes: int, rate: float, readers: int, seed: int):
        self._rng, self._publishes, self._rate, self._place = random.Random(seed), publishes, rate, place
        self._root, self._relay = f"unix:{place}/root.sock", f"unix:{place}/relay.sock"
        self._node, far = shared
        module = [sys.executable, "-m"]
        weights = [
            *module,
            "services.weights",
            f"--shared-folder={self._node}",
            "--budget-gib=1",
            "--drain-seconds=0.1",
        ]
        relay = [*weights[:3], f"--shared-folder={far}", *weights[4:], f"--upstream={self._root}"]
        self.root = Player("root", [*weights, f"--listen={self._root}", f"--durable-folder={place}/disk"], place)
        self.relay = Player("relay", [*relay, f"--listen={self._relay}"], place)
        self.publisher = Player("publisher", [], place)
        self.readers = []
        for number in range(readers):
            where = [self._relay, self._root] if number % 2 else [self._root]
            memory = (self._node, far, f"{place}/apart", far)[number % 4]
            arguments = json.dumps({"addresses": where, "folder": memory, "seed": seed + number})
            command = [*module, "benchmarks.weight_soak", "--as", "reader", arguments]
            self.readers.append(Player(f"reader{number}", command, place))

    def run(self) -> Outcome:
        """Start everything, kill at random, and look at what was said."""
        started, outcome = time.monotonic(), Outcome()
        everybody = [self.root, self.relay, *self.readers, self.publisher]
        with ExitStack() as stack:
            for player in everybody:
                stack.callback(player.kill)
            self.root.start()
            wait_ready(self._root)
            for player in (self.relay, *self.readers):
                player.start()
            self._publish()
            limit = started + 10 * self._publishes / self._rate + CALM_SECONDS
            while not self._done():
                if time.monotonic() > limit:
                    outcome.wrong.append("the publisher did not come to its end in time")
                    break
                time.sleep(self._rng.uniform(0.3, 1.5))
                victim = self._rng.choice([self.root, self.relay, self.publisher, *self.readers[:3]])
                if self._working(victim) and not self._done():
                    outcome.kills[victim.name] = outcome.kills.get(victim.name, 0) + 1
                    self._restart(victim)
            self._judge(outcome)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _working(self, victim: Player) -> bool:
        """Whether it has come to work since it was started: what is killed while it starts proves little."""
        if victim in (self.root, self.relay):
            return time.monotonic() - victim.since > SERVER_SECONDS
        return any("sealed" in said or "applied" in said for said in victim.said()[-1])

    def _publish(self) -> None:
        epoch = self.publisher.lives + 1
        sealed = [said["sealed"] for life in self.publisher.said() for said in life if "sealed" in said]
        # Like a learner that falls back to its checkpoint: a few updates are made again, under a newer epoch.
        start = max(0, max(sealed, default=0) - 3)
        arguments = json.dumps(
            {
                "address": self._root,
                "folder": self._node,
                "epoch": epoch,
                "start": start,
                "last": self._publishes,
                "rate": self._rate,
            }
        )
        self.publisher.command = [sys.executable, "-m", "benchmarks.weight_soak", "--as", "publisher", arguments]
        self.publisher.start()

    def _restart(self, victim: Player) -> None:
        victim.kill()
        if victim is self.publisher:
            self._publish()
        else:
            victim.start()

    def _done(self) -> bool:
        life = self.publisher.said()[-1:]
        return bool(life) and any("done" in said for said in life[0])

    def _judge(self, outcome: Outcome) -> None:
        """Everybody must come to the last version; nobody may have seen anything else than versions in order."""
        last = [self.publisher.lives, self._publishes]
        deadline = time.monotonic() + CALM_SECONDS
        waiting = list(self.readers)
        while waiting and time.monotonic() < deadline:
            waiting = [r for r in waiting if {"applied": last} not in r.said()[-1]]
            time.sleep(0.1)
        outcome.wrong += [f"{player.name} never came to the last version" for player in waiting]
        lives = self.publisher.said()
        outcome.sealed = sum("sealed" in said for life in lives for said in life)
        for player in self.readers:
            for life in player.said():
                outcome.wrong += [f"{player.name}: {said['wrong']}" for said in life if "wrong" in said]
                outcome.applied += sum("applied" in said for said in life)


def soak(publishes: int, rate: float, readers: int, seed: int) -> Outcome:
    """Run it in folders of its own."""
    with short_folder() as place, shared_memory() as node, shared_memory() as far:
        return Soak(place, (node, far), publishes, rate, readers, seed).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end_in_order()
    outcome = soak(given.publishes, given.rate, given.readers, given.seed)
    print(
        f"{outcome.sealed} versions sealed, {outcome.applied} applied and checked, in {outcome.seconds:.0f} s; "
        f"killed: {outcome.kills}; wrong: {outcome.wrong or 'nothing'}"
    )
    if given.json:
        given.json.write_text(json.dumps(vars(outcome)) + "\n")
    return 0 if outcome.good else 1


if __name__ == "__main__":
    configure_logging("error")
    if sys.argv[1:2] == ["--as"]:
        {"publisher": publisher, "reader": reader}[sys.argv[2]](**json.loads(sys.argv[3]))
        sys.exit()
    sys.exit(main())
