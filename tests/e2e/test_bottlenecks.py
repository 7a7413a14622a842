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
        asked = sum(row["chunks_trained"] for row in rows) * 0.06
        share = asked / len(rows) / ((rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1))
        assert summary.lanes["training"].busy == pytest.approx(share, abs=0.1)
        assert busy == pytest.approx(asked, rel=0.25)


def is_slow_lane(slow: str, lane: str, state: str) -> bool:
    where = {"simulation": "env-0", "learner": "training", "weights": "receiving"}[slow]
    return lane == where and state == "busy"
