"""Scores of a batch's rows under given weights, without gradient, in parts that fit into memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.learner.batch import Batch
from services.learner.episodes import Rows
from services.learner.losses.terms import at_level
from services.learner.objective import Level
from services.policies.base import Policy


@torch.no_grad()
def score_rows(policy: Policy, rows: Rows, level: Level, micro_rows: int) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [N, T] of the recorded actions, and values [N] if the policy has a value head."""
    scores, values = [], []
    for part in slices(len(rows), micro_rows):
        piece = rows.map(lambda tensor, part=part: tensor[part])  # type: ignore[misc]
        evaluation = policy.evaluate(piece.inputs, piece.record)
        scores.append(at_level(evaluation.log_prob, piece.mask, level))
        if evaluation.value is not None:
            values.append(evaluation.value)
    return torch.cat(scores), torch.cat(values) if values else None


@torch.no_grad()
def bootstrap_values(policy: Policy, batch: Batch, micro_rows: int) -> Tensor:
    """What each of the M episodes was worth where it was cut off: float32 [M], 0 where it terminated."""
    out = torch.zeros(len(batch.members), device=batch.rows.behaviour.device)
    if batch.finals is not None:
        for part in slices(len(batch.finals.episode), micro_rows):
            inputs = {name: tensor[part].to(out.device) for name, tensor in batch.finals.inputs.items()}
            out[batch.finals.episode[part].to(out.device)] = policy.estimate(inputs)
    return out


def slices(length: int, size: int) -> Iterator[slice]:
    """Consecutive parts of at most `size`."""
    for start in range(0, length, size):
        yield slice(start, start + size)
