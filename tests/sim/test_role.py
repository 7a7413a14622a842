"""The role as a process: one clear line and exit code 2 for bad settings, a clean end, no orphans."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from dvla.v1 import role_pb2, role_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import Unavailable
from services.sim.client import SimClient

ENV = {**os.environ, "PYTHONPATH": ".:protos/gen", "OMP_NUM_THREADS": "1"}


def sim(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.sim", *arguments]


def until(condition: Callable[[], bool], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    out = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = Path(f"/proc/{pid}/task").iterdir()
    found = {int(child) for thread in threads for child in (thread / "children").read_text().split()}
    return sorted(found | {int(child) for child in out})


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def role(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    address = f"unix:{tmp_path}/sim.sock"
    process = subprocess.Popen(
        sim("--sim", "toy", "--tasks", "reach", "--listen", address, "--processes", "1"), env=ENV
    )
    client = SimClient(address)

    def up() -> bool:
        try:
            return bool(client.describe())
        except Unavailable:
            assert process.poll() is None
            return False

    try:
        until(up)
        yield process, address
    finally:
        client.close()
        process.kill()
        process.wait(30)


def test_sigterm_ends_it_cleanly_with_its_children(role: tuple[subprocess.Popen[bytes], str]) -> None:
    process, address = role
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types lack the methods
        health = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        status = role_pb2_grpc.RoleServiceStub(channel).GetStatus(role_pb2.GetStatusRequest(), timeout=5)
        assert status.role == "sim"
        assert [lane.name for lane in status.lanes] == ["env-0"]
        assert status.metrics["environments_up"] == 1
        assert status.facts["environments"] == "1 of 1 up, 2 sessions"
    kids = children(process.pid)
    assert kids
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    until(lambda: not any(alive(kid) for kid in kids))


def test_children_die_with_a_killed_parent(role: tuple[subprocess.Popen[bytes], str]) -> None:
    process, _ = role
    kids = children(process.pid)
    process.kill()
    until(lambda: not any(alive(kid) for kid in kids), 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sim", "toy", "--tasks", "fly"], "toy tasks ['fly'] do not exist; choose from reach, mirror"),
        (["--sim", "warp"], "sim = 'warp'; expected toy, scripted, maniskill or module:Class"),
        (["--sim", "toy", "--tasks", "reach", "--slots", "0"], "slots = 0; expected 1 or more"),
        (["--sim", "no.such:Sim"], "cannot be loaded"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    command = sim(*arguments, "--listen", f"unix:{tmp_path}/s.sock", "--log-level", "error")
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_check_command(role: tuple[subprocess.Popen[bytes], str]) -> None:
    _, address = role
    done = subprocess.run(sim("check", address), env=ENV, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("ok ") for line in done.stdout.splitlines()) == 9
