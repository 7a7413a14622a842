"""Servers and child processes for the weight benchmarks, on this machine or in network namespaces of their own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dvla.v1 import weights_pb2, weights_pb2_grpc

from services.common.channels import open_channel

ROOT = Path(__file__).resolve().parents[1]
Command = tuple[str, ...]
HERE: Command = ()


class Child:
    """A process of `weight_children`, or of another such module: lines in, JSON objects out."""

    def __init__(
        self, kind: str, where: Command = HERE, module: str = "benchmarks.weight_children", **arguments: Any
    ) -> None:
        command = [*where, sys.executable, "-m", module, kind, json.dumps(arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment
        )

    def read(self) -> dict[str, Any]:
        """Its next object; raises EOFError if it ended."""
        assert self.process.stdout is not None
        raw = self.process.stdout.readline()
        if not raw:
            raise EOFError(f"a child ended with {self.process.wait()}: {self.process.args}")
        answer = json.loads(raw)
        assert isinstance(answer, dict)
        return answer

    def ask(self) -> dict[str, Any]:
        """Have it do its work once; returns what it says."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self.read()

    def until(self, update: int) -> dict[str, Any]:
        """Read until it has applied this update, or a newer one."""
        while (said := self.read()).get("update", -1) < update:
            pass
        return said

    def close(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def children(*started: Child) -> Iterator[None]:
    """Close them at the end, whatever happens."""
    with ExitStack() as stack:
        for child in started:
            stack.callback(child.close)
        yield


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a name short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        yield Path(name)


@contextmanager
def shared_memory() -> Iterator[str]:
    """A private folder on tmpfs."""
    with tempfile.TemporaryDirectory(prefix="dvla-bench-", dir="/dev/shm") as name:
        yield name


@contextmanager
def weights_server(
    address: str, folder: str, where: Command = HERE, **settings: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """`dvla weights` as a process, ready to serve."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [*where, sys.executable, "-m", "services.weights", f"--listen={address}", f"--shared-folder={folder}"]
    log = Path(folder) / f"server-{abs(hash(address))}.log"
    with log.open("wb") as out:
        server = subprocess.Popen([*command, *flags, "--drain-seconds=0.2"], cwd=ROOT, stdout=out, stderr=out)
    try:
        if address.startswith("unix:") or not where:
            wait_ready(address)
        else:
            probe = [*where, sys.executable, "-m", "benchmarks.weight_hosts", address]
            subprocess.run(probe, cwd=ROOT, check=True, timeout=150)
        yield server
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_ready(address: str) -> None:
    """Until a weights server answers there."""
    with open_channel(address) as channel:
        stub = weights_pb2_grpc.WeightsServiceStub(channel)
        stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=120, wait_for_ready=True)


class Namespaces:
    """Two hosts on one machine, joined by a pair of virtual links. Needs root and iproute2."""

    A, B = "10.77.0.1", "10.77.0.2"

    def __init__(self) -> None:
        tag = f"dvla{os.getpid()}"
        self._names = (f"{tag}a", f"{tag}b")
        self.a: Command = ("ip", "netns", "exec", self._names[0])
        self.b: Command = ("ip", "netns", "exec", self._names[1])

    @staticmethod
    def possible() -> bool:
        """Whether this machine lets us."""
        return os.geteuid() == 0 and shutil.which("ip") is not None

    def __enter__(self) -> "Namespaces":
        first, second = self._names
        for name in self._names:
            _ip("netns", "add", name)
        _ip("link", "add", "v0", "netns", first, "type", "veth", "peer", "name", "v1", "netns", second)
        for name, link, address in ((first, "v0", self.A), (second, "v1", self.B)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def sent_by_a(self) -> int:
        """Bytes that went from a to b so far."""
        done = subprocess.run(
            [*self.a, "cat", "/sys/class/net/v0/statistics/tx_bytes"], capture_output=True, check=True, text=True
        )
        return int(done.stdout)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    wait_ready(sys.argv[1])
