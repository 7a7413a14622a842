"""What a learner can be told. Plain data, no torch; impossible values are refused with the remedy."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from services.common.config import RoleConfig
from services.common.delta import DeltaRule
from services.common.errors import ConfigError
from services.learner.objective import ObjectiveSettings

Mode = Literal["async", "sync"]
OnFailure = Literal["zero", "discard"]
Schedule = Literal["constant", "linear", "cosine"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(ObjectiveSettings, RoleConfig):
    """A learner trains one run. It opens the run in the store with the numbers given here."""

    listen: str = "127.0.0.1:50055"

    # The run
    run: str = "default"
    """Run to open or to go on with."""
    model: str = "policy"
    """Name under which weights are published."""
    init: str = ""
    """Folder of the policy checkpoint to start from, as `dvla sft` writes it."""
    output: str = ""
    """Run folder: checkpoints/, metrics.jsonl and tensorboard/ go there. Holding checkpoints, it is gone on with."""
    store: str = "127.0.0.1:50052"
    """Address of the rollout store."""
    weights: str = "127.0.0.1:50054"
    """Address of the root weights server."""
    tasks: tuple[str, ...] = ()
    """Task ids, each with an optional relative weight, such as "PushCube-v1" or "PushCube-v1:2"."""
    groups_per_update: int = 8
    """Groups of one update, B."""
    updates: int = 10
    """Updates after which the run ends."""
    mode: Mode = "async"
    """"sync" takes strict turns: collect, train, publish, wait."""
    staleness: int | None = None
    """Updates between the weights that made a chunk and the update that trains it, at most. Default: 1 in mode
    async, 0 in mode sync."""
    seed: int = 0
    """Seed of the order in which rows are trained, and of torch."""
    seed_base: int = 0
    """First index of the training start states."""
    max_attempts: int = 2
    """Failed attempts at an episode after which on_failure applies."""
    on_failure: OnFailure = "zero"
    """Then the episode scores zero, or its group is discarded."""
    episode_bytes: int = 4 * 1024 * 1024
    """Largest size of one trajectory in bytes."""
    grant_seconds: float = 30.0
    """Seconds without a sign of life after which a worker's jobs go to others."""
    close_run: bool = True
    """Close the run in the store after the last update, which sends the workers home."""

    # The optimiser
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises from 0."""
    schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up: constant, or to a tenth by the last update."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.95
    """Decay of Adam's second moment."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    epochs: int = 1
    """Passes over the data of one update."""
    minibatches: int = 4
    """Optimiser steps of one pass."""
    micro_rows: int = 256
    """Chunks scored at once; changes memory and speed, never the gradient."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass in place of keeping them: less memory, a third more time."""
    average: float = 0.0
    """Decay of an exponential average of the weights, per optimiser step; checkpoints hold it in average/, for
    evaluation. 0 for none."""
    threads: int = 1
    """CPU threads of torch."""
    device: str = "cpu"
    """torch device: cpu, cuda or cuda:N."""

    # Publishing
    shared_folder: str = ""
    """Folder of the weights in shared memory, the same as the weights server's. Default: dvla-UID in /dev/shm."""
    staging_files: int = 6
    """Versions in memory at once: two that the server keeps, two being written, and one for each reader that lags and
    each evaluation that holds one."""
    delta_density: float = 0.1
    """Largest share of changed elements for which a weights server elsewhere gets a delta; 0 for never."""
    delta_anchor: int = 25
    """Every so many updates the whole version is sent."""

    # Checkpoints and waits
    checkpoint_updates: int = 5
    """Write a checkpoint every so many updates; 0 for never (the last update writes one in any case)."""
    checkpoint_seconds: float = 60.0
    """Write a checkpoint when the last one is older than this; 0 for never."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept."""
    stop_at_success: float = 0.0
    """End the run early once training episodes, before any filter, succeed at this rate; 0 for never. A policy that
    always succeeds leaves no group to learn from."""
    prefetch_updates: int = 2
    """Updates whose groups are fetched ahead at most."""
    starved_seconds: float = 60.0
    """Wait for groups after which the learner calls itself starved."""
    give_up_seconds: float = 0.0
    """Wait for groups after which the learner fails; 0 for never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choices()
        self._check_names()
        self._check_run()
        self._check_objective()
        self._check_optimiser()
        self._check_waits()

    @property
    def delta_rule(self) -> DeltaRule:
        """When a delta is worth it."""
        return DeltaRule(self.delta_density, self.delta_anchor)

    @property
    def staleness_bound(self) -> int:
        """`staleness` with its default resolved."""
        return self.staleness if self.staleness is not None else int(self.mode == "async")

    @property
    def task_shares(self) -> tuple[tuple[str, float], ...]:
        """Task ids and relative weights."""
        return tuple(_task_share(text) for text in self.tasks)

    def _check_choices(self) -> None:
        for name, kind in (
            ("mode", Mode),
            ("on_failure", OnFailure),
            ("schedule", Schedule),
        ):
            self._one_of(name, get_args(kind))

    def _check_names(self) -> None:
        for name in ("run", "model"):
            if not _NAME.fullmatch(getattr(self, name)):
                self._refuse(name, "1 to 100 letters, digits, '.', '_' or '-'")
        for name, remedy in (
            ("init", "the folder that `dvla sft` wrote"),
            ("output", "a folder of the run's own"),
            ("store", "the rollout store's address"),
            ("weights", "the root weights server's address"),
            ("tasks", "at least one task id"),
        ):
            if not getattr(self, name):
                self._refuse(name, remedy)
        names = [name for name, _ in self.task_shares]
        if len(set(names)) != len(names):
            self._refuse("tasks", "distinct task ids")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            self._refuse("device", "cpu, cuda or cuda:N")

    def _check_run(self) -> None:
        for name in ("groups_per_update", "updates", "max_attempts", "episode_bytes"):
            self._at_least(name, 1)
        for name in ("seed", "seed_base"):
            self._at_least(name, 0)
        self._above("grant_seconds", 0)
        if self.staleness is not None:
            self._at_least("staleness", 0)
        if self.mode == "sync" and self.staleness_bound != 0:
            self._refuse("staleness", "0 in mode sync, which takes strict turns; leave it out or use mode async")

    def _check_optimiser(self) -> None:
        for name in ("learning_rate", "grad_clip"):
            self._above(name, 0)
        for name in ("weight_decay", "warmup_updates"):
            self._at_least(name, 0)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                self._refuse(name, "0 or more and less than 1")
        if not 0 <= self.average < 1:
            self._refuse("average", "0 or more and less than 1 (0.99 is usual)")
        for name in ("epochs", "minibatches", "micro_rows", "threads"):
            self._at_least(name, 1)
        episodes = self.group_size * self.groups_per_update
        if self.minibatches > episodes:
            self._refuse("minibatches", f"at most group_size * groups_per_update = {episodes}")
        if self.warmup_updates >= self.updates and self.warmup_updates:
            self._refuse("warmup_updates", f"fewer than updates = {self.updates}")

    def _check_waits(self) -> None:
        for name in ("checkpoint_updates", "checkpoint_seconds", "give_up_seconds"):
            self._at_least(name, 0)
        for name in ("keep_checkpoints", "prefetch_updates"):
            self._at_least(name, 1)
        self._at_least("staging_files", 3, "because one version is current while two are being written")
        _ = self.delta_rule  # refuses impossible ones
        self._above("starved_seconds", 0)
        if not 0 <= self.stop_at_success <= 1:
            self._refuse("stop_at_success", "0 to 1")


def _task_share(text: str) -> tuple[str, float]:
    """From "id" or "id:weight"."""
    task, colon, share = text.rpartition(":")
    if not colon:
        return text, 1.0
    try:
        weight = float(share)
    except ValueError:
        return text, 1.0  # the colon belongs to the id
    if not task or not 0 < weight < float("inf"):
        raise ConfigError(f"task {text!r} has weight {share}; expected id:weight with a weight above 0")
    return task, weight
