"""The checkpoint thread: training waits for a copy of the state, never for a disk."""

import copy
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import structlog
from safetensors import SafetensorError

from services.common.bundle import Version
from services.common.errors import DvlaError
from services.common.telemetry import BUSY, Telemetry
from services.learner.checkpoint import LearnerState, write_checkpoint
from services.learner.durable import prune_folders
from services.learner.threads import Background, Failures, Stopwatch
from services.policies.base import Policy

log = structlog.get_logger()

Written = tuple[Version, Path]


@dataclass(frozen=True)
class _Order:
    state: LearnerState
    waiters: tuple[Future[Written], ...]


class Checkpointer:
    """Writes one checkpoint at a time and keeps the newest `keep`. `durable` is called with each durable version."""

    def __init__(
        self,
        root: Path,
        keep: int,
        policy: Policy,
        newest: Version | None,
        durable: Callable[[Version], None],
        telemetry: Telemetry,
        failures: Failures,
    ) -> None:
        self._root, self._keep, self._durable = root, keep, durable
        self._policy, self._copy = policy, copy.deepcopy(policy).cpu()
        self._telemetry = telemetry
        self._orders: queue.Queue[_Order] = queue.Queue()
        self._lane = telemetry.lane("checkpoint", "update")
        self._thread = Background("checkpoint", self._run, failures)
        self._idle = threading.Event()
        self._idle.set()
        self.newest = newest
        self.failure: DvlaError | None = None
        self.since = Stopwatch()

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Finish the checkpoint in hand, for at most `seconds`."""
        return self._thread.stop(seconds)

    @property
    def busy(self) -> bool:
        """Whether one is being written: then the copy is in use and `copy_policy` must wait."""
        return not self._idle.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until none is being written."""
        return self._idle.wait(seconds)

    def copy_policy(self) -> Policy:
        """A copy of the policy as it is now, valid until this checkpoint is written. Not while `busy`."""
        self._copy.load_state({name: tensor.cpu() for name, tensor in self._policy.trainable_state().items()})
        return self._copy

    def write(self, state: LearnerState, waiters: tuple[Future[Written], ...] = ()) -> None:
        """Write this state in the background; then resolve the waiters. Not while `busy`."""
        self._idle.clear()
        self.since.restart()
        self._orders.put(_Order(state, waiters))

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=0.2)
            except queue.Empty:
                if self._thread.stopping.is_set():
                    return
                continue
            with self._lane.during(BUSY):
                self._write(order)

    def _write(self, order: _Order) -> None:
        version = order.state.version
        try:
            path = write_checkpoint(self._root, order.state)
        except (OSError, SafetensorError) as error:
            # Training goes on and tries again when the next one is due: a full disk may be emptied meanwhile.
            self.failure = DvlaError(f"checkpoint {version} cannot be written to {str(self._root)!r}: {error}")
            log.error("checkpoint failed", reason=str(self.failure))
            self._telemetry.facts["checkpoint"] = str(self.failure)
            self._idle.set()
            for waiter in order.waiters:
                waiter.set_exception(self.failure)
            return
        self.failure, self.newest = None, version
        self._telemetry.facts["checkpoint"] = f"{version} is durable"
        self._durable(version)
        self._idle.set()
        log.info("checkpoint", version=str(version), path=str(path))
        for waiter in order.waiters:
            waiter.set_result((version, path))
        prune_folders(self._root, self._keep)
