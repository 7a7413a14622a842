"""Every loss and its gradient against an independent float64 reference in plain Python, on hand-made batches."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError, DvlaError
from services.learner.losses.registry import ALGORITHMS, build_loss
from services.learner.losses.terms import LossOptions, LossTerms

Floats = npt.NDArray[np.float64]
ROWS, TERMS = 5, 3


@dataclass
class Case:
    """Log-probabilities [5, 3] and values [5], drawn around each other; fields are those of LossTerms."""

    current: Floats
    behaviour: Floats
    proximal: Floats | None
    advantage: Floats
    mask: npt.NDArray[np.bool_]
    weight: Floats
    reference: Floats
    entropy: Floats
    value: Floats
    old_value: Floats
    target: Floats

    def terms(self) -> LossTerms:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: None if a is None else torch.tensor(a) for name, a in given.items()}
        for name in ("current", "value", "entropy"):
            tensor = tensors[name]
            assert tensor is not None
            tensor.requires_grad_()
        return LossTerms(**tensors)  # type: ignore[arg-type]


def case(seed: int, decoupled: bool) -> Case:
    rng = np.random.default_rng(seed)
    shape = (ROWS, TERMS)
    behaviour = rng.normal(-2, 1, shape)
    old_value = rng.normal(0, 1, ROWS)
    return Case(
        current=behaviour + rng.normal(0, 0.6, shape),
        behaviour=behaviour,
        proximal=behaviour + rng.normal(0, 0.5, shape) if decoupled else None,
        advantage=rng.normal(0, 1, ROWS),
        mask=rng.random(shape) < 0.7,
        weight=rng.random(shape),
        reference=behaviour + rng.normal(0, 0.6, shape),
        entropy=rng.normal(2, 1, shape),
        value=old_value + rng.normal(0, 0.4, ROWS),
        old_value=old_value,
        target=old_value + rng.normal(0, 1, ROWS),
    )


def expected(algorithm: str, c: Case, o: LossOptions) -> tuple[float, Floats, Floats]:
    """Loss, gradient by the current log-probabilities, gradient by the values: term by term from the formulas."""
    loss, by_current, by_value = 0.0, np.zeros((ROWS, TERMS)), np.zeros(ROWS)
    for i, j in zip(*np.nonzero(c.mask), strict=True):
        cur, beh, adv, weight = c.current[i, j], c.behaviour[i, j], c.advantage[i], c.weight[i, j]
        if algorithm == "rloo":
            importance = min(math.exp(cur - beh), o.importance_cap)
            loss -= weight * importance * adv * cur
            by_current[i, j] -= weight * importance * adv
        else:
            anchor = beh if c.proximal is None else c.proximal[i, j]
            importance = 1.0 if c.proximal is None else min(math.exp(anchor - beh), o.importance_cap)
            ratio = math.exp(cur - anchor)
            held = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
            objective, moves = min(ratio * adv, held * adv), ratio * adv <= held * adv
            if o.dual_clip and adv < 0 and objective < o.dual_clip * adv:
                objective, moves = o.dual_clip * adv, False
            loss -= weight * importance * objective
            by_current[i, j] -= weight * importance * ratio * adv * moves
        gap = c.reference[i, j] - cur
        loss += o.kl_weight * weight * (math.exp(gap) - gap - 1) - o.entropy_bonus * weight * c.entropy[i, j]
        by_current[i, j] += o.kl_weight * weight * (1 - math.exp(gap))
    if algorithm == "ppo":
        for i in range(ROWS):
            share = float((c.weight[i] * c.mask[i]).sum()) * o.value_weight
            free, near = c.value[i] - c.target[i], math.inf
            if o.value_clip:
                change = min(max(c.value[i] - c.old_value[i], -o.value_clip), o.value_clip)
                near = c.old_value[i] + change - c.target[i]
            larger = free if not o.value_clip or free**2 >= near**2 else near
            loss += share * 0.5 * larger**2
            inside = abs(c.value[i] - c.old_value[i]) <= o.value_clip
            by_value[i] += share * larger * (larger == free or inside)
    return loss, by_current, by_value


OPTIONS = (
    LossOptions(0.2, 0.2),
    LossOptions(0.2, 0.28, kl_weight=0.1, entropy_bonus=0.02),
    LossOptions(0.1, 0.5, dual_clip=1.5, value_clip=0.2),
    LossOptions(0.2, 0.28, dual_clip=3.0, importance_cap=1.1, kl_weight=1.0, value_weight=2.0),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("decoupled", [False, True])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10)
def test_loss_and_gradient_equal_the_reference(
    algorithm: str, options: LossOptions, decoupled: bool, seed: int
) -> None:
    made = case(seed, decoupled)
    terms = made.terms()
    result = build_loss(algorithm, options)(terms)
    result.loss.backward()
    loss, by_current, by_value = expected(algorithm, made, options)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert terms.current.grad is not None
    np.testing.assert_allclose(terms.current.grad.numpy(), by_current, rtol=1e-6, atol=1e-9)
    if algorithm == "ppo":
        assert terms.value is not None
        assert terms.value.grad is not None
        np.testing.assert_allclose(terms.value.grad.numpy(), by_value, rtol=1e-6, atol=1e-9)
    assert terms.entropy is not None
    if options.entropy_bonus:
        assert terms.entropy.grad is not None
        wanted = np.where(made.mask, -options.entropy_bonus * made.weight, 0.0)
        np.testing.assert_allclose(terms.entropy.grad.numpy(), wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e30])
def test_masked_terms_change_neither_loss_nor_gradient(algorithm: str, poison: float) -> None:
    clean = case(3, decoupled=True)
    dirty = replace(clean)
    for name in ("current", "behaviour", "proximal", "reference", "entropy"):
        setattr(dirty, name, np.where(clean.mask, getattr(clean, name), poison))
    results, gradients = [], []
    for each in (clean, dirty):
        terms = each.terms()
        result = build_loss(algorithm, LossOptions(dual_clip=3.0, entropy_bonus=0.1, kl_weight=0.3))(terms)
        result.loss.backward()
        assert terms.current.grad is not None
        results.append([float(result.loss.detach()), *(float(value) for value in result.metrics.values())])
        gradients.append(terms.current.grad)
    assert results[0] == results[1]
    assert torch.equal(gradients[0], gradients[1])
    assert not gradients[1][~torch.from_numpy(clean.mask)].any()


def test_divergence_is_zero_at_the_reference_and_pulls_back_to_it() -> None:
    for offset, sign in ((0.0, 0.0), (0.5, 1.0), (-0.5, -1.0)):
        made = replace(case(1, False), advantage=np.zeros(ROWS), mask=np.ones((ROWS, TERMS), np.bool_))
        made.reference = made.current - offset
        terms = made.terms()
        result = build_loss("grpo", LossOptions(kl_weight=1.0))(terms)
        result.loss.backward()
        assert terms.current.grad is not None
        assert torch.equal(terms.current.grad.sign(), torch.full((ROWS, TERMS), sign, dtype=torch.float64))
        assert (float(result.metrics["reference_kl"]) > 0) == bool(offset)


def test_importance_weights_of_rloo_carry_no_gradient_and_are_cut_off() -> None:
    made = replace(case(2, False), mask=np.ones((ROWS, TERMS), np.bool_))
    made.behaviour = made.current - 5.0
    terms = made.terms()
    result = build_loss("rloo", LossOptions(importance_cap=1.5))(terms)
    result.loss.backward()
    assert terms.current.grad is not None
    np.testing.assert_allclose(terms.current.grad.numpy(), -1.5 * made.weight * made.advantage[:, None])
    total = float(made.weight.sum())
    assert float(result.metrics["importance_mean"]) == pytest.approx(1.5 * total)
    assert float(result.metrics["clip_fraction"]) == pytest.approx(total)


def test_ppo_without_values_says_so() -> None:
    terms = replace(case(1, False).terms(), value=None)
    with pytest.raises(DvlaError, match="values and targets"):
        build_loss("ppo", LossOptions())(terms)


def test_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="grpo, rloo, ppo"):
        build_loss("ppg", LossOptions())
