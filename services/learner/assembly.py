"""Builds a learner from its settings and connects its parts. Parts never reach back."""

from pathlib import Path

import torch

from services.common.bundle import Version
from services.common.errors import ConfigError
from services.common.telemetry import Telemetry
from services.learner.checkpointer import Checkpointer
from services.learner.collected import Collected
from services.learner.config import LearnerConfig
from services.learner.distribution import Distribution, Publisher
from services.learner.episodes import EpisodeRules
from services.learner.imitation import Imitation
from services.learner.journal import Journal
from services.learner.lanes import Lanes
from services.learner.ledger import Ledger
from services.learner.loop import TrainingLoop
from services.learner.opening import run_spec
from services.learner.prefetch import Prefetch
from services.learner.progress import Progress
from services.learner.resume import restore_optimiser, start_or_resume
from services.learner.session import Session
from services.learner.source import Store
from services.learner.threads import Failures
from services.learner.update import Updater
from services.learner.upkeep import Upkeep


def prepare_torch(config: LearnerConfig) -> None:
    """Threads and device; raises ConfigError if this machine lacks the device."""
    torch.set_num_threads(config.threads)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {config.device!r}, but torch finds no usable GPU here; use --device cpu")


def _output_folder(config: LearnerConfig) -> Path:
    root = Path(config.output)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / ".writable").touch()
        (root / ".writable").unlink()
    except OSError as error:
        raise ConfigError(
            f"output = {config.output!r} cannot be written to: {error.strerror}; choose another"
        ) from error
    return root


def build_loop(
    config: LearnerConfig, store: Store, publisher: Publisher, progress: Progress, telemetry: Telemetry
) -> TrainingLoop:
    """Load the policy or the newest checkpoint, and make the loop that trains it."""
    prepare_torch(config)
    root = _output_folder(config)
    state = start_or_resume(config)
    updater = Updater(state.policy, config, state.reference, Imitation.from_config(state.policy, config))
    restore_optimiser(updater, state)
    session, failures = Session(), Failures()
    collected = Collected(window=config.group_size * config.groups_per_update)
    ledger = Ledger(store, session, state.consumed, collected, telemetry, failures)
    prefetch = Prefetch(
        store,
        session,
        state.consumed,
        collected,
        ledger,
        state.policy,
        EpisodeRules(config.score, config.reward_range, bootstraps=not config.groups),
        config.groups_per_update * config.prefetch_updates,
        telemetry,
        failures,
    )

    def published(version: Version) -> None:
        progress.published = version

    def durable(version: Version) -> None:
        progress.checkpoint = version
        ledger.ack(session.epoch, version.update)

    resumed = Version(state.epoch, state.update) if state.epoch else None
    progress.checkpoint = resumed
    lanes = Lanes(
        store=store,
        session=session,
        failures=failures,
        ledger=ledger,
        prefetch=prefetch,
        distribution=Distribution(state.policy, config.model, publisher, session, published, telemetry, failures),
        checkpointer=Checkpointer(
            root / "checkpoints", config.keep_checkpoints, state.policy, resumed, durable, telemetry, failures
        ),
        journal=Journal(root, telemetry),
    )
    spec = run_spec(config, state.policy.spec)
    upkeep = Upkeep(config, spec, state, updater, lanes, collected, progress, telemetry)
    return TrainingLoop(config, state, updater, lanes, upkeep, collected, progress, telemetry)
