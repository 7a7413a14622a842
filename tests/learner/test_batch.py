"""Groups to tensors: masks by policy, staleness, members without data, and metrics that ignore masked steps (S39)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.errors import InvalidInput
from services.common.trajectory import Trajectory
from services.learner.batch import Batch, build_batch
from services.learner.episodes import Member, PreparedGroup, prepare_group
from services.learner.lineage import Lineage
from services.learner.report import batch_metrics, staleness_histogram
from services.policies.base import Policy
from tests.learner.data import ACTIONS, CHUNK, FAMILIES, make_group, make_member, make_trajectory, small_policy
from tests.learner.data import without_data as failed


def batch_of(groups: list[PreparedGroup], update: int = 0, lineage: Lineage | None = None) -> Batch:
    batch = build_batch(groups, update, lineage or Lineage(), "std")
    assert batch is not None
    return batch


@pytest.mark.parametrize("family", FAMILIES)
def test_unexecuted_actions_are_masked_for_token_heads_only(family: str) -> None:
    policy = small_policy(family)
    rows = make_group(policy, 1).rows
    assert rows is not None
    for row in range(len(rows)):
        executed = int(rows.executed[row]) if family == "tiny-oft" else CHUNK
        assert rows.mask[row].tolist() == [True] * executed + [False] * (CHUNK - executed)


def test_groups_of_unequal_size_keep_their_episodes_apart() -> None:
    policy = small_policy()
    groups = [make_group(policy, 1, (1.0, 0.0, 0.0)), make_group(policy, 2, (0.0, 1.0))]
    batch = batch_of(groups)
    assert batch.group_numbers == [1, 2]
    counts = [len(m.trajectory["reward"]) for m in batch.members if m.trajectory is not None]
    assert batch.rows.episode.tolist() == np.repeat(range(5), counts).tolist()
    per_episode = [float(batch.advantage[batch.rows.episode == i][0]) for i in range(5)]
    np.testing.assert_allclose(per_episode[:3], [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], rtol=1e-4)
    np.testing.assert_allclose(per_episode[3:], [-(0.5**0.5), 0.5**0.5], rtol=1e-4)


def test_a_failed_member_counts_in_its_group_and_brings_no_rows() -> None:
    policy = small_policy()
    members = [make_member(policy, "a", 1.0), failed(make_member(policy, "b", 1.0))]
    group = prepare_group(4, "reach", members, policy)
    batch = batch_of([make_group(policy, 3), group])
    assert 4 not in batch.rows.episode.tolist()
    assert float(batch.advantage[batch.rows.episode == 3][0]) == pytest.approx(0.5**0.5, rel=1e-4)
    assert batch_metrics(batch)["episodes_without_data"] == 1


def test_a_batch_without_any_data_is_none() -> None:
    policy = small_policy()
    group = prepare_group(1, "reach", [failed(make_member(policy, "a", 0.0))] * 3, policy)
    assert group.rows is None
    assert build_batch([group], 0, Lineage(), "std") is None


def test_equal_scores_are_no_signal() -> None:
    policy = small_policy()
    assert not batch_of([make_group(policy, 1, (0.35, 0.35, 0.35)), make_group(policy, 2, (1.0, 1.0))]).informative
    assert batch_of([make_group(policy, 1, (0.35, 0.35, 0.35)), make_group(policy, 2, (1.0, 0.0))]).informative


def test_staleness_counts_updates_and_rolled_back_weights_as_the_newest() -> None:
    """A learner resumed at 30 in epoch 2; weights (1, 37) were made by updates that it took back."""
    policy = small_policy()
    groups = [make_group(policy, i, version=v) for i, v in enumerate([(1, 29), (1, 37), (2, 30), (1, 30)])]
    batch = batch_of(groups, update=31, lineage=Lineage().continued(1, 0).continued(2, 30))
    by_group = [set(batch.staleness[batch.rows.version[:, 1] == u].tolist()) for u in (29, 37, 30)]
    assert by_group == [{2}, {0}, {1}]
    assert set(batch.rows.version[batch.rolled_back][:, 1].tolist()) == {37}
    current = batch_of(groups, update=30, lineage=Lineage().continued(1, 0).continued(2, 30))
    assert {tuple(v) for v in current.rows.version[current.on_policy].tolist()} == {(2, 30), (1, 30)}
    assert sum(staleness_histogram(batch)) == len(batch.rows)


def hand_made() -> tuple[Policy, Batch]:
    """Two episodes of 2 chunks; the first executed 3 + 1 actions, the second 3 + 3. Half of what follows is mask."""
    policy = small_policy("tiny-oft")

    def member(key: str, score: float, last: int) -> Member:
        made = make_member(policy, key, score, chunks=2)
        assert made.trajectory is not None
        trajectory: Trajectory = made.trajectory | {"executed": np.array([3, last], np.int32)}
        return replace(made, trajectory=trajectory, steps=3 + last)

    return policy, batch_of([prepare_group(1, "reach", [member("a", 1.0, 1), member("b", 0.0, 3)], policy)])


def test_half_masked_batch_gives_hand_computed_metrics() -> None:
    """S39: 4 valid actions with advantage +1/sqrt 2, 6 with -1/sqrt 2."""
    _, batch = hand_made()
    metrics = batch_metrics(batch)
    unit = 0.5**0.5 / (1 + 1e-6 / 0.5**0.5)
    assert metrics["advantage_mean"] == pytest.approx(unit * (4 - 6) / 10, rel=1e-5)
    assert metrics["advantage_std"] == pytest.approx(unit * (1 - 0.2**2) ** 0.5, rel=1e-5)
    assert metrics["env_steps"] == 10
    assert metrics["episode_steps"] == 5
    assert metrics["success_trained"] == metrics["success_trained/reach"] == 0.5
    assert metrics["chunks"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs/state": np.zeros((1, 7), np.float32)}, "state"),
        ({"obs/state": np.full((1, 4), np.nan, np.float32)}, "not finite"),
        ({"log_prob": np.full((1, CHUNK, ACTIONS), np.inf, np.float32)}, "not finite"),
        ({"record/tokens": np.zeros((1, CHUNK, ACTIONS), np.int64)}, "tokens"),
        ({"record/other": np.zeros((1,), np.float32)}, "record"),
        ({"log_prob": np.zeros((1, CHUNK, ACTIONS + 1), np.float32)}, "log_prob"),
        ({"executed": np.array([9], np.int32)}, "executed"),
        ({"instruction": np.frombuffer(b"x" * 40, np.uint8)}, "instruction"),
    ],
)
def test_a_bad_member_is_refused_by_name(change: dict[str, np.ndarray], message: str) -> None:
    policy = small_policy()
    good = make_member(policy, "good", 1.0)
    bad = replace(good, trajectory=make_trajectory(policy, "bad", chunks=1) | change)
    with pytest.raises(InvalidInput, match=message):
        prepare_group(9, "reach", [good, bad], policy)


def test_a_missing_observation_is_refused_by_name() -> None:
    policy = small_policy()
    trajectory = make_trajectory(policy, "x")
    del trajectory["obs/state"]
    bad = replace(make_member(policy, "x", 1.0), trajectory=trajectory)
    with pytest.raises(InvalidInput, match="'state' is missing"):
        prepare_group(9, "reach", [bad], policy)


def test_prepared_rows_share_no_memory_with_the_payload() -> None:
    policy = small_policy()
    member = make_member(policy, "a", 1.0)
    group = prepare_group(1, "reach", [member, make_member(policy, "b", 0.0)], policy)
    assert group.rows is not None
    before = group.rows.behaviour.clone()
    assert member.trajectory is not None
    member.trajectory["log_prob"][:] = 0
    assert torch.equal(group.rows.behaviour, before)
