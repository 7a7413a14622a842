"""One supervised child process: its command, its log, how it ended, and when it may start again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PARENT_VARIABLE = "DVLA_PARENT_PID"
"""Set for children of the launcher: the pid that they must not outlive (see `services.cli.__main__`)."""
TAIL_BYTES = 8192


@dataclass(frozen=True)
class ChildSpec:
    """What to run. Exit code 0 ends a child that may finish; any other end makes it start again.

    rank: children of a lower rank are stopped first, because they need the ones of a higher rank to finish.
    grace_seconds: time between SIGTERM and SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    may_finish: bool = False
    rank: int = 1
    grace_seconds: float = 10.0
    before_start: Callable[[], None] | None = None


def role_command(*arguments: str) -> tuple[str, ...]:
    """The command line of `dvla` itself with these arguments, in this interpreter."""
    return (sys.executable, "-m", "services.cli", *arguments)


class Child:
    """A child process and its history."""

    def __init__(self, spec: ChildSpec, environment: dict[str, str] | None = None) -> None:
        self.spec = spec
        self._environment = environment or {}
        self.restarts = 0
        self.quick_failures = 0
        self.finished = False
        self.next_start = 0.0
        self.started = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id, 0 if it does not run."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start it in a process group of its own, so that a Ctrl-C in the terminal reaches the launcher only."""
        if self.spec.before_start:
            self.spec.before_start()
        environment = os.environ | self.spec.environment | self._environment | {PARENT_VARIABLE: str(os.getpid())}
        with self.spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )
        self.started = time.monotonic()

    def ended(self) -> int | None:
        """The exit code once it has ended (minus the signal number if a signal ended it); the child is then reaped."""
        if self._process is None or not _has_ended(self._process.pid):
            return None
        # Its own children must not live on. The dead leader still holds the group's number, so it is safe to use.
        self.send(signal.SIGKILL)
        code = self._process.wait()
        self._process = None
        return code

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to the child; SIGKILL goes to its whole process group."""
        if self._process is None:
            return
        try:
            if sig == signal.SIGKILL:
                os.killpg(self._process.pid, sig)
            else:
                os.kill(self._process.pid, sig)
        except (ProcessLookupError, PermissionError):
            return  # it has just ended; macOS and old kernels answer EPERM for a zombie's group

    def end(self, grace_seconds: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """End it and reap it: SIGTERM, then SIGKILL after the grace time; True if it took SIGKILL."""
        self.send(signal.SIGTERM)
        if self.wait(grace_seconds, hurry):
            return False
        self.send(signal.SIGKILL)
        self.wait(5.0)
        return True

    def wait(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Wait for its end and reap it; False if it still runs after so long, or when `hurry` says so."""
        deadline = time.monotonic() + seconds
        while self.pid and self.ended() is None:
            if time.monotonic() > deadline or hurry():
                return False
            time.sleep(0.01)
        return True

    def tail(self, lines: int = 5) -> list[str]:
        """The last lines of its log."""
        return tail(self.spec.log, lines)


def tail(log: Path, lines: int = 5) -> list[str]:
    """The last non-empty lines of a log file."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def last_error(log: Path) -> str:
    """The reason in a log: its last `error: ...` line, else its last line, else nothing."""
    lines = tail(log, 50)
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines or [""])[-1]


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _has_ended(pid: int) -> bool:
    """Whether a child is a zombie now, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
