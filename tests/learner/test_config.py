"""Impossible settings are one clear line that names value, expectation and remedy; exit code 2, no torch loaded."""

import subprocess
import sys
from typing import Any

import pytest

from services.common.config import run_app
from services.common.errors import ConfigError
from services.learner.__main__ import app
from services.learner.config import LearnerConfig

NEEDED: dict[str, Any] = {"init": "policy", "output": "run", "tasks": ("PushCube-v1",)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"init": ""}, "init = ''; expected the folder that `dvla sft` wrote"),
        ({"output": ""}, "output = ''"),
        ({"tasks": ()}, "tasks = (); expected at least one task id"),
        ({"tasks": ("a", "a:2")}, "distinct task ids"),
        ({"tasks": ("a:0",)}, "weight above 0"),
        ({"run": "a/b"}, "run = 'a/b'; expected 1 to 100 letters"),
        ({"group_size": 1}, "group_size = 1; expected 2 or more, because grpo compares"),
        ({"groups_per_update": 0}, "groups_per_update = 0; expected 1 or more"),
        ({"updates": 0}, "updates = 0"),
        ({"mode": "both"}, "mode = 'both'; expected one of async, sync"),
        ({"mode": "sync", "staleness": 1}, "staleness = 1; expected 0 in mode sync"),
        ({"staleness": -1}, "staleness = -1"),
        ({"score": "sum"}, "punishes finishing early"),
        ({"differential_reward": True}, "differential_reward = True"),
        ({"clip_low": 1.5}, "clip_low = 1.5"),
        ({"clip_high": 0.0}, "clip_high = 0.0; expected more than 0"),
        ({"dual_clip": 0.5}, "dual_clip = 0.5; expected more than 1"),
        ({"objective": "clipped", "importance_cap": 3.0}, "unless objective = 'decoupled'"),
        ({"learning_rate": float("nan")}, "learning_rate = nan"),
        ({"minibatches": 65}, "at most group_size * groups_per_update = 64"),
        ({"warmup_updates": 10}, "fewer than updates = 10"),
        ({"device": "tpu"}, "device = 'tpu'; expected cpu, cuda or cuda:N"),
        ({"keep_checkpoints": 0}, "keep_checkpoints = 0"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds = -1.0"),
        ({"stop_at_success": 1.5}, "stop_at_success = 1.5"),
        ({"algorithm": "ppo2"}, "algorithm = 'ppo2'; expected one of grpo"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LearnerConfig(**(NEEDED | settings))
    assert expected in str(refused.value)


def test_defaults_follow_the_mode() -> None:
    assert LearnerConfig(**NEEDED).staleness_bound == 1
    assert LearnerConfig(**NEEDED, mode="sync").staleness_bound == 0
    assert LearnerConfig(**NEEDED, staleness=3).staleness_bound == 3
    LearnerConfig(**NEEDED, score="sum", end_on_success=False)
    LearnerConfig(**NEEDED, score="sum", differential_reward=True)


def test_tasks_carry_weights() -> None:
    config = LearnerConfig(init="x", output="y", tasks=("PushCube-v1", "PickCube-v1:2.5", "my:task"))
    assert config.task_shares == (("PushCube-v1", 1.0), ("PickCube-v1", 2.5), ("my:task", 1.0))


def test_a_bad_flag_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["--init", "x", "--output", "y", "--tasks", "a", "--group-size", "1"]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0


def test_settings_need_no_torch() -> None:
    code = "import sys, services.learner.__main__; assert not {'torch', 'grpc'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
