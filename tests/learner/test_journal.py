"""metrics.jsonl and TensorBoard events; success before any filter."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from services.common.telemetry import BUSY, Telemetry
from services.learner.collected import Collected
from services.learner.journal import Journal, idle_shares
from services.learner.source import StoreStats
from tests.learner.harness import Bench


def stats(accepted: int, successes: int, workers: int = 1, **counters: int) -> StoreStats:
    return StoreStats(
        workers=workers,
        counters={"accepted": accepted, "accepted_steps": 10 * accepted, **counters},
        sums={"accepted_success": float(successes), "accepted_length": 10.0 * accepted},
    )


def test_lines_survive_a_killed_writer(tmp_path: Path) -> None:
    telemetry = Telemetry("learner", "test")
    journal = Journal(tmp_path, telemetry)
    journal.write(1, 1, {"loss": 0.5, "staleness_histogram": [3, 1]})
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "lo')
    journal = Journal(tmp_path, telemetry)
    journal.write(2, 2, {"loss": float("nan")})
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["update"], line["loss"]) for line in lines] == [(1, 1, 0.5), (2, 2, None)]
    assert lines[0]["staleness_histogram"] == [3, 1]


def test_numbers_reach_tensorboard(tmp_path: Path) -> None:
    journal = Journal(tmp_path, Telemetry("learner", "test"))
    journal.write(1, 7, {"loss": 0.5})
    journal.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.step == 7]
    values = {
        value.tag: value.tensor.float_val or value.simple_value for event in events for value in event.summary.value
    }
    assert "loss" in values


def test_idle_shares_leave_the_start_out() -> None:
    telemetry = Telemetry("learner", "test")
    lane = telemetry.lane("training")
    assert idle_shares(telemetry) == {}
    lane.set(BUSY)
    lane.set("lease")
    assert 0 <= idle_shares(telemetry)["training"] <= 1


def test_success_counts_every_accepted_episode() -> None:
    """The store discards uniform groups; their episodes still count in the success that is reported."""
    collected = Collected(window=10)
    collected.see(stats(0, 0))
    collected.see(stats(40, 10))
    first = collected.close_update()
    assert first["success"] == 0.25
    assert first["env_steps_accepted"] == 400
    collected.see(stats(60, 25))
    assert collected.close_update()["success"] == 0.75
    assert "success" not in collected.close_update()


def test_recent_success_needs_a_whole_window() -> None:
    collected = Collected(window=10)
    for accepted, successes in ((0, 0), (4, 4), (9, 9)):
        collected.see(stats(accepted, successes))
        assert collected.recent_success() == 0.0
    collected.see(stats(12, 9))
    assert collected.recent_success() == 0.75
    collected.see(stats(22, 19))
    assert collected.recent_success() == 1.0


def test_counters_that_fall_start_anew() -> None:
    collected = Collected(window=10)
    collected.see(stats(100, 100))
    collected.see(stats(5, 0))
    collected.see(stats(15, 1))
    assert collected.recent_success() == pytest.approx(0.1)


def test_waiting_is_explained() -> None:
    collected = Collected(window=10)
    collected.see(stats(0, 0, workers=0))
    assert collected.explain() == "no rollout worker is alive"
    collected.see(stats(80, 0, discarded_uniform=10))
    assert collected.explain().startswith("no informative groups: all episodes scored the same in each of the last 10")
    collected.close_update()
    assert "1 workers" in collected.explain()


def test_a_run_leaves_one_line_per_update(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(updates=3)
    bench.run()
    lines = [json.loads(line) for line in (bench.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert {
            "loss",
            "clip_fraction",
            "grad_norm",
            "entropy",
            "staleness_mean",
            "idle/training",
            "time",
        } <= line.keys()
        assert line["env_steps_trained"] <= line["env_steps_accepted"]
    assert lines[0]["ratio_gap"] < 1e-4
    steps = [line["env_steps"] for line in lines]
    assert lines[-1]["env_steps_trained"] == sum(steps)
    assert sum(lines[2]["staleness_histogram"]) == lines[2]["chunks"]
    assert bench.progress.metrics()["loss"] == lines[-1]["loss"]
