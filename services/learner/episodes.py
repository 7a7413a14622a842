"""From leased groups to tensors: decode, validate, preprocess. Runs outside the training lane.

Everything that can be wrong with a trajectory is found here, group by group, so that one offender is refused by
name and never meets an optimiser step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.common.errors import InvalidInput
from services.common.spec import Array
from services.common.trajectory import Trajectory, instruction_text, prefixed, validate
from services.learner.objective import Score
from services.learner.rewards import check_range, step_rewards
from services.policies.base import Inputs, Policy, PolicySpec, Record


@dataclass(frozen=True)
class EpisodeRules:
    """What a run wants of its episodes. bootstraps: a truncated one needs its final observation (PPO)."""

    score: Score = "success"
    reward_range: tuple[float, ...] = ()
    bootstraps: bool = False


@dataclass(frozen=True)
class Member:
    """One episode of a group: the store's facts, and its trajectory, or None if it failed for good (scores 0)."""

    score: float
    steps: int
    reward_sum: float
    success_once: bool
    success_at_end: bool
    trajectory: Trajectory | None


@dataclass(frozen=True)
class Rows:
    """All chunks of some episodes, one row each, in order of episode and time. N rows, C actions, D dimensions.

    inputs, record: what the policy reads, [N, ...]. behaviour: float32 [N, C, D], log-probability of the policy
    that acted. mask: bool [N, C], actions that may carry gradient. version: int64 [N, 2], (epoch, update).
    reward: float32 [N, C], of the control steps, as `rewards.step_rewards` gives them. action: float32 [N, C, D],
    environment units. executed: int64 [N], control steps. episode: int64 [N], index of the row's episode.
    """

    inputs: Inputs
    record: Record
    behaviour: Tensor
    mask: Tensor
    version: Tensor
    reward: Tensor
    action: Tensor
    executed: Tensor
    episode: Tensor

    def __len__(self) -> int:
        return len(self.behaviour)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        """All tensors changed alike: selected, moved, ..."""
        return Rows(
            inputs={name: change(tensor) for name, tensor in self.inputs.items()},
            record={name: change(tensor) for name, tensor in self.record.items()},
            behaviour=change(self.behaviour),
            mask=change(self.mask),
            version=change(self.version),
            reward=change(self.reward),
            action=change(self.action),
            executed=change(self.executed),
            episode=change(self.episode),
        )

    @staticmethod
    def join(parts: Sequence["Rows"]) -> "Rows":
        """The rows of all parts, one after another; every `episode` must count in one common index already."""
        first = parts[0]
        return Rows(
            inputs={name: torch.cat([part.inputs[name] for part in parts]) for name in first.inputs},
            record={name: torch.cat([part.record[name] for part in parts]) for name in first.record},
            behaviour=torch.cat([part.behaviour for part in parts]),
            mask=torch.cat([part.mask for part in parts]),
            version=torch.cat([part.version for part in parts]),
            reward=torch.cat([part.reward for part in parts]),
            action=torch.cat([part.action for part in parts]),
            executed=torch.cat([part.executed for part in parts]),
            episode=torch.cat([part.episode for part in parts]),
        )


@dataclass(frozen=True)
class Finals:
    """The observations at which episodes were cut off by a limit, E of them; those that terminated have none.

    inputs: what the policy reads, [E, ...]. episode: int64 [E].
    """

    inputs: Inputs
    episode: Tensor

    @staticmethod
    def join(parts: Sequence["Finals"]) -> "Finals":
        """One after another; every `episode` must count in one common index already."""
        names = parts[0].inputs
        return Finals(
            inputs={name: torch.cat([part.inputs[name] for part in parts]) for name in names},
            episode=torch.cat([part.episode for part in parts]),
        )


@dataclass(frozen=True)
class PreparedGroup:
    """A group ready for training. rows: None if no member has a trajectory; `episode` indexes `members`.

    finals: None if none of them was cut off, or if nobody wants to know.
    """

    group: int
    task: str
    members: tuple[Member, ...]
    rows: Rows | None
    finals: Finals | None = None

    @property
    def informative(self) -> bool:
        """False if all members have the same score: nothing to learn from."""
        scores = [member.score for member in self.members]
        return min(scores) != max(scores)


