import math

import pytest
import torch

from services.policies.flow import TinyFlow, gaussian_log_prob, sde_step
from services.policies.noise import RowNoise
from tests.policies.toys import act, inputs_for, keys, make_policy

TARGET_MEAN, TARGET_STD = 0.7, 0.4


def exact_velocity(x: torch.Tensor, time: float) -> torch.Tensor:
    """E[noise - data | x_t = x] for data N(TARGET_MEAN, TARGET_STD^2), by the regression of two Gaussians."""
    variance = time**2 + (1 - time) ** 2 * TARGET_STD**2
    slope = (time - (1 - time) * TARGET_STD**2) / variance
    return slope * (x - (1 - time) * TARGET_MEAN) - TARGET_MEAN


def step_of(k: int, steps: int, x: torch.Tensor, level: float) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(x)
    velocity = exact_velocity(x, 1 - k / steps)
    return sde_step(x, velocity, torch.full((count,), k), torch.full((count,), steps), torch.full((count,), level))


@pytest.mark.parametrize(("steps", "expected"), [(4, 0.326), (10, 0.367), (50, 0.395), (1000, TARGET_STD)])
def test_the_sde_keeps_the_marginals_of_an_exact_flow(steps: int, expected: float) -> None:
    """Every step is linear in x, so mean and variance propagate exactly: nothing is sampled."""
    mean, variance = 0.0, 1.0
    for k in range(steps):
        at, std = step_of(k, steps, torch.tensor([[[0.0]], [[1.0]]], dtype=torch.float64), 0.5)
        offset, gain = at[0].item(), (at[1] - at[0]).item()
        mean, variance = offset + gain * mean, gain**2 * variance + std[0].item() ** 2
    assert mean == pytest.approx(TARGET_MEAN, abs=2e-3)
    assert math.sqrt(variance) == pytest.approx(expected, abs=2e-3)


def test_noise_levels_of_four_steps() -> None:
    stds = [step_of(k, 4, torch.zeros(1, 1, 1), 0.5)[1].item() for k in range(4)]
    assert stds == pytest.approx([0.5, 0.433, 0.25, 0.1443], abs=1e-3)


def test_without_noise_the_sde_is_the_ode() -> None:
    x = torch.randn(5, 1, 1)
    mean, std = step_of(1, 4, x, 0.0)
    assert torch.allclose(mean, x - exact_velocity(x, 0.75) / 4)
    assert std.abs().max() == 0


def test_gaussian_log_prob_agrees_with_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    value, mean = (torch.randn(3, 50, dtype=torch.float64, generator=draw) for _ in range(2))
    std = torch.rand(3, 50, dtype=torch.float64, generator=draw) + 0.1
    value, mean, std = value.float(), mean.float(), std.float()
    assert torch.allclose(gaussian_log_prob(value, mean, std), torch.distributions.Normal(mean, std).log_prob(value))


def test_the_random_step_is_drawn_per_row() -> None:
    policy = make_policy(family="tiny-flow")
    inputs = inputs_for(policy, 200)
    steps = act(policy, inputs, list(range(200))).record["step"]
    assert (steps.bincount(minlength=4) - 50).abs().max() < 35


def test_only_the_recorded_step_is_random() -> None:
    """Following the ODE from `after` to the end gives the action, and up to `before` from the initial noise."""
    policy = make_policy(family="tiny-flow")
    assert isinstance(policy, TinyFlow)
    inputs = inputs_for(policy, 16)
    acted = act(policy, inputs, list(range(16)))
    x = RowNoise(keys(16)).normal(4, 3)
    with torch.no_grad():
        context, _ = policy._read(inputs)
        for k, modulation in enumerate(policy._schedule(x)):
            here = (acted.record["step"] == k).view(-1, 1, 1)
            assert torch.allclose(torch.where(here, x, acted.record["before"]), acted.record["before"], atol=1e-6)
            x = torch.where(here, acted.record["after"], x - policy._velocity(x, context, modulation) / 4)
    assert torch.allclose(x, acted.actions, atol=1e-6)


def test_scoring_uses_the_recorded_settings() -> None:
    """A worker that sampled with another step count or noise level is scored by what it did."""
    policy, other = make_policy(family="tiny-flow"), make_policy(family="tiny-flow", denoising_steps=7, noise_level=0.2)
    other.load_state(policy.trainable_state())
    inputs = inputs_for(policy, 4)
    acted = act(other, inputs, [0, 1, 2, 3])
    assert acted.record["steps"].tolist() == [7] * 4
    assert (policy.evaluate(inputs, acted.record).log_prob - acted.log_prob).abs().max() < 1e-5


def test_a_chain_is_scored_by_sum_or_mean_of_its_terms() -> None:
    mean, summed = (make_policy(flow_method="noise", noise_reduction=r) for r in ("mean", "sum"))
    inputs = inputs_for(mean, 4)
    record = act(mean, inputs, [0, 1, 2, 3]).record
    terms = summed.evaluate(inputs, record).log_prob
    assert torch.allclose(mean.evaluate(inputs, record).log_prob * 5, terms, atol=1e-5)


def test_fpo_scores_minus_the_mean_flow_loss_at_the_recorded_draws() -> None:
    policy = make_policy(family="tiny-flow", flow_method="fpo", flow_samples=3)
    inputs = inputs_for(policy, 4)
    act = policy.act(inputs, "train", RowNoise(keys(4)))
    record = act.record
    assert torch.equal(record["action"], act.actions)
    context, _ = policy._read(inputs)  # type: ignore[operator]
    loss = torch.zeros(4)
    for draw in range(3):
        time, noise = record["time"][:, draw], record["noise"][:, draw]
        at = time[:, None, None]
        noisy = at * noise + (1 - at) * act.actions
        velocity = policy._velocity(noisy, context, policy.expert.modulations(time))  # type: ignore[operator, union-attr]
        loss += (velocity - (noise - act.actions)).square().mean((1, 2)).detach() / 3
    torch.testing.assert_close(act.log_prob.sum((1, 2)), -loss, rtol=1e-4, atol=1e-5)
    assert policy.spec.chunk_only
    assert policy.spec.ratio_level == "chunk"
    assert not policy.spec.has_entropy
