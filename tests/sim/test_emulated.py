"""Emulated devices wait one after the other, end episodes as told, and say that they are emulated."""

import copy
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.config import role_app, run_app
from services.common.emulated import EmulatedDevice
from services.common.errors import ConfigError
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.registry import build_policy
from services.sim.config import SimConfig
from services.sim.emulated import TASK, EmulatedSim
from services.sim.vector import Start


def test_work_is_done_one_after_the_other() -> None:
    device, began, done = EmulatedDevice(), time.monotonic(), list[float]()

    def work() -> None:
        device.work(0.02)
        done.append(time.monotonic() - began)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(done) >= 0.06


def play(sim: EmulatedSim, seed: int, action: float) -> list[bool]:
    slots = np.arange(1)
    sim.reset(slots, [Start(TASK, sim.make_start(TASK, seed))])
    actions = np.full((1, 7), action, np.float32)
    return [bool(sim.step(slots, actions).success[0]) for _ in range(10)]


def test_fates_depend_on_start_and_first_action() -> None:
    sim = EmulatedSim(2, steps=10, shortest=4, success=0.5)
    assert sim.spec.backend == "emulated"
    outcomes = [play(sim, seed, 0.1 * seed) for seed in range(60)]
    assert outcomes == [play(EmulatedSim(1, steps=10, shortest=4, success=0.5), s, 0.1 * s) for s in range(60)]
    wins = [outcome for outcome in outcomes if any(outcome)]
    assert 15 < len(wins) < 45
    assert all(sum(outcome) == 1 and outcome.index(True) >= 3 for outcome in wins)


def test_the_simulator_waits_when_it_is_looked_at() -> None:
    sim = EmulatedSim(4, step_seconds=0.01, slot_seconds=0.001, observe_seconds=0.002, image_size=4)
    slots = np.arange(4)
    sim.reset(slots, [Start(TASK, sim.make_start(TASK, 1))] * 4)
    began = time.monotonic()
    for _ in range(3):
        sim.step(slots, np.zeros((4, 7), np.float32))
    seen = sim.observe(slots)
    assert time.monotonic() - began >= 3 * 0.014 + 4 * 0.002
    assert seen["rgb/emulated"].shape == (4, 4, 4, 3)
    assert seen["state"].shape == (4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stepp_seconds": 1}, "no option 'stepp_seconds'"),
        ({"steps": 0}, "steps"),
        ({"step_seconds": -1}, "a number from 0"),
        ({"step_seconds": "1"}, "a number from 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmulatedSim(1, **options)


def config(**options: float) -> PolicyConfig:
    return PolicyConfig(action_dim=7, state_dim=8, chunk=3, family="emulated", options=options)


def test_the_policy_scores_what_it_did_and_learns() -> None:
    policy = build_policy(config(act_row_seconds=0.001, weights=10))
    inputs = policy.preprocess({"state": np.zeros((2, 8), np.float32)}, ["", ""])
    began = time.monotonic()
    act = policy.act(inputs, "train", RowNoise(["a", "b"]))
    assert time.monotonic() - began >= 0.002
    score = policy.evaluate(inputs, act.record)
    torch.testing.assert_close(score.log_prob, act.log_prob)
    score.log_prob.sum().backward()
    gradient = dict(policy.named_parameters())["mean"].grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    assert policy.spec.family == "emulated"
    assert (policy.act(inputs, "eval", RowNoise(["a", "b"])).actions == 0).all()


def test_loading_takes_as_long_as_told_where_the_policy_acts() -> None:
    policy = build_policy(config(load_seconds=0.03)).requires_grad_(False)
    began = time.monotonic()
    copy.deepcopy(policy).trainable_state()
    assert time.monotonic() - began >= 0.03


def test_numbers_of_options_survive_a_recipe_and_a_command_line(tmp_path: Path) -> None:
    got: list[SimConfig] = []
    app = role_app("sim", SimConfig, got.append, "test")
    recipe = tmp_path / "r.toml"
    recipe.write_text('[sim]\noptions = {steps = 40, step_seconds = 0.02, on = true, text = "0:1:2"}\n')
    assert run_app(app, ["--recipe", str(recipe)]) == 0
    assert run_app(app, ["--options.step_seconds", "0.5", "--options.steps", "3"]) == 0
    assert got[0].options == {"steps": 40, "step_seconds": 0.02, "on": True, "text": "0:1:2"}
    assert got[1].options == {"step_seconds": 0.5, "steps": 3}
    assert [type(value) for value in got[1].options.values()] == [float, int]