def prepare_group(
    group: int, task: str, members: Sequence[Member], policy: Policy, rules: EpisodeRules = EpisodeRules()
) -> PreparedGroup:
    """Validate and preprocess one group; raises InvalidInput naming the member and what is wrong with it."""
    if not members:
        raise InvalidInput(f"group {group} has no members")
    for index, member in enumerate(members):
        if not np.isfinite([member.score, member.reward_sum]).all():
            raise InvalidInput(f"member {index} of group {group}: score or reward sum is not finite")
        if member.trajectory is not None:
            try:
                _check_member(member.trajectory, policy.spec)
                check_range(member.trajectory, rules.reward_range)
            except InvalidInput as error:
                raise InvalidInput(f"member {index} of group {group}: {error}") from error
    present = [(index, member.trajectory) for index, member in enumerate(members) if member.trajectory is not None]
    rows = _rows(present, policy, rules) if present else None
    finals = _finals(present, policy) if rules.bootstraps else None
    return PreparedGroup(group, task, tuple(members), rows, finals)


def _finals(present: Sequence[tuple[int, Trajectory]], policy: Policy) -> Finals | None:
    """Never at a termination, nor when both ends coincide: there is no value beyond it."""
    cut = [(index, trajectory) for index, trajectory in present if not trajectory["ends"][0]]
    if not cut:
        return None
    for index, trajectory in cut:
        if missing := [name for name in policy.spec.observation if f"final_obs/{name}" not in trajectory]:
            raise InvalidInput(
                f"member {index} was truncated but has no final observation {missing[0]!r}, which its value needs; "
                "expected workers of a run with final_observation"
            )
    trajectories = [trajectory for _, trajectory in cut]
    observation = {name: _joined(trajectories, f"final_obs/{name}") for name in policy.spec.observation}
    with torch.no_grad():
        inputs = policy.preprocess(observation, [instruction_text(trajectory) for trajectory in trajectories])
    return Finals(inputs, torch.tensor([index for index, _ in cut]))


def _rows(present: Sequence[tuple[int, Trajectory]], policy: Policy, rules: EpisodeRules) -> Rows:
    spec = policy.spec
    trajectories = [trajectory for _, trajectory in present]
    counts = [len(trajectory["reward"]) for trajectory in trajectories]
    instructions = [
        text for trajectory, count in zip(trajectories, counts, strict=True) for text in _told(trajectory, count)
    ]
    observation = {name: _joined(trajectories, f"obs/{name}") for name in spec.observation}
    executed = torch.from_numpy(_joined(trajectories, "executed")).long()
    if spec.mask_unexecuted:
        mask = torch.arange(spec.chunk) < executed[:, None]
    else:
        # Later positions of a denoised chunk influenced the executed ones, so the chunk stays whole.
        mask = torch.ones(len(executed), spec.chunk, dtype=torch.bool)
    with torch.no_grad():
        inputs = policy.preprocess(observation, instructions)
    return Rows(
        inputs=inputs,
        record={name: torch.from_numpy(_joined(trajectories, f"record/{name}")) for name in spec.record},
        behaviour=torch.from_numpy(_joined(trajectories, "log_prob")),
        mask=mask,
        version=torch.from_numpy(_joined(trajectories, "version")),
        reward=torch.from_numpy(np.concatenate([step_rewards(each, rules.score) for each in trajectories])),
        action=torch.from_numpy(_joined(trajectories, "action")),
        executed=executed,
        episode=torch.tensor([index for index, _ in present]).repeat_interleave(torch.tensor(counts)),
    )


def _told(trajectory: Trajectory, count: int) -> list[str]:
    return [instruction_text(trajectory)] * count


def _joined(trajectories: Sequence[Trajectory], name: str) -> Array:
    """One new, writable array: the views of the payloads are read-only and tensors must not alias them."""
    arrays = [trajectory[name] for trajectory in trajectories]
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{dtype}{shape}" for dtype, shape in kinds))
        raise InvalidInput(f"members of one group differ in {name!r}: {found}")
    return np.concatenate(arrays)


def _check_member(trajectory: Trajectory, spec: PolicySpec) -> None:
    """The trajectory's own rules, then those of this policy."""
    validate(trajectory)
    chunk = trajectory["log_prob"].shape[1:]
    if chunk != (spec.chunk, spec.action_dim):
        raise InvalidInput(f"'log_prob' has chunks of {chunk}; the policy's are {(spec.chunk, spec.action_dim)}")
    observed = prefixed(trajectory, "obs")
    missing = [name for name in spec.observation if name not in observed]
    if missing:
        raise InvalidInput(f"observation {missing[0]!r} is missing; the policy reads {', '.join(spec.observation)}")
    record = prefixed(trajectory, "record")
    if record.keys() != spec.record.keys():
        raise InvalidInput(f"record holds {sorted(record)}; the policy needs {sorted(spec.record)}")
    for name, (shape, dtype) in spec.record.items():
        array = record[name]
        if array.shape[1:] != tuple(shape) or array.dtype.name != dtype:
            raise InvalidInput(f"record {name!r} is {array.dtype}{array.shape[1:]}; expected {dtype}{tuple(shape)}")
