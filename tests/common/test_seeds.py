"""Training, demonstrations and evaluation never share a start, and no index repeats one."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.common.seeds import (
    DEMONSTRATIONS,
    EVALUATION,
    TRAINING,
    demonstration_seed,
    evaluation_seed,
    training_seed,
)

bases = st.integers(0, 2**63)
indices = st.integers(0, 2**30 - 1)


@given(base=bases, index=indices)
def test_each_purpose_draws_from_its_own_range(base: int, index: int) -> None:
    assert training_seed(base, index) in TRAINING
    assert demonstration_seed(base, index) in DEMONSTRATIONS
    assert evaluation_seed(index, base) in EVALUATION
    assert training_seed(base, index) == training_seed(base, index)


@given(base=bases, one=indices, other=indices)
def test_two_indices_never_share_a_seed(base: int, one: int, other: int) -> None:
    for seed in (training_seed, demonstration_seed, lambda b, n: evaluation_seed(n, b)):
        assert (seed(base, one) == seed(base, other)) == (one == other)


def test_a_run_covers_distinct_seeds_and_two_runs_differ() -> None:
    first = [training_seed(1, index) for index in range(5000)]
    assert len(set(first)) == 5000
    assert len(set(first) & {training_seed(2, index) for index in range(5000)}) < 10


@pytest.mark.parametrize("index", [-1, 2**31])
def test_an_index_outside_the_range_is_refused(index: int) -> None:
    for seed in (partial(training_seed, 0), partial(demonstration_seed, 0), evaluation_seed):
        with pytest.raises(ConfigError, match=f"start {index} does not exist"):
            seed(index)
