"""Acting and scoring agree: same weights, same log-probability, whatever the batch."""

import pytest
import torch

from services.policies.base import Policy
from services.policies.noise import RowNoise
from tests.policies.toys import HEADS, act, inputs_for, keys, make_policy, take, through_numpy

ROWS = list(range(8))


@pytest.fixture(params=HEADS)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(**HEADS[request.param])


def test_scores_what_it_acted(policy: Policy) -> None:
    inputs = inputs_for(policy, 8)
    acted = act(policy, inputs, ROWS)
    scored = policy.evaluate(inputs, through_numpy(policy, acted.record))
    assert acted.log_prob.dtype == torch.float32
    assert acted.log_prob.shape == scored.log_prob.shape == acted.actions.shape
    assert torch.isfinite(scored.log_prob).all()
    assert (scored.log_prob - acted.log_prob).abs().max() < 1e-5
    assert scored.log_prob.requires_grad
    if acted.value is not None and scored.value is not None:
        assert acted.value.shape == (8,)
        assert (scored.value - acted.value).abs().max() < 1e-5
    assert (acted.value is None) == (not policy.spec.config["value_head"])


def test_the_batch_does_not_matter(policy: Policy) -> None:
    inputs = inputs_for(policy, 8)
    whole = act(policy, inputs, ROWS)
    scored = policy.evaluate(inputs, whole.record)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    moved = act(policy, inputs, order)
    assert (moved.actions - whole.actions[order]).abs().max() < 1e-5
    assert (moved.log_prob - whole.log_prob[order]).sum((1, 2)).abs().max() < 1e-4
    for row in (0, 5):
        alone = act(policy, inputs, [row])
        assert (alone.actions - whole.actions[row]).abs().max() < 1e-5
        single = policy.evaluate(take(inputs, [row]), take(whole.record, [row]))
        assert (single.log_prob - scored.log_prob[row]).sum().abs() < 1e-4


def test_training_mode_of_the_module_does_not_matter(policy: Policy) -> None:
    inputs = inputs_for(policy, 8)
    acted = act(policy.eval(), inputs, ROWS)
    ratio = (policy.train().evaluate(inputs, acted.record).log_prob - acted.log_prob).sum((1, 2)).exp()
    assert (ratio - 1).abs().max() < 1e-4


def test_evaluation_actions_are_repeatable_and_storable(policy: Policy) -> None:
    inputs = inputs_for(policy, 4)
    first, second = (policy.act(inputs, "eval", RowNoise(keys(4))) for _ in range(2))
    assert torch.equal(first.actions, second.actions)
    through_numpy(policy, first.record)


def test_entropy_is_the_mean_of_entropies(policy: Policy) -> None:
    inputs = inputs_for(policy, 3)
    scored = policy.evaluate(inputs, act(policy, inputs, [0, 1, 2]).record)
    assert scored.entropies.shape == scored.log_prob.shape
    assert torch.allclose(scored.entropy, scored.entropies.mean((1, 2)))


@pytest.mark.parametrize("head", ["oft", "sde", "noise-mean"])
def test_bfloat16_scores_its_own_actions_in_float32(head: str) -> None:
    policy = make_policy(dtype="bfloat16", **HEADS[head])
    inputs = inputs_for(policy, 8)
    acted = act(policy, inputs, ROWS)
    scored = policy.evaluate(inputs, acted.record)
    assert acted.log_prob.dtype == scored.log_prob.dtype == torch.float32
    assert (scored.log_prob - acted.log_prob).abs().max() < 1e-5
    assert all(parameter.dtype == torch.bfloat16 for parameter in policy.parameters())
    assert all(buffer.dtype == torch.float32 for buffer in policy.buffers())


@pytest.mark.parametrize("head", HEADS)
def test_log_prob_gradient_matches_finite_differences(head: str) -> None:
    policy = make_policy(**HEADS[head]).double()
    inputs = inputs_for(policy, 2)
    record = act(policy, inputs, [0, 1]).record
    parameters = list(policy.parameters())
    policy.evaluate(inputs, record).log_prob.sum().backward()
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, direction, strict=True) if p.grad is not None)

    def shifted(step: float) -> torch.Tensor:
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.add_(step * d)
            value = policy.evaluate(inputs, record).log_prob.sum()
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.sub_(step * d)
        return value

    numeric = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
    assert abs(numeric - slope) < 1e-5 * abs(numeric)
