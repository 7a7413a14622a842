import json

from hypothesis import given
from hypothesis import strategies as st

from services.cli.control import EpisodeResult
from services.cli.evaluation import brief, figures, held_out, table
from services.common.bundle import Version
from services.common.seeds import EVALUATION


@given(st.integers(1, 400), st.integers(0, 5))
def test_held_out_starts_are_distinct_and_held_out(episodes: int, base: int) -> None:
    listed = held_out(["a", "b"], episodes, base)
    seeds = [seed for _, seed in listed]
    assert len(set(seeds)) == episodes
    assert all(seed in EVALUATION for seed in seeds)
    assert listed == held_out(["a", "b"], 400, base)[:episodes], "more episodes extend the list"
    assert abs(sum(task == "a" for task, _ in listed) - episodes / 2) <= 0.5


def results() -> list[EpisodeResult]:
    good = [EpisodeResult(n, "a", n, True, n % 2 == 0, 2.0, 1.0, 50, "toy x8") for n in range(1, 7)]
    return [*good, EpisodeResult(7, "b", 7, False, False, 0.0, 0.0, 50), EpisodeResult(8, "b", 8, failure="sim died")]


def test_figures() -> None:
    result = figures(Version(2, 9), results(), t=12.34567, trained_steps=500)
    assert result["version"] == "2-9"
    assert (result["episodes"], result["failed"]) == (8, 1)
    assert (result["success_once"], result["success_at_end"]) == (0.75, 0.375)
    assert result["mean_return"] == 1.5
    assert result["success_once_interval"][0] < 0.75 < result["success_once_interval"][1]
    assert {task: rates["success_once"] for task, rates in result["tasks"].items()} == {"a": 1.0, "b": 0.0}
    assert len(json.loads(json.dumps(result))["results"]) == 8


def test_table_and_brief() -> None:
    result = figures(Version(2, 9), results())
    text = table(result)
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["a", "b", "all"]
    assert "0.750" in text.splitlines()[-1]
    assert brief(result) == "0.75 (95 %: 0.41 to 0.93)"
    assert "all" in table(figures(Version(1, 0), results()[:6])), "one task needs no row of its own"
