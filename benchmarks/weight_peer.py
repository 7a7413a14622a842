"""RLinf's bucket sync beside ours, in turns, with as many receivers and the same tensors."""

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import Report, ratio
from benchmarks.weight_hosts import ROOT, Child, children

MB = 1024 * 1024
PYTHON = ROOT / ".venv-rlinf" / "bin" / "python"
SCRIPT = Path(__file__).with_name("peer_rlinf.py")


class Peer:
    """RLinf's processes, driven by lines."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def read(self) -> dict[str, float]:
        """The next JSON object; what Ray prints between is passed over."""
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            if raw.startswith(b"{"):
                answer = json.loads(raw)
                assert isinstance(answer, dict)
                return answer
        raise EOFError(f"RLinf ended with {self._process.wait()}")

    def ask(self) -> float:
        """One sync; its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self.read()["seconds"]


@contextmanager
def rlinf(size: int, receivers: int) -> Iterator[Peer]:
    """RLinf with one sender and so many receivers, warmed up."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    process = subprocess.Popen(
        [PYTHON, SCRIPT, str(size), str(receivers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=ROOT,
    )
    try:
        peer = Peer(process)
        peer.read()
        yield peer
    finally:
        process.terminate()
        process.wait(60)


def compare(report: Report, rounds: int, sizes: tuple[int, ...]) -> None:
    """From the start (ours: before the snapshot) to the last receiver's applied weights."""
    from benchmarks.weight_plane import running

    for size in sizes:
        for receivers in (1, 2):
            name = f"{size // MB} MB, {receivers} receiver{'s' if receivers > 1 else ''}"
            target, factor = ("faster", 1.0) if receivers == 1 else (">= 2x", 2.0)
            if not PYTHON.exists():
                report.add(f"{name}: RLinf's bucket sync to ours", None, target=target, note="run peer_rlinf.sh first")
                continue
            ours, theirs = list[float](), list[float]()
            with rlinf(size, receivers) as peer, running(size) as (trainer, address, folder):
                readers = [Child("reader", address=address, folder=folder) for _ in range(receivers)]
                with children(*readers):
                    for reader in readers:
                        reader.read()
                    for number in range(rounds + 5):
                        seconds = peer.ask()
                        offered, _, _ = trainer.publish()
                        applied = max(reader.until(trainer.update)["at"] for reader in readers)
                        if number >= 5:
                            theirs.append(seconds)
                            ours.append(applied - offered)
            report.add(f"{name}: ours, versioned and verified, pause included", ours, "s")
            report.add(f"{name}: RLinf's bucket sync", theirs, "s")
            quotient = ratio(theirs, ours)
            met = statistics.median(quotient) > factor
            report.add(f"{name}: RLinf's time to ours", quotient, "x", target, met if (size == 256 * MB) else None)
