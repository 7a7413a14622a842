"""Where a learner begins: at its newest complete checkpoint, or at the policy it is told to start from."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch
from torch import Tensor

from services.common.errors import ConfigError, InvalidInput, NotFound
from services.learner.checkpoint import read_checkpoint, restore_random_state
from services.learner.config import LearnerConfig
from services.learner.durable import newest_folder, sweep_folders
from services.learner.lineage import Lineage
from services.learner.session import Consumed
from services.learner.update import Updater
from services.policies.base import Policy
from services.policies.checkpoint import load_checkpoint

log = structlog.get_logger()


@dataclass
class RunState:
    """What the loop changes. update: updates done. epoch: of the newest checkpoint, 0 without one.

    reference: the policy that the run started from, if the objective needs it.
    """

    policy: Policy
    reference: Policy | None = None
    update: int = 0
    epoch: int = 0
    lineage: Lineage = field(default_factory=Lineage)
    consumed: Consumed = field(default_factory=Consumed)
    totals: dict[str, float] = field(default_factory=dict)
    optimiser: Mapping[str, Tensor] = field(default_factory=dict)
    average: Mapping[str, Tensor] = field(default_factory=dict)


def start_or_resume(config: LearnerConfig) -> RunState:
    """The state to go on from. Raises ConfigError if checkpoint, run and policy do not belong together."""
    torch.manual_seed(config.seed)
    policy = _initial(config)
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if config.kl_weight else None
    root = Path(config.output) / "checkpoints"
    sweep_folders(root)
    folder = newest_folder(root)
    if folder is None:
        log.info("starting", init=config.init, policy=policy.spec.family)
        return RunState(policy, reference)
    saved = read_checkpoint(folder)
    if saved.run != config.run:
        raise ConfigError(
            f"output = {config.output!r} holds checkpoints of run {saved.run!r}, expected {config.run!r}; "
            "choose another output folder or that run"
        )
    if saved.policy.spec.config != policy.spec.config:
        raise ConfigError(
            f"checkpoint {str(folder)!r} holds another policy ({_difference(saved.policy, policy)}) than "
            f"init = {config.init!r}; choose another output folder or the init it began with"
        )
    policy.load_state(saved.policy.trainable_state())
    restore_random_state(saved.random, config.device)
    log.info("resuming", checkpoint=str(folder), version=str(saved.version))
    return RunState(
        policy=policy,
        reference=reference,
        update=saved.version.update,
        epoch=saved.version.epoch,
        lineage=saved.lineage,
        consumed=saved.consumed,
        totals=dict(saved.totals),
        optimiser=saved.optimiser,
        average=saved.average,
    )


def restore_optimiser(updater: Updater, state: RunState) -> None:
    """Give a new optimiser the moments of the checkpoint; raises ConfigError if they are of other parameters."""
    try:
        updater.load_optimiser_state(dict(state.optimiser))
        if updater.average is not None and state.average:
            updater.average.load_state(state.average)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the checkpoint's optimiser does not fit the policy: {error}; start from init") from error


def _initial(config: LearnerConfig) -> Policy:
    try:
        return load_checkpoint(Path(config.init), device=config.device)
    except (NotFound, InvalidInput) as error:
        raise ConfigError(f"init = {config.init!r} cannot be used: {error}") from error


def _difference(saved: Policy, given: Policy) -> str:
    """The first settings that differ."""
    ours, theirs = given.spec.config, saved.spec.config
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} = {theirs.get(name)!r} instead of {ours.get(name)!r}" for name in names[:3])
