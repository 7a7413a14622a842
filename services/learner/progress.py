"""What others may know and ask of a running learner. Shared by the loop, its threads and the servicer."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Literal

from services.common.bundle import Version
from services.common.errors import Unavailable
from services.learner.checkpointer import Written

State = Literal["starting", "waiting", "training", "starved", "finished", "stopped", "failed"]


class Progress:
    """State and newest metrics of the run, and requests to the loop. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._requests: list[Future[Written]] = []
        self._closed = False
        self.state: State = "starting"
        self.version: Version | None = None
        self.published: Version | None = None
        self.checkpoint: Version | None = None
        self.stopping = threading.Event()

    def metrics(self) -> dict[str, float]:
        """Metrics of the last update."""
        with self._lock:
            return dict(self._metrics)

    def show(self, metrics: Mapping[str, float]) -> None:
        """New metrics, replacing the old ones."""
        with self._lock:
            self._metrics = dict(metrics)

    def request_checkpoint(self) -> "Future[Written]":
        """Ask for a checkpoint after the current update; raises Unavailable once the learner has stopped."""
        with self._lock:
            if self._closed:
                raise Unavailable("the learner is stopping; its last checkpoint is durable")
            future: Future[Written] = Future()
            self._requests.append(future)
            return future

    def requests(self) -> tuple["Future[Written]", ...]:
        """Take the open requests, without those whose caller is gone."""
        with self._lock:
            taken, self._requests = self._requests, []
        return tuple(future for future in taken if future.set_running_or_notify_cancel())

    @property
    def requested(self) -> bool:
        """Whether somebody waits for a checkpoint."""
        with self._lock:
            return bool(self._requests)

    def close(self) -> None:
        """Refuse requests from now on, those that wait included."""
        with self._lock:
            self._closed, waiting, self._requests = True, self._requests, []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(Unavailable("the learner stopped before this checkpoint"))
