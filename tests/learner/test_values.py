"""PPO in the learner: what it asks of policies and episodes, where it bootstraps, groups of one (S02, S03)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError, InvalidInput
from services.common.trajectory import Trajectory
from services.learner.batch import Batch, build_batch
from services.learner.episodes import EpisodeRules, Member, PreparedGroup, prepare_group
from services.learner.lineage import Lineage
from services.learner.opening import run_spec
from services.learner.update import Updater
from services.policies.base import Policy
from tests.learner.data import FAMILIES, STATE, make_member, same_weights, small_config, small_policy, weights_of

PPO: dict[str, Any] = {"algorithm": "ppo", "group_size": 1, "groups_per_update": 6}
RULES = EpisodeRules(bootstraps=True)


def cut_off(member: Member, terminated: bool = False) -> Member:
    """Ended by the limit of steps, with the observation at which it was."""
    assert member.trajectory is not None
    final = np.full((1, STATE), 0.5, np.float32)
    trajectory: Trajectory = member.trajectory | {"ends": np.array([terminated, True]), "final_obs/state": final}
    return replace(member, trajectory=trajectory)


def groups_of_one(policy: Policy, change: Any = lambda member: member) -> list[PreparedGroup]:
    members = [change(make_member(policy, f"m{i}", float(i % 2))) for i in range(6)]
    return [prepare_group(i, "reach", [member], policy, RULES) for i, member in enumerate(members)]


def batch_of(groups: list[PreparedGroup], update: int = 0) -> Batch:
    batch = build_batch(groups, update, Lineage(), None)
    assert batch is not None
    return batch


def constant_value(policy: Policy, value: float) -> None:
    """Let the value head say the same everywhere."""
    head: Any = policy.value
    with torch.no_grad():
        head[-1].weight.zero_()
        head[-1].bias.fill_(value)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_bootstrapped_at_truncation_and_never_at_termination(family: str) -> None:
    """V = 1, no reward, gamma = .9: the last chunk's target is gamma^n where the limit cut it off, else 0."""
    policy = small_policy(family, value_head=True)
    constant_value(policy, 1.0)
    updater = Updater(policy, small_config(**PPO, discount=0.9, gae_lambda=1.0))
    for change, worth in (
        (lambda m: m, 0.0),
        (cut_off, 1.0),
        (lambda m: cut_off(m, terminated=True), 0.0),  # both ends coincide
    ):
        batch = updater.judge(batch_of(groups_of_one(policy, change)))
        assert batch.values is not None
        last = torch.cat([batch.rows.episode[1:] != batch.rows.episode[:-1], torch.tensor([True])])
        wanted = worth * 0.9 ** batch.rows.executed[last].double()
        np.testing.assert_allclose(batch.values.target[last].numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bootstrap_reads_the_final_observation(family: str) -> None:
    policy = small_policy(family, value_head=True)
    updater = Updater(policy, small_config(**PPO))
    groups = groups_of_one(policy, cut_off)
    first = updater.judge(batch_of(groups))
    assert groups[0].finals is not None
    moved = replace(groups[0].finals, inputs={k: v.clone() for k, v in groups[0].finals.inputs.items()})
    moved.inputs["state"] += 1.0
    second = updater.judge(batch_of([replace(groups[0], finals=moved), *groups[1:]]))
    assert first.values is not None
    assert second.values is not None
    changed = first.values.target != second.values.target
    assert changed[first.rows.episode == 0].all()
    assert not changed[first.rows.episode != 0].any()


def test_estimate_is_the_value_of_acting() -> None:
    for family in FAMILIES:
        policy = small_policy(family, value_head=True)
        group = groups_of_one(policy)[0]
        assert group.rows is not None
        value = policy.evaluate(group.rows.inputs, group.rows.record).value
        assert value is not None
        torch.testing.assert_close(policy.estimate(group.rows.inputs), value.detach(), rtol=1e-5, atol=1e-6)


def test_a_truncated_episode_without_its_final_observation_is_refused() -> None:
    policy = small_policy(value_head=True)
    member = make_member(policy, "a", 1.0)
    assert member.trajectory is not None
    bare = replace(member, trajectory=member.trajectory | {"ends": np.array([False, True])})
    with pytest.raises(InvalidInput, match="truncated but has no final observation 'state'"):
        prepare_group(1, "reach", [bare], policy, RULES)
    assert prepare_group(1, "reach", [bare], policy).finals is None  # nobody wants to know


@pytest.mark.parametrize("family", FAMILIES)
def test_advantages_are_normalised_and_an_update_improves_the_values(family: str) -> None:
    policy = small_policy(family, value_head=True)

    def rewarded(member: Member) -> Member:
        assert member.trajectory is not None
        success = member.trajectory["success"].copy()
        success[-1, 0] = member.score > 0
        return replace(member, trajectory=member.trajectory | {"success": success})

    updater = Updater(policy, small_config(**PPO, epochs=20, learning_rate=3e-3))
    batch = updater.judge(batch_of(groups_of_one(policy, rewarded)))
    assert float(batch.advantage.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(batch.advantage.square().mean()) == pytest.approx(1.0, rel=1e-4)
    metrics = updater.run(batch, 0)
    assert metrics["skipped_steps"] == 0
    assert 0 <= metrics["ratio_gap"] < 1e-4
    after = updater.judge(batch)
    assert batch.values is not None
    assert after.values is not None
    errors = [(v.estimate - batch.values.target).square().mean() for v in (batch.values, after.values)]
    assert errors[1] < 0.5 * errors[0]


def test_a_policy_without_a_value_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a policy with a value head"):
        Updater(small_policy(), small_config(**PPO))
    with pytest.raises(ConfigError, match="no value head"):
        small_policy().estimate({"instruction": torch.zeros(1, 32, dtype=torch.uint8), "state": torch.zeros(1, STATE)})


def test_ppo_asks_for_final_observations_and_not_for_equal_starts() -> None:
    policy = small_policy(value_head=True)
    spec = run_spec(small_config(**PPO), policy.spec)
    assert (spec.group_size, spec.same_start, spec.final_observation, spec.filter_uniform) == (1, False, True, False)
    spec = run_spec(small_config(), policy.spec)
    assert (spec.group_size, spec.same_start, spec.final_observation, spec.filter_uniform) == (3, True, False, True)


def test_values_of_the_start_of_the_update_are_the_proximal_policy_on_stale_data() -> None:
    policy = small_policy(value_head=True)
    updater = Updater(policy, small_config(**PPO, epochs=1, minibatches=1))
    before = weights_of(policy)
    metrics = updater.run(updater.judge(batch_of(groups_of_one(policy), update=1)), 1)
    assert metrics["importance_mean"] == pytest.approx(1.0, abs=1e-4)  # the weights did not change in between
    assert not same_weights(before, weights_of(policy))
