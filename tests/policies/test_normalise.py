import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from services.common.errors import ConfigError, InvalidInput
from services.policies.noise import RowNoise
from services.policies.normalise import STATE_CLIP, Normaliser
from services.policies.sft import fit_normalisation
from tests.policies.toys import ACTION, CHUNK, STATE, inputs_for, keys, make_policy

random = np.random.default_rng(0)


def demonstrations() -> tuple[np.ndarray, np.ndarray]:
    """States and actions with an ordinary, a constant and a nearly constant dimension each."""
    states = random.normal(0, 0.2, (500, STATE)).astype(np.float32)
    states[:, 1] = 0.3
    states[:, 2] = 0.02 + 1e-6 * states[:, 2]
    actions = random.uniform(-1, 1, (500, ACTION)).astype(np.float32)
    actions[:, 1] = -1.0
    actions[:, 2] = 0.0005 * actions[:, 2]
    return states, actions


def test_flat_dimensions_are_floored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """S08: bounded normalised values and an exact inverse, whatever a dimension's spread."""
    states, actions = demonstrations()
    normaliser = Normaliser(STATE, ACTION)
    with caplog.at_level(logging.WARNING):
        normaliser.fit(states, actions, "quantile")
    assert "state dimensions [1 2]" in caplog.text
    assert "action dimensions [1 2]" in caplog.text
    assert normaliser.state(torch.from_numpy(states)).abs().max() < STATE_CLIP
    normalised = normaliser.action(torch.from_numpy(actions))
    assert normalised.abs().max() < 1.1
    assert torch.allclose(normaliser.denormalise_action(normalised), torch.from_numpy(actions), atol=1e-6)


@pytest.mark.parametrize("head", [{"family": "tiny-oft"}, {"family": "tiny-flow"}, {"action_norm": "meanstd"}])
def test_a_training_step_on_flat_dimensions_is_finite(head: dict[str, Any]) -> None:
    """S08."""
    policy = make_policy(**head)
    states, actions = demonstrations()
    fit_normalisation(policy, states, actions)
    chunks = torch.from_numpy(actions[: 8 * CHUNK].reshape(8, CHUNK, ACTION))
    inputs = policy.preprocess({"state": states[:8]}, ["go"] * 8)
    loss = policy.sft_loss(inputs, chunks, torch.ones(8, CHUNK), RowNoise(keys(8)))
    loss.sum().backward()
    assert loss.max() < 50
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


def test_a_state_far_from_the_demonstrations_stays_bounded() -> None:
    policy = make_policy()
    fit_normalisation(policy, *demonstrations())
    far = policy.preprocess({"state": np.full((1, STATE), 1e6, np.float32)}, ["go"])["state"]
    assert far.abs().max() == STATE_CLIP


def test_rare_values_that_quantiles_miss_stay_in_range() -> None:
    """A gripper that closes in 0.5 % of the steps: q01 = q99, but closing must be expressible."""
    actions = random.uniform(-1, 1, (1000, ACTION)).astype(np.float32)
    actions[:, 2] = np.where(np.arange(1000) < 5, -1.0, 1.0)
    normaliser = Normaliser(0, ACTION)
    normaliser.fit(None, actions, "quantile")
    assert normaliser.action(torch.from_numpy(actions))[:, 2].unique().tolist() == [-1.0, 1.0]


@settings(max_examples=40)
@given(
    arrays(np.float32, (20, ACTION), elements=st.floats(-100, 100, width=32)), st.sampled_from(["quantile", "meanstd"])
)
def test_normalising_has_an_inverse(actions: np.ndarray, method: str) -> None:
    normaliser = Normaliser(0, ACTION)
    normaliser.fit(None, actions, "quantile" if method == "quantile" else "meanstd")
    there = normaliser.action(torch.from_numpy(actions))
    assert torch.isfinite(there).all()
    back = normaliser.denormalise_action(there)
    assert torch.allclose(back, torch.from_numpy(actions), atol=1e-4, rtol=1e-4)


def test_statistics_travel_with_the_weights() -> None:
    policy, other = make_policy(), make_policy(seed=1)
    fit_normalisation(policy, *demonstrations())
    other.load_state(policy.trainable_state())
    inputs = inputs_for(policy, 2)
    actions = policy.act(inputs, "eval", RowNoise(keys(2))).actions
    assert np.array_equal(policy.postprocess(actions), other.postprocess(actions))
    assert policy.postprocess(actions).dtype == np.float32


def test_statistics_of_bad_arrays_are_refused() -> None:
    policy = make_policy()
    states, actions = demonstrations()
    for wrong in (actions[:, :2], actions[0], actions[:0], np.full_like(actions, np.nan)):
        with pytest.raises(InvalidInput, match="action statistics"):
            fit_normalisation(policy, states, wrong)
    with pytest.raises(InvalidInput, match="no states"):
        fit_normalisation(policy, None, actions)


def test_a_policy_with_statistics_of_its_own_says_so() -> None:
    policy = make_policy()
    del policy.normaliser
    with pytest.raises(ConfigError, match="statistics of its own"):
        fit_normalisation(policy, *demonstrations())
