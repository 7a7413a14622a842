"""Small real policies and episodes that they really made, on random observations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.trajectory import Trajectory, instruction_array
from services.learner.config import LearnerConfig
from services.learner.episodes import Member, PreparedGroup, prepare_group
from services.policies.base import Policy, numpy_record
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.registry import build_policy

CHUNK, ACTIONS, STATE = 3, 2, 4
INSTRUCTION = "move the point to the goal"
FAMILIES = ("tiny-oft", "tiny-flow")


def small_policy(family: str = "tiny-oft", seed: int = 0, **settings: Any) -> Policy:
    return build_policy(
        PolicyConfig(action_dim=ACTIONS, family=family, chunk=CHUNK, state_dim=STATE, instruction_bytes=32, **settings),
        seed=seed,
    )


def small_config(folder: Path = Path("unused"), **settings: Any) -> LearnerConfig:
    given: dict[str, Any] = {
        "init": str(folder / "init"),
        "output": str(folder / "run"),
        "tasks": ("reach",),
        "run": "test",
        "group_size": 3,
        "groups_per_update": 2,
        "updates": 6,
        "minibatches": 2,
        "epochs": 2,
        "micro_rows": 4,
        "learning_rate": 1e-3,
        "checkpoint_seconds": 0.0,
        "prefetch_updates": 1,
    }
    return LearnerConfig(**(given | settings))


def make_trajectory(policy: Policy, key: str, version: tuple[int, int] = (1, 0), chunks: int = 0) -> Trajectory:
    """An episode of 1 to 3 chunks, or as many as asked for, whose last chunk may be cut short."""
    rng = np.random.default_rng([ord(letter) for letter in key])
    chunks = chunks or int(rng.integers(1, 4))
    state = rng.normal(size=(chunks, STATE)).astype(np.float32)
    with torch.no_grad():
        inputs = policy.preprocess({"state": state}, [INSTRUCTION] * chunks)
        act = policy.act(inputs, "train", RowNoise([f"{key}/{i}" for i in range(chunks)]))
    executed = np.full(chunks, CHUNK, np.int32)
    executed[-1] = rng.integers(1, CHUNK + 1)
    action = policy.postprocess(act.actions)
    return {
        "obs/state": state,
        **{f"record/{name}": array for name, array in numpy_record(act.record).items()},
        "action": action,
        "executed_action": np.clip(action, -1, 1),
        "log_prob": act.log_prob.numpy(),
        "reward": np.zeros((chunks, CHUNK), np.float32),
        "success": np.zeros((chunks, CHUNK), np.bool_),
        "executed": executed,
        "version": np.tile(np.array([version], np.int64), (chunks, 1)),
        "ends": np.array([True, False]),
        "instruction": instruction_array(INSTRUCTION),
    }


def make_member(policy: Policy, key: str, score: float, version: tuple[int, int] = (1, 0), chunks: int = 0) -> Member:
    trajectory = make_trajectory(policy, key, version, chunks)
    return Member(
        score=score,
        steps=int(trajectory["executed"].sum()),
        reward_sum=score,
        success_once=score > 0,
        success_at_end=score > 0,
        trajectory=trajectory,
    )


def make_group(
    policy: Policy, number: int, scores: tuple[float, ...] = (1.0, 0.0, 0.0), version: tuple[int, int] = (1, 0)
) -> PreparedGroup:
    members = [make_member(policy, f"{number}-{i}", score, version) for i, score in enumerate(scores)]
    return prepare_group(number, "reach", members, policy)


def without_data(member: Member) -> Member:
    """A member that failed for good."""
    return replace(member, score=0.0, steps=0, reward_sum=0.0, trajectory=None, success_once=False)


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.trainable_state().items()}


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
