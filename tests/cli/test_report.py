import re
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.advice import advice, diagnose
from services.cli.lanes import LaneShare
from services.cli.report import write_report
from services.cli.runfolder import RunFolder, write_json
from services.cli.samples import Sample
from services.cli.summary import Summary, summarise
from tests.cli.recorded import recorded


def folder(tmp_path: Path, samples: list[Sample]) -> RunFolder:
    run = RunFolder(tmp_path / "a-run")
    run.create()
    run.recipe.write_text('[run]\nname = "<a> & b"\n')
    run.samples.write_text("".join(sample.to_json() + "\n" for sample in samples))
    return run


def test_report_of_a_recorded_run(tmp_path: Path) -> None:
    run = folder(tmp_path, recorded())
    run.event(30.0, "rollout-0", "died", "killed by SIGKILL after 30.0 s")
    run.event(30.2, "rollout-0", "restarted", "pid 101")
    write_json(run.path / "facts.json", {"rollout-0": {"transport/sim-0": "shm: same boot id", "other": "x"}})
    result = {
        "t": 10.0, "trained_steps": 0, "version": "1-0", "episodes": 300, "success_once": 0.28, "success_at_end": 0.25,
        "success_once_interval": [0.23, 0.33], "mean_return": 0.28, "mean_steps": 44.0, "failed": 0,
    }  # fmt: skip
    write_json(run.evaluation("before"), result)
    run.update_state(evaluations={"before": 0.28}, result="success 0.28 -> 0.98")
    text = write_report(run).read_text()
    assert text.count("<svg") == 5
    for part in ("success 0.28 -&gt; 0.98", "0.230 to 0.330", "killed by SIGKILL", "shm: same boot id", "rollout-0 1",
                 "3,920 (80 per second of training)", "&lt;a&gt; &amp; b", "80 % of them trained"):  # fmt: skip
        assert part in text, part
    assert not re.search(r'(src|href)="https?:', text), "the page needs nothing from elsewhere"


def test_report_of_a_run_that_has_just_begun(tmp_path: Path) -> None:
    text = write_report(folder(tmp_path, [])).read_text()
    assert "not finished" in text
    assert "Too little training" in text


def summary(sampling: LaneShare, training: LaneShare, **others: LaneShare) -> Summary:
    return Summary(seconds=60, updates=9, lanes={"sampling": sampling, "training": training, **others})


def busy(share: float) -> LaneShare:
    return LaneShare(share, {"client": 1 - share})


WAITS_FOR_EPISODES = LaneShare(0.4, {"lease": 0.6})
SAMPLES = LaneShare(0.95, {"work": 0.05})


@pytest.mark.parametrize(
    ("bottleneck", "lanes"),
    [
        ("simulation", summary(SAMPLES, WAITS_FOR_EPISODES)),
        ("simulation", summary(SAMPLES, WAITS_FOR_EPISODES, simulation=busy(0.97), inference=busy(0.5))),
        ("inference", summary(SAMPLES, WAITS_FOR_EPISODES, simulation=busy(0.5), inference=busy(0.97))),
        ("overlap", summary(SAMPLES, WAITS_FOR_EPISODES, simulation=busy(0.5), inference=busy(0.45))),
        ("learner", summary(LaneShare(0.4, {"admission": 0.6}), LaneShare(0.95, {"lease": 0.05}))),
        ("weights", summary(LaneShare(0.5, {"weights": 0.5}), LaneShare(0.5, {"lease": 0.5}), receiving=busy(0.8))),
        ("weights", summary(LaneShare(0.5, {"weights": 0.5}), LaneShare(0.5, {"lease": 0.5}), distribution=busy(0.8))),
        ("staleness", summary(LaneShare(0.5, {"admission": 0.5}), LaneShare(0.5, {"lease": 0.5}))),
        ("nothing", summary(LaneShare(0.9, {"work": 0.1}), LaneShare(0.9, {"lease": 0.1}))),
        ("publishing", summary(SAMPLES, LaneShare(0.6, {"lease": 0.1, "snapshot": 0.2, "checkpoint": 0.1}))),
        ("simulators", summary(LaneShare(0.5, {"sim": 0.5}), WAITS_FOR_EPISODES)),
        ("memory", summary(LaneShare(0.5, {"memory": 0.5}), WAITS_FOR_EPISODES)),
        ("restarts", replace(summary(SAMPLES, WAITS_FOR_EPISODES), restarts={"sim-0": 3})),
        ("unknown", summarise([])),
    ],
)
def test_advice_names_the_bottleneck(bottleneck: str, lanes: Summary) -> None:
    found = diagnose(lanes, 2)
    assert found.bottleneck == bottleneck, found
    assert found.text.endswith(".")
    assert advice(lanes, 2) == found.text


def test_advice_for_lanes_that_take_turns() -> None:
    found = diagnose(summary(LaneShare(0.5, {"admission": 0.5}), LaneShare(0.4, {"lease": 0.6})), 2, mode="sync")
    assert found.bottleneck == "turns"
    assert "1.80 times as fast" in found.text
