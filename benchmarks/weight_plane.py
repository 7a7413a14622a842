"""The weight plane measured: pauses, publish to applied, added receivers, a network, deltas, late joiners, and a peer.

    python -m benchmarks.weight_plane [--quick] [--json FILE] [--only NAME ...]

What is compared is measured in turns (A B A B) within one run. A memcpy is one warm copy of as many bytes between two
arrays of one process. Run it on a quiet machine; rows say what they were held against.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import QUIET, Report, busy_cores, end_in_order, machine, ratio
from benchmarks.weight_hosts import Child, Namespaces, children, shared_memory, short_folder, weights_server
from benchmarks.weight_parts import deltas, pauses
from services.common import bundle
from services.common.bundle import Layout, Version, plan
from services.common.server import configure_logging
from services.common.staging import Stage
from services.common.weights_client import WeightPublisher
from services.learner.snapshot import Staging

MB = 1024 * 1024
TENSOR = 8 * MB
PEER = Path(__file__).with_name("peer_rlinf.sh")
Sizes = tuple[int, ...]


@dataclass
class Plan:
    """How much to measure."""

    rounds: int
    sizes: Sizes
    receivers: tuple[int, ...]
    large: bool


class Trainer:
    """The publishing side: tensors that change, snapshots, publishes. Its process is this one."""

    def __init__(self, address: str, folder: str, size: int, files: int = 4) -> None:
        self.layout = layout_of_size(size)
        generator = torch.Generator().manual_seed(0)
        self.home = torch.zeros(self.layout.length, dtype=torch.uint8)
        self.state = {
            t.name: self.home[t.offset : t.offset + t.length].view(torch.bfloat16).view(t.shape)
            for t in self.layout.tensors
        }
        for tensor in self.state.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).mul_(0.02))
        self.publisher = WeightPublisher(address, "policy", folder=folder, files=files)
        self.publisher.fence(1)
        self.update = 0
        first = self.stage()
        self._staging = Staging(self.layout, torch.device("cpu"), first, self.home)
        first.give_back()

    def stage(self) -> Stage:
        while (stage := self.publisher.stage(self.layout.length)) is None:
            time.sleep(0.005)
        return stage

    def publish(self) -> tuple[float, float, float]:
        """One version: (time of the offer, time the snapshot was there, CPU seconds of this process)."""
        for tensor in self.state.values():
            tensor.view(-1)[self.update % 1000 :: 1000] += 0.01
        self._staging.attach(self.stage())
        self.update += 1
        cpu, offered = time.process_time(), time.monotonic()
        self._staging.fill(self.state)
        snapshot = time.monotonic()
        manifest = bundle.seal(self.layout, "policy", Version(1, self.update), self._staging.settle())
        self.publisher.publish(manifest, self._staging.stage)
        return offered, snapshot, time.process_time() - cpu

    def close(self) -> None:
        self.publisher.close()


def layout_of_size(size: int) -> Layout:
    """bfloat16 tensors of 8 MB each, and a small one."""
    count = max(1, size // TENSOR)
    return plan(
        [*((f"layer.{i}", "bfloat16", (TENSOR // 2048, 1024)) for i in range(count)), ("bias", "bfloat16", (1024,))]
    )


@contextmanager
def running(size: int, files: int = 4, **settings: Any) -> Iterator[tuple[Trainer, str, str]]:
    """A weights server with its disk, and a trainer."""
    with short_folder() as place, shared_memory() as folder, ExitStack() as stack:
        address = f"unix:{place}/w.sock"
        disk = {"durable_folder": place / "disk"} | settings
        stack.enter_context(weights_server(address, folder, budget_gib=20, **disk))
        trainer = Trainer(address, folder, size, files)
        stack.callback(trainer.close)
        yield trainer, address, folder


Measured = dict[str, list[float]]


def publishing(report: Report, given: Plan) -> None:
    """Pause, publish to applied, and what another receiver costs, for each size."""
    for size in given.sizes:
        rounds = max(2, given.rounds * 256 * MB // max(size, 256 * MB) // 2)
        by_count: dict[int, Measured] = {count: {} for count in given.receivers}
        with running(size) as (trainer, address, folder):
            for count in given.receivers * 2:  # A B A B
                readers = [Child("reader", address=address, folder=folder) for _ in range(count)]
                with children(*readers):
                    for reader in readers:
                        reader.read()
                    for name, values in publish_rounds(trainer, readers, rounds, size).items():
                        by_count[count].setdefault(name, []).extend(values)
        report_publishing(report, size, by_count)


def report_publishing(report: Report, size: int, by_count: dict[int, Measured]) -> None:
    """Rows of one size."""
    name, (first, *others) = f"{size // MB} MB", by_count
    for count, measured in by_count.items():
        words = f"{name}, {count} receiver{'s' if count > 1 else ''}: "
        took, goal = ratio(measured["publish"], measured["copy"]), (size, count) == (256 * MB, 1)
        report.add(words + "publish to applied and verified", measured["publish"], "s")
        target, met = ("< 3 memcpys", statistics.median(took) < 3) if goal else ("", None)
        report.add(words + "the same in memcpys", took, "x", target, met)
        report.add(words + "pause included, in memcpys", ratio(measured["offer"], measured["copy"]), "x")
    pauses, copies = ([v for m in by_count.values() for v in m[what]] for what in ("pause", "copy"))
    relative = ratio(pauses, copies)
    speed = f"{size / statistics.median(copies) / 1e9:.1f} GB/s"
    report.add(f"{name}: one warm memcpy", copies, "s", note=speed)
    met = statistics.median(relative) < 1.1
    report.add(f"{name}: training pause per publish, in memcpys", relative, "x", "< 1.1", met)
    for count in others:
        for what, words in (("pause", "pause"), ("cpu", "publisher CPU")):
            change = statistics.median(by_count[count][what]) / statistics.median(by_count[first][what]) - 1
            words = f"{name}: {words}, {count} receivers against {first}"
            report.add(words, 100 * change, "%", "within 5 %", abs(change) <= 0.05)


def publish_rounds(trainer: Trainer, readers: list[Child], rounds: int, size: int) -> Measured:
    """Publishes with a memcpy between them; the first ones warm files and mappings up."""
    out: Measured = {name: [] for name in ("copy", "pause", "publish", "offer", "cpu")}
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    for number in range(rounds + 5):
        started = time.monotonic()
        np.copyto(target, source)
        copied = time.monotonic() - started
        offered, snapshot, cpu = trainer.publish()
        applied = max(reader.until(trainer.update)["at"] for reader in readers)
        time.sleep(0.05)
        if number < 5:
            continue
        for name, value in (
            ("copy", copied),
            ("pause", snapshot - offered),
            ("publish", applied - snapshot),
            ("offer", applied - offered),
            ("cpu", cpu),
        ):
            out[name].append(value)
    return out


def without_spare(report: Report, given: Plan) -> None:
    """4 GB, one receiver that has room for one model only."""
    if not given.large:
        report.add("4 GB, 1 receiver, no spare buffer: publish to applied", None)
        return
    size = 4096 * MB
    with running(size, files=2, keep=1, durable_folder="") as (trainer, address, folder):
        reader = Child("reader", address=address, folder=folder, spare=False)
        with children(reader):
            reader.read()
            took = []
            for number in range(4):
                _, snapshot, _ = trainer.publish()
                if number:
                    took.append(reader.until(trainer.update)["at"] - snapshot)
        report.add(
            "4 GB, 1 receiver, no spare buffer: publish to applied",
            took,
            "s",
            note=f"{size / statistics.median(took) / 1e9:.1f} GB/s",
        )


def late_joiner(report: Report, given: Plan) -> None:
    """A receiver that starts while versions are published: newest version first, and the trainer does not notice."""
    size = 256 * MB
    with running(size) as (trainer, address, folder):
        quiet, joined, took = list[float](), list[float](), list[float]()
        for number in range(3 + given.rounds):
            offered, snapshot, _ = trainer.publish()
            if number >= 3:
                quiet.append(snapshot - offered)
        for _ in range(max(2, given.rounds // 2)):
            late = Child("reader", address=address, folder=folder)
            with children(late):
                began = late.read()["at"]
                newest = trainer.update
                offered, snapshot, _ = trainer.publish()
                said = late.read()
                assert said["update"] >= newest
                joined.append(snapshot - offered)
                took.append(said["at"] - began)
        change = statistics.median(joined) / statistics.median(quiet) - 1
        report.add("256 MB: late joiner, start to newest version applied", took, "s")
        report.add(
            "256 MB: pause while one joins, against before", 100 * change, "%", "within 5 %", abs(change) <= 0.05
        )


def remote(report: Report, given: Plan) -> None:
    """Two network namespaces: our stream, a bare one, and raw TCP, in turns; then what a relay saves."""
    if not Namespaces.possible():
        report.add("remote: rows need root and iproute2", None)
        return
    size = 256 * MB
    with Namespaces() as hosts, shared_memory() as far, shared_memory() as near, ExitStack() as stack:
        root = f"{hosts.A}:50054"
        stack.enter_context(weights_server(root, far, hosts.a, insecure="true", budget_gib=4))
        publish_in(hosts, root, size)
        length = layout_of_size(size).length
        servers = [
            Child("bare_server", hosts.a, address=f"{hosts.A}:6001", length=length),
            Child("tcp_server", hosts.a, host=hosts.A, port=6002, length=length),
        ]
        clients = {
            "ours": Child("fetcher", hosts.b, address=root, folder=near),
            "bare": Child("bare_client", hosts.b, address=f"{hosts.A}:6001", length=length),
            "tcp": Child("tcp_client", hosts.b, host=hosts.A, port=6002, length=length),
        }
        with children(*servers, *clients.values()):
            for server in servers:
                server.read()
            times: dict[str, list[float]] = {name: [] for name in clients}
            for number in range(given.rounds + 2):
                for name, client in clients.items():
                    seconds = client.ask()["seconds"]
                    if number >= 2:
                        times[name].append(seconds)
        for name, words in (("ours", "fetched and verified"), ("bare", "bare gRPC stream"), ("tcp", "raw TCP")):
            report.add(f"remote 256 MB: {words}", [length / t / 1e9 for t in times[name]], "GB/s")
        to_bare, to_tcp = ratio(times["bare"], times["ours"]), ratio(times["tcp"], times["ours"])
        report.add(
            "remote 256 MB: ours to the bare stream", to_bare, "x", ">= 0.95", statistics.median(to_bare) >= 0.95
        )
        report.add("remote 256 MB: ours to raw TCP", to_tcp, "x")
        relayed(report, hosts, root, near, length, stack)


def publish_in(hosts: Namespaces, root: str, size: int) -> None:
    """Publish one version to a root in the other namespace."""
    code = (
        "import sys; from benchmarks.weight_plane import Trainer; "
        "t = Trainer(sys.argv[1], '', int(sys.argv[2])); t.publish(); t.close()"
    )
    subprocess.run([*hosts.a, sys.executable, "-c", code, root, str(size)], check=True, stdout=subprocess.DEVNULL)


def relayed(report: Report, hosts: Namespaces, root: str, near: str, length: int, stack: ExitStack) -> None:
    """Bytes across the link for two readers on one node, with and without a relay there."""
    before = hosts.sent_by_a()
    direct = [Child("fetcher", hosts.b, address=root, folder=near) for _ in range(2)]
    with children(*direct):
        for reader in direct:
            reader.ask()
    plain = hosts.sent_by_a() - before
    before = hosts.sent_by_a()
    relay = f"{hosts.B}:50055"
    stack.enter_context(weights_server(relay, near, hosts.b, insecure="true", upstream=root, budget_gib=4))
    readers = [Child("reader", hosts.b, address=relay, folder=near) for _ in range(2)]
    with children(*readers):
        for reader in readers:
            reader.read()
            reader.until(1)
    saved = (hosts.sent_by_a() - before) / plain
    report.add(
        "remote 256 MB: bytes across the link, two readers behind a relay", saved, "x", "0.5", abs(saved - 0.5) < 0.05
    )


def peer(report: Report, given: Plan) -> None:
    """RLinf's bucket sync of the same bytes to as many receivers, in turns with ours."""
    from benchmarks.weight_peer import compare

    compare(report, given.rounds, (256 * MB,) if given.rounds < 8 else (64 * MB, 256 * MB))


PARTS: dict[str, Callable[[Report, Plan], None]] = {
    "publishing": publishing,
    "pauses": lambda report, given: pauses(report, given.rounds),
    "late": late_joiner,
    "remote": remote,
    "deltas": lambda report, given: deltas(report),
    "peer": peer,
    "large": without_spare,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within five minutes: fewer rounds, 64 and 256 MB")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="only these parts")
    given = parser.parse_args()
    end_in_order()
    torch.set_num_threads(1)
    configure_logging("warning")
    chosen = (
        Plan(5, (64 * MB, 256 * MB), (1, 2), False)
        if given.quick
        else Plan(12, (64 * MB, 256 * MB, 1024 * MB), (1, 2, 4), True)
    )
    report = Report("weight plane")
    print(machine())
    if (busy := busy_cores()) > QUIET:
        print(f"note: other processes keep {busy:.1f} cores busy; figures will be worse than on a quiet machine")
    for name in given.only:
        PARTS[name](report, chosen)
    report.write(given.json)


if __name__ == "__main__":
    main()
