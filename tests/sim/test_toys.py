"""The toy and scripted simulators, seeds, and start states."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError, InvalidInput
from services.common.seeds import DEMONSTRATIONS, EVALUATION, TRAINING
from services.common.seeds import demonstration_seed as demo
from services.common.seeds import evaluation_seed as held_out
from services.common.seeds import training_seed as train
from services.common.spec import FloatArray, IntArray
from services.sim.chunks import ChunkRunner
from services.sim.config import SimConfig, build_sim
from services.sim.scripted import Script
from services.sim.toy import MIN_DISTANCE, MIRROR, RADIUS, ToyFault, ToySim
from services.sim.vector import Start

bases, indices = st.integers(0, 2**40), st.integers(0, 2**30 - 1)


@given(bases, indices, indices)
def test_seeds_of_one_base_are_distinct_and_in_their_range(base: int, one: int, other: int) -> None:
    for draw, seeds in ((train, TRAINING), (demo, DEMONSTRATIONS)):
        assert draw(base, one) in seeds
        assert (draw(base, one) == draw(base, other)) == (one == other)
    assert held_out(one, base) in EVALUATION


def test_seed_ranges_never_meet_and_fit_numpy() -> None:
    assert TRAINING[-1] < DEMONSTRATIONS[0] <= DEMONSTRATIONS[-1] < EVALUATION[0]
    assert EVALUATION[-1] == 2**32 - 1
    with pytest.raises(ConfigError, match="expected an index"):
        train(0, -1)


def test_s05_starts_differ_within_a_replica_and_between_replicas_and_repeat_exactly() -> None:
    def starts(base: int) -> list[str]:
        sim = ToySim(1)
        return [hashlib.sha256(sim.make_start("reach", train(base, i))).hexdigest() for i in range(100)]

    one, other = starts(1), starts(2)
    assert len(set(one)) == len(set(other)) == 100
    assert not set(one) & set(other)
    assert starts(1) == one


@pytest.mark.parametrize("task", ["reach", "mirror"])
def test_episodes_start_away_from_the_target_and_straight_moves_succeed(task: str) -> None:
    sim = ToySim(50, tasks=("reach", "mirror"))
    runner = ChunkRunner(sim)
    slots = np.arange(50)
    starts = [Start(task, sim.make_start(task, seed)) for seed in range(50)]
    runner.reset(slots, starts, np.ones(50, np.bool_))

    def way(slots: IntArray) -> FloatArray:
        state = sim.privileged_state(slots)
        return MIRROR[task] * state[:, 2:] - state[:, :2]

    gap = way(slots)
    assert (np.linalg.norm(gap, axis=1) >= MIN_DISTANCE).all()
    assert RADIUS + 0.15 * np.sqrt(2) < MIN_DISTANCE, "no first step solves it"
    for _ in range(20):
        running = runner.running
        if not len(running):
            break
        runner.advance(running, (way(running) / np.float32(0.15))[:, None])
    assert not len(runner.running)


@pytest.mark.parametrize(("reward", "low"), [("sparse", 0.0), ("dense", 0.01)])
def test_rewards(reward: str, low: float) -> None:
    sim = ToySim(1, reward=reward)
    slot = np.zeros(1, np.int64)
    state = np.array([0, 0, 0.7, 0], "<f4").tobytes()
    sim.reset(slot, [Start("reach", state)])
    got = [float(sim.step(slot, np.array([[1, 0]], np.float32)).reward[0]) for _ in range(5)]
    assert got == sorted(got)
    assert got[-1] == 1
    assert got[0] >= low
    assert reward == "dense" or set(got) == {0.0, 1.0}


def test_images_show_point_and_goal() -> None:
    sim = ToySim(1, observation="rgb", image_size=32)
    slot = np.zeros(1, np.int64)
    sim.reset(slot, [Start("reach", np.array([-0.5, 0.5, 0.5, -0.5], "<f4").tobytes())])
    image = sim.observe(slot)["rgb/top"][0].astype(int)
    assert image.shape == (32, 32, 3)
    rows, columns = np.nonzero(image[..., 0] > 200)  # the red point: left, and up
    assert (rows.mean() < 16) & (columns.mean() < 16)
    rows, columns = np.nonzero(image[..., 1] > 150)  # the green goal: right, and down
    assert (rows.mean() > 16) & (columns.mean() > 16)
    frame = sim.render(0)
    assert frame is not None
    assert frame.shape == (64, 64, 3)


@pytest.mark.parametrize("state", [b"", b"x" * 15, np.array([0, 0, 0, 2], "<f4").tobytes(), b"\xff" * 16])
def test_malformed_start_states_are_refused(state: bytes) -> None:
    with pytest.raises(InvalidInput):
        ToySim(1).reset(np.zeros(1, np.int64), [Start("reach", state)])


def test_built_from_a_role_configuration() -> None:
    sim = build_sim(
        SimConfig(sim="toy", tasks=("mirror",), max_steps=7, slots=3, options={"faults": "0:0:1:nan_reward"})
    )
    assert sim.num_slots == 3
    assert [(task.id, task.max_steps) for task in sim.spec.tasks] == [("mirror", 7)]
    scripted = build_sim(SimConfig(sim="scripted", slots=4, options={"script": "s3,-"}))
    assert scripted.num_slots == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sim": "nope"}, "expected toy, scripted, maniskill or module:Class"),
        ({"sim": "toy", "tasks": ("fly",)}, "choose from reach, mirror"),
        ({"sim": "toy", "tasks": ("reach",), "observation": "depth"}, "choose state, rgb or rgb"),
        ({"sim": "toy", "tasks": ("reach",), "options": {"speed": 1}}, "it knows faults"),
        ({"sim": "no.such.module:Sim"}, "cannot be loaded"),
        ({"sim": "services.sim.toy:Nope"}, "cannot be loaded"),
        ({"sim": "services.sim.toy:ToySim", "options": {"speed": 1}}, "refuses num_slots and options"),
        ({"sim": "services.sim.toy:ToyFault"}, "refuses num_slots"),
        ({"sim": "collections:Counter"}, "makes a Counter, expected a VectorSim"),
        ({"slots": 0}, "slots = 0; expected 1 or more"),
        ({"device": "tpu"}, "expected cpu, cuda or cuda:N"),
        ({"processes": 3, "sessions": 2}, "at most 2 processes"),
        ({"step_timeout": 0.0}, "more than 0 seconds"),
    ],
)
def test_impossible_settings_are_one_clear_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_sim(SimConfig(**settings))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["x", "1:2:3", "1:2:3:nope"])
def test_malformed_faults(text: str) -> None:
    with pytest.raises(ConfigError, match="slot:episode:step"):
        ToyFault.parse(text)


@pytest.mark.parametrize("text", ["q3", "s", "3s4", "f"])
def test_malformed_scripts(text: str) -> None:
    with pytest.raises(ConfigError, match="is not like"):
        Script.parse(text)


def test_scripts() -> None:
    assert [Script.parse(text) for text in ("s3", "f5", "s3f5", "-")] == [
        Script(3, 0),
        Script(0, 5),
        Script(3, 5),
        Script(0, 0),
    ]
