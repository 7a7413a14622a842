from services.cli.samples import Sample, StoreSample
from services.cli.solved import Solved


def seen(accepted: int, wins: float) -> Sample:
    return Sample(0.0, "training", store=StoreSample(counters={"accepted": accepted}, sums={"accepted_success": wins}))


def test_only_the_latest_episodes_count() -> None:
    solved = Solved(0.95, 100)
    assert solved.look(None) == ""
    assert solved.look(seen(0, 0)) == ""
    assert solved.look(seen(500, 100)) == ""
    assert solved.look(seen(550, 150)) == "", "too few episodes since things went well"
    assert solved.look(seen(600, 199)) == "solved: 99 of the latest 100 training episodes succeeded"


def test_a_bound_of_zero_never_stops() -> None:
    solved = Solved(0.0, 10)
    assert [solved.look(seen(n, n)) for n in (0, 100)] == ["", ""]


def test_counters_that_begin_anew_are_noticed() -> None:
    solved = Solved(0.9, 10)
    solved.look(seen(1000, 10))
    assert solved.look(seen(5, 5)) == ""
    assert solved.look(seen(15, 15)) != ""
