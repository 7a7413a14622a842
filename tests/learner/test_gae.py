"""Advantages over chunks: a naive float64 reference, and where value passes over an episode's end (S02, S03)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner import gae


def naive(
    rewards: list[list[float]], values: list[float], bootstrap: float, discount: float, gae_lambda: float
) -> list[float]:
    """One episode: the sum of lambda-weighted n-chunk advantages, written from the definition of the deltas."""
    chunk = [math.fsum(discount**j * r for j, r in enumerate(steps)) for steps in rewards]
    following = [*values[1:], bootstrap]
    decay = [discount ** len(steps) for steps in rewards]
    delta = [r + d * v - own for r, d, v, own in zip(chunk, decay, following, values, strict=True)]
    out = []
    for start in range(len(delta)):
        factor, total = 1.0, 0.0
        for k in range(start, len(delta)):
            total += factor * delta[k]
            factor *= decay[k] * gae_lambda
        out.append(total)
    return out


@given(data=st.data())
@settings(max_examples=60)
def test_equals_the_naive_reference_for_episodes_of_any_length(data: st.DataObject) -> None:
    chunk = data.draw(st.integers(1, 4))
    number = st.floats(-3, 3, width=32)
    discount, gae_lambda = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    episodes, reward, executed, owner = [], [], [], []
    for index in range(data.draw(st.integers(1, 4))):
        counts = [chunk] * data.draw(st.integers(0, 3)) + [data.draw(st.integers(1, chunk))]
        steps = [[data.draw(number) for _ in range(count)] for count in counts]
        episodes.append((steps, [data.draw(number) for _ in counts], data.draw(number)))
        reward += [row + [99.0] * (chunk - len(row)) for row in steps]  # what is beyond the end must not count
        executed += counts
        owner += [index] * len(counts)
    got = gae.advantages(
        torch.tensor(reward),
        torch.tensor(executed),
        torch.tensor([v for _, values, _ in episodes for v in values]),
        torch.tensor(owner),
        torch.tensor([bootstrap for _, _, bootstrap in episodes]),
        discount,
        gae_lambda,
    )
    wanted = [a for steps, values, end in episodes for a in naive(steps, values, end, discount, gae_lambda)]
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_only_a_truncated_episode_gets_a_bootstrap() -> None:
    """S03: V = 1 and gamma = .9; ended by success, by the limit, by both. Chunks of one step, one chunk each."""
    got = gae.advantages(
        reward=torch.zeros(3, 1),
        executed=torch.ones(3, dtype=torch.long),
        value=torch.zeros(3),
        episode=torch.arange(3),
        bootstrap=torch.tensor([0.0, 1.0, 0.0]),  # as `bootstrap_values` gives them
        discount=0.9,
        gae_lambda=0.95,
    )
    assert got.tolist() == pytest.approx([0.0, 0.9, 0.0])


def test_the_bootstrap_is_discounted_by_the_steps_that_were_executed() -> None:
    got = gae.advantages(
        reward=torch.tensor([[1.0, 1.0, 7.0]]),
        executed=torch.tensor([2]),
        value=torch.tensor([0.5]),
        episode=torch.tensor([0]),
        bootstrap=torch.tensor([4.0]),
        discount=0.5,
        gae_lambda=1.0,
    )
    assert got.tolist() == pytest.approx([1 + 0.5 + 0.25 * 4 - 0.5])


def test_normalised_over_the_whole_batch() -> None:
    got = gae.normalised(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    assert float(got.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(got.square().mean()) == pytest.approx(1.0)
    assert gae.normalised(torch.full((4,), 0.35, dtype=torch.float64)).abs().max() < 1e-6
