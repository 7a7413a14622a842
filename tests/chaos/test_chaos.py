"""A run of all roles under random SIGKILLs loses and doubles nothing; benchmarks/chaos.py does it 200 times."""

from pathlib import Path

import pytest

from benchmarks.chaos import under_fire


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(900)
def test_random_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    outcome = under_fire(tmp_path, kills=6, seed=6)
    assert sum(outcome.kills.values()) == 6
    assert outcome.groups >= 10, outcome.table()
    assert outcome.exactly_once, outcome.table()
