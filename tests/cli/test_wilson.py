from hypothesis import given
from hypothesis import strategies as st

from services.cli.wilson import wilson

counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def test_known_values() -> None:
    low, high = wilson(81, 263)  # Newcombe 1998, table I
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert [round(x, 4) for x in wilson(0, 20)] == [0.0, 0.1611]


@given(counts)
def test_interval_holds_the_share_and_stays_a_probability(count: tuple[int, int]) -> None:
    wins, total = count
    low, high = wilson(wins, total)
    assert 0 <= low <= wins / total <= high <= 1
    assert high - low > 0, "even 0 of n and n of n leave doubt"


@given(counts)
def test_failures_mirror_successes(count: tuple[int, int]) -> None:
    wins, total = count
    low, high = wilson(wins, total)
    other_low, other_high = wilson(total - wins, total)
    assert abs(low - (1 - other_high)) < 1e-12
    assert abs(high - (1 - other_low)) < 1e-12


def test_without_trials_nothing_is_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
