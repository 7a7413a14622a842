"""Supervised warm start: clone demonstrations by imitation, before RL improves on them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.errors import ConfigError, InvalidInput
from services.common.spec import FloatArray, IntArray
from services.policies.base import Policy
from services.policies.demodata import Demos, chunk_at
from services.policies.noise import RowNoise
from services.policies.normalise import Normaliser

Progress = Callable[[int, float], None]
"""Called after every step with the number of steps done and the batch's loss."""


@dataclass(frozen=True)
class SftConfig:
    """steps: optimiser steps. batch: chunks a step. lr: peak learning rate, after a warm-up of 5 % of the steps and
    before a cosine decay to 5 %. weight_decay: AdamW's. clip: largest gradient norm. seed: of batches and noise.
    """

    steps: int = 1000
    batch: int = 128
    lr: float = 1e-3
    weight_decay: float = 1e-4
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "lr", "clip"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"sft setting {name} is {value}, expected more than 0: change it in the recipe")


def fit_normalisation(policy: Policy, states: FloatArray | None, actions: FloatArray) -> None:
    """Set a policy's normalisation from demonstrations: states [N, S] (None if it reads none), actions [N, D]."""
    normaliser = getattr(policy, "normaliser", None)
    if not isinstance(normaliser, Normaliser):
        raise ConfigError(f"policy {policy.spec.family} has no `normaliser`: it keeps statistics of its own")
    normaliser.fit(states, actions, "meanstd" if policy.spec.config.get("action_norm") == "meanstd" else "quantile")


@torch.enable_grad()  # a simulator in the same process switches gradients off globally
def train_sft(policy: Policy, demos: Demos, config: SftConfig, progress: Progress | None = None) -> Policy:
    """Fit the normalisation, then the weights, to demonstrations; returns the same policy, trained in place.

    Every step of every episode starts a chunk; steps past an episode's end are masked.
    """
    check_fit(policy, demos)
    fit_normalisation(policy, _states(policy, demos), demos.action)
    optimiser = torch.optim.AdamW(policy.parameters(), config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, config.steps))
    random = np.random.default_rng(config.seed)
    for step in range(config.steps):
        rows = random.integers(len(demos), size=config.batch)
        loss = imitation_loss(policy, demos, rows, f"sft/{config.seed}/{step}")
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.clip)
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, loss.item())
    return policy


def imitation_loss(policy: Policy, demos: Demos, rows: IntArray, key: str) -> Tensor:
    """Mean imitation loss, with gradient, of the chunks that start at these rows; `key` keys the noise."""
    observation = {name: demos.observation[name][rows] for name in policy.spec.observation}
    inputs = policy.preprocess(observation, demos.texts(rows))
    actions, mask = chunk_at(demos, rows, policy.spec.chunk)
    device = next(policy.parameters()).device
    noise = RowNoise([f"{key}/{row}" for row in range(len(rows))], device)
    loss = policy.sft_loss(inputs, torch.from_numpy(actions).to(device), torch.from_numpy(mask).to(device), noise)
    return loss.mean()


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, cosine decay."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _states(policy: Policy, demos: Demos) -> FloatArray | None:
    return demos.observation["state"].astype(np.float32) if "state" in policy.spec.observation else None


def check_fit(policy: Policy, demos: Demos) -> None:
    """Refuse demonstrations that lack what the policy reads, or drive other actions; raises InvalidInput."""
    if missing := [name for name in policy.spec.observation if name not in demos.observation]:
        raise InvalidInput(
            f"the policy reads {', '.join(missing)}, the demonstrations hold {', '.join(demos.observation)}: "
            "record them with the observations of this recipe"
        )
    if demos.action.shape[1] != policy.spec.action_dim:
        raise InvalidInput(
            f"the demonstrations have {demos.action.shape[1]} action dimensions, the policy {policy.spec.action_dim}: "
            "use demonstrations of this recipe's control mode"
        )
