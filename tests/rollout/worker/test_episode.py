"""What an episode records, and the facts the store is told."""

import numpy as np
import pytest
from dvla.v1 import store_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec import Array
from services.common.trajectory import instruction_text, validate
from services.rollout.worker.episode import Episode, facts
from services.rollout.worker.policy_runner import Chunk
from services.rollout.worker.turn import Outcome
from tests.rollout.worker.fakes import CHUNK, DIM, make_chunk, make_job, make_outcome


def observed(mark: float) -> dict[str, Array]:
    return {"state": np.array([mark, 0], np.float32), "rgb/base": np.full((2, 2, 3), int(mark), np.uint8)}


def played(*steps: tuple[Chunk, Outcome]) -> dict[str, Array]:
    """The trajectory of an episode with these chunks; before chunk n the observation's mark is n."""
    episode = Episode(make_job(4), "grüß das Ziel", True)
    for number, (chunk, outcome) in enumerate(steps):
        episode.observation = observed(number)
        episode.add(chunk, outcome)
    return episode.trajectory(steps[-1][1])


def test_each_row_holds_what_the_policy_read_and_did_and_what_came_of_it() -> None:
    first = make_outcome(reward=(1, 2, 3), action=np.full((CHUNK, DIM), 0.5, np.float32))
    last = make_outcome(executed=2, truncated=True, reward=(4, 5), success=[1])
    chunk = Chunk(
        action=np.full((CHUNK, DIM), 9, np.float32),
        log_prob=np.full((CHUNK, DIM), -1, np.float32),
        record={"chain": np.ones((2, 3), np.float32)},
        value=0.25,
        version=(2, 7),
    )
    trajectory = played((chunk, first), (chunk, last))
    validate(trajectory)
    np.testing.assert_array_equal(trajectory["obs/state"], [[0, 0], [1, 0]])
    np.testing.assert_array_equal(trajectory["obs/rgb/base"][:, 0, 0, 0], [0, 1])
    assert trajectory["obs/rgb/base"].dtype == np.uint8
    assert trajectory["record/chain"].shape == (2, 2, 3)
    np.testing.assert_array_equal(trajectory["value"], np.array([0.25, 0.25], np.float32))
    assert (trajectory["action"] == 9).all()  # as the policy gave it: log_prob belongs to it
    assert (trajectory["executed_action"][0] == 0.5).all()  # after clipping
    assert (trajectory["log_prob"] == -1).all()
    np.testing.assert_array_equal(trajectory["reward"], [[1, 2, 3], [4, 5, 0]])
    np.testing.assert_array_equal(trajectory["success"], [[False] * 3, [False, True, False]])
    np.testing.assert_array_equal(trajectory["executed"], [3, 2])
    np.testing.assert_array_equal(trajectory["version"], [[2, 7], [2, 7]])
    np.testing.assert_array_equal(trajectory["ends"], [False, True])
    assert instruction_text(trajectory) == "grüß das Ziel"


def test_the_final_observation_travels_where_it_was_kept() -> None:
    episode = Episode(make_job(1), "", True, observed(0))
    outcome = make_outcome(truncated=True)
    episode.add(make_chunk(), outcome)
    episode.end_at(observed(5))
    trajectory = episode.trajectory(outcome)
    validate(trajectory)
    np.testing.assert_array_equal(trajectory["final_obs/state"], [[5, 0]])
    assert "final_obs/state" not in played((make_chunk(), outcome))


def test_a_success_that_is_lost_again_counts_once_but_not_at_the_end() -> None:
    """S38."""
    end = make_outcome(executed=2, truncated=True)
    lost = facts(played((make_chunk(), make_outcome(success=[1])), (make_chunk(), end)), "success", "toy x1", "w")
    assert (lost.success_once, lost.success_at_end, lost.score) == (True, False, 1.0)
    kept = facts(played((make_chunk(), make_outcome(executed=2, truncated=True, success=[1]))), "success", "", "")
    assert (kept.success_once, kept.success_at_end) == (True, True)
    never = facts(played((make_chunk(), end)), "success", "", "")
    assert (never.success_once, never.success_at_end, never.score) == (False, False, 0.0)


@pytest.mark.parametrize(("terminated", "truncated"), [(True, False), (False, True), (True, True)])
def test_ends_are_told_apart(terminated: bool, truncated: bool) -> None:
    told = facts(played((make_chunk(), make_outcome(terminated=terminated, truncated=truncated))), "sum", "b", "w")
    assert (told.terminated, told.truncated) == (terminated, truncated)
    assert (told.backend, told.worker) == ("b", "w")


versions = st.tuples(st.integers(1, 3), st.integers(0, 20))


@given(
    made=st.lists(versions, min_size=1, max_size=6),
    last=st.integers(1, CHUNK),
    rewards=st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3),
    rule=st.sampled_from(["success", "sum"]),
)
def test_facts_sum_up_the_chunks(made: list[tuple[int, int]], last: int, rewards: list[float], rule: str) -> None:
    middle = make_outcome(reward=rewards)
    end = make_outcome(executed=last, truncated=True, reward=rewards[:last])
    steps = [(make_chunk(version=v), middle) for v in made[:-1]] + [(make_chunk(version=made[-1]), end)]
    told = facts(played(*steps), rule, "toy x1", "w")
    assert (told.oldest.epoch, told.oldest.update) == min(made)
    assert (told.newest.epoch, told.newest.update) == max(made)
    assert told.steps == CHUNK * (len(made) - 1) + last
    expected = float(sum(rewards)) * (len(made) - 1) + float(sum(rewards[:last]))
    assert told.reward_sum == pytest.approx(expected, abs=1e-3)
    assert told.score == (0.0 if rule == "success" else told.reward_sum)


def test_randomness_belongs_to_the_job_and_the_chunk_and_to_nothing_else() -> None:
    keys = set()
    for run, group, member, attempt in [("r", 1, 0, 1), ("r", 1, 1, 1), ("r", 2, 0, 1), ("r", 1, 0, 2), ("q", 1, 0, 1)]:
        job = make_job(group, attempt)
        job.key.run, job.key.member = run, member
        episode = Episode(job, "", True, observed(0))
        for chunk in range(3):
            assert episode.chunks == chunk
            keys.add(episode.noise_key())
            assert episode.noise_key() == f"{run}/{group}/{member}/{attempt}/{chunk}"
            episode.add(make_chunk(), make_outcome())
    assert len(keys) == 15
    job = make_job(1)
    job.seed += 1  # nor to the environment's seed
    assert Episode(job, "", True).noise_key() == "r/1/1/1/0"


def test_randomness_of_an_evaluation_belongs_to_the_start_whoever_runs_it() -> None:
    one, other = make_job(3, attempt=1, evaluate=True), make_job(9, attempt=2, evaluate=True)
    other.seed = one.seed
    other.version.update += 1
    keys = {Episode(job, "", False).noise_key() for job in (one, other)}
    assert keys == {f"evaluate/reach/{one.seed}/0"}
    assert one.kind == store_pb2.JOB_KIND_EVALUATE
