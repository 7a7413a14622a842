"""The checkpoint thread: training waits for a copy of the state, never for a disk.

Two copies of the policy: one is being written, the other takes the next state. A state that nobody has begun to write
is replaced by the next: checkpoints coalesce, as versions do, and only what is durable is acknowledged.
"""

import copy
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
POLL_SECONDS = 0.2


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
        self._policy = policy
        self._free: Policy | None = copy.deepcopy(policy).cpu()
        self._held: Policy | None = None  # made when a disk turns out to be slow
        self._telemetry = telemetry
        self._lane = telemetry.lane("checkpoint", "update")
        self._thread = Background("checkpoint", self._run, failures)
        self._changed = threading.Condition()
        self._offered: _Order | None = None
        self._writing = False
        self.newest = newest
        self.failure: DvlaError | None = None
        self.since = Stopwatch()

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Finish the checkpoint in hand, for at most `seconds`."""
        self._thread.stopping.set()
        with self._changed:
            self._changed.notify_all()
        return self._thread.stop(seconds)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is offered or being written."""
        with self._changed:
            return self._changed.wait_for(lambda: self._offered is None and not self._writing, seconds)

    def offer(self, capture: Callable[[Policy], LearnerState], waiters: tuple[Future[Written], ...] = ()) -> None:
        """Write the state in the background, in place of one that waits; then resolve the waiters of both.

        capture: makes the state, given a copy of the policy as it is now.
        """
        with self._changed:
            self._free = self._free or copy.deepcopy(self._policy).cpu()
            self._free.load_state({name: tensor.cpu() for name, tensor in self._policy.trainable_state().items()})
            if self._offered is not None:
                self._telemetry.count("checkpoints_coalesced")
                waiters = self._offered.waiters + waiters
            self._offered = _Order(capture(self._free), waiters)
            self.since.restart()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            order = self._next()
            if order is not None:
                with self._lane.during(BUSY):
                    self._write(order)
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()
            elif self._thread.stopping.is_set():
                return

    def _next(self) -> _Order | None:
        """The offered state, its copy of the policy now held; None after a while without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._offered is not None or self._thread.stopping.is_set(), POLL_SECONDS)
            order, self._offered = self._offered, None
            if order is not None:
                self._writing = True
                self._free, self._held = self._held, self._free
            return order

    def _write(self, order: _Order) -> None:
        version = order.state.version
        try:
            path = write_checkpoint(self._root, order.state)
        except (OSError, SafetensorError) as error:
            # Training goes on and tries again when the next one is due: a full disk may be emptied meanwhile.
            self.failure = DvlaError(f"checkpoint {version} cannot be written to {str(self._root)!r}: {error}")
            log.error("checkpoint failed", reason=str(self.failure))
            self._telemetry.facts["checkpoint"] = str(self.failure)
            for waiter in order.waiters:
                waiter.set_exception(self.failure)
            return
        self.failure, self.newest = None, version
        self._telemetry.facts["checkpoint"] = f"{version} is durable"
        self._durable(version)
        log.info("checkpoint", version=str(version), path=str(path))
        for waiter in order.waiters:
            waiter.set_result((version, path))
        prune_folders(self._root, self._keep)
