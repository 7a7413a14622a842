from typing import Any

import pytest
import torch

from services.policies.noise import RowNoise
from services.policies.oft import BINS, TinyOft
from tests.policies.toys import act, inputs_for, keys, make_policy


def make_oft(**settings: Any) -> TinyOft:
    policy = make_policy(family="tiny-oft", **settings)
    assert isinstance(policy, TinyOft)
    return policy


def test_actions_are_the_centres_of_the_recorded_tokens() -> None:
    policy = make_oft()
    acted = act(policy, inputs_for(policy, 6), list(range(6)))
    assert torch.equal(acted.actions, policy.centres[acted.record["tokens"].long()])
    assert len(set(policy.centres.tolist())) == BINS
    assert policy.centres[0] == pytest.approx(-1 + 1 / 256)


def test_tokens_are_never_derived_from_actions() -> None:
    """Statistics that change between acting and scoring move the actions, and must not move the log-probability."""
    policy = make_oft()
    inputs = inputs_for(policy, 6)
    acted = act(policy, inputs, list(range(6)))
    policy.normaliser.action_scale.mul_(3.0)
    policy.normaliser.action_centre.add_(0.4)
    assert torch.allclose(policy.evaluate(inputs, acted.record).log_prob, acted.log_prob, atol=1e-5)


def test_samples_follow_the_tempered_softmax() -> None:
    policy = make_oft(temperature=0.5)
    inputs = inputs_for(policy, 1)
    rows = {name: tensor.expand(1000, *tensor.shape[1:]) for name, tensor in inputs.items()}
    tokens = policy.act(rows, "train", RowNoise(keys(1000))).record["tokens"].long()
    with torch.no_grad():
        probabilities = (policy._logits(policy._decode(inputs))[0, 0, 0] / 0.5).softmax(-1)
    frequencies = tokens[:, 0, 0].bincount(minlength=BINS) / 1000
    assert (frequencies.cumsum(0) - probabilities.cumsum(0)).abs().max() < 0.062  # Kolmogorov-Smirnov, p = 0.001


def test_evaluation_takes_the_likeliest_token() -> None:
    policy = make_oft()
    inputs = inputs_for(policy, 3)
    acted = policy.act(inputs, "eval", RowNoise(keys(3)))
    with torch.no_grad():
        logits = policy._logits(policy._decode(inputs))
    assert torch.equal(acted.record["tokens"].long(), logits.argmax(-1))


def test_scoring_uses_the_recorded_temperature() -> None:
    policy, other = make_oft(), make_oft(temperature=1.7)
    inputs = inputs_for(policy, 4)
    acted = act(other, inputs, [0, 1, 2, 3])
    assert (policy.evaluate(inputs, acted.record).log_prob - acted.log_prob).abs().max() < 1e-5


def test_tokens_are_independent_given_the_observation() -> None:
    """So that unexecuted tokens can be masked exactly: changing them leaves the other log-probabilities alone."""
    policy = make_oft()
    inputs = inputs_for(policy, 2)
    record = act(policy, inputs, [0, 1]).record
    changed = record | {"tokens": record["tokens"].clone()}
    changed["tokens"][:, 2:] = 7
    before, after = (policy.evaluate(inputs, r).log_prob for r in (record, changed))
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_imitation_targets_centre_on_the_action(spread: float) -> None:
    policy = make_oft(token_spread=spread)
    targets = policy._targets(torch.tensor([[[0.5, -0.25, 9.0]]]))[0, 0]
    assert targets.sum(-1) == pytest.approx(torch.ones(3))
    means = (targets * policy.centres).sum(-1)
    assert means[:2].tolist() == pytest.approx([0.5, -0.25], abs=0.01)
    assert targets[2].argmax() == BINS - 1  # beyond the range: the last bin
