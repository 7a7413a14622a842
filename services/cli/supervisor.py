"""Keeps the roles of a run alive: starts them, restarts what dies, gives up with a reason, stops all in order.

Not a thread: whoever owns a `Supervisor` calls `tick` a few times a second, and always from the same thread, because
the kernel ties PR_SET_PDEATHSIG to the thread that started the child.
"""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.cli.child import Child, ChildSpec, describe_exit, last_error
from services.common.errors import ConfigError, DvlaError

Listener = Callable[[str, str, str], None]
"""Called with (child, what, detail): what is started, died, restarted, finished or stopped."""


@dataclass(frozen=True)
class RestartPolicy:
    """When to try again: back-off doubles from `first` to `longest` seconds while a child keeps failing.

    A child that lived `settled` seconds counts as good; `limit` failures in a row that came sooner end the run.
    """

    first: float = 0.2
    longest: float = 5.0
    settled: float = 20.0
    limit: int = 5


class RoleFailed(DvlaError):
    """A role cannot be kept alive; the message names it and why, `log` holds its last lines."""

    def __init__(self, message: str, log: list[str], exit_code: int = 1) -> None:
        super().__init__(message)
        self.log = log
        self.exit_code = exit_code


class Supervisor:
    """The children of one run."""

    def __init__(self, listener: Listener, policy: RestartPolicy = RestartPolicy()) -> None:
        self.children: dict[str, Child] = {}
        self._listener = listener
        self._policy = policy

    def add(self, specs: Iterable[ChildSpec]) -> None:
        """Start these children."""
        for spec in specs:
            child = Child(spec)
            self.children[spec.name] = child
            child.start()
            self._listener(spec.name, "started", f"pid {child.pid}")

    def tick(self) -> None:
        """Reap what ended and start again what should run. Raises RoleFailed when that is hopeless."""
        now = time.monotonic()
        for child in self.children.values():
            code = child.ended()
            if code is not None:
                self._ended(child, code, now)
            if not child.pid and not child.finished and now >= child.next_start:
                child.start()
                child.restarts += 1
                self._listener(child.spec.name, "restarted", f"pid {child.pid}")

    def restarts(self) -> dict[str, int]:
        """Restarts so far, by child."""
        return {name: child.restarts for name, child in self.children.items() if child.restarts}

    def remove(self, name: str) -> None:
        """Stop a child and forget it."""
        child = self.children.pop(name, None)
        if child is not None:
            self._stop([child], lambda: False)

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop all, rank by rank: SIGTERM, then SIGKILL after the grace time, or as soon as `hurry` says so."""
        for rank in sorted({child.spec.rank for child in self.children.values()}):
            self._stop([child for child in self.children.values() if child.spec.rank == rank], hurry)

    def kill(self) -> None:
        """End all at once and reap them."""
        running = [child for child in self.children.values() if child.pid]
        for child in running:
            child.send(signal.SIGKILL)
        for child in running:
            child.wait(5.0)

    def _ended(self, child: Child, code: int, now: float) -> None:
        name, lived = child.spec.name, now - child.started
        if code == 0 and child.spec.may_finish:
            child.finished = True
            self._listener(name, "finished", "")
            return
        reason = last_error(child.spec.log) if code > 0 else ""
        self._listener(name, "died", f"{describe_exit(code)} after {lived:.1f} s" + (f": {reason}" if reason else ""))
        # A bad setting does not get better by trying again. Later in its life the same child started well before.
        if code == ConfigError.exit_code and not child.restarts:
            raise RoleFailed(f"{name}: {reason}", [], exit_code=2)
        child.quick_failures = 1 if lived >= self._policy.settled else child.quick_failures + 1
        if child.quick_failures >= self._policy.limit:
            log = child.spec.log
            text = f"{name} ended {child.quick_failures} times in a row ({describe_exit(code)}); its log is {log}"
            raise RoleFailed(text, child.tail())
        delay = min(self._policy.first * 2 ** (child.quick_failures - 1), self._policy.longest)
        child.next_start = now + delay

    def _stop(self, children: list[Child], hurry: Callable[[], bool]) -> None:
        for child in children:
            child.send(signal.SIGTERM)
        began = time.monotonic()
        for child in children:
            killed = child.end(max(0.0, child.spec.grace_seconds - (time.monotonic() - began)), hurry)
            self._listener(child.spec.name, "stopped", "by SIGKILL" if killed else "")
