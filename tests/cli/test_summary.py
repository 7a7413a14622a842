import re
from dataclasses import replace

import pytest

from services.cli.lanes import LANES, seconds_between, series, shares
from services.cli.samples import RoleSample, Sample
from services.cli.summary import Summary, final_line, summarise, training_spans
from tests.cli.recorded import recorded

LINE = (
    r"success 0\.\d\d -> [01]\.\d\d \(300 held-out starts\), \d+ env steps/s, "
    r"lanes idle \d+/\d+/\d+/\d+ %, staleness mean \d+\.\d max \d+"
)


def test_figures_of_the_training_stage() -> None:
    summary = summarise(recorded())
    assert summary.seconds == 49
    assert summary.trained_steps == 80 * 49
    assert summary.steps_per_second == 80
    assert summary.accepted_steps == 100 * 49
    assert summary.updates == 49 // 4
    assert summary.staleness_mean == pytest.approx(0.5)
    assert summary.staleness_max == 1
    assert summary.restarts == {"rollout-0": 1}


def test_idle_shares_survive_a_restart() -> None:
    lanes = summarise(recorded()).lanes
    assert lanes["sampling"].busy == pytest.approx(0.75)
    assert lanes["sampling"].idle == {"admission": pytest.approx(0.25)}
    assert lanes["training"].idle_share == pytest.approx(0.5)
    assert all(share.busy + share.idle_share == pytest.approx(1.0) for share in lanes.values())


def test_the_final_line_has_the_promised_form() -> None:
    text = final_line(0.276, 0.9833, 300, summarise(recorded()))
    assert re.fullmatch(LINE, text)
    assert text == (
        "success 0.28 -> 0.98 (300 held-out starts), 80 env steps/s, lanes idle 25/99/50/98 %, staleness mean 0.5 max 1"
    )


def test_a_run_without_training_has_figures_too() -> None:
    assert summarise([]) == Summary()
    assert re.fullmatch(LINE, final_line(0.1, 0.1, 300, summarise(recorded(seconds=5))))


def test_the_last_sample_before_training_holds_the_counters_at_its_start() -> None:
    (span,) = training_spans(recorded())
    assert [span[0].stage, span[1].stage] == ["evaluation before", "training"]


def test_pauses_and_other_stages_do_not_count() -> None:
    first = recorded(40)
    rest = [replace(sample, t=sample.t + 1000, launch=2) for sample in recorded(60)[40:]]
    silent = [replace(sample, stage="starting", store=None) for sample in rest[:3]]
    evaluated = [replace(rest[0], stage="evaluation after"), *rest[1:]]
    assert summarise([*first, *silent, *rest]).seconds == 29 + 19
    summary = summarise([*first, *evaluated])
    assert summary.seconds == 29 + 19
    assert summary.steps_per_second == pytest.approx(80)
    assert summary.lanes["sampling"].busy == pytest.approx(0.75)


def test_replicas_are_summed() -> None:
    def sample(t: float, first: float, second: float) -> Sample:
        def role(busy: float) -> RoleSample:
            return RoleSample("rollout", 1, {"sampling": {"busy": busy, "work": t - busy}})

        return Sample(t, "training", {"rollout-0": role(first), "rollout-1": role(second)})

    seconds = seconds_between([sample(10, 5, 5), sample(20, 15, 5)])
    assert seconds == {"sampling": {"busy": 10, "work": 10}}
    assert shares(seconds)["sampling"].busy == 0.5


def test_series_covers_the_whole_run() -> None:
    rows = series(recorded(200), points=50)
    assert len(rows) <= 50
    assert set(rows[0][1]) == set(LANES)
