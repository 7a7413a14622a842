"""The example of docs/policies.md: under 60 lines, and a whole policy to the rest of the system."""

import numpy as np
import pytest
import torch

from examples.custom_policy.gaussian import GaussianPolicy
from services.common.errors import InvalidInput
from services.learner.batch import build_batch
from services.learner.lineage import Lineage
from services.learner.update import Updater
from services.policies import families
from services.policies.base import Policy
from services.policies.checkpoint import load_checkpoint, save_checkpoint
from services.policies.config import PolicyConfig
from services.policies.demodata import Demos
from services.policies.noise import RowNoise
from services.policies.registry import build_policy
from services.policies.sft import SftConfig, train_sft
from tests.architecture.source import ROOT
from tests.learner.data import INSTRUCTION, make_group, same_weights, small_config, weights_of

FAMILY = "examples.custom_policy.gaussian:GaussianPolicy"


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setenv(families.ENVIRONMENT, FAMILY)  # as a user does, in every role
    config = PolicyConfig(action_dim=2, family=FAMILY, chunk=3, state_dim=4, options={"width": 16})
    return build_policy(config)


def test_it_is_short_and_its_page_shows_how_to_run_it() -> None:
    source = (ROOT / "examples" / "custom_policy" / "gaussian.py").read_text()
    assert len(source.splitlines()) < 65
    body = source[source.index("class GaussianPolicy") :]
    assert len(body.splitlines()) < 60
    page = (ROOT / "docs" / "policies.md").read_text()
    assert FAMILY in page
    for method in ("preprocess", "postprocess", "act", "evaluate", "sft_loss"):
        assert f"`{method}" in page


def test_it_scores_what_it_acted_in_any_batch(policy: Policy) -> None:
    assert isinstance(policy, GaussianPolicy)
    state = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    inputs = policy.preprocess({"state": state}, [INSTRUCTION] * 6)
    act = policy.act(inputs, "train", RowNoise([f"{i}" for i in range(6)]))
    scored = policy.evaluate(inputs, act.record)
    assert (scored.log_prob - act.log_prob).abs().max() < 1e-5
    alone = policy.act({"state": inputs["state"][4:5]}, "train", RowNoise(["4"]))
    torch.testing.assert_close(alone.actions, act.actions[4:5])
    with pytest.raises(InvalidInput, match="state"):
        policy.preprocess({"state": state[:, :3]}, [INSTRUCTION] * 6)


def test_it_clones_trains_and_survives_a_checkpoint(policy: Policy, tmp_path: object) -> None:
    rng = np.random.default_rng(0)
    state = rng.normal(size=(200, 4)).astype(np.float32)
    demos = Demos({"state": state}, state[:, :2] * 0.5, np.arange(200) // 20, np.zeros(200, np.int64), (INSTRUCTION,))
    losses: list[float] = []
    train_sft(policy, demos, SftConfig(steps=150, batch=32, lr=1e-2), lambda _, loss: losses.append(loss))
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])

    before = weights_of(policy)
    batch = build_batch([make_group(policy, n) for n in range(3)], 0, Lineage(), "std")
    assert batch is not None
    metrics = Updater(policy, small_config(entropy_bonus=0.01)).run(batch, 0)
    assert 0 <= metrics["ratio_gap"] < 1e-4
    assert not same_weights(before, weights_of(policy))

    folder = tmp_path / "policy"  # type: ignore[operator]
    save_checkpoint(folder, policy)
    assert same_weights(weights_of(load_checkpoint(folder)), weights_of(policy))
