"""The training loop: lease, update, publish, checkpoint. Lane 3; everything slow happens in other threads.

The order that makes every group count exactly once: the update, then `trained`; a durable checkpoint that contains
it, then `ack`. A learner killed between any two of them is continued by its checkpoint and the store's memory.
"""

from collections.abc import Sequence

import structlog

from services.common.telemetry import BUSY, Telemetry
from services.learner.batch import Batch, build_batch
from services.learner.collected import Collected
from services.learner.config import LearnerConfig
from services.learner.episodes import PreparedGroup
from services.learner.lanes import Lanes
from services.learner.progress import Progress
from services.learner.report import batch_metrics, staleness_histogram
from services.learner.resume import RunState
from services.learner.threads import Stopwatch
from services.learner.update import Updater
from services.learner.upkeep import POLL_SECONDS, STOP_SECONDS, Upkeep

log = structlog.get_logger()


class TrainingLoop:
    """One learner of one run. `run` returns when the run is finished or a stop was asked for."""

    def __init__(
        self,
        config: LearnerConfig,
        state: RunState,
        updater: Updater,
        lanes: Lanes,
        upkeep: Upkeep,
        collected: Collected,
        progress: Progress,
        telemetry: Telemetry,
    ) -> None:
        self._config, self._state, self._updater = config, state, updater
        self._lanes, self._upkeep, self._collected = lanes, upkeep, collected
        self._progress, self._telemetry = progress, telemetry
        self._lane = telemetry.lane("training")
        self._clock = Stopwatch()

    def run(self, floor: int) -> None:
        """Train until the last update. floor: highest epoch known from checkpoints and weights."""
        self._lanes.start()
        try:
            self._upkeep.open(floor)
            while not self._done():
                groups = self._collect()
                if groups:
                    self._train(groups)
            self._upkeep.end()
        except BaseException:
            self._progress.state = "failed"
            self._lanes.stop(STOP_SECONDS)
            raise
        finally:
            self._progress.close()

    def _done(self) -> bool:
        return self._progress.stopping.is_set() or self._upkeep.finished

    def _collect(self) -> list[PreparedGroup]:
        """The groups of the next update in admission order; none if the loop is done meanwhile."""
        epoch, groups = self._lanes.session.epoch, list[PreparedGroup]()
        self._upkeep.waiting.restart()
        with self._lane.during("lease"):
            while len(groups) < self._config.groups_per_update:
                self._upkeep.attend()
                if self._done():
                    return []
                if epoch != self._lanes.session.epoch:  # the store that leased the others is gone
                    epoch, groups = self._lanes.session.epoch, []
                if group := self._lanes.prefetch.take(POLL_SECONDS):
                    groups.append(group)
                    self._upkeep.waiting.restart()
                    self._progress.state = "waiting"
        return groups

    def _train(self, groups: Sequence[PreparedGroup]) -> None:
        """One update, and word of it to everyone."""
        config, state = self._config, self._state
        self._progress.state = "training"
        with self._lane.during(BUSY):
            batch = build_batch(groups, state.update, state.lineage, config.normalisation, config.device)
            batch = batch and self._updater.judge(batch)
            if batch is None or not batch.informative:
                self._refuse(groups)
                return
            metrics = self._updater.run(batch, state.update) | batch_metrics(batch)
            state.update += 1
            state.consumed.add(state.update, batch.group_numbers)
            self._record(batch, metrics)
        self._upkeep.publish()
        if config.checkpoint_updates and state.update % config.checkpoint_updates == 0:
            self._upkeep.checkpoint()
        if config.mode == "sync":
            self._upkeep.wait_published()
        self._progress.state = "waiting"

    def _refuse(self, groups: Sequence[PreparedGroup]) -> None:
        """A batch without signal makes no step and no version: momentum alone would move the weights."""
        self._telemetry.count("batches_without_signal")
        log.warning("batch without signal discarded", groups=[group.group for group in groups])
        for group in groups:
            scores = sorted({member.score for member in group.members})
            reason = f"its batch has no signal; its episodes scored {scores}"
            self._lanes.ledger.refuse(self._lanes.session.epoch, group.group, reason, discard=True)

    def _record(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Tell the store, then the journal, what made this update. Both in the ledger's thread."""
        version, totals = self._upkeep.version, self._state.totals
        for name, amount in (
            ("env_steps_trained", metrics["env_steps"]),
            ("episodes_trained", metrics["episodes"]),
            ("seconds", self._clock.seconds),
        ):
            totals[name] = totals.get(name, 0.0) + amount
        self._clock.restart()
        line = metrics | totals
        histogram = staleness_histogram(batch)

        def done() -> None:
            shown = line | self._collected.close_update()
            self._progress.show(shown)
            self._telemetry.update({f"update/{name}": value for name, value in shown.items()})
            self._lanes.journal.write(version.epoch, version.update, shown | {"staleness_histogram": histogram})

        self._lanes.ledger.trained(version.epoch, version.update, batch.group_numbers, done)
