"""Samples of an imaginary run with round figures, for tests of everything that reads them."""

from services.cli.samples import LearnerSample, RoleSample, Sample, StoreSample

GROUPS_PER_SECOND = 2


def recorded(seconds: int = 60, restart_at: int = 30) -> list[Sample]:
    """10 s of evaluation, then training: the sampler is idle a quarter of the time, the learner half."""
    return [_sample(t, restart_at) for t in range(seconds)]


def _sample(t: int, restart_at: int) -> Sample:
    training = max(0, t - 10)
    groups = GROUPS_PER_SECOND * training
    since = t if t < restart_at else t - restart_at  # the rollout worker starts anew
    rollout = RoleSample(
        role="rollout",
        pid=100 if t < restart_at else 101,
        lanes={
            "sampling": {"busy": 0.75 * since, "admission": 0.25 * since},
            "receiving": {"busy": 0.01 * since, "weights": 0.99 * since},
        },
        metrics={"env_steps": 120.0 * since, "queue/appends": 3.0},
    )
    learner = RoleSample(
        role="learner",
        pid=200,
        lanes={
            "training": {"busy": 0.5 * t, "lease": 0.5 * t},
            "distribution": {"busy": 0.02 * t, "work": 0.98 * t},
        },
        metrics={"queue/prefetch": 1.0},
    )
    store = StoreSample(
        update=training // 4,
        open_groups=3,
        complete_groups=1,
        counters={
            "accepted": 8 * groups,
            "accepted_steps": 100 * training,
            "trained_steps": 80 * training,
            "discarded_uniform": training // 10,
        },
        sums={"accepted_success": 8 * groups * min(1.0, 0.3 + 0.012 * training)},
        staleness=(groups // 2, groups // 2),
    )
    return Sample(
        t=float(t),
        stage="evaluation before" if t <= 10 else "training",
        roles={"rollout-0": rollout, "learner": learner} if t != restart_at - 1 else {"learner": learner},
        store=store,
        learner=LearnerSample(
            "training", (1, training // 4), (1, training // 4), (1, 0), 20, {"return": 0.5, "loss": 0.1}
        ),
        restarts={"rollout-0": 1} if t >= restart_at else {},
    )
