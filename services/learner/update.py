"""One update: epochs x minibatches of optimiser steps over the groups of one batch.

Knows nothing of stores, threads or files. Lane 3 calls `Updater.run`; everything in it is tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
import xxhash
from torch import Tensor, nn

from services.common.errors import ConfigError, DvlaError
from services.learner import gae
from services.learner.average import Average
from services.learner.batch import Batch, Values
from services.learner.config import LearnerConfig
from services.learner.data import UpdateData
from services.learner.episodes import Rows
from services.learner.imitation import Imitation
from services.learner.informative import informative_rows
from services.learner.losses.registry import build_loss
from services.learner.losses.terms import LossOptions, LossTerms, at_level, mean_at_level, term_mask, term_weights
from services.learner.optimiser import AdamW
from services.learner.scoring import bootstrap_values, score_rows, slices
from services.policies.base import Policy


class Updater:
    """The policy's optimiser and how one batch moves it.

    reference: the policy that the run started from, if the objective keeps near it. imitation: demonstrations, if it
    keeps near them. Raises ConfigError if the policy lacks what the settings need.
    """

    def __init__(
        self,
        policy: Policy,
        config: LearnerConfig,
        reference: Policy | None = None,
        imitation: Imitation | None = None,
    ) -> None:
        _check_fit(policy, config)
        self._policy = policy.eval()  # dropout would make the same weights score differently here and in rollout
        if config.activation_checkpointing:
            policy.recompute_activations()
        self._config, self._reference, self._imitation = config, reference, imitation
        self._level = policy.spec.ratio_level if config.ratio_level == "auto" else config.ratio_level
        self._decoupled = config.objective == "decoupled" and config.algorithm != "rloo"
        self._loss = build_loss(config.algorithm, _options(config))
        self._parameters = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._optimiser = AdamW(self._parameters, (config.beta1, config.beta2), config.weight_decay)
        self._rate = config.learning_rate
        self.average = Average(policy, config.average) if config.average else None

    def judge(self, batch: Batch) -> Batch:
        """The batch with advantages. For an algorithm with values: from the value head, as the weights are now."""
        if self._config.groups:
            return batch
        config, rows = self._config, batch.rows
        log_prob, value = self._score(self._policy, rows)
        if value is None:
            raise DvlaError(f"{self._policy.spec.family} says that it has a value head, but gives no values")
        bootstrap = bootstrap_values(self._policy, batch, config.micro_rows)
        advantage = gae.advantages(
            rows.reward, rows.executed, value, rows.episode, bootstrap, config.discount, config.gae_lambda
        ).to(value.device)
        values = Values(estimate=value, target=(advantage + value).float(), log_prob=log_prob)
        return replace(batch, advantage=gae.normalised(advantage).float(), values=values)

    def run(self, batch: Batch, update: int) -> dict[str, float]:
        """Train the update that follows `update` on a judged batch; returns what happened, by metric name.

        The same policy, optimiser state, batch and update number give the same bits on a CPU.
        """
        self._rate = learning_rate(self._config, update)
        if self._config.informative_share < 1:
            seed = _order_seed(self._config.seed, update, -1)
            batch = batch.select(informative_rows(batch, self._config.informative_share, seed))
        data = self._data(batch)
        steps: list[dict[str, Tensor]] = []
        for epoch in range(self._config.epochs):
            for minibatch in self._minibatches(data, update, epoch):
                steps.append(self._step(minibatch, update, len(steps)))
        counts = {"optimiser_steps": float(len(steps)), "chunks_trained": float(len(data))}
        return {"learning_rate": self._rate} | counts | _value_metrics(batch) | _summary(steps)

    def optimiser_state(self) -> dict[str, Tensor]:
        """Adam's moments and step counts as "name//moment" tensors: the optimiser's own, not copies."""
        return self._optimiser.state()

    def load_optimiser_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `optimiser_state`; raises KeyError or ValueError for tensors of other parameters."""
        self._optimiser.load_state(state)

    def _data(self, batch: Batch) -> UpdateData:
        rows, level, values = batch.rows, self._level, batch.values
        mask = term_mask(rows.mask, rows.behaviour.shape[2], level)
        proximal = None
        # On data of the current weights the proximal policy is the one that acted: no need to score it again.
        if self._decoupled and not batch.on_policy.all():
            proximal = self._score(self._policy, rows)[0] if values is None else values.log_prob
        return UpdateData(
            rows=rows,
            behaviour=at_level(rows.behaviour, rows.mask, level),
            proximal=proximal,
            reference=None if self._reference is None else self._score(self._reference, rows)[0],
            advantage=batch.advantage,
            mask=mask,
            weight=term_weights(mask, rows.episode, self._config.weighting),
            on_policy=batch.on_policy.to(mask.device),
            old_value=None if values is None else values.estimate,
            target=None if values is None else values.target,
        )

    def _score(self, policy: Policy, rows: Rows) -> tuple[Tensor, Tensor | None]:
        return score_rows(policy, rows, self._level, self._config.micro_rows)

    def _minibatches(self, data: UpdateData, update: int, epoch: int) -> Iterator[UpdateData]:
        """Random, nearly equal parts. The order depends on seed, update and epoch only, so it survives a restart."""
        count = self._config.minibatches
        if count > 1:
            data = data.shuffled(_order_seed(self._config.seed, update, epoch))
        for part in slices(len(data), math.ceil(len(data) / count)):
            yield data.select(part)

    def _step(self, data: UpdateData, update: int, number: int) -> dict[str, Tensor]:
        """One optimiser step over micro-batches, whose losses add up: denominators are the whole minibatch's."""
        self._optimiser.zero_grad()
        weight = data.weight / data.weight.sum()
        totals: dict[str, Tensor] = {}
        gaps = []
        for part in slices(len(data), self._config.micro_rows):
            piece = data.select(part)
            metrics, ratio = self._backward(piece, weight[part])
            for name, value in metrics.items():
                totals[name] = totals[name] + value if name in totals else value
            gaps.append(torch.where(piece.mask & piece.on_policy[:, None], (ratio - 1.0).abs(), -1.0).max())
        if self._imitation is not None:
            imitation = self._imitation.loss(update, number)
            (self._config.demo_weight * imitation).backward()
            totals["imitation_loss"] = imitation.detach()
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip)
        finite = bool(norm.isfinite())
        if finite:
            self._optimiser.step(self._rate)
            if self.average is not None:
                self.average.step()
        # A gradient that is not finite would stay in the weights for good: the step is left out and counted.
        totals["skipped_steps"] = torch.tensor(float(not finite))
        totals["grad_norm"] = norm.detach() if finite else torch.tensor(0.0)
        return totals | ({"ratio_gap": torch.stack(gaps).max()} if number == 0 else {})

    def _backward(self, piece: UpdateData, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
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
            reference=piece.reference,
            entropy=entropy if self._config.entropy_bonus else None,
            value=evaluation.value,
            old_value=piece.old_value,
            target=piece.target,
        )
        result = self._loss(terms)
        result.loss.backward()
        metrics = {"loss": result.loss.detach(), "entropy": (weight * entropy.detach()).sum()} | result.metrics
        return metrics, (current.detach() - piece.behaviour).exp()


