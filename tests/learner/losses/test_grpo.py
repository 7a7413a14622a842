"""The clipped objective against a float64 reference in plain Python, its gradient, and its masks."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner.losses.grpo import grpo_loss
from services.learner.losses.terms import LossOptions, LossTerms, at_level, mean_at_level, term_mask, term_weights


def term(c: float, b: float, p: float | None, a: float, options: LossOptions) -> float:
    """The objective of one term, written from the formulas."""
    importance = 1.0 if p is None else min(math.exp(p - b), options.importance_cap)
    ratio = math.exp(c - (b if p is None else p))
    held = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
    objective = min(ratio * a, held * a)
    if options.dual_clip and a < 0:
        objective = max(objective, options.dual_clip * a)
    return float(importance * objective)


@dataclass
class Case:
    """A hand-made batch in float64."""

    current: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray | None
    advantage: np.ndarray
    mask: np.ndarray
    weight: np.ndarray

    def terms(self) -> LossTerms:
        t = torch.from_numpy
        return LossTerms(
            current=t(self.current).requires_grad_(),
            behaviour=t(self.behaviour),
            proximal=None if self.proximal is None else t(self.proximal),
            advantage=t(self.advantage),
            mask=t(self.mask),
            weight=t(self.weight),
        )

    def loss(self, options: LossOptions) -> float:
        total = 0.0
        for i, j in zip(*np.nonzero(self.mask), strict=True):
            p = None if self.proximal is None else float(self.proximal[i, j])
            value = term(self.current[i, j], self.behaviour[i, j], p, self.advantage[i], options)
            total -= self.weight[i, j] * value
        return total


def case(seed: int, decoupled: bool) -> Case:
    rng = np.random.default_rng(seed)
    behaviour = rng.normal(-2, 1, (5, 3))
    proximal = behaviour + rng.normal(0, 0.5, (5, 3)) if decoupled else None
    return Case(
        current=behaviour + rng.normal(0, 0.6, (5, 3)),
        behaviour=behaviour,
        proximal=proximal,
        advantage=rng.normal(0, 1, 5),
        mask=rng.random((5, 3)) < 0.7,
        weight=rng.random((5, 3)),
    )


OPTIONS = (
    LossOptions(0.2, 0.2),
    LossOptions(0.2, 0.28),
    LossOptions(0.1, 0.5, dual_clip=1.5),
    LossOptions(0.2, 0.28, dual_clip=3.0, importance_cap=1.1),
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("decoupled", [False, True])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_loss_and_gradient_match_the_reference(options: LossOptions, decoupled: bool, seed: int) -> None:
    given_case = case(seed, decoupled)
    terms = given_case.terms()
    result = grpo_loss(terms, options)
    assert float(result.loss.detach()) == pytest.approx(given_case.loss(options), rel=1e-9, abs=1e-12)

    result.loss.backward()
    assert terms.current.grad is not None
    step = 1e-6
    for i, j in ((0, 0), (2, 1), (4, 2)):
        moved = replace(given_case, current=given_case.current.copy())
        moved.current[i, j] += step
        up = moved.loss(options)
        moved.current[i, j] -= 2 * step
        slope = (up - moved.loss(options)) / (2 * step)
        assert float(terms.current.grad[i, j]) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_dual_clip_bounds_a_bad_action_that_became_likely() -> None:
    terms = LossTerms(
        current=torch.tensor([[3.0]], requires_grad=True),
        behaviour=torch.zeros(1, 1),
        proximal=None,
        advantage=torch.tensor([-1.0]),
        mask=torch.ones(1, 1, dtype=torch.bool),
        weight=torch.ones(1, 1),
    )
    assert float(grpo_loss(terms, LossOptions()).loss.detach()) == pytest.approx(math.exp(3), rel=1e-5)
    assert float(grpo_loss(terms, LossOptions(dual_clip=3.0)).loss.detach()) == pytest.approx(3.0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30, -1e30])
def test_masked_terms_change_neither_loss_nor_gradient(poison: float) -> None:
    clean = case(3, decoupled=True)
    dirty = replace(clean, current=clean.current.copy(), behaviour=clean.behaviour.copy())
    assert clean.proximal is not None
    dirty.proximal = clean.proximal.copy()
    for array in (dirty.current, dirty.behaviour, dirty.proximal):
        array[~clean.mask] = poison
    results: list[list[float]] = []
    gradients: list[torch.Tensor] = []
    for each in (clean, dirty):
        terms = replace(each.terms(), entropy=torch.from_numpy(np.where(each.mask, 1.0, each.current)))
        result = grpo_loss(terms, LossOptions(dual_clip=3.0, entropy_bonus=0.1))
        result.loss.backward()
        results.append([float(result.loss.detach()), *(float(value) for value in result.metrics.values())])
        assert terms.current.grad is not None
        gradients.append(terms.current.grad)
    assert results[0] == results[1]
    assert torch.equal(gradients[0], torch.nan_to_num(gradients[1], nan=1e9))
    assert not gradients[1][~torch.from_numpy(clean.mask)].any()


def test_levels_sum_the_unmasked_only() -> None:
    values = torch.arange(12.0).view(1, 3, 4)
    values[0, 2] = float("nan")
    mask = torch.tensor([[True, True, False]])
    assert at_level(values, mask, "token").tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0]]
    assert at_level(values, mask, "action").tolist() == [[6, 22, 0]]
    assert at_level(values, mask, "chunk").tolist() == [[28]]
    assert mean_at_level(values, mask, "chunk").tolist() == [[3.5]]
    assert mean_at_level(values, mask, "action").tolist() == [[1.5, 5.5, 0.0]]
    assert term_mask(mask, 4, "token").tolist() == [[True] * 8 + [False] * 4]
    assert term_mask(mask, 4, "action").tolist() == mask.tolist()
    assert term_mask(mask, 4, "chunk").tolist() == [[True]]


def test_weights_per_trajectory_and_per_token() -> None:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    episode = torch.tensor([0, 0, 2])  # episode 1 has no rows
    assert term_weights(mask, episode, "token").tolist() == [[1, 1], [1, 0], [1, 1]]
    weights = term_weights(mask, episode, "trajectory")
    torch.testing.assert_close(weights, torch.tensor([[1 / 3, 1 / 3], [1 / 3, 0], [0.5, 0.5]]))
