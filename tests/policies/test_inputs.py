import numpy as np
import pytest
import torch

from services.common.errors import InvalidInput
from services.policies.backbone import scale_image
from services.policies.noise import RowNoise
from services.policies.tiny import TinyPolicy
from tests.policies.toys import HEADS, INSTRUCTION, STATE, inputs_for, keys, make_policy, observe


def test_images_span_exactly_minus_one_to_one() -> None:
    """S07: black, white and a gradient; never outside, never scaled twice."""
    black, white = torch.zeros(1, 4, 4, 3, dtype=torch.uint8), torch.full((1, 4, 4, 3), 255, dtype=torch.uint8)
    assert scale_image(black).unique().tolist() == [-1.0]
    assert scale_image(white).unique().tolist() == [1.0]
    ramp = scale_image(torch.arange(256, dtype=torch.uint8))
    assert torch.all(ramp.diff() > 0)
    assert ramp.mean().abs() < 1e-6


def test_images_reach_the_network_upright_and_unpadded() -> None:
    """S07: a bright corner shows up in the patch token of that corner, and in no other."""
    policy = make_policy(**HEADS["oft-rgb"])
    assert isinstance(policy, TinyPolicy)
    stem = policy.backbone.embedding.stem
    dark = np.zeros((1, 16, 16, 3), np.uint8)
    lit = dark.copy()
    lit[0, :2, -2:] = 255  # rows first: the top right corner
    state = np.zeros((1, STATE), np.float32)
    a, b = (policy.preprocess({"state": state, "rgb/top": image}, [INSTRUCTION])["rgb/top"] for image in (dark, lit))
    changed = (stem(scale_image(a).permute(0, 3, 1, 2)) - stem(scale_image(b).permute(0, 3, 1, 2))).abs().sum(1)[0]
    assert changed.shape == (2, 2)
    assert changed.argmax() == 1
    assert changed[1, 0] == 0


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((2, 3, 16, 16), np.uint8),
        np.zeros((2, 16, 16, 3), np.float32),
        np.zeros((2, 16, 20, 3), np.uint8),
        np.zeros((2, 32, 32, 3), np.uint8),
        np.zeros((1, 16, 16, 3), np.uint8),
        np.zeros((2, 16, 16, 4), np.uint8),
    ],
    ids=["channels first", "float", "not square", "too large", "too few rows", "four channels"],
)
def test_wrong_frames_are_refused_with_the_expected_shape(image: np.ndarray) -> None:
    """S07: never a silent cast, transpose or resize."""
    policy = make_policy(**HEADS["oft-rgb"])
    observation = {"state": np.zeros((2, STATE), np.float32), "rgb/top": image}
    with pytest.raises(InvalidInput, match=r"rgb/top is .*expected uint8\(2, 16, 16, 3\)"):
        policy.preprocess(observation, [INSTRUCTION] * 2)


@pytest.mark.parametrize("state", [np.zeros((2, STATE)), np.zeros((2, STATE + 1), np.float32)])
def test_wrong_states_are_refused(state: np.ndarray) -> None:
    policy = make_policy()
    with pytest.raises(InvalidInput, match=rf"expected float32\(2, {STATE}\)"):
        policy.preprocess({"state": state}, [INSTRUCTION] * 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_states_that_are_not_finite_are_refused_by_row(bad: float) -> None:
    policy = make_policy()
    observation = observe(policy, 4)
    observation["state"][2, 1] = bad
    with pytest.raises(InvalidInput, match=r"not finite in rows \[2\]"):
        policy.preprocess(observation, [INSTRUCTION] * 4)


def test_missing_tensors_are_named() -> None:
    with pytest.raises(InvalidInput, match="state is missing"):
        make_policy().preprocess({"stats": np.zeros((1, STATE), np.float32)}, [INSTRUCTION])


def test_long_instructions_are_refused_rather_than_cut() -> None:
    policy = make_policy(instruction_bytes=20)
    policy.preprocess(observe(policy, 1), ["ä" * 10])
    with pytest.raises(InvalidInput, match="21 bytes, the policy reads 20"):
        policy.preprocess(observe(policy, 1), ["ä" * 10 + "b"])


@pytest.mark.parametrize("head", ["oft", "sde", "noise-mean"])
def test_the_instruction_conditions_the_actions(head: str) -> None:
    policy = make_policy(**HEADS[head])
    actions = [
        policy.act(inputs_for(policy, 2, text), "eval", RowNoise(keys(2))).actions
        for text in ("push the red cube", "push the red cubf", "")
    ]
    assert not torch.allclose(actions[0], actions[1], atol=1e-5) or head == "oft"
    log_probs = []
    record = policy.act(inputs_for(policy, 2, ""), "train", RowNoise(keys(2))).record
    for text in ("push the red cube", "push the red cubf", "ush the red cubep"):
        log_probs.append(policy.evaluate(inputs_for(policy, 2, text), record).log_prob)
    assert (log_probs[0] - log_probs[1]).abs().max() > 1e-4
    assert (log_probs[0] - log_probs[2]).abs().max() > 1e-4


@pytest.mark.parametrize("head", HEADS)
def test_every_weight_of_the_inputs_gets_a_gradient(head: str) -> None:
    """Nothing that a policy claims to read is cut off from its output."""
    policy = make_policy(**HEADS[head])
    inputs = inputs_for(policy, 4)
    scored = policy.evaluate(inputs, policy.act(inputs, "train", RowNoise(keys(4))).record)
    (scored.log_prob.sum() + (0 if scored.value is None else scored.value.sum())).backward()
    unread = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    last = "backbone.blocks.1."
    if policy.spec.family == "tiny-flow":  # only the last block's keys and values are read
        unread = [name for name in unread if not name.startswith(last)]
    assert unread == []
