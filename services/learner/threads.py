"""Threads of the learner's lanes: one that ends by an error ends the learner, never silently itself alone."""

import threading
import time
from collections.abc import Callable, Iterator

import structlog

log = structlog.get_logger()

RETRY_SECONDS = (0.1, 0.3, 1.0, 2.0)


class Failures:
    """The first error of any background thread, for the training lane to raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: BaseException | None = None

    def report(self, error: BaseException) -> None:
        """Keep the first one."""
        with self._lock:
            self._first = self._first or error

    def check(self) -> None:
        """Raise what a thread reported."""
        if self._first is not None:
            raise self._first


class Background:
    """A named thread that runs `body` until it returns. `body` must watch `stopping`."""

    def __init__(self, name: str, body: Callable[[], None], failures: Failures) -> None:
        self.stopping = threading.Event()
        self._failures, self._body = failures, body
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for its end; False if it is still busy after `seconds`."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self, seconds: float) -> bool:
        """Ask it to end and wait; False if it is still busy after `seconds`."""
        self.stopping.set()
        return self.join(seconds)

    def _run(self) -> None:
        try:
            self._body()
        except BaseException as error:  # noqa: BLE001 - handed to the training lane, which raises it
            log.debug("thread failed", thread=self._thread.name, error=repr(error))
            self._failures.report(error)


def delays(stopping: threading.Event) -> Iterator[int]:
    """Attempt numbers from 0, with a growing pause between them; ends when `stopping` is set."""
    attempt = 0
    while not stopping.is_set():
        yield attempt
        stopping.wait(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
        attempt += 1


class Stopwatch:
    """Seconds since the last `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._since
