"""Each accepted group is in exactly one update of the surviving history, wherever the learner dies (S29)."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.learner.harness import Bench, Life

Make = Callable[..., Bench]

DEATHS = [
    ("open", 1),
    ("publish", 1),
    ("lease", 2),
    ("trained", 1),
    ("trained", 3),
    ("trained", 4),
    ("checkpoint", 1),
    ("checkpoint", 2),
    ("ack", 1),
    ("ack", 2),
]


def bench_for(make_bench: Make) -> Bench:
    return make_bench(updates=4, checkpoint_updates=2, epochs=1)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("kind", "nth"), DEATHS, ids=lambda value: str(value))
def test_death_at_any_outward_step(make_bench: Make, kind: str, nth: int, after: bool) -> None:
    """A death between an update, its record, its checkpoint and its ack costs nothing and doubles nothing."""
    bench = bench_for(make_bench)
    assert not bench.run(Life(kind, nth, after)), "the learner should have died"
    assert bench.run()
    bench.assert_exactly_once()
    assert bench.store.run.finished


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    deaths=st.lists(st.tuples(st.sampled_from(DEATHS), st.booleans()), min_size=2, max_size=4),
)
def test_death_again_and_again(make_bench: Make, deaths: list[tuple[tuple[str, int], bool]]) -> None:
    bench = bench_for(make_bench)
    for (kind, nth), after in deaths:
        bench.run(Life(kind, nth, after))
    assert bench.run()
    bench.assert_exactly_once()


def test_a_checkpoint_that_the_store_never_heard_of(make_bench: Make) -> None:
    """Redis lost its last second: the record of update 2 is gone, the checkpoint that contains it is not."""
    bench = bench_for(make_bench)
    bench.run(Life("trained", 2))
    earlier = bench.store.snapshot()
    bench.run(Life("ack", 1))  # the checkpoint of update 2 is durable by now
    bench.store.restore(earlier)
    assert bench.run()
    bench.assert_exactly_once()


def test_groups_leased_but_not_trained_come_back(make_bench: Make) -> None:
    bench = bench_for(make_bench)
    bench.run(stop_after=1)
    leased = set(bench.store.run.leased)
    assert leased
    bench.run()
    bench.assert_exactly_once()
    assert leased <= {group for groups in bench.surviving().values() for group in groups}


def test_nothing_is_acked_before_it_is_durable(make_bench: Make) -> None:
    bench = bench_for(make_bench)
    bench.run(Life("checkpoint", 1))
    assert not bench.store.run.acked
    bench.run(Life("ack", 1))
    assert not bench.store.run.acked
    bench.run()
    assert set(bench.store.run.acked.values()) == {1, 2, 3, 4}
