"""Numbers about the data of one update: what was trained, how old it was, how well it went."""

import torch
from torch import Tensor

from services.learner.batch import Batch


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Episode, advantage and staleness metrics of a batch; masked actions count nowhere.

    success_trained (also for each task), success_at_end_trained, return, episode_steps: means over the trained
    episodes, which are those left after the store's filter. env_steps: control steps executed. advantage_*: over
    rows, weighed by their valid actions.
    """
    rows = batch.rows
    valid = rows.mask.sum(1).double().cpu()  # (N,)
    advantage = batch.advantage.double().cpu()
    mean = _mean(advantage, valid)
    members = batch.members
    return {
        "groups": float(len(batch.groups)),
        "groups_without_signal": float(sum(not group.informative for group in batch.groups)),
        "episodes": float(len(members)),
        "episodes_without_data": float(sum(member.trajectory is None for member in members)),
        "chunks": float(len(rows)),
        "env_steps": float(rows.executed.sum()),
        "success_trained": _average([float(member.success_once) for member in members]),
        "success_at_end_trained": _average([float(member.success_at_end) for member in members]),
        "return": _average([member.score for member in members]),
        "reward_sum": _average([member.reward_sum for member in members]),
        "episode_steps": _average([float(member.steps) for member in members]),
        "advantage_mean": mean,
        "advantage_std": _mean((advantage - mean).square(), valid) ** 0.5,
        "advantage_max": float(advantage.abs().max()),
        "staleness_mean": float(batch.staleness.double().mean()),
        "staleness_max": float(batch.staleness.max()),
        "chunks_rolled_back": float(batch.rolled_back.sum()),
    } | _per_task(batch)


def _per_task(batch: Batch) -> dict[str, float]:
    """Success of the trained episodes of each task."""
    outcomes: dict[str, list[float]] = {}
    for group in batch.groups:
        outcomes.setdefault(group.task, []).extend(float(member.success_once) for member in group.members)
    return {f"success_trained/{task}": _average(values) for task, values in outcomes.items()}


def staleness_histogram(batch: Batch) -> list[int]:
    """Chunks by staleness: index = updates."""
    counts: list[int] = torch.bincount(batch.staleness).tolist()
    return counts


def _mean(values: Tensor, weight: Tensor) -> float:
    return float((values * weight).sum() / weight.sum())


def _average(values: list[float]) -> float:
    return sum(values) / len(values)
