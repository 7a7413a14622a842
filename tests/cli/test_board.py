import io

import pytest
from rich.console import Console

from services.cli.board import Board, Progress
from services.cli.live import PlainView, clock, line, screen
from services.cli.samples import EvaluationSample, Sample
from tests.cli.recorded import recorded


def filled(seconds: int = 60) -> Board:
    board = Board("a-run", roles=("rollout-0", "learner", "sim-0"))
    board.enter("training")
    for sample in recorded(seconds):
        board.add(sample)
    return board


def test_figures_come_from_the_latest_samples() -> None:
    figures = filled().figures()
    assert figures.trained_rate == pytest.approx(80)
    assert figures.accepted_rate == pytest.approx(100)
    assert figures.version == (1, 12)
    assert figures.staleness == pytest.approx(0.5)
    assert figures.staleness_max == 1
    assert figures.lanes["sampling"].busy == pytest.approx(0.75)
    assert figures.queues == {
        "jobs": 0, "open groups": 3, "complete groups": 1, "leased groups": 0, "appends": 3, "prefetch": 1
    }  # fmt: skip
    assert figures.restarts == {"rollout-0": 1}
    assert figures.missing == ("sim-0",)
    assert figures.progress == Progress(12, 20, "updates")
    # 64 episodes are the last 4 s; the store's sums say how many of them succeeded.
    wins, episodes = (16 * 49 * 0.888 - 16 * 45 * 0.84), 64
    assert figures.success == pytest.approx(wins / episodes)


def test_before_any_sample_nothing_is_claimed() -> None:
    figures = Board("a-run").figures()
    assert (figures.success, figures.trained_rate, figures.staleness, figures.eta) == (None, None, None, None)
    assert "starting" in line(figures)


def test_an_evaluation_is_the_progress_of_its_stage() -> None:
    board = Board("a-run")
    board.enter("evaluation before")
    board.add(Sample(1.0, "evaluation before", evaluation=EvaluationSample("before", 300, 60, 21)))
    assert board.figures().progress == Progress(60, 300, "episodes", "success 0.35")


def test_every_figure_is_on_the_screen() -> None:
    board = filled()
    board.evaluated("before", "0.28 (0.23 to 0.33)")
    board.note("sim-0 restarted")
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(screen(board.figures()))
    text = console.export_text()
    parts = (
        "a-run",
        "training",
        "12/20 updates",
        "80",
        "1-12",
        "sampling",
        "distribution",
        "% busy",
        "admission",
        "queues",
    )
    more = "prefetch 1", "0.28 (0.23 to 0.33)", "not answering: sim-0", "restarts: rollout-0 1", "sim-0 restarted"
    for part in (*parts, *more):
        assert part in text


def test_plain_lines_where_there_is_no_terminal() -> None:
    output = io.StringIO()
    with PlainView(filled(), output, seconds=0.01) as view:
        view._stopping.wait(0.2)
    first = output.getvalue().splitlines()[0]
    assert "training, 12/20 updates" in first
    assert "80 env steps/s" in first
    assert "idle 25/99/50/98 %" in first


def test_clock() -> None:
    assert [clock(s) for s in (0, 61, 3600 + 62)] == ["0:00", "1:01", "1:01:02"]
