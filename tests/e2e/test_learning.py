"""Learning works, through all five roles as real processes: each policy family on the toy simulator."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "toy.toml"
FAMILIES = {
    "tiny-flow": (),
    "tiny-oft": ("sft.steps=400", "learner.learning_rate=4e-4", "learner.clip_high=0.28"),
}
CPU_SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "mode"), [("tiny-flow", "async"), ("tiny-flow", "sync"), ("tiny-oft", "async")])
def test_a_weak_policy_becomes_a_good_one(tmp_path: Path, family: str, mode: str) -> None:
    settings = (f"policy.family={family}", f"run.mode={mode}", "eval.episodes=200", "eval.videos=0", *FAMILIES[family])
    sets = [part for setting in settings for part in ("--set", setting)]
    for role in ("sim", "rollout", "store", "learner"):
        sets += ["--set", f"{role}.shared_folder={tmp_path}/shared"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "services.cli", "train", str(RECIPE), "--name", "run", "--out", str(tmp_path)]
    done = subprocess.run([*command, *sets], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    success = {
        name: json.loads((tmp_path / "run" / "evaluations" / f"{name}.json").read_text())["success_once"]
        for name in ("before", "after")
    }
    assert success["before"] < 0.35, done.stdout
    assert success["after"] > 0.9, done.stdout
    # What a newcomer waits for: a bound on work done, not on time passed.
    assert after.ru_utime - before.ru_utime < CPU_SECONDS
    assert "arena made" in (tmp_path / "run" / "logs" / "store.log").read_text()
    assert not list((tmp_path / "shared").glob("*.arena")), "a finished run leaves no memory behind"
    assert staleness(tmp_path / "run") <= (1 if mode == "async" else 0)


def staleness(run: Path) -> float:
    """The largest staleness of any chunk that was trained."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows
    return max(float(row["staleness_max"]) for row in rows)
