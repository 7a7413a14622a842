"""One update: epochs x minibatches of optimiser steps over the groups of one batch.

Knows nothing of stores, threads or files. Lane 3 calls `Updater.run`; everything in it is tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

from services.learner.batch import Batch
from services.learner.config import LearnerConfig
from services.learner.episodes import Rows
from services.learner.losses.grpo import GrpoOptions
from services.learner.losses.registry import build_loss
from services.learner.losses.terms import LossTerms, at_level, mean_at_level, term_mask, term_weights
from services.policies.base import Policy


@dataclass(frozen=True)
class _Data:
    """Rows with all that the loss reads of them; every tensor has leading dimension N. Sliced and shuffled whole."""

    rows: Rows
    behaviour: Tensor  # (N, T)
    proximal: Tensor | None  # (N, T)
    advantage: Tensor  # (N,)
    mask: Tensor  # (N, T)
    weight: Tensor  # (N, T)
    on_policy: Tensor  # (N,)

    def select(self, index: Tensor | slice) -> "_Data":
        return _Data(
            rows=self.rows.map(lambda tensor: tensor[index]),
            behaviour=self.behaviour[index],
            proximal=None if self.proximal is None else self.proximal[index],
            advantage=self.advantage[index],
            mask=self.mask[index],
            weight=self.weight[index],
            on_policy=self.on_policy[index],
        )


class Updater:
    """The policy's optimiser and how one batch moves it."""

    def __init__(self, policy: Policy, config: LearnerConfig) -> None:
        self._policy = policy.eval()  # dropout would make the same weights score differently here and in rollout
        self._config = config
        self._level = policy.spec.ratio_level if config.ratio_level == "auto" else config.ratio_level
        options = GrpoOptions(
            config.clip_low, config.clip_high, config.dual_clip, config.importance_cap, config.entropy_bonus
        )
        self._decoupled = config.objective == "decoupled"
        self._loss = build_loss(config.algorithm, options)
        self._parameters = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def run(self, batch: Batch, update: int) -> dict[str, float]:
        """Train the update that follows `update` on a batch with signal; returns what happened, by metric name.

        The same policy, optimiser state, batch and update number give the same bits on a CPU.
        """
        self._optimiser.param_groups[0]["lr"] = rate = learning_rate(self._config, update)
        data = self._data(batch)
        steps: list[dict[str, Tensor]] = []
        for epoch in range(self._config.epochs):
            for minibatch in self._minibatches(data, update, epoch):
                steps.append(self._step(minibatch, first=not steps))
        return {"learning_rate": rate, "optimiser_steps": float(len(steps))} | _summary(steps)

    def optimiser_state(self) -> dict[str, Tensor]:
        """Adam's moments and step counts as "name//moment" tensors: the optimiser's own, not copies."""
        names = list(self._parameters)
        state = self._optimiser.state_dict()["state"]
        return {f"{names[index]}//{key}": value for index, moments in state.items() for key, value in moments.items()}

    def load_optimiser_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `optimiser_state`; tensors for other parameters are a `KeyError`."""
        index = {name: number for number, name in enumerate(self._parameters)}
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, moment = key.partition("//")
            moments.setdefault(index[name], {})[moment] = value
        whole = self._optimiser.state_dict()
        self._optimiser.load_state_dict({"state": moments, "param_groups": whole["param_groups"]})

    def _data(self, batch: Batch) -> _Data:
        rows, level = batch.rows, self._level
        mask = term_mask(rows.mask, rows.behaviour.shape[2], level)
        return _Data(
            rows=rows,
            behaviour=at_level(rows.behaviour, rows.mask, level),
            # On data of the current weights the proximal policy is the one that acted: no need to score it again.
            proximal=self._score(rows) if self._decoupled and not batch.on_policy.all() else None,
            advantage=batch.advantage,
            mask=mask,
            weight=term_weights(mask, rows.episode, self._config.weighting),
            on_policy=batch.on_policy.to(mask.device),
        )

    @torch.no_grad()
    def _score(self, rows: Rows) -> Tensor:
        """Log-probabilities [N, T] under the weights at the start of the update."""
        scores = []
        for part in _slices(len(rows), self._config.micro_rows):
            piece = rows.map(lambda tensor, part=part: tensor[part])  # type: ignore[misc]
            evaluation = self._policy.evaluate(piece.inputs, piece.record)
            scores.append(at_level(evaluation.log_prob, piece.mask, self._level))
        return torch.cat(scores)

    def _minibatches(self, data: _Data, update: int, epoch: int) -> Iterator[_Data]:
        """Random, nearly equal parts. The order depends on seed, update and epoch only, so it survives a restart."""
        count = self._config.minibatches
        if count > 1:
            generator = torch.Generator().manual_seed(_order_seed(self._config.seed, update, epoch))
            data = data.select(torch.randperm(len(data.rows), generator=generator).to(data.mask.device))
        size = math.ceil(len(data.rows) / count)
        for part in _slices(len(data.rows), size):
            yield data.select(part)

    def _step(self, data: _Data, first: bool) -> dict[str, Tensor]:
        """One optimiser step over micro-batches, whose losses add up: denominators are the whole minibatch's."""
        self._optimiser.zero_grad(set_to_none=True)
        weight = data.weight / data.weight.sum()
        totals: dict[str, Tensor] = {}
        gaps = []
        for part in _slices(len(data.rows), self._config.micro_rows):
            piece = data.select(part)
            metrics, ratio = self._backward(piece, weight[part])
            for name, value in metrics.items():
                totals[name] = totals[name] + value if name in totals else value
            if first:
                gaps.append(torch.where(piece.mask & piece.on_policy[:, None], (ratio - 1.0).abs(), -1.0).max())
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip)
        finite = bool(norm.isfinite())
        if finite:
            self._optimiser.step()
        # A gradient that is not finite would stay in the weights for good: the step is left out and counted.
        totals["skipped_steps"] = torch.tensor(float(not finite))
        totals["grad_norm"] = norm.detach() if finite else torch.tensor(0.0)
        return totals | ({"ratio_gap": torch.stack(gaps).max()} if first else {})

    def _backward(self, piece: _Data, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Add the gradient of one micro-batch; returns its metrics and the ratios [N, T] to the acting policy."""
        evaluation = self._policy.evaluate(piece.rows.inputs, piece.rows.record)
        current = at_level(evaluation.log_prob, piece.rows.mask, self._level)
        entropy = mean_at_level(evaluation.entropies, piece.rows.mask, self._level)
        terms = LossTerms(
            current=current,
            behaviour=piece.behaviour,
            proximal=piece.proximal,
            advantage=piece.advantage,
            mask=piece.mask,
            weight=weight,
            entropy=entropy if self._config.entropy_bonus else None,
        )
        result = self._loss(terms)
        result.loss.backward()
        metrics = {"loss": result.loss.detach(), "entropy": (weight * entropy.detach()).sum()} | result.metrics
        return metrics, (current.detach() - piece.behaviour).exp()


def learning_rate(config: LearnerConfig, update: int) -> float:
    """Learning rate of the update that follows `update`: linear warm-up, then the schedule, down to a tenth."""
    done = update + 1
    if done <= config.warmup_updates:
        return config.learning_rate * done / config.warmup_updates
    share = (done - config.warmup_updates) / max(1, config.updates - config.warmup_updates)
    if config.schedule == "constant":
        return config.learning_rate
    fall = share if config.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * share)
    return config.learning_rate * (1.0 - 0.9 * min(1.0, fall))


def _order_seed(*key: int) -> int:
    return xxhash.xxh3_64_intdigest(":".join(map(str, key)).encode()) >> 1  # torch takes a signed number


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, start + size)


def _summary(steps: list[dict[str, Tensor]]) -> dict[str, float]:
    """Means over the optimiser steps; the skipped ones are counted, the ratio gap is the first step's."""
    gap = float(steps[0].pop("ratio_gap"))
    out = {name: float(torch.stack([step[name].cpu() for step in steps]).mean()) for name in steps[0]}
    out["skipped_steps"] *= len(steps)
    # Negative: no row of the first minibatch was made by exactly the current weights.
    return out | ({"ratio_gap": gap} if gap >= 0 else {})
