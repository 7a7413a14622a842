from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError, InvalidInput
from services.policies.demodata import Demos
from services.policies.noise import RowNoise
from services.policies.sft import SftConfig, train_sft
from tests.policies.toys import ACTION, CHUNK, HEADS, STATE, inputs_for, keys, make_config, make_policy

random = np.random.default_rng(0)


def make_demos(episodes: int = 30, length: int = 10, images: bool = False) -> Demos:
    """Actions that are a function of the state, which stays the same in an episode, and of the instruction."""
    count = episodes * length
    states = random.uniform(-1, 1, (episodes, STATE)).astype(np.float32).repeat(length, axis=0)
    instruction = np.repeat(np.arange(episodes) % 2, length)
    actions = (states[:, :ACTION] * np.where(instruction, -1, 1)[:, None]).astype(np.float32)
    observation: dict[str, np.ndarray] = {"state": states}
    if images:
        observation["rgb/top"] = np.broadcast_to(
            np.uint8(127 * (1 + states[:, :1, None, None])), (count, 16, 16, 3)
        ).copy()
    return Demos(observation, actions, np.repeat(np.arange(episodes), length), instruction, ("go", "mirror"))


@pytest.mark.parametrize("head", ["oft", "sde-dropout", "oft-rgb"])
def test_imitation_reduces_the_loss(head: str) -> None:
    policy = make_policy(**HEADS[head])
    losses: list[float] = []
    config = SftConfig(steps=30, batch=16, lr=3e-3)
    trained = train_sft(policy, make_demos(images="rgb" in head), config, lambda step, loss: losses.append(loss))
    assert trained is policy
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < np.mean(losses[:3]) - 0.1


def test_a_clone_follows_state_and_instruction() -> None:
    policy = train_sft(make_policy(), make_demos(100), SftConfig(steps=120, batch=32, lr=3e-3))
    states = random.uniform(-0.9, 0.9, (64, STATE)).astype(np.float32)
    for instruction, sign in (("go", 1), ("mirror", -1)):
        inputs = policy.preprocess({"state": states}, [instruction] * 64)
        actions = policy.postprocess(policy.act(inputs, "eval", RowNoise(keys(64))).actions)
        assert np.corrcoef(actions[:, 0].ravel(), sign * states[:, :ACTION].ravel())[0, 1] > 0.3  # chance: 0.07


def test_a_seed_fixes_the_result() -> None:
    def weights(seed: int) -> torch.Tensor:
        policy = train_sft(make_policy(), make_demos_once, SftConfig(steps=3, batch=8, seed=seed))
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    make_demos_once = make_demos()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("head", ["oft", "sde", "noise-mean"])
def test_masked_steps_do_not_change_the_gradient(head: str) -> None:
    policy = make_policy(**HEADS[head])
    inputs = inputs_for(policy, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    actions = torch.rand(4, CHUNK, ACTION)
    loss = policy.sft_loss(inputs, actions, mask, RowNoise(keys(4)))
    assert loss.shape == (4,)
    assert loss[3] == 0
    if head == "oft":  # a flow mixes the actions of a chunk while denoising; only the loss itself is masked there
        other = torch.where(mask.bool().unsqueeze(-1), actions, torch.rand(4, CHUNK, ACTION))
        assert torch.equal(loss, policy.sft_loss(inputs, other, mask, RowNoise(keys(4))))


def test_gradients_flow_even_where_a_simulator_switched_them_off() -> None:
    policy = make_policy()
    with torch.no_grad():
        before = [p.clone() for p in policy.parameters()]
        train_sft(policy, make_demos(), SftConfig(steps=1, batch=4))
        assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_demonstrations_that_do_not_fit_are_refused() -> None:
    demos = make_demos()
    with pytest.raises(InvalidInput, match="rgb/top"):
        train_sft(make_policy(**HEADS["oft-rgb"]), demos, SftConfig())
    with pytest.raises(InvalidInput, match=f"{ACTION} action dimensions, the policy 7"):
        train_sft(make_policy(action_dim=7), demos, SftConfig())
    with pytest.raises(ConfigError, match="batch"):
        SftConfig(batch=0)
    assert make_config().action_dim == ACTION


@pytest.mark.parametrize(
    "change", [{"steps": 4}, {"batch": 8}, {"lr": 1e-4}, {"weight_decay": 0.5}, {"clip": 0.01}, {"seed": 1}]
)
def test_every_setting_of_imitation_changes_the_clone(change: dict[str, Any]) -> None:
    demos, clones = make_demos(), []
    for settings in ({}, change):
        policy = train_sft(make_policy(), demos, SftConfig(**({"steps": 3, "batch": 4} | settings)))
        clones.append(torch.cat([tensor.flatten() for tensor in policy.trainable_state().values()]))
    assert not torch.equal(clones[0], clones[1])
