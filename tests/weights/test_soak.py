"""A short soak: publisher, root, relay and readers as processes, killed at random while versions flow."""

import pytest

from benchmarks.weight_soak import soak


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_whatever_is_killed_readers_see_whole_versions_in_order_and_reach_the_last() -> None:
    outcome = soak(publishes=25, rate=5, readers=4, seed=1)
    assert not outcome.wrong
    assert outcome.sealed >= 5
    assert outcome.applied >= 4
    assert outcome.kills
