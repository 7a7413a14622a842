"""What a learner can be told. Plain data, no torch; impossible values are refused with the remedy."""

import re
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from services.common.config import RoleConfig
from services.common.delta import DeltaRule
from services.common.errors import ConfigError

Mode = Literal["async", "sync"]
Score = Literal["success", "sum"]
OnFailure = Literal["zero", "discard"]
Algorithm = Literal["grpo"]
Normalisation = Literal["std", "mean", "leave-one-out"]
Objective = Literal["clipped", "decoupled"]
Level = Literal["token", "action", "chunk"]
Weighting = Literal["trajectory", "token"]
Schedule = Literal["constant", "linear", "cosine"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(RoleConfig):
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
    group_size: int = 8
    """Episodes from one start state that are compared with each other, G."""
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
    score: Score = "success"
    """Return of an episode: "success" (1 if it ever succeeded) or "sum" (sum of rewards)."""
    end_on_success: bool = True
    """End training episodes on success."""
    differential_reward: bool = False
    """The simulator's reward is a change of potential, so that its sum does not punish finishing early."""
    filter_uniform: bool = True
    """The store discards and replaces groups whose episodes all scored the same."""
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

    # The objective
    algorithm: Algorithm = "grpo"
    """Which loss."""
    advantage: Normalisation = "std"
    """Advantages within a group: divided by the standard deviation, only centred, or leave-one-out."""
    objective: Objective = "decoupled"
    """"clipped" compares with the policy that acted; "decoupled" clips around the policy at the start of the update
    and weighs stale data by a truncated importance weight. Both are the same on data of the current weights; with
    staleness 1, "clipped" lost up to half of the success in trials where "decoupled" lost none."""
    ratio_level: Level | Literal["auto"] = "auto"
    """Level of the importance ratios; "auto" takes the policy's own."""
    weighting: Weighting = "trajectory"
    """Every trajectory weighs the same, or every token."""
    clip_low: float = 0.2
    """Ratios are clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """Ratios are clipped above 1 + clip_high."""
    dual_clip: float = 0.0
    """Bound for negative advantages, in advantages; above 1, or 0 for none."""
    importance_cap: float = 2.0
    """Largest importance weight of the decoupled objective."""
    entropy_bonus: float = 0.0
    """Reward of a nat of entropy per action dimension."""

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
            ("score", Score),
            ("on_failure", OnFailure),
            ("algorithm", Algorithm),
            ("advantage", Normalisation),
            ("objective", Objective),
            ("weighting", Weighting),
            ("schedule", Schedule),
        ):
            self._one_of(name, get_args(kind))
        self._one_of("ratio_level", ("auto", *get_args(Level)))

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
        self._at_least("group_size", 2, f"because {self.algorithm} compares the episodes of a group")
        for name in ("groups_per_update", "updates", "max_attempts", "episode_bytes"):
            self._at_least(name, 1)
        for name in ("seed", "seed_base"):
            self._at_least(name, 0)
        self._above("grant_seconds", 0)
        if self.staleness is not None:
            self._at_least("staleness", 0)
        if self.mode == "sync" and self.staleness_bound != 0:
            self._refuse("staleness", "0 in mode sync, which takes strict turns; leave it out or use mode async")
        if self.score == "sum" and self.end_on_success and not self.differential_reward:
            self._refuse(
                "score",
                "success together with end_on_success, because a summed dense reward then punishes finishing early; "
                "set end_on_success = false, or differential_reward = true if the reward is a change of potential",
            )
        if self.differential_reward and self.score != "sum":
            self._refuse("differential_reward", "false unless score = 'sum', the only score that reads rewards")

    def _check_objective(self) -> None:
        for name in ("clip_low", "clip_high"):
            self._above(name, 0)
        if self.clip_low >= 1:
            self._refuse("clip_low", "less than 1, because a ratio is never negative")
        if self.dual_clip != 0 and self.dual_clip <= 1:
            self._refuse("dual_clip", "more than 1 (3 is usual), or 0 for none")
        self._at_least("importance_cap", 1)
        if self.objective == "clipped" and self.importance_cap != LearnerConfig.importance_cap:
            self._refuse("importance_cap", "no such setting unless objective = 'decoupled', the only one that reads it")
        self._at_least("entropy_bonus", 0)

    def _check_optimiser(self) -> None:
        for name in ("learning_rate", "grad_clip"):
            self._above(name, 0)
        for name in ("weight_decay", "warmup_updates"):
            self._at_least(name, 0)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                self._refuse(name, "0 or more and less than 1")
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

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            self._refuse(name, f"one of {', '.join(allowed)}")

    def _at_least(self, name: str, low: float, reason: str = "") -> None:
        value = getattr(self, name)
        if not low <= value < float("inf"):
            self._refuse(name, f"{low} or more{', ' + reason if reason else ''}")

    def _above(self, name: str, low: float) -> None:
        if not low < getattr(self, name) < float("inf"):
            self._refuse(name, f"more than {low}")

    def _refuse(self, name: str, expected: str) -> NoReturn:
        value: Any = getattr(self, name)
        raise ConfigError(f"learner setting {name} = {value!r}; expected {expected}")


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
