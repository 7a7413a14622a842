"""Opening a run in the store: its spec, made from the learner's settings, and the wait for a store that is away."""

import threading

import structlog
from dvla.v1 import store_pb2

from services.common.errors import ConfigError, Exhausted, InvalidInput, Unavailable
from services.common.telemetry import Telemetry
from services.learner.config import LearnerConfig
from services.learner.source import Opened, Store
from services.learner.threads import delays
from services.policies.base import PolicySpec

log = structlog.get_logger()


def run_spec(config: LearnerConfig, policy: PolicySpec) -> store_pb2.RunSpec:
    """What the store and the workers must know of this run."""
    return store_pb2.RunSpec(
        run=config.run,
        group_size=config.group_size,
        groups_per_update=config.groups_per_update,
        staleness=config.staleness_bound,
        total_updates=config.updates,
        tasks=[store_pb2.TaskShare(task=task, weight=weight) for task, weight in config.task_shares],
        seed_base=config.seed_base,
        filter_uniform=config.filters_uniform,
        max_attempts=config.max_attempts,
        on_failure=config.on_failure,
        episode_bytes=config.episode_bytes,
        model=config.model,
        score=config.score,
        end_on_success=config.end_on_success,
        grant_seconds=config.grant_seconds,
        observation=policy.observation,
        same_start=config.groups,  # their members are compared
        final_observation=not config.groups,  # values are bootstrapped where an episode was cut off
    )


def open_run(
    store: Store,
    spec: store_pb2.RunSpec,
    floor: int,
    update: int,
    telemetry: Telemetry,
    stopping: threading.Event,
) -> Opened | None:
    """Open the run at `update` with an epoch above `floor`; waits while the store is away. None: a stop was asked for.

    Raises ConfigError if the store holds a run of this name with another spec.
    """
    for attempt in delays(stopping):
        try:
            opened = store.open(spec, floor, update)
        except (Unavailable, Exhausted) as error:
            telemetry.facts["store"] = f"waiting: {error}"
            if attempt == 0:
                log.warning("waiting for the store", reason=str(error))
            continue
        except InvalidInput as error:
            raise ConfigError(f"run {spec.run!r} cannot be opened: {error}") from error
        if opened.lost:
            # Freed after a checkpoint that is gone now: those updates cannot be repeated with the same data.
            log.warning("groups lost with rolled-back updates", groups=list(opened.lost))
        telemetry.count("groups_lost", len(opened.lost))
        telemetry.count("groups_rolled_back", len(opened.rolled_back))
        log.info(
            "run open", run=spec.run, epoch=opened.epoch, update=opened.update, rolled_back=len(opened.rolled_back)
        )
        return opened
    return None
