"""What the training lane does between updates: open the run, publish, checkpoint, watch, end."""

import structlog
from dvla.v1 import store_pb2

from services.common.bundle import Version
from services.common.errors import DvlaError
from services.common.telemetry import Lane, Telemetry
from services.learner.checkpoint import LearnerState, random_state
from services.learner.collected import Collected
from services.learner.config import LearnerConfig
from services.learner.lanes import Lanes
from services.learner.opening import open_run
from services.learner.progress import Progress
from services.learner.resume import RunState
from services.learner.threads import Stopwatch
from services.learner.update import Updater
from services.policies.base import Policy

log = structlog.get_logger()

POLL_SECONDS = 0.2
MAX_LOSSES = 5
"""Losses of the run in a row, without a recorded update between them, after which the learner gives up."""
FINISH_SECONDS, STOP_SECONDS = 60.0, 5.0


class Upkeep:
    """The training lane's dealings with the other lanes. Only the training lane calls it."""

    def __init__(
        self,
        config: LearnerConfig,
        spec: store_pb2.RunSpec,
        state: RunState,
        updater: Updater,
        lanes: Lanes,
        collected: Collected,
        progress: Progress,
        telemetry: Telemetry,
    ) -> None:
        self._config, self._spec, self._state, self._updater = config, spec, state, updater
        self._lanes, self._collected = lanes, collected
        self._progress, self._telemetry = progress, telemetry
        self._lane: Lane = telemetry.lane("training")
        self._solved = False
        self.waiting = Stopwatch()  # since the loop began to wait for the next group

    @property
    def version(self) -> Version:
        """The version that the weights have now."""
        return Version(self._lanes.session.epoch, self._state.update)

    @property
    def finished(self) -> bool:
        """Whether the last update is done, or training episodes succeed as often as asked for."""
        goal = self._config.stop_at_success
        if goal and not self._solved and self._collected.recent_success() >= goal:
            log.info("success reached", success=round(self._collected.recent_success(), 3), goal=goal)
            self._solved = True
        return self._solved or self._state.update >= self._config.updates

    def open(self, floor: int) -> None:
        """Open the run and publish the current weights under the granted epoch; only then are groups leased."""
        lanes, state, stopping = self._lanes, self._state, self._progress.stopping
        with self._lane.during("open"):
            opened = open_run(lanes.store, self._spec, floor, state.update, self._telemetry, stopping)
            if opened is None:
                return
            lanes.session.grant(opened.epoch)
            state.lineage = state.lineage.continued(opened.epoch, state.update)
            self.publish()
            self.wait_published()
        for update, groups in state.consumed.unconfirmed():
            lanes.ledger.restate(opened.epoch, update, groups)
        if lanes.checkpointer.newest is not None:
            lanes.ledger.ack(opened.epoch, lanes.checkpointer.newest.update)
        self.waiting.restart()
        lanes.session.open()

    def publish(self) -> None:
        """Offer the weights to lane 4. The pause is one flat copy."""
        with self._lane.during("snapshot"):
            self._lanes.distribution.offer(self.version)
        self._progress.version = self.version

    def wait_published(self) -> None:
        """Wait until the current version is sealed; returns early if a stop is asked for or the run is lost."""
        with self._lane.during("publish"):
            while not self._lanes.distribution.wait(self.version, POLL_SECONDS):
                self._lanes.failures.check()
                if self._progress.stopping.is_set():
                    return

    def checkpoint(self) -> None:
        """Copy the state for the checkpoint thread; if that is still busy, the newest state waits for it."""
        state, version, updater = self._state, self.version, self._updater

        def capture(policy: Policy) -> LearnerState:
            return LearnerState(
                run=self._config.run,
                version=version,
                policy=policy,
                optimiser={name: t.detach().to("cpu", copy=True) for name, t in updater.optimiser_state().items()},
                random=random_state(self._config.device),
                lineage=state.lineage,
                consumed=state.consumed.copy(),
                totals=dict(state.totals),
                average=updater.average.state() if updater.average is not None else {},
            )

        with self._lane.during("checkpoint"):
            self._lanes.checkpointer.offer(capture, self._progress.requests())

    def attend(self) -> None:
        """What must be looked at while nothing is trained: failures, a lost run, checkpoints, starvation."""
        self._lanes.failures.check()
        session = self._lanes.session
        if not session.usable:
            if session.losses > MAX_LOSSES:
                raise DvlaError(f"the store lost this run {session.losses} times without an update; see its log")
            self.open(session.epoch)
        old = 0 < self._config.checkpoint_seconds < self._lanes.checkpointer.since.seconds
        if self._progress.requested or (old and self._undurable()):
            self.checkpoint()
        self._watch_starvation()

    def end(self) -> None:
        """The last checkpoint, the last word to the store, the end of all threads."""
        finished, lanes = self.finished, self._lanes
        self._last_checkpoint()
        if finished:
            self.wait_published()
            if self._config.close_run:
                lanes.ledger.close_run(lanes.session.epoch)
        lanes.stop(FINISH_SECONDS if finished else STOP_SECONDS)
        lanes.failures.check()
        self._progress.state = "finished" if finished else "stopped"
        log.info(self._progress.state, version=str(self.version))

    def _last_checkpoint(self) -> None:
        self._wait_checkpointed()
        if self._undurable():
            self.checkpoint()
            self._wait_checkpointed()
        if self._undurable():
            failure = self._lanes.checkpointer.failure
            raise failure or DvlaError(f"the last checkpoint is not durable after {FINISH_SECONDS:.0f} s")

    def _wait_checkpointed(self) -> None:
        """Wait until the checkpoint thread is idle, for a bounded time."""
        waited = Stopwatch()
        while not self._lanes.checkpointer.wait(POLL_SECONDS) and waited.seconds < FINISH_SECONDS:
            self._lanes.failures.check()

    def _undurable(self) -> bool:
        """Whether updates were made since the newest durable checkpoint."""
        newest = self._lanes.checkpointer.newest
        return self._state.update > (newest.update if newest else 0)

    def _watch_starvation(self) -> None:
        waited = self.waiting.seconds
        if waited < self._config.starved_seconds:
            self._telemetry.facts.pop("starved", None)
            return
        if self._progress.state != "starved":
            log.warning("starved", seconds=round(waited), reason=self._collected.explain())
        self._progress.state = "starved"
        self._telemetry.facts["starved"] = f"{waited:.0f} s without a group: {self._collected.explain()}"
        if 0 < self._config.give_up_seconds < waited:
            raise DvlaError(
                f"no group for {waited:.0f} s: {self._collected.explain()}; look at rollout workers and simulators, "
                "or raise give_up_seconds"
            )
