"""Ctrl-C, SIGTERM and a closed terminal ask the launcher to stop; the second time it hurries."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from services.common.errors import DvlaError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(DvlaError):
    """Somebody asked to stop."""

    exit_code = 130


class Interrupts:
    """Counts requests to stop while it is entered. `check` raises; nothing is raised inside of a handler."""

    def __init__(self) -> None:
        self.count = 0
        self._event = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {sig: signal.signal(sig, self._handle) for sig in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def check(self) -> None:
        """Raise Interrupted if somebody asked to stop."""
        if self.count:
            raise Interrupted("interrupted")

    def wait(self, seconds: float) -> None:
        """Wait so long, or until somebody asks to stop."""
        self._event.wait(seconds)

    def hurry(self) -> bool:
        """Whether somebody asked twice."""
        return self.count > 1

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        self._event.set()
