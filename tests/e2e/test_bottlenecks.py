"""A run that is slow for a known reason says so: five real roles around emulated devices, one of them the slow one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.advice import diagnose
from services.cli.runfolder import RunFolder
from services.cli.samples import read_samples
from services.cli.spans import read_spans
from services.cli.summary import Summary, summarise
from services.policies.emulated import FORWARD_SHARE

RECIPE = Path(__file__).parents[2] / "benchmarks" / "emulated.toml"
CASES = {
    "simulation": ("sim.options={steps=40, step_seconds=0.02}", "policy.options={train_row_seconds=0.0005}"),
    "learner": (
        "sim.options={steps=40, step_seconds=0.002}",
        "policy.options={train_row_seconds=0.06}",
        "learner.updates=7",
    ),
    "weights": ("sim.options={steps=40, step_seconds=0.002}", "policy.options={load_seconds=2.0}"),
}


def run(tmp_path: Path, *settings: str) -> RunFolder:
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "services.cli", "train", str(RECIPE), "--name", "run", "--out", str(tmp_path)]
    done = subprocess.run([*command, *sets], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return RunFolder(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slow", CASES)
def test_the_slow_part_is_named(tmp_path: Path, slow: str) -> None:
    folder = run(tmp_path, *CASES[slow])
    summary = summarise(list(read_samples(folder.samples)))
    found = diagnose(summary, cores=2)
    assert found.bottleneck == slow, f"{found}\n{summary.lanes}"
    assert found.text.split(":")[0] in folder.report.read_text()
    check_truth(slow, summary, folder)


def check_truth(slow: str, summary: Summary, folder: RunFolder) -> None:
    """What a lane says of itself, against the waits that were asked for and against its own spans."""
    busy = sum(span.end - span.start for span in read_spans(folder.spans) if is_slow_lane(slow, span.lane, span.state))
    assert busy > 0
    if slow == "learner":
        rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
        # Data of older weights are scored once more before they are trained.
        each = rows[-1]["chunks_trained"] * 0.06 * (1 + FORWARD_SHARE)
        share = each / ((rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1))
        assert summary.lanes["training"].busy == pytest.approx(share, abs=0.1)
        assert busy == pytest.approx(each * len(rows), rel=0.25)


def is_slow_lane(slow: str, lane: str, state: str) -> bool:
    where = {"simulation": "env-0", "learner": "training", "weights": "receiving"}[slow]
    return lane == where and state == "busy"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_launcher_adds_simulators_where_they_are_missing(tmp_path: Path) -> None:
    folder = run(
        tmp_path,
        *("run.balance=true", "run.sims=1", "run.most_sims=2", "run.most_rollouts=1", "run.minutes=3"),
        *("learner.updates=100000", "sim.options={steps=40, step_seconds=0.04}"),
        "policy.options={train_row_seconds=0.0001}",
    )
    notes = [event["detail"] for event in folder.read_events() if event["what"] == "note"]
    assert any("balance: 2 simulators" in note for note in notes), notes
    served = [name for sample in read_samples(folder.samples) for name in sample.roles if name == "sim-1"]
    assert served
    spans = [span for span in read_spans(folder.spans) if span.who == "sim-1" and span.state == "busy"]
    assert spans, "workers found it and used it"