def _options(config: LearnerConfig) -> LossOptions:
    return LossOptions(**{f.name: getattr(config, f.name) for f in fields(LossOptions)})


def _check_fit(policy: Policy, config: LearnerConfig) -> None:
    """Refuse settings that this policy would silently ignore."""
    spec = policy.spec
    if not config.groups and not spec.has_value:
        raise ConfigError(
            f"algorithm = {config.algorithm!r} needs a policy with a value head; set policy.value_head = true and "
            "clone it anew, or use an algorithm with groups"
        )
    if config.entropy_bonus and not spec.has_entropy:
        raise ConfigError(
            f"entropy_bonus = {config.entropy_bonus}, but the entropy of this {spec.family} does not depend on its "
            "weights; set it to 0"
        )
    if spec.chunk_only and config.ratio_level not in ("auto", "chunk"):
        raise ConfigError(
            f"ratio_level = {config.ratio_level!r}; expected 'chunk', the only level of this {spec.family}"
        )


def _value_metrics(batch: Batch) -> dict[str, float]:
    """How well the value head explains what came of the chunks; 1 is perfect, 0 no better than their mean."""
    if batch.values is None:
        return {}
    error = (batch.values.target - batch.values.estimate).var(correction=0)
    spread = batch.values.target.var(correction=0).clamp(min=1e-12)
    return {
        "value_mean": float(batch.values.estimate.mean()),
        "value_target_mean": float(batch.values.target.mean()),
        "value_explained": float(1.0 - error / spread),
    }


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


def _summary(steps: list[dict[str, Tensor]]) -> dict[str, float]:
    """Means over the optimiser steps; the skipped ones are counted, the ratio gap is the first step's."""
    gap = float(steps[0].pop("ratio_gap"))
    out = {name: float(torch.stack([step[name].cpu() for step in steps]).mean()) for name in steps[0]}
    out["skipped_steps"] *= len(steps)
    # Negative: no row of the first minibatch was made by exactly the current weights.
    return out | ({"ratio_gap": gap} if gap >= 0 else {})
